"""Where a dim goes: the batch, or the sequence, followed from where it enters through all operations.

In: a :class:`~fxpar.graph.Program`, and cuts of some of its values. Out: :class:`Followed`: the same cut of every value
that has it, and the factor of every operation that is split by it. Nothing is decided here; reports use it to say what
a state means, and hand-made layouts to say what to cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.graph import Graph, Node, Program, Ref
from fxpar.rules import rule_for
from fxpar.rules.generate import dim_hint_to_factor, factor_hint_to_dim

#: A dim, and the parts in which it is cut: (0, 4) is ``S0/4``.
Cut = tuple[int, int]

BATCH_DIM, SEQUENCE_DIM = 0, 1


@dataclass(frozen=True)
class Followed:
    """By ``(graph, value)`` the cut of the value, and by ``(graph, node number)`` the factor and parts of the node."""

    values: Mapping[tuple[str, int], Cut]
    nodes: Mapping[tuple[str, int], tuple[str, int]]


def follow(program: Program, seeds: Mapping[tuple[str, int], Cut]) -> Followed:
    """Follow cuts of values (``seeds``) forward; each ends where an operation needs the dim whole or joins it up."""
    walk = _Walk(program, dict(seeds))
    walk.graph("top", program.top)
    return Followed(walk.values, walk.nodes)


def batch(program: Program) -> Followed:
    """The batch: dim 0 of the first input that has dims, and of every input of the model that is as long."""
    return follow(program, {("top", value): (BATCH_DIM, 1) for value in _carriers(program)})


def sequence(program: Program) -> Followed:
    """The sequence: dim 1 of inputs ``[batch, sequence]`` and ``[batch, sequence, features]`` of the model, of what is
    looked up in tables, and of the first input of every block that is ``[batch, sequence, features]``.
    """
    top, dims = program.top, batch(program).values
    seeds: dict[tuple[str, int], Cut] = {}
    for value in _carriers(program):
        if len(top.values[value].shape) in (2, 3):
            seeds["top", value] = (SEQUENCE_DIM, 1)
    for node in top.nodes:
        if node.op.startswith("aten.embedding"):
            ids = node.operands[1]
            if len(top.values[ids].shape) == len((BATCH_DIM, SEQUENCE_DIM)) and ("top", ids) in dims:
                seeds["top", ids] = (SEQUENCE_DIM, 1)
    for name, graph in program.blocks.items():
        stream = stream_of(graph)
        if stream is not None and dims.get((name, stream)) == (BATCH_DIM, 1):
            seeds[name, stream] = (SEQUENCE_DIM, 1)
    return follow(program, seeds)


def dependent(program: Program) -> set[tuple[str, int]]:
    """The values, by graph, that anything in the batch has a part in, in whatever dim."""
    found = {("top", value) for value in _carriers(program)}

    def visit(name: str, graph: Graph) -> None:
        for node in graph.nodes:
            if not any((name, value) in found for value in node.operands):
                continue
            if not node.op.startswith("block:"):
                found.update((name, out) for out in node.outputs if out is not None)
                continue
            block = program.blocks[node.op.removeprefix("block:")]
            entries = [item.value for item in block.inputs if item.kind == "input"]
            found.update(
                (block.name, inner) for arg, inner in zip(node.args, entries, strict=True) if (name, arg.value) in found
            )
            visit(block.name, block)
            found.update(
                (name, out)
                for out, ref in zip(node.outputs, block.outputs, strict=True)
                if out is not None and isinstance(ref, Ref) and (block.name, ref.value) in found
            )

    visit("top", program.top)
    return found


def stream_of(block: Graph) -> int | None:
    """The value that a block reads, changes and hands on: its first input with three dims that carries a gradient."""
    return next(
        (
            item.value
            for item in block.inputs
            if item.kind == "input" and block.values[item.value].grad and len(block.values[item.value].shape) == 3
        ),
        None,
    )


def _carriers(program: Program) -> list[int]:
    """The inputs of the model that have the batch as dim 0."""
    given = [item.value for item in program.top.inputs if item.kind == "input"]
    shapes = {value: program.top.values[value].shape for value in given}
    length = next((shape[0] for shape in shapes.values() if shape), None)
    return [value for value, shape in shapes.items() if shape and shape[0] == length]


class _Walk:
    """Visits graphs in the order in which they run, each once."""

    def __init__(self, program: Program, values: dict[tuple[str, int], Cut]) -> None:
        self.program, self.values = program, values
        self.nodes: dict[tuple[str, int], tuple[str, int]] = {}
        self.seen: set[str] = set()

    def graph(self, name: str, graph: Graph) -> None:
        self.seen.add(name)
        for index, node in enumerate(graph.nodes):
            if node.op.startswith("block:"):
                self._call(name, node)
            else:
                self._node(name, graph, index, node)

    def _call(self, name: str, node: Node) -> None:
        block = node.op.removeprefix("block:")
        graph = self.program.blocks[block]
        entries = [item.value for item in graph.inputs if item.kind == "input"]
        for arg, inner in zip(node.args, entries, strict=True):
            self._copy((name, arg.value), (block, inner))
        if block not in self.seen:
            self.graph(block, graph)
        for out, ref in zip(node.outputs, graph.outputs, strict=True):
            if out is not None and isinstance(ref, Ref):
                self._copy((block, ref.value), (name, out))

    def _copy(self, src: tuple[str, int], dst: tuple[str, int]) -> None:
        if src in self.values:
            self.values.setdefault(dst, self.values[src])

    def _node(self, name: str, graph: Graph, index: int, node: Node) -> None:
        rule = rule_for(graph, node)
        cuts = [
            (at, self.values[name, value]) for at, value in enumerate(node.operands) if (name, value) in self.values
        ]
        if rule is None or not cuts:
            return
        hit = next((hit for at, cut in cuts if (hit := dim_hint_to_factor(rule, at, *cut)) is not None), None)
        if hit is None:
            return
        factor, parts = self.nodes[name, index] = hit
        tensors = [out for out in node.outputs if out is not None]
        for place in rule.places(factor):
            if not isinstance(place.where, int):
                cut = place.dim, factor_hint_to_dim(place, parts)
                self.values.setdefault((name, tensors[place.where[1]]), cut)
