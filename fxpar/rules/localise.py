"""What each rank runs for a strategy: the operation with its arguments made local.

In: a node, a strategy per mesh axis (:func:`fxpar.rules.generate.strategies`), the degrees, a rank's coordinates.
Out: :class:`Local`. The tensors among its arguments stand in the same number and order as in the node: whoever runs it
puts each operand's local piece in its place. Conversions between states are not made here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from fxpar.errors import RuleError
from fxpar.graph import Graph, Node
from fxpar.layout import Layout, S, local_sizes, successive_layout
from fxpar.rules.notation import Rule
from fxpar.rules.registry import LOCALISERS, rule_for
from fxpar.rules.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Local:
    """A call: an aten overload (``"aten.mm.default"``) or ``"local.<name>"`` in :mod:`fxpar.runtime.local_ops`."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def with_arg(self, position: int, name: str, value: Any) -> Local:
        """The same call with another value of the argument at ``position``, also known as ``name``."""
        if position < len(self.args):
            return replace(self, args=(*self.args[:position], value, *self.args[position + 1 :]))
        return replace(self, kwargs=(*((key, arg) for key, arg in self.kwargs if key != name), (name, value)))


#: Successive cuts of one factor: (parts, degree, rank), each of what the ones before leave.
Cuts = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Split:
    """What a localiser may look at: the node, a factor that is cut, how, and the layouts of the node's outputs.

    ``cuts`` has an entry for each mesh axis that cuts the factor; ``degrees`` and ``coordinates`` are those of all
    axes.
    """

    graph: Graph
    node: Node
    rule: Rule
    factor: str
    cuts: Cuts
    outputs: tuple[Layout, ...]
    degrees: tuple[int, ...]
    coordinates: tuple[int, ...]

    @property
    def degree(self) -> int:
        """In how many pieces the factor is cut."""
        return math.prod(degree for _, degree, _ in self.cuts)

    @property
    def rank(self) -> int:
        """A number from 0 to ``degree - 1``, another one for every piece."""
        return reduce(lambda number, cut: number * cut[1] + cut[2], self.cuts, 0)

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of tensor output ``index``."""
        outputs = [value for value in self.node.outputs if value is not None]
        return local_sizes(self.graph.values[outputs[index]].shape, self.outputs[index], self.degrees, self.coordinates)


def localise(
    graph: Graph, node: Node, strategies: Sequence[Strategy], degrees: Sequence[int], coordinates: Sequence[int]
) -> Local:
    """The call that the rank at ``coordinates`` of a mesh makes to run ``node`` as one strategy per axis.

    Raises :class:`RuleError` if a strategy is not one of the node's.
    """
    local = Local(node.op, node.args, node.kwargs)
    localiser = LOCALISERS.get(node.op)
    found: dict[str, list[tuple[int, int]]] = {}  # factor -> (axis, parts)
    for axis, strategy in enumerate(strategies):
        kind, _, detail = strategy.name.partition(":")
        if kind == "split" and localiser is not None:
            factor, _, parts = detail.partition("/")
            found.setdefault(factor, []).append((axis, int(parts or 1)))
    if localiser is None or not found:
        return local
    rule = rule_for(graph, node)
    outputs = tuple(zip(*(strategy.outputs for strategy in strategies), strict=True))
    for factor, places in found.items():
        if rule is None or factor not in rule.factors:
            raise RuleError(
                f"{node.op} ({node.module} {node.source}) has no strategy {strategies[places[0][0]].name!r}"
            )
        axes = [axis for axis, _ in places]
        local_cuts = successive_layout(tuple(S(0, parts) for _, parts in places), [degrees[axis] for axis in axes])
        cuts = tuple((cut.parts, degrees[axis], coordinates[axis]) for axis, cut in zip(axes, local_cuts, strict=True))
        local = localiser(Split(graph, node, rule, factor, cuts, outputs, tuple(degrees), tuple(coordinates)), local)
    return local


def out_sizes(position: int, name: str, index: int = 0) -> Any:
    """A localiser for operations that take the shape of an output as argument ``position``."""

    def change(split: Split, local: Local) -> Local:
        return local.with_arg(position, name, split.out_shape(index))

    return change
