"""Ranks that fail or disagree make all ranks fail, soon, with a message; nothing is changed by a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from training import Stack, assert_close, assert_same_parameters, mesh_of, rows, stack, train

import fxpar
from fxpar.errors import CallError, CaptureError, FxparError, InfeasibleError, PlanError, RankError
from fxpar.plans import Plan
from fxpar.runtime.module import applied_plan

SECONDS = 10


def refused(model: nn.Module, args: tuple[Any, ...] = (), **options: Any) -> tuple[str, str]:
    """The error that parallelizing ``model`` raises; within 10 seconds, and the model is as it was."""
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    start = time.monotonic()
    try:
        fxpar.parallelize(model, mesh_of(), example_args=args or (rows(),), cluster="toy", **options)
    except Exception as error:
        found = type(error).__name__, str(error)
    else:
        found = "nothing", ""
    assert time.monotonic() - start < SECONDS
    assert list(model.state_dict()) == keys
    for name, p in model.named_parameters():
        was, value = before[name]
        assert p is was and not isinstance(p, DTensor) and torch.equal(p, value), name
    assert "forward" not in model.__dict__
    return found


def disagreeing() -> list[tuple[str, str]]:
    """Another width, another depth, another dtype, another input, another seed of equal models."""
    rank = dist.get_rank()
    return [
        refused(stack(width=8 + 8 * rank), (rows(4, 8 + 8 * rank),)),
        refused(stack(blocks=3 + rank)),
        refused(stack().to(torch.float32 if rank else torch.float64), (rows().to(torch.float32 if rank else None),)),
        refused(stack(), (rows(4 + 2 * rank),)),
        refused(frozen_on(1)),
    ]


def frozen_on(rank: int) -> nn.Module:
    model = stack()
    model.head.weight.requires_grad_(dist.get_rank() != rank)
    return model


def test_ranks_with_different_models_all_fail() -> None:
    first, second = run_ranks(2, disagreeing)
    assert first == second
    for kind, text in first:
        assert kind == RankError.__name__
        assert "the ranks disagree about the captured model" in text and "rank 1 has" in text, text


class Failing(Stack):
    """Raises on rank 1, in the way that its ``how`` says."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(super().forward(x)) if dist.get_rank() == 1 else super().forward(x)


