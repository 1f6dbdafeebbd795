"""Graph + GraphPlan -> a plain ``torch.fx.GraphModule`` that one rank runs on local tensors.

In: a graph, its plan, the mesh, this rank's coordinates and process groups. Out: a GraphModule from flat inputs (in the
graph's order) to flat outputs followed by the new values of updated buffers. A graph that calls blocks takes one more
input before all others: ``call_block(name, module, *tensors) -> flat outputs``. Nothing is chosen here, and no
parameter is touched (:mod:`fxpar.runtime.module`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from fxpar.errors import PlanError
from fxpar.fuse import fuse_bias, fuse_loss
from fxpar.graph import Graph, Node, Program, Ref, Value, map_refs
from fxpar.layout import Layout, Mesh, local_layout, written
from fxpar.legality import check_graph, check_program, plain, where_is
from fxpar.plans import GraphPlan, NodePlan, Plan
from fxpar.remade import Path, remade
from fxpar.rules.localise import localise
from fxpar.runtime import modes
from fxpar.runtime.again import Step, mark
from fxpar.runtime.blocks import call_block
from fxpar.runtime.collectives import convert
from fxpar.runtime.targets import resolve, to_torch

Region = tuple[Any, ...]

#: Kinds of inputs whose tensors may require grad although the graph's values carry none.
_MAY_REQUIRE = ("parameter", "input")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its coordinate and process group name on every mesh axis, and its device."""

    mesh: Mesh
    coordinates: tuple[int, ...]
    groups: tuple[str, ...]
    device: torch.device


def rewrite_program(
    program: Program, plan: Plan, place: Place, callables: Mapping[str, Callable[..., Any]]
) -> dict[str, fx.GraphModule]:
    """Every graph of ``program`` for one rank, by name; raises :class:`PlanError` if the plan does not fit."""
    check_program(program, plan)
    return {
        name: _Writer(graph, plan.graphs[name], place, callables).write() for name, graph in program.graphs().items()
    }


def rewrite(
    graph: Graph, plan: GraphPlan, place: Place, callables: Mapping[str, Callable[..., Any]] | None = None
) -> fx.GraphModule:
    """One graph for one rank; ``callables`` runs ``call:`` and ``whole:`` operations by name.

    Raises :class:`PlanError` if the plan does not fit the graph.
    """
    check_graph(graph, plan, place.mesh)
    return _Writer(graph, plan, place, callables or {}).write()


def calls_blocks(graph: Graph) -> bool:
    """Whether the rewritten graph takes a ``call_block`` before its other inputs."""
    return any(node.op.startswith("block:") for node in graph.nodes)


