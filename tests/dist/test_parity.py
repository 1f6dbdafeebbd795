"""Every model on real gloo ranks, against itself unsharded: the optimal plan, Megatron-LM's layouts, random plans.

Outputs, and every gradient of a parameter or an input, agree to 1e-9 in float64; what was communicated is what the plan
said; ten AdamW steps with gradient clipping end with equal losses.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from benchmarks.megatron import megatron_plan
from fxpar.assemble import assemble, random_choice
from fxpar.binding import bind, place_of
from fxpar.capture import capture
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.layout import COLLECTIVES, Mesh
from fxpar.plans import Collective, Plan
from fxpar.precision import Float64Casts
from fxpar.runtime.dtensor import local_piece
from fxpar.runtime.module import applied_plan, apply, call_key
from fxpar.runtime.records import record_collectives
from fxpar.runtime.skeleton import skeleton
from fxpar.space import space
from fxpar.training_step import Step, named_tensors, train_step
from tests.cases import best
from tests.models import MODELS, ODD

BUILDERS = MODELS | ODD
SEEDS = range(20)
DEGREES = (2, 4)


@dataclass(frozen=True)
class Found:
    """What one rank saw of one plan."""

    plan: str
    error: float
    where: str
    digest: str
    unplanned: dict[Collective, int]
    losses: tuple[list[float], list[float]] | None


@functools.cache
def plans_of(name: str, degree: int) -> dict[str, Plan]:
    """The optimal plan, both layouts of Megatron-LM where the family has them, and the random plans."""
    model, args, kwargs = BUILDERS[name]()
    with Float64Casts():
        captured = capture(model, args, kwargs)
    priced = price(space(captured.program, Mesh.of({"tp": degree})), Cluster.load("toy"))
    plans = {"optimal": best(priced)}
    if name in MODELS:
        for label, split in (("megatron tp", False), ("megatron tp+sp", True)):
            plans[label] = megatron_plan(priced, name, sequence_parallel=split)
    for seed in SEEDS:
        plans[f"random {seed}"] = assemble(priced, random_choice(priced.space, seed))
    return plans


def per_rank(name: str, plans: dict[str, Plan], dtype: torch.dtype = torch.float64) -> list[Found]:
    """Every plan on this rank; for random plans the model is captured once."""
    torch.set_default_dtype(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model, args, kwargs = built(name, dtype)
    gc.freeze()  # applying a plan looks through all objects for optimizers: not through those of the libraries
    bare = skeleton(model)
    with lifted(dtype):
        captured = capture(model, args, kwargs)
        wanted = train_step(copy.deepcopy(model), args, kwargs, seed=0)
        whole = numbers(model, *built(name, dtype)[1:])
    found = []
    for label, plan in plans.items():
        model, args, kwargs = built(name, dtype)
        reference = copy.deepcopy(model)
        if label.startswith("random"):
            variant = bind(captured, plan, place_of(mesh, plan.mesh), bare)
            key = call_key(list(model.modules()), args, kwargs)
            apply(model, variant, plan=plan, layouts=plan.parameters, mesh=mesh, recapture=refuse, key=key, seed=0)
            with record_collectives() as ran:
                step = numbers(model, args, kwargs)
            differences, losses = step.compare(pieces(whole, plan, mesh)), None
        else:
            with lifted(dtype):
                given = None if label == "optimal" else plan
                fxpar.parallelize(model, mesh, plan=given, cluster="toy", example_args=args, example_kwargs=kwargs)
                losses = None
                if dtype is torch.float64:
                    losses = tuple(ten_steps(m, *built(name, dtype)[1:]) for m in (copy.deepcopy(model), reference))
            with record_collectives() as ran:
                differences = train_step(model, args, kwargs, seed=0).compare(wanted)
        if dtype is torch.float32:
            # Some gradients are mathematically zero (key biases): the optimizer turns their noise into steps.
            differences = [item for item in differences if item.kind != "parameter after a step"]
        worst = max(differences, key=lambda item: item.error)
        run = applied_plan(model)
        where = f"{worst.kind} {worst.name}"
        found.append(Found(label, worst.error, where, run.digest, difference(ran, run), losses))
    return found


def lifted(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Only what is captured, or run as it is, needs its casts lifted: a captured graph has them lifted already."""
    return Float64Casts() if dtype is torch.float64 else nullcontext()


