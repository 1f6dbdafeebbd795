"""How long a search takes: every zoo model on meshes of one to three axes, against one ``torch.export``, and by depth.

In: names of zoo models (all on meta, no memory). Out: Markdown tables on standard output. The bars are printed beside
what was measured; nothing fails here (:mod:`tests.torch.test_search_size` and :mod:`tests.torch.test_search_depth`
guard the sizes and the work that the times follow from).

    python benchmarks/search_time.py [--models llama3-8b ...] [--repeats 3]

A *search* is fold, space, price, solve, and fit where the memory limit binds. The rest of capturing a model and the
assembling of its plan are counted apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fxpar
from fxpar import zoo
from fxpar.boundary import BoundaryRule, data_axes_of
from fxpar.calls import Calls, capture_call
from fxpar.capture import modules, program
from fxpar.capture.structure import Structure
from fxpar.capture.units import Units
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.cost.rows import memory_rows
from fxpar.errors import InfeasibleError
from fxpar.layout import Mesh
from fxpar.least import least_memory
from fxpar.search import Stages, search
from fxpar.space import space
from fxpar.zoo import ZooModel

CLUSTER = "h100"

#: The meshes, and at most how many seconds a search on them takes, and which part of one export planning takes.
MESHES = (({"tp": 8}, 0.15, 0.25), ({"dp": 2, "tp": 4}, 0.5, 0.4), ({"a": 2, "b": 2, "c": 8}, 1.5, 0.8))

#: A search takes at most this part of one export of llama3-8b.
SHARE = 0.05

#: A model of :data:`DEEP` layers takes at most so many times as long as one of :data:`SHALLOW`.
SHALLOW, DEEP, DEEPER = 8, 128, 1.2

STAGES = ("fold", "space", "price", "solve", "fit")
HEADER = ("what", "on the clock", "processor time", "at most")

#: Seconds on the clock and of this process' processor time, which other programs hardly disturb.
Times = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure search and planning time.")
    parser.add_argument("--models", nargs="*", default=list(zoo.NAMES), help="for the first table (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="measured turns (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    against_export(args.repeats)  # first: its peak memory is that of a process which has not planned before
    every_model(args.models, args.repeats)
    against_depth(args.repeats)


@dataclass(frozen=True)
class Searched:
    """One search: times by stage (``capture`` is without ``fold``), and how sure it is."""

    stages: dict[str, Times]
    status: str

    def total(self, stages: Iterable[str] = STAGES) -> Times:
        """Of some stages together."""
        known = [self.stages[stage] for stage in stages if stage in self.stages]
        return sum(item[0] for item in known), sum(item[1] for item in known)


def every_model(names: Sequence[str], repeats: int) -> None:
    """Each model on each mesh within a device's memory; where nothing fits, within the least multiple that does."""
    models = {name: zoo.build(name) for name in names}
    exported = zoo.build("llama3-8b")
    exports, found = [], dict[tuple[str, int], list[Searched]]()
    memories, refusals = dict[tuple[str, int], float](), dict[tuple[str, int], str]()
    for turn in range(repeats + 1):  # the first warms up
        exports.append(measured(lambda: _export(exported)))
        for name, model in models.items():
            for at, (mesh, *_) in enumerate(MESHES):
                key = name, at
                if not turn:
                    memories[key], refusals[key] = _memory(model, mesh)
                found.setdefault(key, []).append(searched(model, mesh, memories[key]))
    export = _median(exports[1:])
    rows: list[Sequence[str]] = []
    for (name, at), runs in found.items():
        mesh, seconds, _ = MESHES[at]
        text = ", ".join(f"{axis}={degree}" for axis, degree in mesh.items())
        if refusals[name, at]:
            rows.append((name, text, "80 GB", refusals[name, at], *[""] * 11))
        runs = runs[1:]
        each = [_median([run.stages.get(stage, (0.0, 0.0)) for run in runs])[1] for stage in ("capture", *STAGES)]
        clock, processor = _median([run.total() for run in runs])
        shown = (f"{1e3 * item:.0f}" if item else "" for item in each)
        ratio = processor / export[1]
        rows.append((name, text, f"{memories[name, at] / 1e9:.0f} GB", runs[-1].status, *shown,
                     f"{1e3 * processor:.0f}", f"{1e3 * clock:.0f}", _bar(processor, seconds),
                     f"{ratio:.3f}", _bar(ratio, SHARE)))  # fmt: skip
    header = ("model", "mesh", "device memory", "status", "capture", *STAGES, "search", "(on the clock)", "at most, s",
              "/ export", "at most")  # fmt: skip
    title = f"Searches on {CLUSTER}: milliseconds of processor time on one core, median of {repeats}. One torch.export "
    show(f"{title}of llama3-8b took {export[1]:.2f} s ({export[0]:.2f} s on the clock)", header, rows)


