"""Plain attributes of modules during a capture: what a forward reads, and undoing what it writes.

In: every attribute access of a module. Out: per unit, the first value read of each attribute; afterwards, a model with
the attributes it had before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxpar.capture.recorder import MISSING, is_fake, plain_attributes
from fxpar.capture.structure import Structure
from fxpar.errors import CaptureError

_DEEPEST = 3
_LONGEST = 1000


class Attributes:
    """``logs`` has a dict per unit being recorded: ``(module path, name)`` to the value first read.

    ``changed`` are the attributes that had a value before a forward gave them another one.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self.logs: list[dict[tuple[str, str], Any]] = []
        self.written: set[tuple[str, str]] = set()
        self.changed: list[str] = []
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._container_names: dict[int, str] = {}
        self._tensor_paths: dict[int, str] = {}
        self._visited: dict[int, tuple[nn.Module, dict[str, Any]]] = {}

    def read(self, module: nn.Module, name: str, value: Any) -> None:
        path = self._structure.paths.get(id(module))
        if path is None:
            return
        if self.logs and (path, name) not in self.written:
            self.logs[-1].setdefault((path, name), value)
        if isinstance(value, (torch.Tensor, list, tuple, dict, set)):
            self._note(value, f"{path}.{name}" if path else name, 0)

    def _note(self, value: Any, path: str, depth: int) -> None:
        """Remember under which name a tensor is to be found, and what mutable containers hold."""
        if isinstance(value, torch.Tensor):
            if not is_fake(value):
                self._tensor_paths.setdefault(id(value), path)
            return
        if not isinstance(value, (list, tuple, dict, set)) or id(value) in self._containers or depth > _DEEPEST:
            return
        self._container_names[id(value)] = path
        self._containers[id(value)] = (value, value if isinstance(value, tuple) else value.copy())
        if isinstance(value, set) or len(value) > _LONGEST:
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            self._note(item, f"{path}[{key!r}]", depth + 1)

    def tensor_path(self, tensor: torch.Tensor) -> str | None:
        """The attribute path at which ``tensor`` was read, if it was."""
        return self._tensor_paths.get(id(tensor))

    def visit(self, module: nn.Module) -> None:
        """Remember which buffers ``module`` has."""
        if id(module) not in self._visited:
            self._visited[id(module)] = (module, dict(module._buffers))

    def original_buffer(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """The buffer as it was before the forward set it."""
        return next(old for table, key, old in self._undo if table is module._buffers and key == name)

    def write(self, module: nn.Module, name: str, value: Any) -> bool:
        """Note that an attribute is about to be set; whether it is a buffer."""
        path = self._structure.paths.get(id(module))
        if path is None:
            return False
        full = f"{path}.{name}" if path else name
        if name in module._parameters or name in module._modules or isinstance(value, (nn.Parameter, nn.Module)):
            raise CaptureError(
                f"the forward replaces {full!r}; a captured program cannot repeat that: change it outside the forward, "
                f"or keep the module as it is with whole=({path!r},)"
            )
        is_buffer = name in module._buffers
        table = module._buffers if is_buffer else plain_attributes(module)
        self._undo.append((table, name, table.get(name, MISSING)))
        if not is_buffer:
            self.written.add((path, name))
            if name in table:
                self.changed.append(full)
        return is_buffer

    def mark(self) -> int:
        """A point to :meth:`restore` to."""
        return len(self._undo)

    def wrote(self, mark: int) -> bool:
        """Whether anything has been written since ``mark``, attributes or what is in their containers."""
        return len(self._undo) > mark or any(_changed(now, before) for now, before in self._containers.values())

    def restore(self, mark: int = 0) -> None:
        """Undo everything written since ``mark``."""
        for table, name, value in reversed(self._undo[mark:]):
            if value is MISSING:
                table.pop(name, None)
            else:
                table[name] = value
        del self._undo[mark:]
        for now, before in self._containers.values():
            if _changed(now, before):
                self.changed.append(self._container_names[id(now)])
                now.clear()
                now.extend(before) if isinstance(now, list) else now.update(before)
        registered = []
        for module, buffers in self._visited.values():
            for name in [name for name in module._buffers if name not in buffers]:
                del module._buffers[name]
                registered.append(f"{self._structure.paths[id(module)]}.{name}".lstrip("."))
        if registered:
            raise CaptureError(f"the forward registers buffers ({', '.join(registered)}); register them in __init__")


def _changed(now: Any, before: Any) -> bool:
    if now is before:
        return False
    if isinstance(now, set):
        return bool(now != before)
    if isinstance(now, dict):
        return list(now) != list(before) or any(now[key] is not before[key] for key in now)
    return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
