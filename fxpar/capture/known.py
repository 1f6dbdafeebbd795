"""Which fake stands for which tensor, and which fakes have known values.

In: real tensors and fakes. Out: :class:`Known`. Results of operations that depend on no input and no parameter are
computed for real as well, so that a model may look at them (``if (positions[:, -1] == 0).all()``), as it can outside a
capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fxpar.capture.recorder import Fakes

#: Known values are computed up to this many elements.
MOST_ELEMENTS = 1 << 22


class Known:
    """``fakes`` are by ``id`` of the real tensor, ``behind`` is the way back, ``values`` are by ``id`` of the fake."""

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes
        self.fakes: dict[int, torch.Tensor] = {}
        self.behind: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._keep: list[torch.Tensor] = []
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep tensors alive, so that their ``id`` stays theirs."""
        self._keep += tensors

    def stand_in(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Let ``fake`` stand for ``tensor``."""
        self.fakes[id(tensor)] = fake
        self.behind[id(fake)] = tensor
        self.keep(tensor, fake)

    def stand_in_while_alive(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Let ``fake`` stand for ``tensor``, which the model may drop."""
        key = id(tensor)
        self.fakes[key] = fake
        self.keep(fake)
        self._watched[key] = weakref.ref(tensor, lambda _: self.fakes.pop(key, None))

    def set_value(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """``fake`` holds ``value``, whatever the inputs are."""
        self.stand_in(value, fake)
        self.values[id(fake)] = value

    def has_value(self, tensor: torch.Tensor) -> bool:
        return id(self.fakes.get(id(tensor), tensor)) in self.values

    def have_values(self, fakes: Iterable[torch.Tensor]) -> bool:
        return all(id(fake) in self.values for fake in fakes)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run ``func`` on the values of its fakes."""

        def value(arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                return self.values[id(arg)]
            return type(arg)(map(value, arg)) if type(arg) in (list, tuple) else arg

        with self._fakes.outside():
            return func(*value(tuple(args)), **{name: value(arg) for name, arg in kwargs.items()})

    def imitate(self, out: Any) -> Any:
        """Fakes with the metadata of real results."""
        if isinstance(out, torch.Tensor):
            return self._fakes.like(out)
        return type(out)(map(self.imitate, out)) if isinstance(out, (tuple, list)) else out

    def result(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """The real result that goes with the fakes in ``out`` (or ``out``, if it is large)."""
        several = isinstance(out, (tuple, list))
        items = list(out) if several else [out]
        tensors = [item for item in items if isinstance(item, torch.Tensor)]
        if not tensors:
            return self.compute(func, args, kwargs)
        if self.have_values(tensors):
            values = [self.values.get(id(item), item) for item in items]
            return type(out)(values) if several else values[0]
        if sum(item.numel() for item in tensors) > MOST_ELEMENTS:
            return out
        real = self.compute(func, args, kwargs)
        for fake, value in zip(items, real if several else [real], strict=True):
            if isinstance(fake, torch.Tensor):
                self.set_value(fake, value)
        return real
