"""Layers of one make that are split in different ways on real ranks: by constraints, and by a limit that binds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from training import NO_DROPOUT, Block, assert_close, assert_same_gradients, gpt2, ids, mesh_of

import fxpar
from fxpar.plans import Plan
from fxpar.precision import Float64Casts
from fxpar.runtime.checkpoints import whole_of
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives

LAYER = "transformer.h.{}.mlp.c_fc.weight"


def call(length: int = 8) -> dict[str, Any]:
    return {"input_ids": ids(length=length), "labels": ids(length=length)}


def stepped(model: nn.Module, whole: nn.Module, length: int = 8) -> int:
    """Loss and gradients are those of ``whole``; how many collectives ran."""
    for each in (model, whole):
        each.zero_grad()
    with Float64Casts():
        wanted = whole(**call(length)).loss
        wanted.backward()
        with record_collectives() as ran:
            loss = model(**call(length)).loss
            loss.backward()
    assert_close(loss.detach(), wanted.detach(), 1e-12)
    assert_same_gradients(model, whole, 1e-9)
    return len(ran)


def trained(options: dict[str, Any], share: float | None, given: bool) -> dict[str, str]:
    """The kind of every layer, when all numbers are right, those of a call in another shape included."""
    whole = gpt2(n_layer=4, **NO_DROPOUT).double()
    model, mesh = copy.deepcopy(whole), mesh_of()
    options = {"example_kwargs": call(), "cluster": "cpu-gloo", **options}
    with Float64Casts():
        if share is not None:
            free = fxpar.plan(model, {"tp": 2}, **options)
            assert free.memory is not None
            options["memory_limit_bytes"] = share * free.memory.peak_bytes
        plan = fxpar.plan(model, {"tp": 2}, **options) if given else None
        plan = plan and Plan.from_json(plan.to_json())
        fxpar.parallelize(model, mesh, plan=plan, **options)
    applied = applied_plan(model)
    assert plan is None or applied.digest == plan.digest
    if share is not None:
        assert applied.memory is not None and applied.memory.peak_bytes <= options["memory_limit_bytes"]
    assert stepped(model, whole) == sum(item.count for item in applied.collectives)
    stepped(model, whole, length=12)
    values = model.state_dict()
    for name, tensor in whole.state_dict().items():
        value = values[name]
        assert torch.equal(whole_of(value) if isinstance(value, DTensor) else value, tensor), name
    return applied.instances


@pytest.mark.parametrize("given", [False, True], ids=["planned", "given"])
def test_a_limit_that_only_some_layers_have_to_yield_to(given: bool) -> None:
    kinds = run_ranks(2, trained, {}, 0.95, given, timeout=300)[0]
    assert len(set(kinds.values())) > 1


class Twice(nn.Module):
    """Equal layers that run on one input, and again on another of another shape: each is called as two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.layers:
            y = layer(y)
        return x.square().mean() + y.square().mean()


def as_two_blocks(constraints: dict[str, str] | None) -> int:
    """How many kinds there are; loss and gradients are those of the whole model, also by a plan that was saved."""
    torch.set_default_dtype(torch.float64)
    whole, mesh = Twice(), mesh_of()
    x, y = torch.randn(4, 16), torch.randn(8, 16)
    options: dict[str, Any] = {"example_args": (x, y), "cluster": "toy"}
    plan = fxpar.plan(whole, {"tp": 2}, constraints=constraints, **options)
    whole(x, y).backward()
    for given in (None, Plan.from_json(plan.to_json())):
        model = copy.deepcopy(whole)
        model.zero_grad()
        fxpar.parallelize(model, mesh, plan=given, constraints=None if given else constraints, **options)
        model(x, y).backward()
        assert_same_gradients(model, whole, 1e-9)
    return len({name for _, name in plan.calls})


def test_modules_that_are_called_as_two_blocks() -> None:
    alike = run_ranks(2, as_two_blocks, None)[0]
    assert run_ranks(2, as_two_blocks, {"layers.2.up.weight": "S1", "layers.[013].up.weight": "S0"})[0] == alike + 2


def test_a_constraint_on_one_layer_only() -> None:
    constraints = {LAYER.format(1): "S0", LAYER.format(2): "S1", LAYER.format("[03]"): "replicated"}
    kinds = run_ranks(2, trained, {"constraints": constraints}, None, False, timeout=300)[0]
    assert len(set(kinds.values())) == 3 and kinds["transformer.h.0"] == kinds["transformer.h.3"]
