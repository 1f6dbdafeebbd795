"""Run a captured program as it stands, on one device, with the real model's parameters: the proof that it is the model.

In: a :class:`~fxpar.capture.program.Captured`, the model it is of, and arguments. Out: what the model would return,
differentiable. It is slow and plain on purpose; what runs in training is :mod:`fxpar.runtime`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxpar import trees
from fxpar.capture.opaque import WholeCall
from fxpar.capture.program import Captured
from fxpar.errors import CallError
from fxpar.graph import Graph, Node, map_refs
from fxpar.runtime.targets import resolve, to_torch


def evaluate(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What ``model(*args, **kwargs)`` returns, computed by the program; buffers of ``model`` are updated as it would.

    Raises :class:`CallError` if the arguments are not built like those of the capture.

    >>> from fxpar.capture import capture
    >>> model, x = nn.Linear(3, 2), torch.randn(4, 3)
    >>> bool(torch.equal(evaluate(capture(model, (x,)), model, (x,)), model(x)))
    True
    """
    tensors, spec, _ = trees.flatten_call(args, kwargs or {})
    if spec != captured.in_spec:
        raise CallError(f"captured for arguments {captured.in_spec}, called with {spec}")
    device = next((tensor.device for tensor in (*model.parameters(), *tensors)), torch.device("cpu"))
    outputs = _Run(captured, model, device).graph("", captured.program.top, tensors)
    found = [out for out, leaf in zip(outputs, captured.out_spec.leaves, strict=True) if leaf is trees.TENSOR]
    return trees.unflatten(captured.out_spec, found)


class _Run:
    def __init__(self, captured: Captured, model: nn.Module, device: torch.device) -> None:
        self.captured, self.model, self.device = captured, model, device

    def graph(self, path: str, graph: Graph, tensors: list[torch.Tensor]) -> list[Any]:
        """The flat outputs of one graph, for the module at ``path``."""
        given = iter(tensors)
        values: dict[int, Any] = {}
        for item in graph.inputs:
            tensor = next(given) if item.kind == "input" else self.held(path, item.kind, item.name)
            # No gradient flows back to an input that is not marked, whatever the model's tensor says.
            values[item.value] = tensor if graph.values[item.value].grad else tensor.detach()
        for node in graph.nodes:
            args, kwargs = map_refs((node.args, tuple(v for _, v in node.kwargs)), lambda ref: values[ref.value])
            with _modes(node):
                results = self.node(node, args, dict(zip((k for k, _ in node.kwargs), kwargs, strict=True)))
            for out, result in zip(node.outputs, results, strict=True):
                if out is not None:
                    values[out] = result
        with torch.no_grad():
            for name, value in graph.updates:
                self.held(path, "buffer", name).copy_(values[value])
        return list(map_refs(graph.outputs, lambda ref: values[ref.value]))

    def held(self, path: str, kind: str, name: str) -> torch.Tensor:
        if kind == "constant":
            return self.captured.constant_of(self.model, path, name)
        full = f"{path}.{name}" if path else name
        return self.model.get_parameter(full) if kind == "parameter" else self.model.get_buffer(full)

    def node(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The flat results of one node."""
        kind, _, name = node.op.partition(":")
        if kind == "block":
            return self.graph(node.module, self.captured.program.blocks[name], list(args))
        if kind in ("call", "whole"):
            call = self.captured.callables[name]
            return call(self.model.get_submodule(call.path), *args) if isinstance(call, WholeCall) else call(*args)
        kwargs = {key: to_torch(arg, self.device) for key, arg in kwargs.items()}
        result = resolve(node.op)(*to_torch(args, self.device), **kwargs)
        return result if isinstance(result, (tuple, list)) else (result,)


@contextlib.contextmanager
def _modes(node: Node) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if torch.is_grad_enabled() != node.grad_enabled:
            stack.enter_context(torch.set_grad_enabled(node.grad_enabled))
        for kind, dtype, on in node.autocast:
            stack.enter_context(torch.autocast(kind, getattr(torch, dtype), enabled=on))
        yield
