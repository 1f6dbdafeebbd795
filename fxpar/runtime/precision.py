"""The dtypes in which parameters will be read: their own, or those of FSDP2's mixed precision.

In: the modules of a model. Out: a dtype per parameter. FSDP2 casts a module's parameters just before the module runs,
so a graph for the whole model has to be captured before most of them have that dtype. The only file that knows FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def cast_dtypes(modules: Iterable[nn.Module]) -> dict[tuple[int, str], torch.dtype]:
    """The dtypes that FSDP2 casts parameters to, by ``(id of the module, name)``; empty without mixed precision."""
    found: dict[tuple[int, str], torch.dtype] = {}
    for module in modules:
        if not hasattr(type(module), "_get_fsdp_state"):
            continue
        wrapped: Any = module
        for group in wrapped._get_fsdp_state()._fsdp_param_groups:
            if group.mp_policy.param_dtype is None:
                continue
            for held in group.fsdp_params:
                if not held.sharded_param.is_floating_point():
                    continue
                place = held._module_info
                owners = zip([place.module, *place.shared_modules], [place.param_name, *place.shared_param_names],
                             strict=True)  # fmt: skip
                found.update(((id(owner), name), group.mp_policy.param_dtype) for owner, name in owners)
    return found


def dtype_of(
    module: nn.Module, name: str, parameter: nn.Parameter, casts: dict[tuple[int, str], torch.dtype]
) -> torch.dtype:
    """The dtype in which ``parameter`` of ``module`` will be read."""
    return casts.get((id(module), name), parameter.dtype) if casts else parameter.dtype
