"""Which operations on a tensor are views of it, by strides: after a conversion a reshape may copy that did not before.

In: an operation that is a view in some memory layout, with its operand's sizes and strides. Out: the strides of the
result, if it is in the operand's memory. Strides count elements; what torch does is in its notes on views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Strides = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Strides:
    """The strides of a tensor whose elements lie in order.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def reshaped(shape: Sequence[int], strides: Sequence[int], sizes: Sequence[int]) -> Strides | None:
    """Strides of the view with other ``sizes``; None if there is none and a reshape copies.

    >>> reshaped((4, 6), (6, 1), (2, 2, 6)), reshaped((6, 4), (1, 6), (24,)), reshaped((6, 4), (1, 6), (2, 3, 4))
    ((12, 6, 1), None, (3, 1, 6))
    """
    runs: list[tuple[int, int]] = []  # dims that lie in memory as one, with the step between its elements
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    found, room, step = [], 1, 1
    for size in reversed(sizes):
        if size != 1 and room == 1:
            room, step = runs.pop()
        if room % size:
            return None
        found.append(step)
        room, step = room // size, step * size
    return tuple(reversed(found))


#: Operations whose views :func:`view_strides` knows.
KNOWN = ("aten.reshape.default", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor", "aten.select.int")


def view_strides(
    op: str, args: Sequence[Any], shape: Sequence[int], strides: Sequence[int], sizes: Sequence[int]
) -> Strides | None:
    """Strides of the result of one of :data:`KNOWN`, of ``sizes``, if it is a view of an operand of ``shape``.

    >>> view_strides("aten.permute.default", (None, (1, 0)), (4, 6), (6, 1), (6, 4))
    (1, 6)
    """
    if op == "aten.reshape.default":
        return reshaped(shape, strides, sizes) if math.prod(sizes) else contiguous(sizes)
    if op == "aten.permute.default":
        return tuple(strides[dim] for dim in args[1])
    if op == "aten.expand.default":
        new = len(sizes) - len(shape)
        return tuple(
            0 if dim < new or shape[dim - new] != size else strides[dim - new] for dim, size in enumerate(sizes)
        )
    dim = args[1]
    if op == "aten.select.int":
        return (*strides[:dim], *strides[dim + 1 :])
    step = args[4] if len(args) > 4 else 1
    return (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
