"""Grad mode and autocast, entered and left by calls inside a generated graph.

In: what to enter; ``enter`` functions return what their ``leave`` function needs. Out: torch's thread-local modes.
Which operation needs which mode is in the graph. :func:`restored_modes` undoes what an exception left entered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode

_DEVICE_TYPES = ("cpu", "cuda")


def enter_no_grad() -> bool:
    """Turn gradients off; returns whether they were on."""
    was = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    return was


def leave_no_grad(was: bool) -> None:
    """Undo :func:`enter_no_grad`."""
    torch._C._set_grad_enabled(was)


def enter_autocast(device_type: str, dtype: torch.dtype, enabled: bool) -> Any:
    """Enter an autocast region and return its handle."""
    return autocast_mode._enter_autocast(device_type, dtype, enabled, None)


def leave_autocast(handle: Any) -> None:
    """Undo :func:`enter_autocast`."""
    autocast_mode._exit_autocast(handle)


CALLS = (enter_no_grad, leave_no_grad, enter_autocast, leave_autocast)


@contextmanager
def restored_modes() -> Iterator[None]:
    """Put grad mode and autocast back as they were if the body raises."""
    grad = torch.is_grad_enabled()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES]
    try:
        yield
    except BaseException:
        torch._C._set_grad_enabled(grad)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        raise
