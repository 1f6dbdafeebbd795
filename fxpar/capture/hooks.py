"""Hooks on modules whose operations become part of a larger graph: recorded with them, or refused.

In: a module with forward hooks. Out: the same call with its hooks, if they can do nothing but compute with the tensors
they are given, so that the graph repeats them. A hook that may do more (append to a list, count, print) would run once,
while recording, and never again. Hooks on blocks and on the root are not met here: they stay.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fxpar.capture.recorder import plain_attributes
from fxpar.errors import CaptureError

#: Bytecode that reaches, or leaves something, outside of a function's own arguments.
_REACHING = frozenset(
    {
        "DELETE_ATTR", "IMPORT_NAME", "LOAD_CLASSDEREF", "LOAD_CLOSURE", "LOAD_DEREF", "LOAD_FROM_DICT_OR_DEREF",
        "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL", "LOAD_NAME", "MAKE_FUNCTION", "STORE_ATTR", "STORE_DEREF",
        "STORE_GLOBAL", "STORE_NAME", "YIELD_VALUE",
    }
)  # fmt: skip
_READING = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})


def only_computes(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` can only call methods of tensors among its arguments, as far as its bytecode shows.

    >>> def ask_for_gradients(module, args, output):
    ...     output.requires_grad_(True)
    >>> only_computes(ask_for_gradients), only_computes(print), only_computes(lambda *_: seen.append(1))
    (True, False, False)
    """
    if not isinstance(hook, FunctionType) or hook.__code__.co_freevars:
        return False
    for step in dis.get_instructions(hook):
        if step.opname in _REACHING or (step.opname in _READING and not hasattr(torch.Tensor, str(step.argval))):
            return False
    return True


def call_with_hooks(
    module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """``call(args)``, with the forward hooks of ``module`` around it; raises :class:`CaptureError` for other hooks."""
    table = plain_attributes(module)
    before, after = list(table["_forward_pre_hooks"].values()), list(table["_forward_hooks"].values())
    refused = [hook for hook in (*before, *after) if not only_computes(hook)]
    refused += [hook for kind in ("_backward_pre_hooks", "_backward_hooks") for hook in table[kind].values()]
    if table["_forward_pre_hooks_with_kwargs"] or table["_forward_hooks_with_kwargs"]:
        refused += [hook for hook in (*before, *after) if hook not in refused]
    if refused:
        named = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in refused)
        raise CaptureError(
            f"module {path!r} has hooks ({named}) and its operations become part of a larger graph, where they "
            f"would never run; remove them, or keep the module as it is with whole=({path!r},)"
        )
    for hook in before:
        changed = hook(module, args)
        if changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    result = call(args, kwargs)
    for hook in after:
        changed = hook(module, args, result)
        result = result if changed is None else changed
    return result
