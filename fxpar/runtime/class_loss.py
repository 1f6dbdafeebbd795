"""Cross-entropy in two steps, so that logits may be split over their classes: sums over classes, then the loss.

In: logits with the classes in dim 1 (dim 0 if they are all there is), and for every position a number not below its
logits but near them (their largest). Out: sums over classes (:func:`class_terms`), which add up over pieces of the
classes, and the loss made of them (:func:`class_loss`). Neither communicates. Capture writes cross-entropy in these
(:mod:`fxpar.normalise.losses`); where the classes are not split, :mod:`fxpar.fuse` takes torch's own loss again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxpar.rules.localise import Cuts
from fxpar.runtime.pieces import held, piece

MEAN, SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_HALF = (torch.float16, torch.bfloat16)


def class_terms(
    logits: Tensor,
    near: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    smooth: bool = False,
    *,
    classes: int = 0,
    cuts: Cuts = (),
) -> tuple[Tensor, ...]:
    """For every position: ``sum_j exp(x_j - near)``, ``x_target - near``, and if ``smooth`` ``sum_j w_j (x_j - near)``.

    ``near`` may be any number: it cancels in the loss, so no gradient goes to it. Where the target is ``ignore_index``
    the second is 0. Of ``classes`` this rank has the piece that ``cuts`` say. Half precision is summed in float32.
    """
    dim = min(1, logits.dim() - 1)
    counted = target != ignore_index
    mine, index = held(torch.where(counted, target, 0), classes or logits.shape[dim], cuts)
    return _Terms.apply(logits, near, index.unsqueeze(dim), mine & counted, weight, smooth)


class _Terms(torch.autograd.Function):
    """Written out, because torch would make the gradients of the three sums one by one, each as large as the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, near: Tensor, index: Tensor, mine: Tensor, weight: Tensor | None, smooth: bool
    ) -> tuple[Tensor, ...]:
        dim = min(1, logits.dim() - 1)
        ctx.dtype, ctx.dim, ctx.smooth = logits.dtype, dim, smooth
        wide = torch.float32 if logits.dtype in _HALF else logits.dtype
        below = logits.to(wide) - near.to(wide).unsqueeze(dim)
        picked = torch.where(mine, below.gather(dim, index).squeeze(dim), 0)
        weights = None if weight is None else _along(weight.to(wide), dim, logits.dim())
        smoothed = ((below if weights is None else below * weights).sum(dim),) if smooth else ()
        powers = below.exp_()
        ctx.save_for_backward(powers, index, mine, weights)
        return (powers.sum(dim), picked, *smoothed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total: Tensor, picked: Tensor, smoothed: Tensor | None = None) -> Any:
        powers, index, mine, weights = ctx.saved_tensors
        dim = ctx.dim
        grad = powers * total.unsqueeze(dim)
        if smoothed is not None:
            grad += smoothed.unsqueeze(dim) if weights is None else smoothed.unsqueeze(dim) * weights
        grad.scatter_add_(dim, index, torch.where(mine, picked, 0).unsqueeze(dim))
        return grad.to(ctx.dtype), None, None, None, None, None


def class_loss(
    total: Tensor,
    picked: Tensor,
    smoothed: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float,
    classes: int,
    dtype: torch.dtype,
    *,
    pieces: tuple[tuple[int, Cuts], ...] = (),
) -> Tensor:
    """The cross-entropy made of :func:`class_terms`, as ``torch.nn.functional.cross_entropy`` defines it.

    With ``pieces`` (dims of the targets that are cut, and how) the sums are those of a piece of the positions, the
    targets all of them, and the mean comes as a summand: a piece's sum over the weight of all counted targets.
    """
    counted = target != ignore_index
    weights = None if weight is None else weight.to(total.dtype)[torch.where(counted, target, 0)]
    ones = counted.to(total.dtype)
    counts = ones if weights is None else ones * weights
    whole = counts.sum() if reduction == MEAN else None
    for dim, cuts in pieces:
        counted = piece(counted, dim, cuts)
        weights = None if weights is None else piece(weights, dim, cuts)
    logarithm = total.log()
    loss = logarithm - picked
    if weights is not None:
        loss = loss * weights
    if smoothed is not None:
        scale = classes if weight is None else weight.to(total.dtype).sum()
        loss = (1 - smoothing) * loss + smoothing / classes * (scale * logarithm - smoothed)
    loss = torch.where(counted, loss, 0)
    if reduction in (MEAN, SUM):
        loss = loss.sum()
    return (loss if whole is None else loss / whole).to(dtype)


def _along(weight: Tensor, dim: int, dims: int) -> Tensor:
    """Weights of classes as a tensor of ``dims`` dims."""
    return weight.view([-1 if place == dim else 1 for place in range(dims)])
