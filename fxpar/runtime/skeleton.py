"""A copy of a model without its numbers, to capture again later, when the model itself has been sharded.

In: a model, before it is changed. Out: the same modules with parameters and buffers on ``meta``.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn


def skeleton(model: nn.Module) -> nn.Module:
    """A deep copy of ``model`` with parameters and buffers on ``meta``; ties are kept, no memory is used.

    >>> skeleton(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        bare = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = bare
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def follow(bare: nn.Module, model: nn.Module) -> nn.Module:
    """Give the skeleton the train/eval modes and ``requires_grad`` flags that ``model`` has now; return it.

    Modules and parameters that were put around or into ``model`` since are not followed.
    """
    modules = dict(model.named_modules())
    for name, module in bare.named_modules():
        if name in modules:
            module.training = modules[name].training
    parameters = dict(model.named_parameters())
    for name, parameter in bare.named_parameters():
        if name in parameters:
            parameter.requires_grad_(parameters[name].requires_grad)
    return bare


def mode_key(modules: list[nn.Module]) -> tuple[Any, ...]:
    """What a captured program depends on beside its inputs: modes, autocast, parameters' gradient flags and dtypes."""
    parameters = itertools.chain.from_iterable(module._parameters.values() for module in modules)
    casts = tuple(
        (kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(),
        casts,
        tuple(module.training for module in modules),
        tuple((p.requires_grad, p.dtype) for p in parameters if p is not None),
    )