def numbers(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """Outputs and gradients, of parameters as this rank holds them; nothing is communicated that the plan does not."""
    inputs = {name: x for name, x in named_tensors((args, kwargs)) if x.requires_grad}
    outs = dict(named_tensors(model(*args, **kwargs), "output"))
    roots = [out for out in outs.values() if out.requires_grad]
    generator = torch.Generator().manual_seed(0)
    torch.autograd.backward(roots, [torch.randn(out.shape, generator=generator) for out in roots])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(
        {
            "output": {name: out.detach() for name, out in outs.items()},
            "gradient": {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()},
            "input gradient": {name: x.grad for name, x in inputs.items() if x.grad is not None},
        }
    )


def pieces(whole: Step, plan: Plan, mesh: DeviceMesh) -> Step:
    """What this rank should hold of ``whole``."""
    gradients = {
        name: local_piece(gradient, plan.parameters[name], mesh) for name, gradient in whole.tensors["gradient"].items()
    }
    return Step({**whole.tensors, "gradient": gradients})


def built(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, args, kwargs = BUILDERS[name]()
    if dtype is not torch.float64:
        args = tuple(x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in args)
    return model.to(dtype), args, kwargs


def refuse(*_: Any) -> Any:
    raise AssertionError("the same call was captured again")


def difference(ran: list[Collective], plan: Plan) -> dict[Collective, int]:
    """How often each collective ran beyond what was planned (negative: less often)."""
    counts = Counter(ran)
    counts.subtract({replace(item, count=1): item.count for item in plan.collectives})
    return {item: count for item, count in counts.items() if count}


def ten_steps(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """The losses of ten AdamW steps with gradient clipping, and the norms that were clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for _ in range(10):
        loss = sum(out.square().mean() for _, out in named_tensors(model(*args, **kwargs)) if out.requires_grad)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + norms


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", BUILDERS)
def test_parity(name: str, degree: int) -> None:
    plans = plans_of(name, degree)
    for rank, found in enumerate(run_ranks(degree, per_rank, name, plans, timeout=300)):
        assert [mine.plan for mine in found] == list(plans)
        for mine in found:
            at = f"{mine.plan} plan of {name} on rank {rank} of {degree}"
            assert mine.error <= 1e-9, f"{at}: {mine.where} is off by {mine.error:.1e}"
            assert mine.digest == plans[mine.plan].digest, f"{at}: another plan was run"
            assert not mine.unplanned, f"{at}: ran beyond the plan: {mine.unplanned}"
            if mine.losses is not None:
                assert mine.losses[0] == pytest.approx(mine.losses[1], rel=1e-7), at
                assert mine.losses[1][9] < mine.losses[1][0]
                assert min(mine.losses[1][10:]) > 0.1, "nothing was clipped"


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", MODELS)
def test_float32(name: str, degree: int) -> None:
    for rank, (mine,) in enumerate(run_ranks(degree, in_float32, name, timeout=120)):
        assert mine.error <= 1e-4, f"{name} on rank {rank} of {degree}: {mine.where} is off by {mine.error:.1e}"
        assert not mine.unplanned


def in_float32(name: str) -> list[Found]:
    """The optimal plan of the model in float32."""
    return per_rank(name, {"optimal": None}, torch.float32)  # type: ignore[dict-item]


KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}


class _Counting(TorchDispatchMode):
    """Counts calls of functional collectives by kind, whoever makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self.counts[KINDS[name]] += 1
        return func(*args, **(kwargs or {}))


def counted(name: str) -> tuple[Counter[str], Counter[str]]:
    """Collectives of a forward and backward under the optimal plan: seen by the dispatcher, and planned."""
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with Float64Casts():
        model, args, kwargs = BUILDERS[name]()
        fxpar.parallelize(model, mesh, cluster="toy", example_args=args, example_kwargs=kwargs)
        with _Counting() as counting:
            outs = [out for _, out in named_tensors(model(*args, **kwargs)) if out.requires_grad]
            torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    planned: Counter[str] = Counter()
    for item in applied_plan(model).collectives:
        planned[item.kind] += item.count
    return counting.counts, planned


@pytest.mark.parametrize("name", MODELS)
def test_the_dispatcher_sees_the_planned_collectives(name: str) -> None:
    for seen, planned in run_ranks(2, counted, name, timeout=120):
        assert seen == planned
        assert set(seen) <= set(COLLECTIVES) and seen
