"""Seconds of a training step: fxpar against PyTorch's own parallelism, in the same layout and in the best one.

In: the number of timed rounds. Out: Markdown tables on standard output. A 4-layer Llama (hidden 512, batch 4, sequence
256, float32, its loss inside) runs on gloo processes with one thread each: 2 on the mesh ``tp=2``, against
``parallelize_module``, and 4 on ``dp=2, tp=2``, against ``fully_shard`` and ``parallelize_module``. All contestants
live in the same processes and take turns, in another order every round; a step is forward, backward and AdamW, on rank
0's clock between barriers, and in its processor time. Losses and gradients of all are compared before anything is
timed.

    python -m benchmarks.step_time [--rounds 40] [--meshes tp dp,tp]
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from benchmarks.layouts import LAYOUTS, both
from benchmarks.search_time import show
from benchmarks.torch_layouts import torch_tp, torch_tp_sp
from fxpar.assemble import assemble
from fxpar.boundary import BoundaryRule, data_axes_of
from fxpar.calls import Calls, capture_call
from fxpar.cluster import Cluster
from fxpar.cost.comm import wire_bytes
from fxpar.cost.price import price
from fxpar.meshes import as_mesh
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.processes import run_ranks
from fxpar.solver import solve
from fxpar.space import space

DEGREE, BATCH, SEQUENCE, VOCABULARY = 2, 4, 256, 4096
CLUSTER = "cpu-gloo"
#: Losses and gradients of two contestants differ by no more than that, relative to the largest element.
TOLERANCE = 1e-4
#: A collective that sends less is counted as small: its time is all latency.
SMALL_BYTES = 64 * 1024

Make = Callable[[nn.Module, DeviceMesh], nn.Module]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """The whole batch, or this rank's part of it, if the mesh has an axis ``dp``."""
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    if mesh is None or "dp" not in (mesh.mesh_dim_names or ()):
        return inputs
    part = mesh.get_local_rank("dp")
    return {name: tensor.chunk(mesh["dp"].size())[part] for name, tensor in inputs.items()}


# Contestants ------------------------------------------------------------------------------------------------------


