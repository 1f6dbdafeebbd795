"""The table of rules: operation name -> rule line, or a function that writes one for a given node.

In: the modules of this package, which register here. Out: :func:`rule_for`. Nothing here knows any operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fxpar.graph import Graph, Node
from fxpar.rules.notation import Rule, Shape, bind

if TYPE_CHECKING:
    from fxpar.rules.localise import Local, Split

#: A rule line, or a line with the sizes of factors that no plain dim gives, or None: this use is computed whole.
Line = str | tuple[str, dict[str, int]] | None
RuleSource = str | Callable[[Graph, Node], Line]
Localiser = Callable[["Split", "Local"], "Local"]

RULES: dict[str, RuleSource] = {}
LOCALISERS: dict[str, Localiser] = {}


def register(op: str, rule: RuleSource, local: Localiser | None = None) -> None:
    """Register the rule of ``op``, and how its arguments change when it is split (``None``: not at all)."""
    RULES[op] = rule
    if local is not None:
        LOCALISERS[op] = local


def rule(
    *ops: str, local: Localiser | None = None
) -> Callable[[Callable[[Graph, Node], Line]], Callable[[Graph, Node], Line]]:
    """Decorate a function that writes the rule line of each of ``ops``."""

    def add(function: Callable[[Graph, Node], Line]) -> Callable[[Graph, Node], Line]:
        for op in ops:
            register(op, function, local)
        return function

    return add


def shapes(graph: Graph, node: Node) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """The shapes of a node's operands and of its tensor outputs."""
    values = graph.values
    return (
        tuple(values[value].shape for value in node.operands),
        tuple(values[value].shape for value in node.outputs if value is not None),
    )


def rule_for(graph: Graph, node: Node) -> Rule | None:
    """The rule of ``node``, or ``None`` if it is computed whole; raises :class:`RuleError` if the rule does not fit."""
    source = RULES.get(node.op)
    if source is None:
        return None
    line = source if isinstance(source, str) else source(graph, node)
    if line is None:
        return None
    text, sizes = (line, {}) if isinstance(line, str) else line
    inputs, outputs = shapes(graph, node)
    return bind(text, inputs, outputs, tuple(sizes.items()))
