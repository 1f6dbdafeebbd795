"""The few operations whose local form is not the operation itself, by the names that localised calls use.

In: local tensors, and numbers that say which piece they are. Out: local tensors. Each is differentiable, and none
communicates. Who calls them is decided by :mod:`fxpar.rules.localise`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpar.runtime.random import split_stream
from fxpar.runtime.targets import resolve


def piece(x: Tensor, dim: int, parts: int, degree: int, rank: int) -> Tensor:
    """The piece ``rank`` of ``x`` in state ``S(dim/parts)``."""
    cut = x.unflatten(dim, (parts, degree, x.shape[dim] // (parts * degree)))
    return cut.select(dim + 1, rank).flatten(dim, dim + 1)


def mean_split(op: str, degree: int, *args: Any, **kwargs: Any) -> Tensor:
    """A mean over a dim of which this rank has ``1/degree``, as a summand of the whole mean."""
    return resolve(op)(*args, **kwargs) / degree


def random_split(op: str, rank: int, *args: Any, **kwargs: Any) -> Any:
    """``op`` with random numbers of this rank's own, from a stream that leaves the common one as it was elsewhere."""
    with split_stream(rank):
        return resolve(op)(*args, **kwargs)


def embedding_split(
    weight: Tensor, indices: Tensor, vocabulary: int, parts: int, degree: int, rank: int, padding_idx: int
) -> Tensor:
    """Rows of a table of ``vocabulary`` rows of which this rank has those of ``S(0/parts)``; others come as zeros."""
    mine, local = _held(indices, vocabulary // parts, degree, rank)
    padding = -1
    if padding_idx >= 0:
        here, row = _held(torch.tensor(padding_idx), vocabulary // parts, degree, rank)
        padding = int(row) if here else -1
    found = torch.ops.aten.embedding.default(weight, local, padding)
    return torch.where(mine.unsqueeze(-1), found, 0)


def gather_split(
    size: int, parts: int, degree: int, rank: int, x: Tensor, dim: int, index: Tensor, *_: Any, **__: Any
) -> Tensor:
    """``gather`` along a dim of ``size`` of which this rank has the piece ``S(dim/parts)``; others come as zeros."""
    mine, local = _held(index, size // parts, degree, rank)
    return torch.where(mine, x.gather(dim, local), 0)


def _held(indices: Tensor, part_size: int, degree: int, rank: int) -> tuple[Tensor, Tensor]:
    """Which indices of a dim in parts this rank holds, and where in its piece (0 for those it does not hold)."""
    rows = part_size // degree
    part, within = indices // part_size, indices % part_size
    mine = within // rows == rank
    return mine, torch.where(mine, part * rows + within % rows, 0)


def attention_rows(
    queries: int,
    parts: int,
    degree: int,
    rank: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    **kwargs: Any,
) -> Tensor:
    """Causal attention of this rank's piece of ``queries`` rows to all keys: row ``i`` sees keys ``0 .. i``."""
    rows = piece(torch.arange(queries, device=query.device), 0, parts, degree, rank)
    seen = rows.unsqueeze(-1) >= torch.arange(key.shape[-2], device=query.device)
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, seen, dropout_p, False, **kwargs)


def loss_mean_split(
    op: str,
    dim: int,
    parts: int,
    degree: int,
    rank: int,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    *rest: Any,
    **kwargs: Any,
) -> Tensor:
    """A mean loss over positions of which this rank has the logits of a piece, and all targets.

    The summand is this piece's sum over the number (or class weight) of all targets that are not ignored, as torch
    defines the mean: ``sum_i w[y_i] l_i / sum_i w[y_i]``.
    """
    ignore_index = kwargs.pop("ignore_index", ignore_index)
    weight = kwargs.pop("weight", weight)
    kwargs.pop("reduction", None)
    counted = target != ignore_index
    if weight is None:
        total = counted.sum().to(logits.dtype)
    else:
        total = (weight[torch.where(counted, target, 0)] * counted).sum()
    mine = piece(target, dim, parts, degree, rank)
    return resolve(op)(logits, mine, weight, 2, ignore_index, *rest, **kwargs) / total


LOCAL_OPS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (mean_split, random_split, embedding_split, gather_split, loss_mean_split, attention_rows)
}
