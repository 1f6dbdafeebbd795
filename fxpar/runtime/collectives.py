"""How a conversion runs: one differentiable function, :func:`convert`, on local tensors (docs/states.md).

In: a rank's local tensor, the two states, the mesh axis' degree, rank and process group. Out: the local tensor in the
new state. Both directions of :data:`fxpar.layout.CONVERSIONS` are executed exactly as named there. It is an ordinary
``torch.fx`` call target and traces under ``torch.compile``. Which conversions run where is the plan's choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxpar.layout import COLLECTIVES, CONVERSIONS
from fxpar.runtime import records

_collective = torch.ops._c10d_functional

#: dtypes that process groups carry as they are; others travel as bytes, and are summed in a wider dtype.
_CARRIED = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8)
)


@dataclass(frozen=True, slots=True)
class Where:
    """A rank on a mesh axis: the axis' name and degree, the rank's coordinate, and the process group's name."""

    axis: str
    degree: int
    rank: int
    group: str


def convert(x: Tensor, src: str, dst: str, grad: bool, axis: str, degree: int, rank: int, group: str) -> Tensor:
    """Bring the local tensor ``x`` from state ``src`` to ``dst`` on one mesh axis.

    States are written as by :func:`fxpar.layout.written`. ``x`` is this rank's piece (``S``), the whole (``R``,
    ``I``) or a summand (``P``). With ``grad`` the gradient is converted back as the table says; without it nothing
    runs backward.
    """
    if degree == 1 or src == dst:
        return x
    if grad:
        return _Convert.apply(x, src, dst, axis, degree, rank, group)
    kind = CONVERSIONS[src[0], dst[0]].forward
    return run(kind, x, src, dst, Where(axis, degree, rank, group), "forward", records.running_module())


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: str, dst: str, axis: str, degree: int, rank: int, group: str) -> Tensor:
        ctx.states, ctx.where = (src, dst), (axis, degree, rank, group)
        ctx.module = records.running_module()
        return run(CONVERSIONS[src[0], dst[0]].forward, x, src, dst, Where(*ctx.where), "forward", ctx.module)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        src, dst = ctx.states
        kind = CONVERSIONS[src[0], dst[0]].backward
        # The gradient goes the other way: it arrives like dst and leaves like src.
        out = run(kind, grad, dst, src, Where(*ctx.where), "backward", ctx.module)
        return out, None, None, None, None, None, None


