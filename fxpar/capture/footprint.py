"""What every node of a graph takes in memory, and what autograd keeps of it until its backward: asked of torch itself.

In: a graph, with the callables of its opaque nodes. Out: a :class:`~fxpar.graph.Footprint` per node. Each different
operation runs once on fake tensors, strides and all, and its saved tensors are told apart by the memory they are in.
How that adds up over a step is :mod:`fxpar.cost.memory`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpar.capture.recorder import Allocations, Fakes, storage_key
from fxpar.graph import Footprint, Graph, Node, Value, map_refs
from fxpar.runtime.targets import resolve, to_torch

Tensors = list[torch.Tensor]

#: What was learnt in this process: planning again, or the same operation in another block, costs nothing.
_KNOWN: dict[tuple[Any, ...], _Probed] = {}
_MOST_KNOWN = 10_000


@dataclass(frozen=True, slots=True)
class _Meta:
    """A tensor as an operation sees it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    grad: bool

    @staticmethod
    def fresh(value: Value) -> _Meta:
        """A tensor that lies in memory without gaps."""
        sizes = itertools.accumulate(reversed(value.shape), lambda total, size: total * max(size, 1), initial=1)
        return _Meta(value.shape, tuple(sizes)[: len(value.shape)][::-1], value.dtype, value.grad)


@dataclass(frozen=True, slots=True)
class _Probed:
    footprint: Footprint
    strides: tuple[tuple[int, ...], ...]


def footprints(graph: Graph, fakes: Fakes, callables: Mapping[str, Callable[..., Any]]) -> tuple[Footprint, ...]:
    """A footprint per node of ``graph``; those of calls of blocks are empty (:mod:`fxpar.cost.memory` adds them up).

    ``callables`` run ``call:`` and ``whole:`` nodes by their whole name. One that cannot run on fake tensors is taken
    to keep all its operands and outputs.
    """
    metas = {item.value: _Meta.fresh(graph.values[item.value]) for item in graph.inputs}
    found = []
    for node in graph.nodes:
        outs = [out for out in node.outputs if out is not None]
        values = [graph.values[out] for out in outs]
        if node.op.startswith("block:"):
            probed = _unknown(Footprint(views=(None,) * len(outs)), values)
        else:
            operands = tuple(replace(metas[value], grad=graph.values[value].grad) for value in node.operands)
            probed = _probed(node, operands, values, fakes, callables.get(node.op))
        found.append(probed.footprint)
        for out, value, stride in zip(outs, values, probed.strides, strict=True):
            metas[out] = _Meta(value.shape, stride, value.dtype, value.grad)
    return tuple(found)


def _unknown(footprint: Footprint, values: list[Value]) -> _Probed:
    return _Probed(footprint, tuple(_Meta.fresh(value).stride for value in values))


def _probed(
    node: Node, operands: tuple[_Meta, ...], values: list[Value], fakes: Fakes, call: Callable[..., Any] | None
) -> _Probed:
    place, kind = itertools.count(), fakes.device.type
    args, kwargs = map_refs((node.args, node.kwargs), lambda ref: next(place))
    cast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    modes = (node.grad_enabled, node.autocast, torch.is_grad_enabled(), *cast)
    key = (call or node.op, repr((args, kwargs)), node.outputs.count(None), operands, fakes.device, modes)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _probe(node, operands, values, fakes, call)
    return _KNOWN[key]


def _probe(
    node: Node, operands: tuple[_Meta, ...], values: list[Value], fakes: Fakes, call: Callable[..., Any] | None
) -> _Probed:
    run = _Run(node, operands, fakes, call)
    try:
        found = run.forward()
        return _Probed(run.both(found) if found.own_bytes else found, run.strides)
    except Exception:
        if call is None:
            raise
        everything = tuple(range(len(operands))), tuple(range(len(values)))
        return _unknown(Footprint(*everything, views=(None,) * len(values)), values)


class _Run:
    """One operation on fakes."""

    def __init__(self, node: Node, operands: tuple[_Meta, ...], fakes: Fakes, call: Callable[..., Any] | None) -> None:
        self.node, self.operands, self.fakes, self.call = node, operands, fakes, call
        self.strides: tuple[tuple[int, ...], ...] = ()

    def made(self) -> Tensors:
        return self.fakes.grown(
            [(meta.shape, meta.stride, getattr(torch, meta.dtype), meta.grad) for meta in self.operands]
        )

    def results(self, tensors: Tensors) -> Tensors:
        given = iter(tensors)
        args, kwargs = map_refs((self.node.args, tuple(arg for _, arg in self.node.kwargs)), lambda ref: next(given))
        args = to_torch(args, self.fakes.device)
        named = {key: to_torch(arg, self.fakes.device) for (key, _), arg in zip(self.node.kwargs, kwargs, strict=True)}
        with _modes(self.node):
            result = (self.call or resolve(self.node.op))(*args, **named)
        flat = result if isinstance(result, (tuple, list)) else (result,)
        return [tensor for tensor, out in zip(flat, self.node.outputs, strict=True) if out is not None]

    def forward(self) -> Footprint:
        """What is kept and what is a view; nothing about scratch memory."""
        kept: Tensors = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with self.fakes.mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            tensors = self.made()
            outputs = self.results(tensors)
        self.strides = tuple(out.stride() for out in outputs)
        inside = _first(tensors)
        views = tuple(inside.get(storage_key(out)) for out in outputs)
        fresh = {key: index for key, index in _first(outputs).items() if key not in inside}
        sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
        own_bytes = sum(size for key, size in sizes.items() if key not in inside and key not in fresh)
        return Footprint(
            tuple(sorted(inside[key] for key in sizes if key in inside)),
            tuple(sorted(fresh[key] for key in sizes if key in fresh)),
            own_bytes,
            views,
            own_bytes,
        )

    def both(self, known: Footprint) -> Footprint:
        """With the scratch memory of both directions, for an operation that is made of several."""
        tensors = self.made()
        with self.fakes.mode:
            with Allocations(tensors) as allocations:
                outputs = self.results(tensors)
            forward = allocations.peak_bytes - _bytes(outputs, {storage_key(tensor) for tensor in tensors})
            sources = [out for out in outputs if out.requires_grad]
            gradients = [torch.empty_like(out) for out in sources]
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            with Allocations([*tensors, *outputs, *gradients]) as allocations:
                results = torch.autograd.grad(sources, wanted, gradients, allow_unused=True)
        left = _bytes([grad for grad in results if grad is not None], {storage_key(grad) for grad in gradients})
        backward = allocations.peak_bytes - left
        return replace(known, forward_bytes=forward, backward_bytes=max(0, backward))


def _first(tensors: Tensors) -> dict[int, int]:
    """The first position at which each piece of memory stands."""
    found: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(storage_key(tensor), index)
    return found


def _bytes(tensors: Tensors, apart: set[int]) -> int:
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for key, size in sizes.items() if key not in apart)


@contextlib.contextmanager
def _modes(node: Node) -> Iterator[None]:
    """Grad mode and autocast as the node runs in them."""
    with contextlib.ExitStack() as stack:
        if torch.is_grad_enabled() != node.grad_enabled:
            stack.enter_context(torch.set_grad_enabled(node.grad_enabled))
        for kind, dtype, on in node.autocast:
            stack.enter_context(torch.autocast(kind, getattr(torch, dtype), enabled=on))
        yield