def looks_at_data(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise MemoryError("no room")


def one_fails() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    sharded = stack()
    if rank == 1:
        sharded.head.weight = nn.Parameter(DTensor.from_local(sharded.head.weight.detach(), mesh_of()))
    found = [refused(Failing(looks_at_data)), refused(Failing(out_of_memory))]
    try:
        fxpar.parallelize(sharded, mesh_of(), example_args=(rows(),), cluster="toy")
    except FxparError as error:
        found.append((type(error).__name__, str(error)))
    assert not isinstance(sharded.inp.weight, DTensor)
    assert fxpar.parallelize(stack(), mesh_of(), example_args=(rows(),), cluster="toy")  # the ranks still agree
    return found


def test_a_rank_that_fails_makes_all_fail_with_its_message() -> None:
    first, second = run_ranks(2, one_fails)
    for (kind, text), (own_kind, own), wanted, expected in zip(
        first,
        second,
        (r"test_errors.py", "no room", "'head.weight' is a DTensor already"),
        (CaptureError, CaptureError, CallError),
        strict=True,
    ):
        assert kind == own_kind == expected.__name__, (kind, own_kind, text)
        assert wanted in own and text == f"rank 1: {own}", (own, text)


def planner_fails() -> list[tuple[str, str]]:
    """Only the first rank plans; what it finds wrong is raised everywhere."""
    return [
        refused(stack(), constraints={"heads.weight": "S0"}),
        refused(stack(), constraints={"head.weight": "S7"}),
        refused(stack(), constraints={"head.weight": "S0@dp"}),
        refused(stack(), whole=("hed",)),
        refused(stack(), plan=other_plan(stack(blocks=5), rows())),
        refused(stack(), plan=other_plan(stack(), rows(6))),
        refused(stack(), plan=other_plan(stack(), rows(), {"tp": 4})),
        refused(stack(), plan=other_plan(stack(), rows(), {"other": 2})),
    ]


def other_plan(model: nn.Module, x: torch.Tensor, mesh: dict[str, int] | None = None) -> Plan:
    return fxpar.plan(model, mesh or {"tp": 2}, example_args=(x,), cluster="toy")


def test_what_the_first_rank_finds_wrong_is_raised_everywhere() -> None:
    first, second = run_ranks(2, planner_fails)
    kinds = [PlanError, InfeasibleError, fxpar.errors.LayoutError, CaptureError, *[PlanError] * 4]
    texts = ["'heads.weight' matches no parameter and no module; nearest: head.weight",
             "head.weight of shape [8, 8] cannot be S7", "axis 'dp'",
             "whole='hed' names no module", "the plan is for another program", "the plan is for another program",
             "the plan is for a mesh {'tp': 4}, and this one is {'tp': 2}", "{'other': 2}"]  # fmt: skip
    for (kind, text), (other_kind, other), expected, wanted in zip(first, second, kinds, texts, strict=True):
        assert kind == other_kind == expected.__name__, (kind, text)
        assert wanted in text and text in other, (text, other)


def sharded_already() -> bool:
    model = fxpar.parallelize(stack(), mesh_of(), example_args=(rows(),), cluster="toy")
    with pytest.raises(CallError, match=r"'inp.weight' is a DTensor already; parallelize a model once, and before"):
        fxpar.parallelize(model, mesh_of(), example_args=(rows(),), cluster="toy")
    from torch.distributed.fsdp import fully_shard

    other = fully_shard(stack(), mesh=mesh_of())
    with pytest.raises(CallError, match=r"DTensor already.*before fully_shard"):
        fxpar.parallelize(other, mesh_of(), example_args=(rows(),), cluster="toy")
    return True


def test_models_that_are_sharded_already_are_refused() -> None:
    assert all(run_ranks(2, sharded_already))


def square(model: nn.Module) -> torch.Tensor:
    return model(rows()).square().mean()


def saved_plan(text: str) -> str:
    """A plan from JSON runs as it is, without planning, and gives the numbers of one process."""
    plan = Plan.from_json(text)
    wanted, model = stack(), stack()
    fxpar.parallelize(model, mesh_of(), example_args=(rows(),), plan=plan)
    assert_close(torch.stack(train(model, square)), torch.stack(train(wanted, square)), 1e-9)
    assert_same_parameters(model, wanted, 1e-9)
    assert model(rows(6)).shape == (6, 8)
    return applied_plan(model).digest


def test_a_saved_plan_is_applied() -> None:
    plan = other_plan(stack(), rows())
    assert run_ranks(2, saved_plan, plan.to_json()) == [plan.digest] * 2


def failing_recapture() -> list[tuple[str, str]]:
    """A new way of calling the model that only one rank can capture."""

    class Choosy(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 1 and len(x) == 6:
                raise ValueError("not six")
            return super().forward(x)

    torch.manual_seed(0)
    model = fxpar.parallelize(Choosy(), mesh_of(), example_args=(rows(),), cluster="toy")
    start = time.monotonic()
    try:
        model(rows(6))
    except FxparError as error:
        found = type(error).__name__, str(error)
    assert time.monotonic() - start < SECONDS
    assert model(rows(4)).shape == (4, 8)
    return [found]


def test_a_rank_that_cannot_capture_a_new_call_makes_all_fail() -> None:
    ((kind, text),), ((other_kind, other),) = run_ranks(2, failing_recapture)
    assert kind == other_kind == CaptureError.__name__
    assert "not six" in text and text == f"rank 1: {other}"
