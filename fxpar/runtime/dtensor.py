"""Layouts as DTensor placements, and parameters at rest as DTensors. The only file that knows DTensor's insides.

In: layouts, local pieces, a DeviceMesh. Out: DTensors, whole tensors and pieces. What is held in which layout is the
plan's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# S(d/k) has no public placement. _StridedShard(d, split_factor=k) on a mesh axis of degree n cuts dim d into k * n
# chunks and gives rank r the chunks r, n + r, 2n + r, ...: exactly S(d/k). tests/dist/test_apply.py holds it to that.
from torch.distributed.tensor.placement_types import _StridedShard

from fxpar.errors import LayoutError
from fxpar.layout import Layout, S, State
from fxpar.runtime.collectives import split


def placements(layout: Layout) -> tuple[Placement, ...]:
    """The DTensor placements of a layout at rest (``I`` or ``S``); raises :class:`LayoutError` on another state."""
    return tuple(_placement(state) for state in layout)


def _placement(state: State) -> Placement:
    if state.kind == "I":
        return Replicate()
    if state.kind != "S":
        raise LayoutError(f"a parameter cannot be at rest in state {state}; only I or S")
    return Shard(state.dim) if state.parts == 1 else _StridedShard(state.dim, split_factor=state.parts)


@dataclass(frozen=True, slots=True)
class StridedCut:
    """How a DTensor's one strided axis cuts dim ``dim``: in ``parts`` parts, of each of which this rank has a piece."""

    tensor: DTensor
    dim: int
    parts: int

    def chunk_size(self) -> int:
        """Rows per piece."""
        return self.tensor.to_local().shape[self.dim] // self.parts

    def starts(self) -> list[int]:
        """Where each of this rank's pieces begins in the whole."""
        (degree,), (rank,) = self.tensor.device_mesh.shape, coordinates(self.tensor.device_mesh)
        return [(part * degree + rank) * self.chunk_size() for part in range(self.parts)]

    def distributed(self, whole: Tensor) -> DTensor:
        """``whole``, which every rank has, cut the same way."""
        layout = (S(self.dim, self.parts),)
        return as_dtensor(
            local_piece(whole, layout, self.tensor.device_mesh), layout, self.tensor.device_mesh, whole.shape
        )


def strided_cut(tensor: DTensor) -> StridedCut | None:
    """The strided cut of a DTensor on a mesh of one axis, or None if it has none or lies on more axes."""
    placement = tensor.placements[0]
    if len(tensor.placements) != 1 or not isinstance(placement, _StridedShard):
        return None
    return StridedCut(tensor, placement.dim, int(placement.split_factor))


def local_piece(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    """This rank's own contiguous copy of its piece of ``whole``."""
    for state, degree, rank in zip(layout, mesh.shape, coordinates(mesh), strict=True):
        if state.kind == "S":
            whole = split(whole, str(state), degree)[rank]
    return whole.detach().clone(memory_format=torch.contiguous_format)


def as_dtensor(piece: Tensor, layout: Layout, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """A DTensor of global ``shape`` of which this rank holds ``piece``; nothing is communicated."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(piece, mesh, placements(layout), run_check=False, shape=torch.Size(shape), stride=stride)  # type: ignore[no-any-return]


def coordinates(mesh: DeviceMesh) -> tuple[int, ...]:
    """Where this rank stands on every axis; raises :class:`LayoutError` if it is not on the mesh."""
    found = mesh.get_coordinate()
    if found is None:
        raise LayoutError(f"this rank is not on the mesh {mesh}; only its ranks call parallelize")
    return tuple(found)
