"""The few operations whose local form is not the operation itself, by the names that localised calls use.

In: local tensors, and numbers that say which piece they are. Out: local tensors. Each is differentiable, and none
communicates. Who calls them is decided by :mod:`fxpar.rules.localise`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpar.rules.localise import Cuts
from fxpar.runtime.class_loss import class_loss, class_terms
from fxpar.runtime.pieces import held, piece
from fxpar.runtime.random import split_stream
from fxpar.runtime.targets import resolve


def mean_split(op: str, degree: int, *args: Any, **kwargs: Any) -> Tensor:
    """A mean over a dim of which this rank has ``1/degree``, as a summand of the whole mean."""
    return resolve(op)(*args, **kwargs) / degree


def random_split(op: str, rank: int, *args: Any, **kwargs: Any) -> Any:
    """``op`` with random numbers of this rank's own, from a stream that leaves the common one as it was elsewhere."""
    with split_stream(rank):
        return resolve(op)(*args, **kwargs)


def embedding_split(weight: Tensor, indices: Tensor, vocabulary: int, cuts: Cuts, padding_idx: int) -> Tensor:
    """Rows of a table of ``vocabulary`` rows of which this rank has a piece; others come as zeros."""
    mine, local = held(indices, vocabulary, cuts)
    padding = -1
    if padding_idx >= 0:
        here, row = held(torch.tensor(padding_idx), vocabulary, cuts)
        padding = int(row) if here else -1
    found = torch.ops.aten.embedding.default(weight, local, padding)
    return torch.where(mine.unsqueeze(-1), found, 0)


def gather_split(size: int, cuts: Cuts, x: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> Tensor:
    """``gather`` along a dim of ``size`` of which this rank has a piece; others come as zeros."""
    mine, local = held(index, size, cuts)
    return torch.where(mine, x.gather(dim, local), 0)


def attention_rows(
    queries: int,
    cuts: Cuts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    **kwargs: Any,
) -> Tensor:
    """Causal attention of this rank's piece of ``queries`` rows to all keys: row ``i`` sees keys ``0 .. i``."""
    rows = piece(torch.arange(queries, device=query.device), 0, cuts)
    seen = rows.unsqueeze(-1) >= torch.arange(key.shape[-2], device=query.device)
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, seen, dropout_p, False, **kwargs)


def loss_mean_split(
    op: str,
    pieces: tuple[tuple[int, Cuts], ...],
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    *rest: Any,
    **kwargs: Any,
) -> Tensor:
    """A mean loss over positions of which this rank has the logits of a piece, and all targets.

    ``pieces`` are the dims of the targets that are cut, and how.

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
    for dim, cuts in pieces:
        target = piece(target, dim, cuts)
    return resolve(op)(logits, target, weight, 2, ignore_index, *rest, **kwargs) / total


LOCAL_OPS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(mean_split, random_split, embedding_split, gather_split, loss_mean_split, attention_rows),
        *(class_terms, class_loss),
    )
}
