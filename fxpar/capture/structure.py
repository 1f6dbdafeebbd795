"""What a model is made of: names, and a class number per module that is equal for modules built alike.

In: a module tree. Out: :class:`Structure`, and the classes of modules worth recording once (:func:`worth_folding`).
What their forwards read beside parameters and buffers is :mod:`fxpar.capture.reads`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpar.capture.recorder import plain_attributes
from fxpar.errors import CaptureError

#: Attributes of every nn.Module that :class:`Structure` covers, or that never matter to a forward.
STRUCTURAL = frozenset(nn.Module().__dict__) | {"_non_persistent_buffers_set", "__dict__"}

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _identities(module: nn.Module) -> tuple[int, ...]:
    """Which hooks and own forward ``module`` has."""
    return tuple(map(id, hooks_of(module)))


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The hooks that a call of ``module`` runs, and its own ``forward`` if the instance has one."""
    table = plain_attributes(module)
    found: list[Any] = []
    for kind in _HOOKS:
        if table[kind]:
            found += table[kind].values()
    if "forward" in table:
        found.append(table["forward"])
    return tuple(found)


@dataclass
class Structure:
    """One walk over a model: paths, names of parameters and buffers, and a class number per module.

    ``names`` maps ``id(tensor)`` to the kind and all qualified names of a parameter or buffer. ``classes`` maps
    ``id(module)`` to a number that is equal for modules of the same make: type, mode, parameters, buffers, children.
    """

    paths: dict[int, str] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    names: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    classes: dict[int, int] = field(default_factory=dict)
    tied: bool = False
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> Structure:
        structure = Structure()
        structure._walk(model, "")
        return structure

    def aliases(self) -> dict[str, str]:
        """Every further name of a tied parameter or buffer, to its first name."""
        if not self.tied:
            return {}
        return {name: names[0] for _, names in self.names.values() for name in names[1:]}

    def first_names(self) -> list[str]:
        """The first name of every parameter and buffer, in the order of the modules."""
        return [names[0] for _, names in self.names.values()]

    def order(self, module: nn.Module) -> dict[str, int]:
        """The place of every parameter and buffer of ``module``, by its name there."""
        if self.paths.get(id(module)) == "":
            return {name: place for place, name in enumerate(self.first_names())}
        names: dict[str, int] = {}
        for path, part in descendants(module):
            for table in (part._parameters, part._buffers):
                for name in table:
                    names[f"{path}.{name}" if path else name] = len(names)
        return names

    def first_name(self, name: str) -> str:
        """The first name of the parameter or buffer ``name``."""
        return self.aliases().get(name, name)

    def _walk(self, module: nn.Module, path: str) -> int:
        prefix = f"{path}." if path else ""
        table = module.__dict__
        tensors: list[Hashable] = []
        for kind in ("parameter", "buffer"):
            for name, tensor in table[f"_{kind}s"].items():
                if tensor is None:
                    tensors.append((kind, name))
                    continue
                self._name(tensor, kind, prefix + name)
                persistent = kind == "buffer" and name not in table["_non_persistent_buffers_set"]
                tensors.append((kind, name, tensor.shape, tensor.dtype, tensor.requires_grad, persistent))
        children = []
        for name, child in table["_modules"].items():
            if child is not None:
                children.append((name, self._walk(child, prefix + name), _identities(child)))
        number = self.classes.get(id(module))
        if number is None:
            self.paths[id(module)] = path
            self.modules.append(module)
            key = (type(module), table["training"], id(table.get("forward")), tuple(tensors), tuple(children))
            number = self.classes[id(module)] = self._numbers.setdefault(key, len(self._numbers))
        return number

    def _name(self, tensor: torch.Tensor, kind: str, name: str) -> None:
        known = self.names.get(id(tensor))
        if known is not None:
            self.tied = True
            known[1].append(name)
            return
        _check_parameter(tensor, kind, name)
        self.names[id(tensor)] = (kind, [name])
        self.tensors.append(tensor)


def _check_parameter(tensor: torch.Tensor, kind: str, name: str) -> None:
    if is_lazy(tensor):
        raise CaptureError(f"the {kind} {name!r} is lazy and has no shape yet: run the model once before")
    if hasattr(tensor, "placements"):
        raise CaptureError(f"the {kind} {name!r} is a DTensor: the model has been sharded already")


def worth_folding(model: nn.Module, structure: Structure) -> frozenset[int]:
    """The classes of modules to trace once: repeated, with children, and outermost unless folding parts saves more."""
    counts: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for module in structure.modules:
        number = structure.classes[id(module)]
        counts[number] = counts.get(number, 0) + 1
    chosen: set[int] = set()

    def size(module: nn.Module) -> int:
        number = structure.classes[id(module)]
        if number not in sizes:
            children = [child for child in module._modules.values() if child is not None]
            sizes[number] = sum(map(size, children)) or 1
        return sizes[number]

    def inner_size(module: nn.Module, met: set[int]) -> int:
        """What has to be recorded of ``module`` if the repeated modules inside it are folded instead of it."""
        total = 0
        for child in module._modules.values():
            if child is None:
                continue
            number = structure.classes[id(child)]
            if number in met:
                continue
            if repeats(child):
                met.add(number)
                total += size(child)
            else:
                total += inner_size(child, met)
        return total or 1

    def repeats(module: nn.Module) -> bool:
        return counts[structure.classes[id(module)]] > 1 and is_block(module)

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is None:
                continue
            number = structure.classes[id(child)]
            if number in chosen:
                continue
            if repeats(child) and size(child) <= _descending(child, counts[number], inner_size):
                chosen.add(number)
            else:
                visit(child)

    visit(model)
    return frozenset(chosen)


def _descending(module: nn.Module, count: int, inner_size: Callable[[nn.Module, set[int]], int]) -> int:
    """What has to be recorded of ``count`` modules like this one if not they but repeated parts of them are folded."""
    met: set[int] = set()
    first = inner_size(module, met)
    return first + (count - 1) * max(inner_size(module, met) if met else first, 0)


def is_block(module: nn.Module) -> bool:
    """Whether ``module`` is more than a layer of torch: it has parts, or several parameters of its own."""
    if type(module).forward is nn.Module.forward:
        return False
    if any(child is not None for child in module._modules.values()):
        return True
    return not type(module).__module__.startswith("torch.nn.") and len(module._parameters) > 1


def descendants(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below and including ``module``, by relative path, each once."""
    met: set[int] = set()

    def walk(current: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(current) in met:
            return
        met.add(id(current))
        yield path, current
        for name, child in current._modules.items():
            if child is not None:
                yield from walk(child, f"{path}.{name}" if path else name)

    return walk(module, "")


def tie_pattern(module: nn.Module) -> tuple[int, ...]:
    """Which parameters and buffers inside ``module`` are the same tensor: the first position of each."""
    first: dict[int, int] = {}
    pattern = []
    for _, part in descendants(module):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            pattern.append(first.setdefault(id(tensor), len(first)) if tensor is not None else -1)
    return tuple(pattern)