def same_layout(layout: str) -> Make:
    """fxpar in a layout of :data:`benchmarks.layouts.LAYOUTS`, with a loss that every rank of ``tp`` computes whole.

    That is how PyTorch's side has it.
    """

    def make(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return fxpar.parallelize(model, mesh, example_kwargs=batch(mesh), plan=hand_plan(model, mesh, layout))

    return make


def hand_plan(model: nn.Module, mesh: DeviceMesh, layout: str) -> Plan:
    """The plan of a hand-made layout; what it leaves open is filled in at least cost."""
    axes = as_mesh(mesh)
    rule = BoundaryRule(data_axes_of(axes, None))
    captured, boundary = capture_call(model, (), batch(mesh), Calls(axes, rule))
    found = space(captured.program, axes, boundary)
    whole = {f"top::{op}": "I@tp" for op in ("aten.reshape.default", "aten.amax.default", "local.class_*")}
    pins = both(LAYOUTS[layout](found), pin(found, nodes=whole))
    priced = price(found, Cluster.load(CLUSTER))
    return replace(assemble(priced, solve(priced.problem, pins=pins).choice), boundary=boundary.rule)


def optimal(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fxpar.parallelize(model, mesh, example_kwargs=batch(mesh), cluster=CLUSTER)


@dataclass(frozen=True)
class Setting:
    """A mesh and those who compete on it; ``pairs`` are whose times are divided by whose."""

    axes: tuple[str, ...]
    contestants: Mapping[str, Make]
    pairs: tuple[tuple[str, str], ...]

    @property
    def size(self) -> int:
        return int(DEGREE ** len(self.axes))


BEST = f"fxpar, optimal for {CLUSTER}"
#: PyTorch keeps gathered parameters for backward, as fxpar does, unless "freed after forward", which is its default.
SETTINGS = {
    "tp": Setting(
        ("tp",),
        {
            "torch TP": torch_tp,
            "fxpar, the same layout (TP)": same_layout("TP"),
            "torch TP+SP": torch_tp_sp,
            "fxpar, the same layout (TP+SP)": same_layout("TP+SP"),
            BEST: optimal,
        },
        (
            ("fxpar, the same layout (TP)", "torch TP"),
            ("fxpar, the same layout (TP+SP)", "torch TP+SP"),
            (BEST, "torch TP"),
            (BEST, "torch TP+SP"),
        ),
    ),
    "dp,tp": Setting(
        ("dp", "tp"),
        {
            "torch FSDP2 x TP, freed after forward": partial(torch_tp, free_after_forward=True),
            "torch FSDP2 x TP": torch_tp,
            "fxpar, the same layout (FSDP x TP)": same_layout("FSDP x TP"),
            "torch FSDP2 x TP+SP": torch_tp_sp,
            "fxpar, the same layout (FSDP x TP+SP)": same_layout("FSDP x TP+SP"),
            BEST: optimal,
        },
        (
            ("fxpar, the same layout (FSDP x TP)", "torch FSDP2 x TP"),
            ("fxpar, the same layout (FSDP x TP+SP)", "torch FSDP2 x TP+SP"),
            (BEST, "torch FSDP2 x TP, freed after forward"),
            (BEST, "torch FSDP2 x TP"),
            (BEST, "torch FSDP2 x TP+SP"),
        ),
    ),
}

# Measuring --------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts collectives and the bytes each rank sends in them; every group has :data:`DEGREE` ranks."""

    #: Functional collectives, and those of FSDP2, by name: kind, the argument that is sent, whether it is a piece.
    FUNCTIONS = {  # noqa: RUF012
        "_c10d_functional::all_reduce": ("all_reduce", 0, False),
        "_c10d_functional::all_gather_into_tensor": ("all_gather", 0, True),
        "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, False),
        "_c10d_functional::all_to_all_single": ("all_to_all", 0, True),
        "c10d::allreduce_": ("all_reduce", 0, False),
        "c10d::_allgather_base_": ("all_gather", 1, True),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, False),
    }
    #: Ranks meet, or a result is awaited: nothing is sent that counts.
    SILENT = ("c10d::barrier", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.small = 0
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it communicates is then seen here
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in self.FUNCTIONS:
            kind, position, piece = self.FUNCTIONS[name]
            sent = args[position][0] if isinstance(args[position], list) else args[position]
            local = sent.numel() * sent.element_size()
            wire = wire_bytes(kind, local * (DEGREE if piece else 1), DEGREE)
            self.found[kind] += 1
            self.small += wire < SMALL_BYTES
            self.bytes += wire
        elif name.partition("::")[0] in ("c10d", "_c10d_functional") and name not in self.SILENT:
            raise RuntimeError(f"{name} communicates, and is not counted: name it in Counting.FUNCTIONS")
        return out


@dataclass
class Contestant:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: dict[str, Tensor]

    def backward(self) -> Tensor:
        loss: Tensor = self.model(**self.inputs).loss
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.update()


def contestant(make: Make, start: nn.Module, mesh: DeviceMesh) -> Contestant:
    model = make(copy.deepcopy(start), mesh)
    return Contestant(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch(mesh))


def first_step(runner: Contestant) -> dict[str, Tensor]:
    """The loss and all gradients of a step, whole: of the mean over the parts of the batch."""
    loss = runner.backward()
    dist.all_reduce(loss)
    found = {"loss": loss / dist.get_world_size()}
    for name, parameter in runner.model.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    runner.update()
    return found


def furthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference, relative to the largest element of its tensor, and where it is."""
    assert found.keys() == wanted.keys()
    return max(
        (float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-30)), name)
        for name in wanted
    )


def run(rank: int, job: tuple[str, int]) -> str:
    """Per contestant its times in seconds, its collectives, and how far its first step is from the first's, as JSON."""
    which, rounds = job
    torch.set_num_threads(1)
    chosen, start = SETTINGS[which], llama()
    mesh = init_device_mesh("cpu", (DEGREE,) * len(chosen.axes), mesh_dim_names=chosen.axes)
    runners: dict[str, Contestant] = {}
    report: dict[str, dict[str, Any]] = {}
    wanted: dict[str, Tensor] | None = None
    for name, make in chosen.contestants.items():
        runner = runners[name] = contestant(make, start, mesh)
        found = first_step(runner)
        wanted = wanted or found
        off, where = furthest(found, wanted)
        if off > TOLERANCE:
            raise RuntimeError(f"{name} computes something else: {where} is off by {off:.1e}")
        runner.step()
        with Counting() as counting:
            runner.step()
        counted = {"collectives": counting.found, "small": counting.small, "bytes": counting.bytes}
        report[name] = {"off": off, **counted, "seconds": [], "processor": []}
    order, shuffle = list(runners), random.Random(0)  # the same order on all ranks
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            for kind, seconds in _seconds(runners[name].step).items():
                report[name][kind].append(seconds)
    return json.dumps(report)


def _seconds(step: Callable[[], object]) -> dict[str, float]:
    """Seconds on the clock, and of processor time in all threads of this rank: waiting for other ranks takes none."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    step()
    used = time.process_time() - used
    dist.barrier()
    return {"seconds": time.perf_counter() - start, "processor": used}


def bootstrap(ours: list[float], theirs: list[float], draws: int = 5000) -> tuple[float, float, float]:
    """The median over rounds of the ratio of times in one round: its 2.5 %, 50 % and 97.5 % quantiles.

    What disturbs the machine for a while disturbs both of a round, so ratios are taken within rounds.
    """
    ratios = np.array(ours) / np.array(theirs)
    pick = np.random.default_rng(0).integers(len(ratios), size=(draws, len(ratios)))
    low, middle, high = np.quantile(np.median(ratios[pick], axis=1), (0.025, 0.5, 0.975))
    return float(low), float(middle), float(high)


def measure(which: str, rounds: int) -> None:
    """Run one setting and print its tables."""
    chosen = SETTINGS[which]
    report = json.loads(run_ranks(run, chosen.size, (which, rounds)))
    rows = []
    for name, found in report.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["collectives"].items()))
        numbers = (sum(found["collectives"].values()), found["small"])
        medians = [f"{1e3 * statistics.median(found[kind]):.0f}" for kind in ("seconds", "processor")]
        rows.append((name, *medians, *map(str, numbers), kinds, f"{found['bytes'] / 1e6:.2f}", f"{found['off']:.0e}"))
    times = ("step, ms (median)", "processor time, ms")
    header = ("contestant", *times, "collectives", "small", "of which", "wire MB per rank", "off by")
    show(f"A training step on {chosen.size} processes ({which}), {rounds} rounds", header, rows)
    ratios = []
    for ours, theirs in chosen.pairs:
        low, middle, high = bootstrap(report[ours]["seconds"], report[theirs]["seconds"])
        ratios.append((ours, theirs, f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", "1.0"))
    show("Time ratios", ("ours", "theirs", "time ratio", "95 % interval (bootstrap)", "lower end at most"), ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a training step against PyTorch's own parallelism.")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps per contestant (default: %(default)s)")
    parser.add_argument("--meshes", nargs="*", choices=SETTINGS, default=list(SETTINGS), help="(default: all)")
    args = parser.parse_args()
    for which in args.meshes:
        measure(which, args.rounds)


if __name__ == "__main__":
    main()
