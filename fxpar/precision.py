"""Lift a model's own casts to float32 to float64, so that two runs can be compared to 1e-9.

In: nothing. Out: :class:`Float64Casts`, a mode to run in. Meant for comparisons only: it does not make a float32 model
a float64 one (``model.double()`` does).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Casts(TorchFunctionMode):
    """In this mode ``x.float()``, ``x.to(torch.float32)``, ``softmax(..., dtype=torch.float32)`` give float64.

    >>> with Float64Casts():
    ...     torch.ones(1, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)
