"""Axes that carry the batch: every rank calls the model with its own part, and the gradients are those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from training import (
    assert_same_gradients,
    assert_same_parameters,
    mesh_of,
    rows,
    stack,
    train,
)

import fxpar
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives

TOLERANCE = 1e-9
#: Parameters as DistributedDataParallel and as FSDP hold them.
WAYS = {"ddp": {"*": "I"}, "fsdp": {"*.weight": "S0"}, "free": None}


def data_mesh() -> Any:
    return mesh_of(dist.get_world_size(), names=("dp",))


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def outside(way: str) -> bool:
    """A loss outside with equal counts: the mean over the whole batch."""
    wanted, model = stack(), stack()
    batch = rows(count=6)
    fxpar.parallelize(model, data_mesh(), example_args=(mine(batch),), constraints=WAYS[way], cluster="toy")
    with record_collectives() as executed:
        loss = model(mine(batch)).square().mean()
        loss.backward()
    planned = sum(item.count for item in applied_plan(model).collectives)
    assert len(executed) == planned > 0
    wanted_loss = wanted(batch).square().mean()
    wanted_loss.backward()
    dist.all_reduce(loss.detach())
    assert_same_gradients(model, wanted, TOLERANCE)
    assert model(mine(batch)).shape == mine(batch).shape
    train(model, lambda m: m(mine(batch)).square().mean())
    train(wanted, lambda m: m(batch).square().mean())
    assert_same_parameters(model, wanted, TOLERANCE)
    wish = {"ddp": "I", "fsdp": "S0"}.get(way)
    states = {str(state) for name, (state,) in applied_plan(model).parameters.items() if name.endswith("weight")}
    assert wish is None or states == {wish}
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_outside_is_averaged_over_the_ranks(way: str) -> None:
    assert all(run_ranks(2, outside, way))
