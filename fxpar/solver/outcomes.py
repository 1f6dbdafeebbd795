"""What choices under a memory limit come to: seconds and bytes, with one tree of conversions for each value.

In: a :class:`~fxpar.solver.problem.CostTable` with bytes, a choice, prices of a byte or trees. Out: :class:`Outcome`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.cost.trees import Arcs, cheapest_tree
from fxpar.solver.problem import CostTable, Factor

#: The seconds of an outcome and what it holds in each row.
Point = tuple[float, np.ndarray]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one choice per variable, and one tree per tree factor, come to; ``trees`` has ``None`` for a table."""

    choice: tuple[int, ...]
    trees: tuple[tuple[tuple[int, int], ...] | None, ...]
    seconds: float
    bytes: np.ndarray

    def fits(self, limits: np.ndarray) -> bool:
        """Whether no row is above its limit."""
        return bool((self.bytes <= limits).all())


def at_prices(problem: CostTable, prices: np.ndarray) -> CostTable:
    """The problem without bytes in which a byte of each row costs so many seconds."""
    known: dict[int, Arcs] = {}
    factors = []
    for factor in problem.factors:
        if factor.is_tree and factor.conversions.bytes is not None:
            arcs = known.setdefault(id(factor.conversions), factor.conversions.priced(prices))
            factor = Factor(factor.variables, None, arcs, factor.states, factor.weight)
        factors.append(factor)
    variables = [
        item if item.bytes is None else replace(item, costs=item.costs + prices @ item.bytes, bytes=None)
        for item in problem.variables
    ]
    return CostTable(tuple(variables), tuple(factors))


def replace_costs(problem: CostTable, weights: np.ndarray) -> CostTable:
    """The problem whose costs are its bytes, each row times its weight; what is impossible stays so."""
    known: dict[int, Arcs] = {}

    def arcs(old: Arcs) -> Arcs:
        nothing = np.zeros(len(old.seconds))
        return Arcs(old.start, old.ends, nothing if old.bytes is None else weights @ old.bytes)

    factors = []
    for factor in problem.factors:
        if factor.is_tree:
            key = id(factor.conversions)
            if key not in known:
                known[key] = arcs(factor.conversions)
            factors.append(Factor(factor.variables, None, known[key], factor.states, factor.weight))
        else:
            factors.append(replace(factor, table=np.where(np.isinf(factor.values), np.inf, 0.0)))
    variables = [
        replace(
            item,
            costs=np.where(np.isinf(item.costs), np.inf, 0.0 if item.bytes is None else weights @ item.bytes),
            bytes=None,
        )
        for item in problem.variables
    ]
    return CostTable(tuple(variables), tuple(factors))


def outcome(problem: CostTable, choice: Sequence[int], prices: np.ndarray) -> Outcome:
    """Of the trees that are cheapest at ``prices``."""
    known: dict[int, Arcs] = {}
    trees: list[tuple[tuple[int, int], ...] | None] = []
    for factor in problem.factors:
        if not factor.is_tree:
            trees.append(None)
            continue
        arcs = known.setdefault(id(factor.conversions), factor.conversions.priced(prices))
        root, targets = factor.ends([choice[number] for number in factor.variables])
        trees.append(cheapest_tree(arcs, root, targets, range(len(arcs))).arcs)
    return measured(problem, choice, trees)


def measured(problem: CostTable, choice: Sequence[int], trees: Sequence[tuple[tuple[int, int], ...] | None]) -> Outcome:
    """Seconds and bytes of a choice with these trees."""
    seconds, held = 0.0, np.zeros(problem.rows)
    for variable, index in zip(problem.variables, choice, strict=True):
        seconds += float(variable.costs[index])
        if variable.bytes is not None:
            held += variable.bytes[:, index]
    for factor, tree in zip(problem.factors, trees, strict=True):
        if tree is None:
            seconds += factor.at([choice[number] for number in factor.variables])
            continue
        taken = factor.conversions.numbers(tree)
        seconds += factor.weight * float(factor.conversions.seconds[taken].sum())
        if factor.conversions.bytes is not None:
            held += factor.weight * factor.conversions.bytes[:, taken].sum(axis=1)
    return Outcome(tuple(int(index) for index in choice), tuple(trees), seconds, held)
