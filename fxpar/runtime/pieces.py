"""Which piece of a dim a rank has, and which of the dim's indices lie in it.

In: a tensor or its size, and the successive cuts of one dim (:data:`fxpar.rules.localise.Cuts`). Out: local tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.rules.localise import Cuts


def piece(x: Tensor, dim: int, cuts: Cuts) -> Tensor:
    """This rank's piece of ``x``, cut along ``dim``: as ``torch.chunk`` does where the pieces cannot be equal."""
    for parts, degree, rank in cuts:
        if x.shape[dim] % (parts * degree):
            x = x.chunk(degree, dim)[rank]
            continue
        pieces = x.unflatten(dim, (parts, degree, x.shape[dim] // (parts * degree)))
        x = pieces.select(dim + 1, rank).flatten(dim, dim + 1)
    return x


def held(indices: Tensor, size: int, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """Which indices of a dim of ``size`` this rank holds, and where in its piece (0 for those that others hold).

    An index that nobody holds stays out of range on every rank, so that reading it is the error that it is unsplit.

    >>> held(torch.tensor([0, 5, 6, 9]), 8, ((1, 2, 1),))
    (tensor([False,  True,  True, False]), tensor([0, 1, 2, 9]))
    """
    mine, local, outside = torch.ones_like(indices, dtype=torch.bool), indices, (indices < 0) | (indices >= size)
    for parts, degree, rank in cuts:
        rows = -(-size // (parts * degree))  # the last piece may have fewer
        part, within = local // (rows * degree), local % (rows * degree)
        mine = mine & (within // rows == rank)
        local = part * rows + within % rows
        size = rows * parts
    mine = mine & ~outside
    return mine, torch.where(outside, indices, torch.where(mine, local, 0))
