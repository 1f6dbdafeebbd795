"""Tensors cut by several axes: which rows a rank has, what a conversion on one axis gives, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from harness import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard
from training import mesh_of

from fxpar.binding import place_of
from fxpar.cluster import Cluster
from fxpar.cost.arcs import arc_seconds
from fxpar.cost.trees import cheapest_tree
from fxpar.graph import Value
from fxpar.layout import I, Layout, Mesh, R, S, fits, local_layout
from fxpar.pins import parse_layout
from fxpar.rules.joint import layouts_at_rest
from fxpar.runtime.checkpoints import describe, whole_of
from fxpar.runtime.collectives import convert
from fxpar.runtime.dtensor import as_dtensor, local_piece

MESH = Mesh.of({"dp": 2, "tp": 2})
SHAPE = (24, 4)
STATES = (I, S(0), S(1), S(0, 3))


def whole() -> torch.Tensor:
    return torch.arange(96, dtype=torch.float64).view(SHAPE)


def at_rest() -> tuple[Layout, ...]:
    return layouts_at_rest((STATES, STATES), SHAPE, MESH.degrees)


def rows_are_right() -> int:
    """Every layout at rest as a DTensor gives back the whole; plain shards are what DTensor itself makes of them."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    for layout in at_rest():
        held = describe(as_dtensor(local_piece(whole(), layout, mesh), layout, mesh, SHAPE))
        assert torch.equal(whole_of(held), whole()), layout
        assert torch.equal(held.full_tensor(), whole()), layout
        if all(isinstance(placement, Replicate) or type(placement) is Shard for placement in held.placements):
            theirs = torch.distributed.tensor.distribute_tensor(whole(), mesh, held.placements)
            assert torch.equal(held.to_local(), theirs.to_local()), layout
    return len(at_rest())


def test_every_layout_at_rest_is_the_whole_tensor() -> None:
    assert run_ranks(4, rows_are_right)[0] > 15


def outer_axis_alone(text: str) -> bool:
    """The outer axis gathered: the rows of the inner axis' piece, in their order."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    src, dst = parse_layout(text, MESH), (R, S(0))
    layouts = sorted({*layouts_at_rest(((I, R, S(0)), (I, R, S(0))), SHAPE, MESH.degrees), src, dst})
    toy, value = Cluster.load("toy"), Value(SHAPE, "float64", True)
    arcs = arc_seconds(layouts, value, MESH, toy)
    tree = cheapest_tree(arcs, layouts.index(src), [layouts.index(dst)], layouts)
    # Only a strided outer cut is gathered in one go; else the inner axis must let go first.
    assert (len(tree.arcs) == 1) == (text == "S0@tp,S0@dp"), tree
    x, place = local_piece(whole(), src, mesh).requires_grad_(), place_of(mesh, MESH)
    out = x
    for before, after in tree.arcs:
        (axis,) = [at for at in range(2) if before[at] != after[at]]
        a, b = (str(local_layout(layout, MESH.degrees)[axis]) for layout in (before, after))
        out = convert(out, a, b, True, *MESH.axes[axis], place.coordinates[axis], place.groups[axis])
    half = place.coordinates[1]
    assert torch.equal(out, whole()[12 * half : 12 * half + 12])
    (grad,) = torch.autograd.grad(out, x, (place.coordinates[0] + 1.0) * out.detach())  # one summand per rank of dp
    assert torch.equal(grad, 3 * local_piece(whole(), src, mesh))
    return True


def test_s0_dp_s0_tp_to_r_dp_s0_tp_gives_the_right_rows() -> None:
    assert all(run_ranks(4, outer_axis_alone, "S0@dp,S0@tp"))
    assert all(run_ranks(4, outer_axis_alone, "S0@tp,S0@dp"))


def save(folder: str) -> bool:
    import torch.distributed.checkpoint as dcp

    mesh = mesh_of(2, 2, names=("dp", "tp"))
    state = {
        str(layout): describe(as_dtensor(local_piece(whole(), layout, mesh), layout, mesh, SHAPE))
        for layout in at_rest()
    }
    dcp.save(state, checkpoint_id=folder)
    return True


def load(folder: str) -> bool:
    """Each into another layout of two axes, and into a plain tensor."""
    import torch.distributed.checkpoint as dcp

    mesh, layouts = mesh_of(2, 2, names=("dp", "tp")), at_rest()
    state: dict[str, Any] = {}
    for name, other in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        empty = torch.zeros(SHAPE, dtype=torch.float64)
        state[str(name)] = describe(as_dtensor(local_piece(empty, other, mesh), other, mesh, SHAPE))
    dcp.load(state, checkpoint_id=folder)
    assert all(isinstance(value, DTensor) and torch.equal(whole_of(value), whole()) for value in state.values())
    plain = {str(name): torch.zeros(SHAPE, dtype=torch.float64) for name in layouts}
    dcp.load(plain, checkpoint_id=folder)
    return all(torch.equal(value, whole()) for value in plain.values())


def test_checkpoints_move_between_layouts_of_two_axes(tmp_path: Any) -> None:
    assert all(run_ranks(4, save, str(tmp_path)))
    assert all(run_ranks(4, load, str(tmp_path)))


def test_layouts_at_rest_nest() -> None:
    found = at_rest()
    assert all(fits(SHAPE, layout, MESH.degrees) for layout in found)
    assert {(S(0), S(0, 2)), (S(0, 2), S(0)), (S(0, 3), S(0, 6)), (S(0, 6), S(0, 3))} <= set(found)
    assert len(found) == len(set(found)) > 4 * 3