def run(kind: str, x: Tensor, src: str, dst: str, where: Where, phase: str, module: str) -> Tensor:
    """Execute one entry of the conversion table on the local tensor ``x``, from ``src`` to ``dst``.

    Where pieces are uneven, a rank's piece, and the whole, are made as long as if all were like the largest before, and
    cut to their length after: zeros at the end of the whole that no rank keeps.
    """
    joins, splits = kind in ("all_gather", "pad", "all_to_all"), kind in ("slice", "reduce_scatter", "all_to_all")
    if joins and (size := uneven_size(src)):
        x = _lengthened(x, src, -(-size // where.degree))
    if splits and (size := uneven_size(dst)):
        x = _lengthened(x, dst, -(-size // where.degree) * where.degree)
    x = _even(kind, x, src, dst, where, phase, module)
    if joins and (size := uneven_size(src)):
        x = x.narrow(cut(src)[0], 0, size).contiguous()
    if splits and (size := uneven_size(dst)):
        most = -(-size // where.degree)
        x = x.narrow(cut(dst)[0], 0, min(most, size - where.rank * most)).contiguous()
    return x


def _lengthened(x: Tensor, state: str, size: int) -> Tensor:
    """``x`` with zeros after it, up to ``size`` in the dim that ``state`` cuts."""
    dim, missing = cut(state)[0], size - x.shape[cut(state)[0]]
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def _even(kind: str, x: Tensor, src: str, dst: str, where: Where, phase: str, module: str) -> Tensor:
    """One entry of the conversion table between equal pieces."""
    if kind in COLLECTIVES and records.active is not None and not torch.compiler.is_compiling():
        whole_bytes = x.numel() * x.element_size() * (where.degree if src[0] == "S" else 1)
        records.active.add(kind, where.axis, where.degree, whole_bytes, phase, module)
    if kind == "none":
        return x.view_as(x)
    if kind == "keep":
        return x.view_as(x) if where.rank == 0 else torch.zeros_like(x)
    if kind == "slice":
        return own_piece(x, dst, where.degree, where.rank)
    if kind == "pad":
        pieces = x.new_zeros((where.degree, *x.shape))
        pieces[where.rank] = x
        return join(pieces, src)
    if kind == "all_reduce":
        return _all_reduce(x, where, "max" if src == "M" else "sum")
    if kind == "all_gather":
        return join(_all_gather(x, where), src)
    if kind == "reduce_scatter":
        return _reduce_scatter(split(x, dst, where.degree), where)
    if cut(src)[0] == cut(dst)[0]:
        return _restripe(x, src, dst, where)
    return join(_all_to_all(split(x, dst, where.degree), where), src)


def cut(state: str) -> tuple[int, int]:
    """The dim and parts of an ``S`` state.

    >>> cut("S1"), cut("S0/3")
    ((1, 1), (0, 3))
    """
    dim, _, parts = state[1:].partition("~")[0].partition("/")
    return int(dim), int(parts or 1)


def uneven_size(state: str) -> int:
    """The size of the dim that a state cuts in uneven pieces, like ``torch.chunk``; 0 if it cuts none, or evenly.

    >>> uneven_size("S0~53"), uneven_size("S0/3"), uneven_size("R")
    (53, 0, 0)
    """
    return int(state.partition("~")[2] or 0)


def split(x: Tensor, state: str, degree: int) -> Tensor:
    """All ranks' pieces of the whole ``x`` in an ``S`` state, stacked: shape ``(degree, *piece)``.

    >>> split(torch.arange(8), "S0/2", 2).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    dim, parts = cut(state)
    size = x.shape[dim] // (parts * degree)
    pieces = x.reshape(*x.shape[:dim], parts, degree, size, *x.shape[dim + 1 :]).movedim(dim + 1, 0)
    return pieces.flatten(dim + 1, dim + 2)


def own_piece(x: Tensor, state: str, degree: int, rank: int) -> Tensor:
    """A copy of one rank's piece of the whole ``x`` in an ``S`` state: keeping it does not keep the whole.

    >>> own_piece(torch.arange(8), "S0/2", 2, 1).tolist()
    [2, 3, 6, 7]
    """
    dim, parts = cut(state)
    pieces = x.unflatten(dim, (parts, degree, x.shape[dim] // (parts * degree)))
    return pieces.select(dim + 1, rank).clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def join(pieces: Tensor, state: str) -> Tensor:
    """The inverse of :func:`split`: stacked pieces ``(degree, *piece)`` to the whole.

    >>> join(torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]]), "S0/2").tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    dim, parts = cut(state)
    size = pieces.shape[dim + 1] // parts
    blocks = pieces.unflatten(dim + 1, (parts, size)).movedim(0, dim + 1)
    return blocks.flatten(dim, dim + 2)


def _wire(x: Tensor) -> Tensor:
    """``x`` flat and contiguous in a dtype that can be moved."""
    flat = x.contiguous().view(-1)
    return flat if x.dtype in _CARRIED else flat.view(torch.uint8)


def _all_gather(x: Tensor, where: Where) -> Tensor:
    out = _collective.all_gather_into_tensor(_wire(x), where.degree, where.group)
    return _collective.wait_tensor(out).view(x.dtype).view(where.degree, *x.shape)


def _all_to_all(pieces: Tensor, where: Where) -> Tensor:
    flat = _wire(pieces)
    sizes = [flat.numel() // where.degree] * where.degree
    out = _collective.all_to_all_single(flat, sizes, sizes, where.group)
    return _collective.wait_tensor(out).view(pieces.dtype).view(pieces.shape)


def _addable(x: Tensor) -> Tensor:
    """``x`` contiguous in a dtype that process groups can sum."""
    if x.is_complex():
        return torch.view_as_real(x).contiguous()
    return x.contiguous() if x.dtype in _CARRIED else x.to(torch.int64)


def _restored(total: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(total) if like.is_complex() else total.to(like.dtype)


def _all_reduce(x: Tensor, where: Where, how: str) -> Tensor:
    return _restored(_collective.wait_tensor(_collective.all_reduce(_addable(x), how, where.group)), x)


def _reduce_scatter(pieces: Tensor, where: Where) -> Tensor:
    out = _collective.reduce_scatter_tensor(_addable(pieces), "sum", where.degree, where.group)
    return _restored(_collective.wait_tensor(out), pieces)[0]


def _restripe(x: Tensor, src: str, dst: str, where: Where) -> Tensor:
    """``S(d/k) -> S(d/m)``: an all-to-all of uneven pieces along one dim, counted in equal units of that dim."""
    (dim, have_parts), (_, want_parts) = cut(src), cut(dst)
    units = where.degree * math.lcm(have_parts, want_parts)
    have = [units_of(rank, where.degree, have_parts, units) for rank in range(where.degree)]
    want = [units_of(rank, where.degree, want_parts, units) for rank in range(where.degree)]
    mine, needed = have[where.rank], want[where.rank]
    send = [[mine.index(unit) for unit in theirs if unit in mine] for theirs in want]
    receive = [[unit for unit in needed if unit in theirs] for theirs in have]
    arrived = [unit for units in receive for unit in units]
    rows = x.movedim(dim, 0).unflatten(0, (len(mine), -1))
    wire = _wire(rows[[position for positions in send for position in positions]])
    width = wire.numel() // len(mine)
    out = _collective.all_to_all_single(
        wire, [len(units) * width for units in receive], [len(units) * width for units in send], where.group
    )
    moved = _collective.wait_tensor(out).view(x.dtype).view(rows.shape)
    return moved[[arrived.index(unit) for unit in needed]].flatten(0, 1).movedim(0, dim).contiguous()


def units_of(rank: int, degree: int, parts: int, units: int) -> list[int]:
    """Which of a dim's ``units`` equal pieces ``rank`` holds in ``S(d/parts)``, in order.

    >>> units_of(1, 2, 2, 8)
    [2, 3, 6, 7]
    """
    each = units // (parts * degree)
    starts = [(part * degree + rank) * each for part in range(parts)]
    return [start + offset for start in starts for offset in range(each)]
