"""Meshes: of one rank, sub-meshes, smaller than the world, unnamed, too many axes, ranks out of order, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from training import (
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    mesh_of,
    rows,
    stack,
    train,
)

import fxpar
from fxpar.errors import LayoutError
from fxpar.runtime.module import applied_plan

TOLERANCE = 1e-9


def square(model: nn.Module) -> torch.Tensor:
    return model(rows()).square().mean()


def assert_trains(mesh: DeviceMesh) -> nn.Module:
    wanted, model = stack(), stack()
    assert fxpar.parallelize(model, mesh, example_args=(rows(),), cluster="toy") is model
    assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in model.parameters())
    assert_close(torch.stack(train(model, square)), torch.stack(train(wanted, square)), TOLERANCE)
    assert_same_parameters(model, wanted, TOLERANCE)
    return model


def one_rank() -> bool:
    plan = applied_plan(assert_trains(mesh_of(1)))
    assert plan.mesh.axes == (("tp", 1),) and not plan.collectives and plan.unsplit_share == 1
    assert "degree 1" in str(plan)
    return True


def test_a_mesh_of_one_rank() -> None:
    assert run_ranks(1, one_rank) == [True]


def two_axes() -> bool:
    """Sub-meshes of (dp, tp) and of (4, 1), and the refusals of four axes and of ranks that do not ascend."""
    both = mesh_of(2, 2, names=("dp", "tp"))
    model = assert_trains(both["tp"])
    assert applied_plan(model).mesh.axes == (("tp", 2),)
    assert applied_plan(assert_trains(both["dp"])).mesh.axes == (("dp", 2),)
    long = mesh_of(4, 1, names=("dp", "tp"))
    assert applied_plan(assert_trains(long["tp"])).mesh.axes == (("tp", 1),)
    assert applied_plan(assert_trains(long["dp"])).mesh.axes == (("dp", 4),)
    many = mesh_of(1, 2, 2, 1, names=("a", "b", "c", "d"))
    shuffled = DeviceMesh("cpu", [1, 0, 2, 3], mesh_dim_names=("tp",))
    for mesh, message in (
        (many, r"axes a, b, c, d; fxpar splits over 3 at most: pass a sub-mesh such as mesh\['b', 'c', 'd'\]"),
        (mesh_of(2, 1, 2, 1, names=None), "axes dim_0, dim_1, dim_2, dim_3"),
        (shuffled, r"do not ascend along axis 0: \[1, 0, 2, 3\]"),
    ):
        untouched = stack()
        before = dict(untouched.named_parameters())
        with pytest.raises(LayoutError, match=message):
            fxpar.parallelize(untouched, mesh, example_args=(rows(),))
        assert all(untouched.get_parameter(name) is p for name, p in before.items())
    unnamed = mesh_of(4, names=None)
    assert applied_plan(assert_trains(unnamed)).mesh.axes == (("dim_0", 4),)
    return True


def test_sub_meshes_names_and_refusals() -> None:
    assert all(run_ranks(4, two_axes, timeout=120))


def smaller() -> bool:
    """Two ranks of four; the others are refused by name, and nobody waits for them."""
    ranks = dist.new_group([1, 3])
    mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=("tp",))
    assert ranks is not None
    if dist.get_rank() in (1, 3):
        assert_trains(mesh)
    else:
        model = stack()
        with pytest.raises(LayoutError, match=rf"rank {dist.get_rank()} is not part of the mesh"):
            fxpar.parallelize(model, mesh, example_args=(rows(),))
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    return True


def test_a_mesh_smaller_than_the_world() -> None:
    assert all(run_ranks(4, smaller))


def no_mesh() -> bool:
    with pytest.raises(LayoutError, match=r"needs a DeviceMesh, not dict.*init_device_mesh.*fxpar\.plan"):
        fxpar.parallelize(stack(), {"tp": 2}, example_args=(rows(),))  # type: ignore[arg-type]
    return True


def test_something_that_is_no_mesh() -> None:
    assert all(run_ranks(2, no_mesh))


class Odd(nn.Module):
    """Nothing in it divides by 4, or makes four pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def undivided() -> str:
    torch.manual_seed(0)
    wanted = Odd()
    torch.manual_seed(0)
    model: Any = Odd()
    x, y = rows(13, 3).requires_grad_(), rows(13, 3).requires_grad_()
    fxpar.parallelize(model, mesh_of(), example_args=(x,), cluster="toy")
    model(x).square().mean().backward()
    wanted(y).square().mean().backward()
    assert_same_gradients(model, wanted, TOLERANCE)
    assert_close(x.grad, y.grad, TOLERANCE)
    plan = applied_plan(model)
    assert plan.unsplit_share == 1 and not any(c.wire_bytes for c in plan.collectives)
    return str(plan)


def test_a_degree_that_divides_nothing_splits_nothing_and_says_why() -> None:
    texts = run_ranks(4, undivided)
    assert "100" in texts[0] and "no dim of [6, 3] divides by 4" in texts[0], texts[0]
