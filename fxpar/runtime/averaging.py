"""A loss outside of the model, on outputs of which every rank has a part: the mean over the ranks is what is meant.

In: an output as a parallel model gives it. Out: the same, which takes a share of the gradient that comes in. So the
gradients of all parameters are those of the mean of the ranks' losses, as DistributedDataParallel and FSDP have it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def averaged(output: Tensor, share: int) -> Tensor:
    """``output``, with its gradient divided by ``share``.

    >>> x = torch.ones(2, requires_grad=True)
    >>> averaged(x, 4).sum().backward()
    >>> x.grad
    tensor([0.2500, 0.2500])
    """
    return _Averaged.apply(output, share) if share > 1 and output.requires_grad else output


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, share: int) -> Tensor:
        ctx.share = share
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.share, None
