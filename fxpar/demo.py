"""The demonstration: one small Llama, trained on one process and, through fxpar, on several; the losses are compared.

In: a number of steps and of processes. Out: tables on standard output and an exit status. The text is that of Python's
own help (``pydoc_data.topics``), read as bytes, so nothing is downloaded. This module is also the script that torchrun
starts on every rank (``python -m fxpar.demo``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import fxpar
from fxpar import tables
from fxpar.errors import FxparError
from fxpar.plans import Plan
from fxpar.progress import progress
from fxpar.runtime.records import record_collectives

#: The losses may differ by this much, relative: float32 sums are added in another order.
TOLERANCE = 1e-4
BATCH, SEQUENCE = 8, 128


@dataclass(frozen=True)
class Run:
    """One training run: a loss per step, and, where the model was sharded, its plan as JSON.

    ``ready_seconds`` went into capturing, planning and sharding; ``executed`` counts the collectives of one step.
    """

    losses: list[float]
    seconds_per_step: float
    plan: str | None = None
    ready_seconds: float = 0.0
    executed: int = 0


def build() -> nn.Module:
    """A 4-layer Llama over bytes with grouped-query attention, from a fixed random start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=SEQUENCE,
        )
    )


def batches(steps: int) -> list[torch.Tensor]:
    """``steps`` batches of bytes, int64 of shape (BATCH, SEQUENCE), drawn from Python's help texts."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(corpus) - SEQUENCE, (steps, BATCH), generator=generator)
    return [torch.stack([corpus[start : start + SEQUENCE] for start in row.tolist()]) for row in starts]


def train(model: nn.Module, data: list[torch.Tensor]) -> tuple[list[float], float]:
    """An ordinary training loop: the loss of each step, and the mean seconds of a step after the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, started = [], time.perf_counter()
    for step, ids in enumerate(data):
        if step == 1:
            started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (time.perf_counter() - started) / max(1, len(data) - 1)


def run_here(steps: int) -> Run:
    """Train on this rank: sharded over all ranks if torchrun started us, else alone."""
    torch.set_num_threads(1)
    model, data = build(), batches(steps)
    if "RANK" not in os.environ:
        return Run(*train(model, data))
    mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    started = time.perf_counter()
    example = {"input_ids": data[0], "labels": data[0]}
    model = fxpar.parallelize(model, mesh, example_kwargs=example, cluster="toy")
    seconds = time.perf_counter() - started
    losses, seconds_per_step = train(model, data)
    with record_collectives() as executed:
        model(**example).loss.backward()
    return Run(losses, seconds_per_step, fxpar.applied_plan(model).to_json(), seconds, len(executed))


def demo(steps: int = 30, processes: int = 2) -> int:
    """Train both ways, show the plan and both curves; returns 0 if the losses agree, else 1."""
    print(f"A 4-layer Llama (hidden 128, 8 heads, 4 kv heads) on the bytes of Python's help, {steps} steps of AdamW.")
    print("The plan is priced for the made-up cluster 'toy', on which even so small a model is worth splitting.\n")
    with progress("train on 1 process"):
        alone = _start([], steps)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with progress(f"plan, shard and train on {processes} processes"):
        sharded = _start(launcher, steps)
    assert sharded.plan is not None
    plan = Plan.from_json(sharded.plan)
    planned = sum(item.count for item in plan.collectives)
    print(f"{plan}\n\n{planned} collectives in a step are planned, {sharded.executed} were executed")
    print(f"planning took {sum(plan.timings.values()):.2f} s, with sharding {sharded.ready_seconds:.2f} s\n")
    worst = compare(alone, sharded, processes)
    agree = worst <= TOLERANCE
    verdict = "at most" if agree else "MORE THAN"
    print(f"\nlargest relative difference of the losses: {worst:.1e}, {verdict} {TOLERANCE}")
    return 0 if agree else 1


def _start(launcher: list[str], steps: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="fxpar-demo-") as folder:
        out = Path(folder) / "run.json"
        module = ["-m", "fxpar.demo"] if not launcher else [*launcher, "-m", "fxpar.demo"]
        command = [sys.executable, *module, "--steps", str(steps), "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise FxparError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()}")
        return Run(**json.loads(out.read_text()))


def compare(alone: Run, sharded: Run, processes: int) -> float:
    """Show both loss curves; returns the largest relative difference (infinite if a loss is not a number)."""
    differences = [abs(a - b) / abs(a) for a, b in zip(alone.losses, sharded.losses, strict=True)]
    top = max((loss for loss in alone.losses + sharded.losses if math.isfinite(loss)), default=1.0)
    rows = [
        (str(step + 1), f"{a:.6f}", _bar(a / top), f"{b:.6f}", _bar(b / top), f"{difference:.1e}")
        for step, (a, b, difference) in enumerate(zip(alone.losses, sharded.losses, differences, strict=True))
    ]
    tables.show("loss", ("step", "1 process", "", f"{processes} processes", "", "relative difference"), rows)
    seconds = f"{alone.seconds_per_step:.3f} on 1 process, {sharded.seconds_per_step:.3f} on {processes}"
    print(f"\nseconds a step: {seconds}")
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


def _bar(share: float, width: int = 16) -> str:
    """A bar of ``share`` (0 to 1) of ``width`` characters; none for what is not a number."""
    return "#" * round(share * width) if math.isfinite(share) else ""


def main() -> None:
    """What every rank runs; rank 0 writes its run to ``--out``."""
    parser = argparse.ArgumentParser(prog="python -m fxpar.demo")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = run_here(args.steps)
    if os.environ.get("RANK", "0") == "0":
        args.out.write_text(json.dumps(asdict(run)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
