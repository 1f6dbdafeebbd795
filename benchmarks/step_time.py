"""Seconds of a training step: fxpar against the same layout through PyTorch's ``parallelize_module``.

In: the number of timed rounds. Out: Markdown tables on standard output. A 4-layer Llama (hidden 512, batch 4, sequence
256, float32) runs on 2 gloo processes with one thread each. All contestants live in the same processes and take turns,
in another order every round; a step is forward, backward and AdamW, on rank 0's clock between barriers.

    python benchmarks/step_time.py [--rounds 40]
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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron import megatron_pins
from search_time import show
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from fxpar.assemble import assemble
from fxpar.capture import capture
from fxpar.cluster import Cluster
from fxpar.cost.comm import wire_bytes
from fxpar.cost.price import price
from fxpar.layout import Mesh
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.processes import run_ranks
from fxpar.solver import solve
from fxpar.space import space

SIZE, BATCH, SEQUENCE, VOCABULARY = 2, 4, 256, 4096
AXIS = "tp"


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


# Contestants ------------------------------------------------------------------------------------------------------


def torch_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron's layout: heads, inner features and vocabulary split, everything else whole on every rank."""
    return _torch(model, mesh, Replicate(), {})


def torch_tp_sp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same with sequence parallelism: what lies between the split parts is cut along the sequence."""
    norms = ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
    return _torch(model, mesh, Shard(1), {f"model.{name}": SequenceParallel() for name in norms})


def _torch(
    model: nn.Module, mesh: DeviceMesh, between: Replicate | Shard, more: Mapping[str, ParallelStyle]
) -> nn.Module:
    whole = Replicate()
    heads_in = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": between},
        desired_input_kwarg_layouts={"hidden_states": whole},
        use_local_output=False,
    )
    inner_in = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,), use_local_output=False)
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    layer: dict[str, ParallelStyle] = {
        "self_attn": heads_in,
        "mlp": inner_in,
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")},
    }
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=whole),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
        **more,
    }
    return parallelize_module(model, mesh, plan)


def fxpar_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fxpar.parallelize(model, mesh, example_kwargs=batch(), plan=same_layout(model, sequence_parallel=False))


def fxpar_tp_sp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fxpar.parallelize(model, mesh, example_kwargs=batch(), plan=same_layout(model, sequence_parallel=True))


def same_layout(model: nn.Module, *, sequence_parallel: bool) -> Plan:
    """The plan of :func:`torch_tp` or :func:`torch_tp_sp`: Megatron's, with a loss that every rank computes whole."""
    found = space(capture(model, (), batch()).program, Mesh.of({AXIS: SIZE}))
    pins = megatron_pins(found, "llama", sequence_parallel=sequence_parallel)
    whole = {"top::aten.reshape.default": "I", "top::aten.cross_entropy_loss.default": "I"}
    pins |= {slot: left & pins.get(slot, left) for slot, left in pin(found, nodes=whole).items()}
    priced = price(found, Cluster.load("cpu-gloo"))
    return assemble(priced, solve(priced.problem, pins=pins).choice)


def fxpar_optimal(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fxpar.parallelize(model, mesh, example_kwargs=batch(), cluster="cpu-gloo")


CONTESTANTS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "torch TP": torch_tp,
    "fxpar, the same layout (TP)": fxpar_tp,
    "torch TP+SP": torch_tp_sp,
    "fxpar, the same layout (TP+SP)": fxpar_tp_sp,
    "fxpar, optimal for cpu-gloo": fxpar_optimal,
}
PAIRS = (
    ("fxpar, the same layout (TP)", "torch TP"),
    ("fxpar, the same layout (TP+SP)", "torch TP+SP"),
    ("fxpar, optimal for cpu-gloo", "torch TP"),
    ("fxpar, optimal for cpu-gloo", "torch TP+SP"),
)

# Measuring --------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts collectives and the bytes each rank sends in them."""

    FUNCTIONS = {  # noqa: RUF012
        "all_reduce": ("all_reduce", 0),
        "all_gather_into_tensor": ("all_gather", 1),
        "reduce_scatter_tensor": ("reduce_scatter", 0),
        "all_to_all_single": ("all_to_all", 1),
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it communicates is then seen here
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name in self.FUNCTIONS:
            kind, grows = self.FUNCTIONS[name]
            local = args[0].numel() * args[0].element_size()
            self.found[kind] += 1
            self.bytes += wire_bytes(kind, local * (SIZE if grows else 1), SIZE)
        return out


@dataclass
class Contestant:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: dict[str, torch.Tensor]

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def contestant(make: Callable[[nn.Module, DeviceMesh], nn.Module], start: nn.Module, mesh: DeviceMesh) -> Contestant:
    model = make(copy.deepcopy(start), mesh)
    return Contestant(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch())


def run(rank: int, rounds: int) -> str:
    """Times per contestant in seconds, their collectives, and their losses in the first steps, as JSON."""
    torch.set_num_threads(1)
    mesh, start = init_device_mesh("cpu", (SIZE,), mesh_dim_names=(AXIS,)), llama()
    runners = {name: contestant(make, start, mesh) for name, make in CONTESTANTS.items()}
    report: dict[str, dict[str, Any]] = {}
    for name, runner in runners.items():
        losses = [float(runner.step()) for _ in range(2)]
        with Counting() as counting:
            losses.append(float(runner.step()))
        report[name] = {"losses": losses, "collectives": counting.found, "bytes": counting.bytes, "seconds": []}
    order, shuffle = list(runners), random.Random(0)  # the same order on both ranks
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            report[name]["seconds"].append(_seconds(runners[name].step))
    return json.dumps(report)


def _seconds(step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def bootstrap(ours: list[float], theirs: list[float], draws: int = 5000) -> tuple[float, float, float]:
    """The median over rounds of the ratio of times in one round: its 2.5 %, 50 % and 97.5 % quantiles.

    What disturbs the machine for a while disturbs both of a round, so ratios are taken within rounds.
    """
    ratios = np.array(ours) / np.array(theirs)
    pick = np.random.default_rng(0).integers(len(ratios), size=(draws, len(ratios)))
    low, middle, high = np.quantile(np.median(ratios[pick], axis=1), (0.025, 0.5, 0.975))
    return float(low), float(middle), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a training step against PyTorch's own tensor parallelism.")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps per contestant (default: %(default)s)")
    args = parser.parse_args()
    report = json.loads(run_ranks(run, SIZE, args.rounds))
    first = next(iter(report.values()))["losses"]
    rows = []
    for name, found in report.items():
        assert np.allclose(found["losses"], first, rtol=1e-4), f"{name} computes something else: {found['losses']}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["collectives"].items()))
        seconds = f"{1e3 * statistics.median(found['seconds']):.1f}"
        rows.append((name, seconds, str(sum(found["collectives"].values())), kinds, f"{found['bytes'] / 1e6:.2f}"))
    header = ("contestant", "step, ms (median)", "collectives", "of which", "wire MB per rank")
    show(f"A training step on {SIZE} processes, {args.rounds} rounds", header, rows)
    rows = []
    for ours, theirs in PAIRS:
        low, middle, high = bootstrap(report[ours]["seconds"], report[theirs]["seconds"])
        rows.append((ours, theirs, f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", "1.0"))
    header = ("ours", "theirs", "time ratio", "95 % interval (bootstrap)", "lower end at most")
    show("Time ratios", header, rows)


if __name__ == "__main__":
    main()