class _Opaque(nn.Module):
    """A Python callable as a call target of its own name."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _Writer:
    """Writes one GraphModule; ``held`` has the fx node of every value in every layout that exists so far."""

    def __init__(
        self, graph: Graph, plan: GraphPlan, place: Place, callables: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.graph, self.plan, self.place, self.callables = graph, plan, place, callables
        self.out = fx.Graph()
        self.held: dict[tuple[int, Layout], fx.Node] = {}
        self.sources = {
            (value, plain(dst, graph, value)): plain(src, graph, value)
            for value, arcs in plan.trees.items()
            for src, dst in arcs
        }
        self.remade = remade(graph, plan, place.mesh.degrees)
        self.differentiated = any(value.grad for value in graph.values)
        self.regions: list[tuple[Region, fx.Node]] = []
        self.opaque: dict[str, nn.Module] = {}
        self.call_block: fx.Node | None = None

    def write(self) -> fx.GraphModule:
        if calls_blocks(self.graph):
            self.call_block = self.out.placeholder("call_block")
        for item, layout in zip(self.graph.inputs, self.plan.inputs, strict=True):
            given = self.out.create_node("placeholder", _name(item.name), name=_name(item.name))
            self._hold(item.value, layout, self._stopped(item.value, given) if item.kind in _MAY_REQUIRE else given)
        for node, chosen in zip(self.graph.nodes, self.plan.nodes, strict=True):
            self._node(node, chosen)
        finals = [
            self._value(out.value, layout) if isinstance(out, Ref) and layout else self._constant(out)
            for out, layout in zip(self.graph.outputs, self.plan.outputs, strict=True)
        ]
        finals += [
            self._value(value, layout) for (_, value), layout in zip(self.graph.updates, self.plan.updates, strict=True)
        ]
        self._enter(())
        self.out.output(tuple(finals))
        fuse_bias(self.out)
        fuse_loss(self.out)
        module = fx.GraphModule(self.opaque, self.out, class_name=_name(self.graph.name).capitalize())
        self.out.lint()
        return module

    def _node(self, node: Node, chosen: NodePlan) -> None:
        operands = [
            self._value(value, layout, node) for value, layout in zip(node.operands, chosen.inputs, strict=True)
        ]
        self._enter(_regions(node))
        opaque = node.op.startswith(("block:", "call:", "whole:"))
        made = self._opaque(node, operands) if opaque else self._aten(node, chosen, operands)
        made.meta["stack_trace"] = _stack_trace(node)
        tensors = [(index, value) for index, value in enumerate(node.outputs) if value is not None]
        for (index, value), layout in zip(tensors, chosen.outputs, strict=True):
            one = made if not opaque and _returns_one(node.op) else self.out.call_function(getitem, (made, index))
            # Of an operation that reads no gradient, no result carries one; a block, or one result of several, may.
            apart = opaque or any(self.graph.values[other].grad for _, other in tensors)
            self._hold(value, layout, self._stopped(value, one) if apart else one)

    def _stopped(self, value: int, node: fx.Node) -> fx.Node:
        """``node``, detached if the graph says that its value carries no gradient: its tensor may have one still."""
        meta = self.graph.values[value]
        if meta.grad or not self.differentiated or not meta.dtype.startswith(("float", "bfloat", "complex")):
            return node
        return self.out.call_function(torch.ops.aten.detach.default, (node,))

    def _aten(self, node: Node, chosen: NodePlan, operands: list[fx.Node]) -> fx.Node:
        local = localise(self.graph, node, chosen.strategies, self.place.mesh.degrees, self.place.coordinates)
        args, kwargs = self._filled(local.args, local.kwargs, operands)
        name = _name(f"{node.module}.{local.target.split('.')[1]}")
        return self.out.create_node("call_function", resolve(local.target), args, kwargs, name)

    def _opaque(self, node: Node, operands: list[fx.Node]) -> fx.Node:
        kind, _, detail = node.op.partition(":")
        args, kwargs = self._filled(node.args, node.kwargs, operands)
        if kind == "block":
            assert self.call_block is not None
            arguments = (self.call_block, detail, node.module, *args)
            return self.out.create_node("call_function", call_block, arguments, kwargs, _name(node.module))
        if node.op not in self.callables:
            raise PlanError(f"{where_is(node)}: nothing is given that runs it, only {sorted(self.callables)}")
        key = f"{kind}_{len(self.opaque)}"
        self.opaque[key] = _Opaque(self.callables[node.op])
        return self.out.create_node("call_module", key, args, kwargs, _name(f"{node.module}.{kind}"))

    def _filled(self, args: Any, kwargs: Any, operands: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the operands, in order, in place of the tensors."""
        waiting = iter(operands)
        args = map_refs(args, lambda ref: next(waiting))
        kwargs = {key: map_refs(arg, lambda ref: next(waiting)) for key, arg in kwargs}
        return to_torch(args, self.place.device), {key: self._constant(arg) for key, arg in kwargs.items()}

    def _constant(self, arg: Any) -> Any:
        return to_torch(arg, self.place.device)

    def _hold(self, value: int, layout: Layout, node: fx.Node) -> None:
        layout = plain(layout, self.graph, value)
        self.held[value, layout] = node
        node.meta["fxpar"] = (self.graph.values[value], layout)

    def _value(self, value: int, layout: Layout, reader: Node | None = None) -> fx.Node:
        """``value`` in ``layout``, converted just before its first reader, along its tree."""
        layout = plain(layout, self.graph, value)
        if (value, layout) in self.held:
            return self.held[value, layout]
        src = self.sources[value, layout]
        node = self._value(value, src, reader)
        meta = self.graph.values[value]
        if meta.grad:  # its gradient must flow even if this reader is under no_grad: others may read it too
            self._enter(tuple(region for region, _ in self.regions if region[0] != "no_grad"))
        for step in self._steps(src, layout, meta):
            before, b = node, step[1]
            arguments = (before, *step[:2], meta.grad, *step[2:])
            node = self.out.create_node("call_function", convert, arguments, name=f"{node.name}_{_name(b)}")
            if reader is not None:
                node.meta["stack_trace"] = _stack_trace(reader)
        path = self.remade.get((value, layout), ())
        if path[-1:] == (layout,):
            node = self._marked(value, path, before, node)
        self._hold(value, layout, node)
        return node

    def _steps(self, src: Layout, dst: Layout, meta: Value) -> list[Step]:
        """Conversions between two layouts. What each moves is a rank's piece: states as they are there."""
        here, there = (self._written(item, meta) for item in (src, dst))
        places = zip(self.place.mesh.axes, self.place.coordinates, self.place.groups, here, there, strict=True)
        return [
            (a, b, axis, degree, rank, group)
            for ((axis, degree), rank, group, a, b), changed in zip(places, _changed(src, dst), strict=True)
            if changed
        ]

    def _written(self, layout: Layout, meta: Value) -> list[str]:
        degrees = self.place.mesh.degrees
        local = local_layout(layout, degrees)
        return [written(state, meta.shape, degree) for state, degree in zip(local, degrees, strict=True)]

    def _marked(self, value: int, path: Path, before: fx.Node, node: fx.Node) -> fx.Node:
        """``node``, the end of ``path``, marked: backward makes it again."""
        meta = self.graph.values[value]
        steps = tuple(step for src, dst in pairwise(path) for step in self._steps(src, dst, meta) if step[3] > 1)
        names = [f"{item.kind} {item.name!r}" for item in self.graph.inputs if item.value == value]
        names += [f"the result of {where_is(made)}" for made in self.graph.nodes if value in made.outputs]
        arguments: tuple[Any, ...] = (node, before, self.held[value, path[0]], steps, names[0])
        return self.out.create_node("call_function", mark, arguments, name=f"{node.name}_again")

    def _enter(self, wanted: tuple[Region, ...]) -> None:
        """Leave regions that are not wanted and enter those that are."""
        shared = 0
        while shared < min(len(wanted), len(self.regions)) and self.regions[shared][0] == wanted[shared]:
            shared += 1
        while len(self.regions) > shared:
            region, handle = self.regions.pop()
            leave = modes.leave_no_grad if region[0] == "no_grad" else modes.leave_autocast
            self.out.call_function(leave, (handle,))
        for region in wanted[shared:]:
            if region[0] == "no_grad":
                handle = self.out.call_function(modes.enter_no_grad)
            else:
                device_type, dtype, enabled = region[1:]
                handle = self.out.call_function(modes.enter_autocast, (device_type, getattr(torch, dtype), enabled))
            self.regions.append((region, handle))


def _changed(src: Layout, dst: Layout) -> list[bool]:
    return [a != b for a, b in zip(src, dst, strict=True)]


def _regions(node: Node) -> tuple[Region, ...]:
    """The modes a node needs, ``no_grad`` innermost, so that it can be left alone."""
    casts: tuple[Region, ...] = tuple(("autocast", *item) for item in node.autocast)
    return casts if node.grad_enabled else (*casts, ("no_grad",))


def _returns_one(op: str) -> bool:
    """Whether an operation returns a tensor and not a tuple or list of them."""
    target = resolve(op)
    if op.startswith("local."):
        return inspect.signature(target, eval_str=True).return_annotation is torch.Tensor
    returns = target._schema.returns  # type: ignore[attr-defined]
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _name(text: str) -> str:
    """A Python identifier like ``text``."""
    word = re.sub(r"\W+", "_", text).strip("_").lower() or "x"
    return f"_{word}" if word[0].isdigit() else word


def _stack_trace(node: Node) -> str:
    """The user's source line in the form that ``GraphModule.print_readable`` and tracebacks show."""
    file, _, line = node.source.rpartition(":")
    return f'  File "{file or "?"}", line {line or 0}, in {node.module or "forward"}\n    {node.op}'
