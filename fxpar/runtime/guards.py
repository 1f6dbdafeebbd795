"""Refusals: calls and hooks that would silently do nothing, or the wrong thing, on a part of a parallel model.

In: a module whose operations have become part of a larger graph. Out: the same module, which now says what to use.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn

from torch import nn

from fxpar.errors import CallError

_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def refuse_use(module: nn.Module, path: str, through: str) -> None:
    """Make a call of ``module`` and hooks on it raise :class:`CallError`; ``through`` is what may be called."""
    module.__dict__["_fxpar_inlined"] = (path, through)
    module.__dict__["forward"] = types.MethodType(_refuse_call, module)
    for name in _HOOKS:
        module.__dict__[name] = types.MethodType(_refuse_hook, module)


def allow_use(module: nn.Module) -> None:
    """Undo :func:`refuse_use`."""
    for name in ("forward", "_fxpar_inlined", *_HOOKS):
        module.__dict__.pop(name, None)


def _refuse_call(module: nn.Module, *_args: Any, **_kwargs: Any) -> NoReturn:
    path, through = module.__dict__["_fxpar_inlined"]
    raise CallError(
        f"{path!r} was called by itself, but its operations are part of the parallel graph of {through}; call that, "
        f"or keep {path!r} as it is with whole=({path!r},) when parallelizing"
    )


def _refuse_hook(module: nn.Module, *_args: Any, **_kwargs: Any) -> NoReturn:
    path, through = module.__dict__["_fxpar_inlined"]
    raise CallError(
        f"a hook on {path!r} (also fully_shard or checkpoint_wrapper on it) would never run: its operations are part "
        f"of the parallel graph of {through}; put it there, register it before parallelizing (a hook that only "
        f"computes with tensors becomes part of the graph), or keep {path!r} as it is with whole=({path!r},)"
    )
