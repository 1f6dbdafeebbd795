"""Which values carry a gradient, in the end: dead code goes, and gradients stop at explicit detach nodes.

In: nodes and values as rewritten, ``Value.grad`` meaning "requires grad here". Out: a verified :class:`Graph`, its
values numbered in order, ``Value.grad`` meaning "requires grad, and an output that carries a gradient needs it".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxpar.graph import Graph, Input, Node, Ref, Value, map_refs, refs
from fxpar.normalise.call import PURE

DETACH = "aten.detach.default"


def live_nodes(graph: Graph) -> list[Node]:
    """The nodes of which an output or an update depends on some output, in order."""
    needed = {ref.value for ref in refs(graph.outputs)} | {value for _, value in graph.updates}
    live = []
    for node in reversed(graph.nodes):
        if needed.intersection(out for out in node.outputs if out is not None):
            needed.update(node.operands)
            live.append(node)
    return live[::-1]


def needing_gradient(graph: Graph, nodes: list[Node]) -> set[int]:
    """The values through which a gradient flows from the outputs."""
    values = graph.values
    found = {ref.value for ref in refs(graph.outputs) if values[ref.value].grad}
    for node in reversed(nodes):
        if node.op != DETACH and found.intersection(out for out in node.outputs if out is not None):
            found.update(operand for operand in node.operands if values[operand].grad)
    return found


class _Renumbered:
    """The final graph while it grows: old value numbers lead to new ones."""

    def __init__(self, values: tuple[Value, ...], flowing: set[int]) -> None:
        self.old, self.flowing = values, flowing
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.number: dict[int, int] = {}
        self.detached: dict[int, int] = {}

    def add(self, old: int) -> int:
        self.number[old] = len(self.values)
        old_value, grad = self.old[old], old in self.flowing
        self.values.append(old_value if old_value.grad == grad else replace(old_value, grad=grad))
        return self.number[old]

    def stop_gradient(self, old: int, reader: Node) -> int:
        """The detached form of a value that carries a gradient, made at its first reader."""
        if old not in self.detached:
            self.detached[old] = len(self.values)
            self.values.append(replace(self.old[old], grad=False))
            args, outputs = (Ref(self.number[old]),), (self.detached[old],)
            self.nodes.append(Node(DETACH, args, (), outputs, reader.module, reader.source))
        return self.detached[old]

    def append(self, node: Node) -> None:
        differentiated = any(out in self.flowing for out in node.outputs)

        def change(ref: Ref) -> Ref:
            stop = not differentiated and ref.value in self.flowing
            return Ref(self.stop_gradient(ref.value, node) if stop else self.number[ref.value])

        if node.op == DETACH:
            (operand,), (out,) = node.operands, node.outputs
            assert out is not None
            self.number[out] = self.number[operand]
            if operand in self.flowing:
                self.number[out] = self.stop_gradient(operand, node)
            return
        args = map_refs(node.args, change)
        kwargs = tuple((name, map_refs(arg, change)) for name, arg in node.kwargs)
        outputs = tuple(None if out is None else self.add(out) for out in node.outputs)
        # Detach nodes say where gradients stop; only an opaque callable can still see the mode.
        grad_enabled = node.grad_enabled or node.op.startswith(PURE)
        where = node.module, node.source, grad_enabled, node.autocast
        self.nodes.append(Node(node.op, args, kwargs, outputs, *where))


def finalise(graph: Graph) -> Graph:
    """Drop what no output needs, decide ``Value.grad``, insert the detach nodes, number the values anew.

    Parameters, buffers and constants that nothing reads any more are dropped; inputs stay, they are the signature.
    """
    nodes = live_nodes(graph)
    read = {operand for node in nodes for operand in node.operands}
    read |= {ref.value for ref in refs(graph.outputs)} | {value for _, value in graph.updates}
    new = _Renumbered(graph.values, needing_gradient(graph, nodes))
    inputs = [item for item in graph.inputs if item.kind == "input" or item.value in read]
    inputs = [Input(item.kind, item.name, new.add(item.value)) for item in inputs]
    for node in nodes:
        new.append(node)

    def out(ref: Ref) -> Ref:
        return Ref(new.number[ref.value])

    outputs: tuple[Any, ...] = map_refs(graph.outputs, out)
    updates = tuple((name, new.number[value]) for name, value in graph.updates)
    return Graph(graph.name, tuple(new.values), tuple(inputs), tuple(new.nodes), outputs, updates).verify()
