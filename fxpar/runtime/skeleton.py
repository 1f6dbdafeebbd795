"""A copy of a model without its numbers, to capture again later, when the model itself has been sharded.

In: a model, before it is changed. Out: the same modules with parameters and buffers on ``meta``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.runtime.precision import cast_dtypes, dtype_of


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
    """Give the skeleton the train/eval modes, ``requires_grad`` flags and dtypes that ``model`` has now; return it.

    Modules and parameters that were put around or into ``model`` since are not followed.
    """
    modules = dict(model.named_modules())
    casts = cast_dtypes(modules.values())
    for path, module in bare.named_modules():
        now = modules.get(path)
        if now is None:
            continue
        module.training = now.training
        for name, parameter in module._parameters.items():
            current = now._parameters.get(name)
            if parameter is not None and current is not None:
                parameter.requires_grad_(current.requires_grad)
                _cast(parameter, dtype_of(now, name, current, casts))
        for name, buffer in module._buffers.items():
            current_buffer = now._buffers.get(name)
            if buffer is not None and current_buffer is not None:
                _cast(buffer, current_buffer.dtype)
    return bare


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        tensor.data = torch.empty_like(tensor, dtype=dtype)


def mode_key(modules: list[nn.Module]) -> tuple[Any, ...]:
    """What a captured program depends on beside its inputs: modes, autocast, parameters' gradient flags and dtypes."""
    casts = tuple(
        (kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in ("cpu", "cuda")
    )
    dtypes = cast_dtypes(modules)
    return (
        torch.is_grad_enabled(),
        casts,
        tuple(module.training for module in modules),
        tuple(
            (parameter.requires_grad, dtype_of(module, name, parameter, dtypes))
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ),
    )
