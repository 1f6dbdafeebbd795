"""The plain attributes that a forward read, and whether another module has the same.

In: values of attributes. Out: :class:`Reads`. Parameters, buffers and children are :mod:`fxpar.capture.structure`.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpar.capture.recorder import MISSING, plain_attributes
from fxpar.capture.structure import descendants


@dataclass(frozen=True)
class Reads:
    """The plain attributes that a forward read: ``(relative module path, attribute name, value)``.

    ``modules`` maps ``id(module)`` to its relative path, for the module the reads are of.
    """

    entries: tuple[tuple[str, str, Any], ...]
    modules: dict[int, str]

    def same_in(self, module: nn.Module) -> bool:
        """Whether a forward of ``module`` would read the same values."""
        parts: dict[str, nn.Module | None] = {"": module}
        places = _Places(module)
        for path, name, value in self.entries:
            part = parts[path] if path in parts else parts.setdefault(path, _submodule(module, path))
            if part is None:
                return False
            if not same(value, plain_attributes(part).get(name, MISSING), mine=self.modules, theirs=places):
                return False
        return True


class _Places:
    """Relative paths by ``id(module)``, looked for only when asked."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths: dict[int, str] | None = None

    def get(self, key: int) -> str | None:
        if self._paths is None:
            self._paths = {id(part): path for path, part in descendants(self._module)}
        return self._paths.get(key)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    current: nn.Module | None = module
    for name in path.split("."):
        current = current._modules.get(name) if current is not None else None
    return current


def same(a: Any, b: Any, *, mine: dict[int, str], theirs: _Places) -> bool:
    """Whether two attribute values make no difference to a forward. Tensors and modules are compared by their place."""
    if type(a) is type(b) and a is b and isinstance(a, (bool, int, str, type(None))):
        return True
    alike = functools.partial(same, mine=mine, theirs=theirs)
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        place = mine.get(id(a))
        return a is b if place is None else place == theirs.get(id(b))
    if type(a) is not type(b):
        return False
    if a is b and not isinstance(a, (tuple, list, dict, functools.partial)):
        return True
    if isinstance(a, torch.Tensor):
        return (a.shape, a.stride(), a.dtype, a.requires_grad) == (b.shape, b.stride(), b.dtype, b.requires_grad)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, functools.partial):
        return a.func is b.func and alike(a.args, b.args) and alike(a.keywords, b.keywords)
    if hasattr(a, "__func__") and hasattr(a, "__self__"):
        return a.__func__ is b.__func__ and alike(a.__self__, b.__self__)
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, (bool, int, str, bytes, complex, enum.Enum, torch.dtype, torch.device, set, frozenset)):
        return bool(a == b)
    return _declares_equality(type(a)) and _equal(a, b)


def _declares_equality(kind: type) -> bool:
    return kind.__eq__ is not object.__eq__


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        # An object's own comparison failed: nothing is known, so they count as different.
        return False
