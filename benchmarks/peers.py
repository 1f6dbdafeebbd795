"""The same model on the same mesh through AutoParallel and through fxpar, stage by stage, in one run.

In: the folder of a checkout of AutoParallel (https://github.com/meta-pytorch/autoparallel), a model and a mesh. Out: a
Markdown table on standard output. Nothing is trained: the process group is a fake one, the model is on meta. Exit code
2, with the reason, if there is no checkout or it does not run with the installed torch.

    python benchmarks/peers.py --autoparallel DIR [--model llama] [--layers 1] [--mesh dp=2,tp=4]

Both search for the H100's numbers. AutoParallel runs as in its own examples: inputs cut along the data axes, parameters
bounded by what an even share takes. fxpar gets the device's memory as its limit. *Apply* is, for AutoParallel, writing
the joint graph anew for one rank and compiling it without a backend; for fxpar, writing all graphs anew for one rank.
"""

from __future__ import annotations

import argparse
import importlib
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from search_time import show
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar import zoo
from fxpar.binding import bind, place_of
from fxpar.boundary import BoundaryRule, data_axes_of
from fxpar.calls import Calls, capture_call
from fxpar.cluster import Cluster
from fxpar.layout import Mesh
from fxpar.runtime.skeleton import skeleton
from fxpar.search import Stages, search
from fxpar.zoo import ZooModel

STAGES = ("capture", "build", "solve", "apply")

#: What fxpar calls the stages.
OURS = {
    "capture": ("capture",),
    "build": ("space", "price"),
    "solve": ("solve", "fit", "assemble"),
    "apply": ("apply",),
}

#: The name by which both know the hardware that is priced.
DEVICE = "NVIDIA H100"


class CannotRunError(Exception):
    """AutoParallel cannot be run here; the text says why."""


@dataclass
class Times:
    """Seconds by stage, and of the stage that failed the reason."""

    seconds: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = next(iter(str(error).strip().splitlines()), "") or f"at {Path(place.filename).name}:{place.lineno}"
            self.failure = f"{name} failed: {type(error).__name__}: {text[:300]}"
            raise
        self.seconds[name] = time.perf_counter() - start

    def cells(self) -> tuple[str, ...]:
        """A cell per stage, and their sum if none failed."""
        known = [f"{self.seconds[stage]:.2f}" for stage in STAGES if stage in self.seconds]
        known += ["failed", *[""] * len(STAGES)][: len(STAGES) - len(known)]
        return (*known, "" if self.failure else f"{sum(self.seconds.values()):.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time AutoParallel and fxpar on the same model and mesh.")
    parser.add_argument("--autoparallel", metavar="DIR", help="a checkout of github.com/meta-pytorch/autoparallel")
    parser.add_argument("--model", default="llama", help="llama (AutoParallel's own, of 8B width), or one of the zoo")
    parser.add_argument("--layers", type=int, default=1, help="layers that are kept (default: %(default)s)")
    parser.add_argument("--mesh", default="dp=2,tp=4", help="axes and degrees (default: %(default)s)")
    args = parser.parse_args()
    try:
        return compare(args.autoparallel, args.model, args.layers, args.mesh)
    except CannotRunError as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2


def compare(folder: str | None, name: str, layers: int, text: str) -> int:
    """Print the table; 2 if AutoParallel did not get through all stages."""
    version = found_version(folder)
    mesh = Mesh.of({axis: int(degree) for axis, degree in (part.split("=") for part in text.split(","))})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    devices = init_device_mesh(device, mesh.degrees, mesh_dim_names=mesh.names)
    batch = math.prod(mesh.degrees[mesh.names.index(axis)] for axis in data_axes_of(mesh, None))
    of_rank, of_all = built(name, layers, 1), built(name, layers, batch)
    first, other, second = ours(of_rank, mesh, devices), theirs(of_all, mesh, devices), ours(of_rank, mesh, devices)
    rows = [
        ("AutoParallel", *other.cells()),
        ("fxpar, first search of the process", *first.cells()),
        ("fxpar, second", *second.cells()),
    ]
    rows.append(("AutoParallel / fxpar, second", *ratios(other, second)))
    show(
        f"{name}, {layers} layers, on {dict(mesh.axes)}: seconds (torch {torch.__version__}, autoparallel {version}, "
        f"device {device})",
        ("", *STAGES, "all"),
        rows,
    )
    if other.failure:
        raise CannotRunError(
            f"AutoParallel {version} does not get through with torch {torch.__version__} on {device}: {other.failure}"
        )
    return 0