def _bar(number: float, most: float) -> str:
    return f"{most:g}" if number <= most else f"{most:g} **missed**"


def _memory(model: ZooModel, mesh: dict[str, int]) -> tuple[float, str]:
    """Bytes of a device that hold a plan: what the cluster's have, or the least 2^n times that; and why not less."""
    size = Cluster.load(CLUSTER).memory_bytes
    start = time.perf_counter()
    try:
        searched(model, mesh, size)
    except InfeasibleError:
        refused = time.perf_counter() - start
        calls = _calls(model, mesh)
        captured, boundary = capture_call(model.model, model.args, model.kwargs, calls)
        priced = price(space(captured.program, calls.mesh, boundary), Cluster.load(CLUSTER))
        least = least_memory(priced, memory_rows(priced, "adamw"), "adamw")[1].peak_bytes
        while size < least:
            size *= 2
        return size, f"refused: the least found needs {least / 1e9:.0f} GB (said after {refused:.1f} s)"
    return size, ""


def searched(model: ZooModel, mesh: dict[str, int], memory_bytes: float) -> Searched:
    """Capture and search once."""
    calls, clocks = _calls(model, mesh), Clocks()
    with clocks.stage("capture"), folding() as fold:
        captured, boundary = capture_call(model.model, model.args, model.kwargs, calls)
    cluster = Cluster.load(CLUSTER)
    plan = search(
        captured.program, calls.mesh, cluster, boundary=boundary, memory_limit_bytes=memory_bytes, stages=clocks
    )
    whole = clocks.both["capture"]
    clocks.both["capture"] = whole[0] - fold[0], whole[1] - fold[1]
    status = plan.status if plan.status == "optimal" else f"{plan.status} ({plan.gap:.2%})"
    return Searched({"fold": (fold[0], fold[1]), **clocks.both}, status)


def _calls(model: ZooModel, mesh: dict[str, int]) -> Calls:
    axes = Mesh.of(mesh)
    return Calls(axes, BoundaryRule(data_axes_of(axes, None)), model.whole)


class Clocks(Stages):
    """Stages on both clocks."""

    def __init__(self) -> None:
        super().__init__()
        self.both: dict[str, Times] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = _now()
        with super().stage(name):
            yield
        before, end = self.both.get(name, (0.0, 0.0)), _now()
        self.both[name] = before[0] + end[0] - start[0], before[1] + end[1] - start[1]


