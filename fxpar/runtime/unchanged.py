"""A parameter that is changed between a forward and its backward is noticed, as autograd notices it in any model.

In: a DTensor parameter. Out: its local piece. An operation on a DTensor in place counts as a change of the DTensor, not
of the local piece that the graph's operations keep for backward: left alone, gradients would silently be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


def piece_of(parameter: DTensor) -> Tensor:
    """This rank's piece of ``parameter``; backward raises :class:`RuntimeError` if it has been changed by then."""
    local = parameter.to_local()
    if not local.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return local
    return _Unchanged.apply(local, parameter)  # type: ignore[no-any-return]


class _Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, parameter: DTensor) -> Tensor:
        ctx.parameter, ctx.version = parameter, parameter._version
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.parameter._version != ctx.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of shape {list(ctx.parameter.shape)} is at version {ctx.parameter._version}; expected "
                f"version {ctx.version}; make optimizer steps after the backwards of all forwards"
            )
        return grad, None