def found_version(folder: str | None) -> str:
    """The commit of the checkout, which can be imported from now on; raises :class:`CannotRunError`."""
    if folder is None:
        raise CannotRunError(
            "no checkout of AutoParallel; get one (git clone https://github.com/meta-pytorch/autoparallel DIR) and "
            "give it as --autoparallel DIR"
        )
    root = Path(folder)
    if not (root / "autoparallel" / "__init__.py").is_file():
        raise CannotRunError(f"{root} is no checkout of AutoParallel: there is no autoparallel/__init__.py in it")
    sys.path.insert(0, str(root.resolve()))
    try:
        importlib.import_module("autoparallel.api")
    except ImportError as error:
        raise CannotRunError(
            f"AutoParallel in {root} does not import with torch {torch.__version__}: {error}"
        ) from error
    asked = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return commit or "(unknown commit)"


def built(name: str, layers: int, batch: int) -> ZooModel:
    """The model with its first layers only, for a batch of this size."""
    if name == "llama":
        return their_llama(layers, batch)
    model = zoo.build(name, batch=batch)
    for module in model.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > layers:
            del module[layers:]
    for size in ("num_hidden_layers", "n_layer", "num_layers"):
        if hasattr(model.model.config, size):
            setattr(model.model.config, size, layers)
    return model


def their_llama(layers: int, batch: int, sequence: int = 8192) -> ZooModel:
    """The Llama that AutoParallel is tested with, as wide as Llama 3 8B; it returns logits."""
    models = importlib.import_module("autoparallel._testing.models.llama3")
    sizes = models.TransformerModelArgs(
        dim=4096, n_layers=layers, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024,
        rope_theta=500000, vocab_size=128256, max_seq_len=sequence,
    )  # fmt: skip
    with torch.device("meta"):
        model = models.Transformer(sizes).to(torch.bfloat16)
        tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    return ZooModel(model, (tokens,), {})


def ours(model: ZooModel, mesh: Mesh, devices: DeviceMesh) -> Times:
    """What fxpar takes."""
    rule, times, cluster = BoundaryRule(data_axes_of(mesh, None)), Times(), Cluster.load("h100")
    stages = Stages()
    with stages.stage("capture"):
        captured, boundary = capture_call(model.model, model.args, model.kwargs, Calls(mesh, rule, model.whole))
    plan = search(
        captured.program, mesh, cluster, boundary=boundary, memory_limit_bytes=cluster.memory_bytes, stages=stages
    )
    with stages.stage("apply"):
        bind(captured.divided(plan.calls), plan, place_of(devices, mesh), skeleton(model.model))
    times.seconds = {name: sum(stages.seconds.get(part, 0.0) for part in parts) for name, parts in OURS.items()}
    return times


def theirs(model: ZooModel, mesh: Mesh, devices: DeviceMesh) -> Times:
    """What AutoParallel takes, up to the stage that fails."""
    api = importlib.import_module("autoparallel.api")
    inputs = importlib.import_module("autoparallel.input_validation").ForwardInputs
    if devices.device_type == "cpu":
        # It asks the device for its name, and looks the name up in a table of accelerators.
        torch.cpu.get_device_name = lambda device=None: DEVICE  # type: ignore[attr-defined]
    times, device = Times(), torch.device(devices.device_type)

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def example() -> Any:
        return inputs(tuple(map(on_device, model.args)), {name: on_device(item) for name, item in model.kwargs.items()})

    cuts = data_axes_of(mesh, None)
    placement = tuple(Shard(0) if axis in cuts else Replicate() for axis in mesh.names)
    try:
        search = api.AutoParallel(model.model, example, devices)
        trace = search.build_model_graph
        search.build_model_graph = lambda: staged(times, "capture", trace)
        start = time.perf_counter()
        try:
            search.__enter__()
        except Exception as error:
            times.failure = times.failure or f"build failed: {type(error).__name__}: {str(error)[:300]}"
            raise
        times.seconds["build"] = time.perf_counter() - start - times.seconds["capture"]
        with times.stage("solve"):
            search.add_input_constraints([placement] * (len(model.args) + len(model.kwargs)))
            search.add_parameter_memory_constraint(low=None, high=None)
            found = search.optimize_placement()
        with times.stage("apply"):
            search.apply_placement(found)
    except Exception:
        if not times.failure:
            raise
        traceback.print_exc()
    return times


def staged(times: Times, name: str, work: Callable[[], Any]) -> Any:
    with times.stage(name):
        return work()


def ratios(their: Times, our: Times) -> Iterator[str]:
    for stage in STAGES:
        known = stage in their.seconds
        yield f"{their.seconds[stage] / our.seconds[stage]:.0f}" if known else ""
    yield "" if their.failure else f"{sum(their.seconds.values()) / sum(our.seconds.values()):.0f}"


if __name__ == "__main__":
    sys.exit(main())
