"""Tensors that autograd does not keep: backward makes them again, by the collectives that made them in forward.

In: calls of :func:`mark` in a rewritten graph, run inside :func:`made_again`. Out: autograd keeps what a marked tensor
was made of; its conversions run once more when backward first needs it, once for all that need it in that pass. It
knows tensors by their memory, so views of a marked one count too. What is marked is the plan's choice.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxpar.errors import CallError
from fxpar.layout import CONVERSIONS
from fxpar.runtime import records
from fxpar.runtime.collectives import Where, run

#: One conversion: states before and after, and the mesh axis' name, degree, rank and process group.
Step = tuple[str, str, str, int, int, str]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def mark(x: Tensor, before: Tensor, source: Tensor, steps: tuple[Step, ...], name: str) -> Tensor:
    """``x``, noted as what ``steps`` made of ``source``, the last of them from ``before``; ``name`` is for errors.

    Outside :func:`made_again` nothing is noted.
    """
    if torch.compiler.is_compiling() or _running.keeper is None or source.is_inference():
        return x
    if x.untyped_storage() is before.untyped_storage():
        x = x.clone()  # a view of what may be kept: whether it is one may differ from rank to rank
    _running.keeper.recipes[x.untyped_storage()] = _Recipe(_running.keeper, x, source, steps, name)
    return x


@contextmanager
def made_again(wanted: bool, owners: Callable[[], Sequence[tuple[Tensor, Tensor]]] = tuple) -> Iterator[None]:
    """What autograd saves in here of marked tensors, and of views of them, is made again in backward.

    Hooks on saved tensors that are in force already, such as those of activation checkpointing, get all other tensors,
    and what marked ones are made of. Not ``wanted``, without gradients and in compiled code, everything is kept.
    ``owners`` gives local tensors and the DTensors that they are the pieces of: operations on a DTensor raise its own
    version and not that of its piece.
    """
    if not wanted or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    outer = _running.keeper
    keeper = _Keeper(torch._C._autograd._top_saved_tensors_default_hooks(False), outer)
    keeper.owners.update((piece.untyped_storage(), owner) for piece, owner in owners())
    _running.keeper = keeper
    try:
        with saved_tensors_hooks(keeper.pack, keeper.unpack):
            yield
    finally:
        _running.keeper = outer
        keeper.recipes.clear()  # of what was not saved: its memory may live on, and what it was made of would too


class _Recipe:
    """How a marked tensor is made, and the tensor itself while a backward pass needs it."""

    def __init__(self, keeper: _Keeper, x: Tensor, source: Tensor, steps: tuple[Step, ...], name: str) -> None:
        self.keeper, self.steps, self.module = keeper, steps, records.running_module()
        self.size, self.stride, self.offset, self.dtype = x.size(), x.stride(), x.storage_offset(), x.dtype
        self.source = _Kept(source, keeper.owner(source), name)
        self.packed: Any = None
        self.pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()
        self.made: Tensor | None = None
        self.waiting: set[int] = set()

    def piece(self, x: Tensor) -> _Piece:
        """What is kept instead of ``x``, which is in the marked tensor's memory."""
        if self.packed is None:
            self.packed = self.keeper.pack(self.source.kept)
            if isinstance(self.packed, _Kept):
                self.packed = self.source
            del self.source
        piece = _Piece(self, x.size(), x.stride(), int(x.storage_offset() - self.offset))
        self.pieces.add(piece)
        return piece

    def take(self, piece: _Piece) -> Tensor:
        """The marked tensor, for the backward of what saved ``piece``."""
        if isinstance(self.packed, _Kept):
            self.packed.check()
        made = self.made
        if made is None:
            made = self._make()
            if _when_backward_ends(weakref.WeakMethod(self.drop)):
                self.made, self.waiting = made, {id(other) for other in self.pieces}
        self.waiting.discard(id(piece))
        if not self.waiting:
            self.drop()
        return made

    def drop(self) -> None:
        self.made = None

    def _make(self) -> Tensor:
        made = self.keeper.unpack(self.packed)
        with torch.no_grad():
            for src, dst, axis, degree, rank, group in self.steps:
                kind = CONVERSIONS[src[0], dst[0]].forward
                made = run(kind, made, src, dst, Where(axis, degree, rank, group), "backward", self.module)
            if made.stride() == self.stride:
                return made
            return made.new_empty_strided(self.size, self.stride).copy_(made)


class _Piece:
    """A saved tensor in a marked tensor's memory: its size, strides and, from that tensor's beginning, its offset."""

    def __init__(self, recipe: _Recipe, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self.recipe, self.size, self.stride, self.offset = recipe, size, stride, offset

    def tensor(self) -> Tensor:
        made = self.recipe.take(self)
        return made.as_strided(self.size, self.stride, made.storage_offset() + self.offset)


class _Kept:
    """A saved tensor as it is, and the versions of it and of its owner; ``name`` says what is made of it."""

    def __init__(self, x: Tensor, owner: Tensor | None, name: str = "") -> None:
        self.kept, self.name = x.detach(), name
        self.watched = [(each, each._version) for each in (self.kept, owner) if each is not None]

    def tensor(self) -> Tensor:
        self.check()
        return self.kept

    def check(self) -> None:
        """Raise if it was changed in place since, as autograd does, which cannot see through hooks."""
        changes = [(each._version, version) for each, version in self.watched if each._version != version]
        if not changes:
            return
        versions = "it is at version {}, expected version {} instead".format(*changes[0])
        if self.name:
            raise CallError(
                f"{self.name} was changed in place after forward, but backward makes a tensor again from what it was "
                f"then: {versions}; change it after the last backward() that needs it"
            )
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{self.kept.type()} {list(self.kept.shape)}]: {versions}"
        )


class _Keeper:
    """Hooks on what autograd saves, and the recipes of the memory that is in use."""

    def __init__(self, outer: Hooks | None, around: _Keeper | None) -> None:
        self.outer = outer
        # One for all that are in force, as any of them may come to keep a tensor.
        self.owners: weakref.WeakKeyDictionary[Any, Tensor] = around.owners if around else weakref.WeakKeyDictionary()
        self.recipes: weakref.WeakKeyDictionary[Any, _Recipe] = weakref.WeakKeyDictionary()

    def pack(self, x: Tensor) -> Any:
        recipe = self._recipe(x)
        if recipe is not None:
            return recipe.piece(x)
        return _Kept(x, self.owner(x)) if self.outer is None else self.outer[0](x)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, (_Kept, _Piece)):
            return packed.tensor()
        assert self.outer is not None, "only the outer hooks pack into something else"
        return self.outer[1](packed)

    def owner(self, x: Tensor) -> Tensor | None:
        """The DTensor in whose piece's memory ``x`` is, if it is in any."""
        return self.owners.get(x.untyped_storage()) if x.layout == torch.strided else None

    def _recipe(self, x: Tensor) -> _Recipe | None:
        if x.layout != torch.strided or x.is_conj() or x.is_neg():
            return None
        recipe = self.recipes.get(x.untyped_storage())
        return recipe if recipe is not None and recipe.dtype == x.dtype else None


class _Running(threading.local):
    keeper: _Keeper | None = None


_running = _Running()


def _when_backward_ends(method: weakref.WeakMethod[Any]) -> bool:
    """Call ``method``, if its object is still there, when the running backward pass ends; False if none runs."""

    def call() -> None:
        if (bound := method()) is not None:
            bound()

    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]
    except RuntimeError:  # what a node has saved is being looked at, outside any pass
        return False
    return True
