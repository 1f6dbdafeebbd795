"""How long planning takes: against one ``torch.export`` of the same model, against depth, and stage by stage.

In: names of zoo models (all on meta, no memory). Out: Markdown tables on standard output. The bars are printed beside
what was measured; nothing fails here (:mod:`tests.torch.test_search_size` guards the sizes that the times follow from).

    python benchmarks/search_time.py [--models llama3-8b ...] [--repeats 5]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import fxpar
from fxpar import zoo
from fxpar.plans import Plan
from fxpar.zoo import ZooModel

MESH = {"tp": 8}
STAGES = ("capture", "space", "price", "solve", "assemble")
HEADER = ("what", "on the clock", "processor time", "at most")
SIZES = ("nodes", "nodes_folded", "unique_blocks", "variables", "constraints")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure planning time.")
    parser.add_argument("--models", nargs="*", default=list(zoo.NAMES), help="for the table of stages (default: all)")
    parser.add_argument("--repeats", type=int, default=9, help="plans per model (default: %(default)s)")
    args = parser.parse_args()
    against_export(args.repeats)
    on_meshes(args.repeats)
    against_depth(args.repeats)
    stages(args.models, args.repeats)


def against_export(repeats: int) -> None:
    """llama3-8b: planning seconds and memory against one whole-model export in the same process."""
    _export(zoo.build("llama3-8b", shrink=True))  # warms the exporter up
    model = zoo.build("llama3-8b")
    extra: list[int] = []
    ours = _median([measured(lambda: extra.append(peak_extra_bytes(lambda: plan(model)))) for _ in range(repeats)])
    export = measured(lambda: _export(model))
    rows = [
        ("one torch.export of the model", *_texts(export, "s"), ""),
        (f"fxpar.plan, median of {repeats}", *_texts(ours, "s"), ""),
        ("fxpar.plan / torch.export", *_texts(ours / export), "0.25"),
        ("peak extra memory of fxpar.plan", f"{max(extra) / 1e6:.0f} MB", "", "1000 MB"),
    ]
    show("Planning llama3-8b on tp=8 (h100), against exporting it once", HEADER, rows)


#: Meshes of several axes, and the most that planning on them may take of one export.
MESHES = (({"dp": 2, "tp": 4}, "0.4"), ({"a": 2, "b": 2, "c": 8}, "0.8"))


def on_meshes(repeats: int) -> None:
    """llama3-8b on two and three axes, within a device's memory, against one export, in turn."""
    model = zoo.build("llama3-8b")
    turns = [
        [measured(lambda: _export(model)), *(measured(lambda mesh=mesh: plan(model, mesh)) for mesh, _ in MESHES)]
        for _ in range(min(repeats, 3) + 1)
    ][1:]  # the first turn warms up
    export, *ours = (_median([turn[which] for turn in turns]) for which in range(1 + len(MESHES)))
    rows = [("one torch.export of the model", *_texts(export, "s"), "")]
    for (mesh, bar), seconds in zip(MESHES, ours, strict=True):
        found = plan(model, mesh)
        rows.append((f"fxpar.plan on {mesh}: {found.status}", *_texts(seconds, "s"), ""))
        rows.append(("fxpar.plan / torch.export", *_texts(seconds / export), bar))
    show(f"Planning llama3-8b within a device's memory (h100), median of {len(turns)} turns", HEADER, rows)


def against_depth(repeats: int) -> None:
    """llama3-405b (126 layers) against llama3-8b (32 layers), planned in turn."""
    shallow, deep = zoo.build("llama3-8b"), zoo.build("llama3-405b")
    turns = [[measured(lambda model=model: plan(model)) for model in (shallow, deep)] for _ in range(repeats + 1)]
    first, second = (_median([turn[which] for turn in turns[1:]]) for which in (0, 1))  # the first turn warms up
    rows = [
        ("llama3-8b, 32 layers", *_texts(first, "s"), ""),
        ("llama3-405b, 126 layers", *_texts(second, "s"), ""),
        ("ratio", *_texts(second / first), "1.5 (goal: 1.2)"),
    ]
    show(f"Planning time against depth, median of {repeats}", HEADER, rows)


def stages(names: Sequence[str], repeats: int) -> None:
    """Milliseconds per stage and sizes, for each model."""
    rows = []
    for name in names:
        model = zoo.build(name)
        plans = [plan(model) for _ in range(repeats + 1)][1:]
        times = [np.median([found.timings[stage] for found in plans]) for stage in STAGES]
        sizes = [f"{plans[-1].stats[key]:,}" for key in SIZES]
        rows.append((name, *(f"{1e3 * item:.0f}" for item in (*times, sum(times))), *sizes, plans[-1].status))
    header = ("model", *(f"{stage}, ms" for stage in STAGES), "all, ms", *(key.replace("_", " ") for key in SIZES))
    show(f"Planning on tp=8 (h100), stage by stage, median of {repeats}", (*header, "status"), rows)


def plan(model: ZooModel, mesh: Mapping[str, int] | None = None) -> Plan:
    """On ``mesh`` within a device's memory; on one axis, where not all models would fit, without a limit."""
    return fxpar.plan(
        model.model,
        mesh or MESH,
        example_args=model.args,
        example_kwargs=model.kwargs,
        cluster="h100",
        whole=model.whole,
        memory_limit_bytes=None if mesh else math.inf,
    )


def _export(model: ZooModel) -> None:
    torch.export.export(model.model, model.args, model.kwargs, strict=False)


def measured(work: Callable[[], object]) -> np.ndarray:
    """Seconds of ``work``: on the clock, and of this process' processor time, which other programs hardly disturb."""
    start = np.array([time.perf_counter(), time.process_time()])
    work()
    return np.array([time.perf_counter(), time.process_time()]) - start


def _median(times: Sequence[np.ndarray]) -> np.ndarray:
    return np.median(times, axis=0)


def _texts(numbers: np.ndarray, unit: str = "") -> tuple[str, str]:
    clock, processor = (f"{number:.3f} {unit}".strip() for number in numbers)
    return clock, processor


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
