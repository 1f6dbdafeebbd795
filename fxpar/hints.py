"""Which dims of which values are worth cutting in parts (``S(d/k)``), spread through a program.

In: a :class:`~fxpar.graph.Program`. Out: :class:`Hints`. A rule gives birth to a hint where a factor stands inside a
dim behind others (one third of a fused ``[q|k|v]``); a strided cut of one place of a factor is one of all its places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxpar.graph import Graph, Node, Program, Ref
from fxpar.layout import S, divides
from fxpar.rules import rule_for
from fxpar.rules.generate import dim_hint_to_factor, factor_hint_to_dim, hint_links
from fxpar.rules.notation import Rule

#: More part counts than this for one dim are not tried: each makes every table around it larger.
MAX_PARTS_PER_DIM = 3

Place = tuple[str, int, int]  # graph, value, dim


@dataclass
class Hints:
    """Part counts by place, and by factor of a node."""

    places: dict[Place, list[int]] = field(default_factory=dict)
    nodes: dict[tuple[str, int], dict[str, set[int]]] = field(default_factory=dict)

    def parts(self, graph: str, value: int) -> tuple[tuple[int, int], ...]:
        """The ``(dim, parts)`` in which a value may be cut as well."""
        found = [(dim, parts) for (name, number, dim), all_ in self.places.items() if (name, number) == (graph, value)
                 for parts in all_]  # fmt: skip
        return tuple(sorted(found))

    def factors(self, graph: str, node: int) -> dict[str, set[int]]:
        """For each factor of a node's rule, the parts in which it may be cut as well."""
        return self.nodes.get((graph, node), {})


def propagate(program: Program, degrees: Sequence[int]) -> Hints:
    """Spread every hint that suits some axis as far as rules carry it, also into and out of folded blocks."""
    return _Spread(program, [degree for degree in degrees if degree > 1]).run()


class _Spread:
    def __init__(self, program: Program, degrees: Sequence[int]) -> None:
        self.program, self.degrees = program, degrees
        self.graphs = program.graphs()
        self.hints = Hints()
        self.todo: list[tuple[Place, int]] = []
        self.readers: dict[tuple[str, int], list[tuple[int, Rule, int | tuple[str, int]]]] = {}
        self.joined: dict[tuple[str, int], set[tuple[str, int]]] = {}

    def run(self) -> Hints:
        for name, graph in self.graphs.items():
            for index, node in enumerate(graph.nodes):
                if node.op.startswith("block:"):
                    self._join(name, node)
                else:
                    self._node(name, graph, index, node)
        while self.todo:
            (name, value, dim), parts = self.todo.pop()
            for other, number in sorted(self.joined.get((name, value), ())):
                self._add((other, number, dim), parts)
            for index, rule, where in self.readers.get((name, value), ()):
                self._through(name, index, rule, where, dim, parts)
        return self.hints

    def _node(self, name: str, graph: Graph, index: int, node: Node) -> None:
        rule = rule_for(graph, node)
        if rule is None:
            return
        tensors = [out for out in node.outputs if out is not None]
        for position, value in enumerate(node.operands):
            self.readers.setdefault((name, value), []).append((index, rule, position))
        for position, value in enumerate(tensors):
            self.readers.setdefault((name, value), []).append((index, rule, ("out", position)))
        for link in hint_links(graph, node):
            for place in link.places:
                if place.leading > 1 and any(link.size % degree == 0 for degree in self.degrees):
                    self._add((name, self._value(node, place.where), place.dim), place.leading)

    def _join(self, name: str, node: Node) -> None:
        block = self.program.blocks[node.op.removeprefix("block:")]
        inside = [item.value for item in block.inputs if item.kind == "input"]
        pairs = [(ref.value, value) for ref, value in zip(node.args, inside, strict=True)]
        pairs += [(out, ref.value) for out, ref in zip(node.outputs, block.outputs, strict=True)
                  if out is not None and isinstance(ref, Ref)]  # fmt: skip
        for outer, inner in pairs:
            self.joined.setdefault((name, outer), set()).add((block.name, inner))
            self.joined.setdefault((block.name, inner), set()).add((name, outer))

    def _value(self, node: Node, where: int | tuple[str, int]) -> int:
        if isinstance(where, int):
            return node.operands[where]
        return [out for out in node.outputs if out is not None][where[1]]

    def _through(self, graph: str, index: int, rule: Rule, where: int | tuple[str, int], dim: int, parts: int) -> None:
        hit = dim_hint_to_factor(rule, where, dim, parts)
        if hit is None:
            return
        factor, own = hit
        if own > 1:
            self.hints.nodes.setdefault((graph, index), {}).setdefault(factor, set()).add(own)
        for place in rule.places(factor):
            value = self._value(self.graphs[graph].nodes[index], place.where)
            self._add((graph, value, place.dim), factor_hint_to_dim(place, own))

    def _add(self, place: Place, parts: int) -> None:
        graph, value, dim = place
        known = self.hints.places.setdefault(place, [])
        if parts <= 1 or parts in known or len(known) >= MAX_PARTS_PER_DIM:
            return
        shape = self.graphs[graph].values[value].shape
        if any(divides(shape, S(dim, parts), degree) for degree in self.degrees):
            known.append(parts)
            self.todo.append((place, parts))