@contextmanager
def folding() -> Iterator[list[float]]:
    """What a capture takes to find out which modules are alike and which block a call is one of; recording is apart."""
    spent, since, running = [0.0, 0.0], [0.0, 0.0], [False]  # whether what runs now is folding

    def turn() -> None:
        now = _now()
        if running[-1]:
            spent[:] = [total + end - start for total, end, start in zip(spent, now, since, strict=True)]
        since[:] = now

    def switched(on: bool, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            turn()
            running.append(on)
            try:
                return work(*args, **kwargs)
            finally:
                turn()
                running.pop()

        return run

    replaced = (
        (program, "worth_folding", True), (Units, "call", True), (Units, "merged", True),
        (Units, "check_repeats", True), (Units, "check_updates", True),
        (Units, "_record", False), (Units, "_append", False), (modules, "inline", False),
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(patch.object(Structure, "of", staticmethod(switched(True, Structure.of))))
        for owner, name, on in replaced:
            stack.enter_context(patch.object(owner, name, switched(on, getattr(owner, name))))
        yield spent


def against_export(repeats: int) -> None:
    """llama3-8b: planning, capture and all, against one whole-model export in the same process."""
    model = zoo.build("llama3-8b")
    extra: list[int] = []
    turns = []
    for _ in range(repeats + 1):
        export = measured(lambda: _export(model))
        plans = [measured(lambda mesh=mesh: extra.append(peak_extra_bytes(lambda: _plan(model, mesh))))  # type: ignore[misc]
                 for mesh, *_ in MESHES]  # fmt: skip
        turns.append([export, *plans])
    export, *ours = (_median([turn[which] for turn in turns[1:]]) for which in range(1 + len(MESHES)))
    rows = [("one torch.export of the model", *_texts(export, " s"), "")]
    for (mesh, _, most), times in zip(MESHES, ours, strict=True):
        rows.append((f"fxpar.plan on {mesh}", *_texts(times, " s"), ""))
        ratio = times[0] / export[0], times[1] / export[1]
        rows.append(("fxpar.plan / torch.export", *_texts(ratio), _bar(ratio[1], most)))
    extra_mb = max(extra) / 1e6
    rows.append(("peak extra memory of fxpar.plan", f"{extra_mb:.0f} MB", "", "1000 MB"))
    show(f"Planning llama3-8b, capture and all, against exporting it: median of {repeats}", HEADER, rows)


def against_depth(repeats: int) -> None:
    """The same Llama with few layers and with many, searched in turn."""
    models = {layers: _llama(layers) for layers in (SHALLOW, DEEP)}
    memory = Cluster.load(CLUSTER).memory_bytes
    rows = []
    for mesh, *_ in MESHES:
        turns = [
            {layers: searched(model, mesh, memory) for layers, model in models.items()} for _ in range(repeats + 1)
        ][1:]
        for what, stages in (("search", STAGES), ("all", ("capture", *STAGES, "assemble"))):
            few, many = (_median([turn[layers].total(stages) for turn in turns]) for layers in (SHALLOW, DEEP))
            ratio, clock = many[1] / few[1], many[0] / few[0]
            cells = [f"{1e3 * item:.0f}" for item in (few[1], many[1])]
            rows.append(
                (str(mesh), what, *cells, *_texts((ratio, clock)), _bar(ratio, DEEPER) if what == "search" else "")
            )
    header = ("mesh", "what", f"{SHALLOW} layers", f"{DEEP} layers", "ratio", "(on the clock)", "at most")
    show(f"Depth, in milliseconds of processor time, median of {repeats}", header, rows)


def _llama(layers: int) -> ZooModel:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=512, intermediate_size=1024, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(8, 128, dtype=torch.int64)
    return ZooModel(model, (), {"input_ids": ids, "labels": ids})


def _plan(model: ZooModel, mesh: Mapping[str, int]) -> object:
    return fxpar.plan(
        model.model, mesh, example_args=model.args, example_kwargs=model.kwargs, cluster=CLUSTER, whole=model.whole
    )


def _export(model: ZooModel) -> None:
    torch.export.export(model.model, model.args, model.kwargs, strict=False)


def _now() -> Times:
    return time.perf_counter(), time.process_time()


def measured(work: Callable[[], object]) -> Times:
    """What ``work`` takes."""
    start = _now()
    work()
    end = _now()
    return end[0] - start[0], end[1] - start[1]


def _median(times: Sequence[Times]) -> Times:
    clock, processor = zip(*times, strict=True)
    return statistics.median(clock), statistics.median(processor)


def _texts(numbers: Times, unit: str = "") -> tuple[str, str]:
    return f"{numbers[0]:.3f}{unit}", f"{numbers[1]:.3f}{unit}"


def peak_extra_bytes(work: Callable[[], object]) -> int:
    """By how many bytes the memory of this process grew at its peak during ``work`` (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status_bytes("VmRSS")
    work()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    print(f"\n{title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in lines), flush=True)


if __name__ == "__main__":
    main()
