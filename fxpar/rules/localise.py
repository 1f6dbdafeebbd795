"""What each rank runs for a strategy: the operation with its arguments made local.

In: a node, a strategy from :func:`fxpar.rules.generate.strategies`, the degree and the rank. Out: :class:`Local`.
The tensors among the arguments stand in the same number and order as in the node: whoever runs it puts each
operand's local piece in its place. Conversions between states are not made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpar.errors import RuleError
from fxpar.graph import Graph, Node
from fxpar.layout import State
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


@dataclass(frozen=True, slots=True)
class Split:
    """What a localiser may look at: the node, and the factor that is cut, in how many parts and pieces."""

    graph: Graph
    node: Node
    rule: Rule
    strategy: Strategy
    factor: str
    parts: int
    degree: int
    rank: int

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of tensor output ``index``."""
        outputs = [value for value in self.node.outputs if value is not None]
        return local_sizes(self.graph.values[outputs[index]].shape, self.strategy.outputs[index], self.degree)


def local_sizes(shape: Sequence[int], state: State, degree: int) -> tuple[int, ...]:
    """A global shape as one rank sees it, on one axis."""
    return tuple(size // degree if state.kind == "S" and dim == state.dim else size for dim, size in enumerate(shape))


def localise(graph: Graph, node: Node, strategy: Strategy, degree: int, rank: int) -> Local:
    """The call that ``rank`` of an axis of ``degree`` makes to run ``node`` as ``strategy``.

    Raises :class:`RuleError` if the strategy is not one of the node's.
    """
    local = Local(node.op, node.args, node.kwargs)
    kind, _, detail = strategy.name.partition(":")
    localiser = LOCALISERS.get(node.op)
    if kind != "split" or localiser is None:
        return local
    rule = rule_for(graph, node)
    factor, _, parts = detail.partition("/")
    if rule is None or factor not in rule.factors:
        raise RuleError(f"{node.op} ({node.module} {node.source}) has no strategy {strategy.name!r}")
    return localiser(Split(graph, node, rule, strategy, factor, int(parts or 1), degree, rank), local)


def out_sizes(position: int, name: str, index: int = 0) -> Any:
    """A localiser for operations that take the shape of an output as argument ``position``."""

    def change(split: Split, local: Local) -> Local:
        return local.with_arg(position, name, split.out_shape(index))

    return change
