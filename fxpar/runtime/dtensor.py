"""Layouts as DTensor placements, and parameters at rest as DTensors. The only file that knows DTensor's insides.

In: layouts, local pieces, a DeviceMesh. Out: DTensors, whole tensors and pieces. What is held in which layout is the
plan's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# S(d/k) has no public placement. _StridedShard(d, split_factor=k) on a mesh axis of degree n cuts dim d into k * n
# chunks and gives rank r the chunks r, n + r, 2n + r, ...: exactly S(d/k). tests/dist/test_apply.py holds it to that.
from torch.distributed.tensor.placement_types import _StridedShard

from fxpar.errors import LayoutError
from fxpar.layout import Layout, S, State, nested_layout, successive_layout
from fxpar.runtime.pieces import piece


def placements(layout: Layout, degrees: Sequence[int]) -> tuple[Placement, ...]:
    """The DTensor placements of a layout at rest (``I`` or ``S``); raises :class:`LayoutError` on another state."""
    return tuple(_placement(state) for state in successive_layout(layout, degrees))


def _placement(state: State) -> Placement:
    if state.kind == "I":
        return Replicate()
    if state.kind != "S":
        raise LayoutError(f"a parameter cannot be at rest in state {state}; only I or S")
    return Shard(state.dim) if state.parts == 1 else _StridedShard(state.dim, split_factor=state.parts)


@dataclass(frozen=True, slots=True)
class Pieces:
    """What this rank holds of a DTensor with a strided cut: for every dim, which rows of the whole, in their order."""

    tensor: DTensor
    rows: tuple[Tensor, ...]

    def runs(self, dim: int) -> list[tuple[int, int, int]]:
        """The rows of a dim as ``(start in the whole, start in the piece, length)``."""
        rows = self.rows[dim].tolist()
        starts = [at for at, row in enumerate(rows) if at == 0 or row != rows[at - 1] + 1]
        return [(rows[at], at, end - at) for at, end in zip(starts, [*starts[1:], len(rows)], strict=True)]

    def of(self, whole: Tensor) -> DTensor:
        """``whole``, which every rank has, cut the same way."""
        piece = whole[self._grid()].contiguous()
        like = self.tensor
        return DTensor.from_local(piece, like.device_mesh, like.placements, run_check=False, shape=like.shape,
                                  stride=like.stride())  # type: ignore[no-any-return]  # fmt: skip

    def gather(self) -> Tensor:
        """The whole, on every rank."""
        local, mesh = self.tensor.to_local().detach(), self.tensor.device_mesh
        whole = local.new_zeros(self.tensor.shape)
        whole[self._grid()] = local
        for axis, placement in enumerate(self.tensor.placements):
            if isinstance(placement, (Shard, _StridedShard)):
                dist.all_reduce(whole, group=mesh.get_group(axis))
        return whole

    def _grid(self) -> tuple[Tensor, ...]:
        return torch.meshgrid(*self.rows, indexing="ij")


def is_strided(tensor: DTensor) -> bool:
    """Whether one of the tensor's cuts is strided."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def strided_pieces(tensor: DTensor) -> Pieces | None:
    """What this rank holds of a DTensor one of whose cuts is strided; None if none is."""
    if not is_strided(tensor):
        return None
    return Pieces(tensor, tuple(_rows(tensor, dim) for dim in range(tensor.ndim)))


def is_misread(tensor: DTensor) -> bool:
    """Whether torch reads the tensor's placements otherwise than FSDP2 has made them.

    FSDP2 cuts, in contiguous pieces, what it is given: a dim of which this rank already holds separate parts, too. Its
    placements cannot say so, and ``full_tensor`` puts the rows in the wrong order.
    """
    cuts = [placement for placement in tensor.placements if isinstance(placement, (Shard, _StridedShard))]
    return any(
        isinstance(outer, _StridedShard) and isinstance(inner, _StridedShard) and outer.dim == inner.dim
        for index, outer in enumerate(cuts)
        for inner in cuts[index + 1 :]
    )


def _rows(tensor: DTensor, dim: int) -> Tensor:
    """This rank's rows of ``dim``: cut by one axis after the other, FSDP2's cuts last."""
    mesh = tensor.device_mesh
    places = zip(tensor.placements, mesh.shape, coordinates(mesh), strict=True)
    cuts = [cut for cut in places if isinstance(cut[0], (Shard, _StridedShard)) and cut[0].dim == dim]
    inner_first = _is_cut_inner_first(cuts)
    rows = torch.arange(tensor.shape[dim])
    for number, (placement, degree, rank) in enumerate(reversed(cuts) if inner_first else cuts):
        if isinstance(placement, _StridedShard) and not (inner_first and number):
            rows = rows.view(int(placement.split_factor) * degree, -1)[rank::degree].reshape(-1)
        else:
            chunks = rows.chunk(degree)
            rows = chunks[rank] if rank < len(chunks) else rows[:0]
    return rows


def _is_cut_inner_first(cuts: Sequence[tuple[Placement, int, int]]) -> bool:
    """Whether cuts of one dim (placement, degree, rank) are FSDP2's, of what the inner axes had cut already.

    Those of a layout are made in the order of the axes and nest; if no inner cut is strided, both come to the same, and
    FSDP2's pieces may be uneven.
    """
    if len(cuts) < 2 or not isinstance(cuts[0][0], _StridedShard):
        return False
    if not any(isinstance(placement, _StridedShard) for placement, _, _ in cuts[1:]):
        return True
    states = [S(0, int(getattr(placement, "split_factor", 1))) for placement, _, _ in cuts]
    try:
        nested_layout(states, [degree for _, degree, _ in cuts])
    except LayoutError:
        return True
    return False


def local_piece(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    """This rank's own contiguous copy of its piece of ``whole``."""
    for state, degree, rank in zip(successive_layout(layout, mesh.shape), mesh.shape, coordinates(mesh), strict=True):
        if state.kind == "S":
            whole = piece(whole, state.dim, ((state.parts, degree, rank),))
    return whole.detach().clone(memory_format=torch.contiguous_format)


def as_dtensor(piece: Tensor, layout: Layout, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """A DTensor of global ``shape`` of which this rank holds ``piece``; nothing is communicated."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    placed = placements(layout, mesh.shape)
    return DTensor.from_local(piece, mesh, placed, run_check=False, shape=torch.Size(shape), stride=stride)  # type: ignore[no-any-return]


def coordinates(mesh: DeviceMesh) -> tuple[int, ...]:
    """Where this rank stands on every axis; raises :class:`LayoutError` if it is not on the mesh."""
    found = mesh.get_coordinate()
    if found is None:
        raise LayoutError(f"this rank is not on the mesh {mesh}; only its ranks call parallelize")
    return tuple(found)
