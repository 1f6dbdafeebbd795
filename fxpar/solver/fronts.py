"""Seconds against bytes: elimination with a front of points in every entry instead of the least cost.

In: a problem with bytes, in which few choices are left. Out: choices with trees, none of which beats another in both.
Fronts that grow too long are thinned to the points that cost least at given prices of a byte, so this finds good
choices under a limit and does not prove that there are no better ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from fxpar import tree_kernels
from fxpar.cost.trees import Arcs, cheapest_tree
from fxpar.solver import elimination
from fxpar.solver.problem import CostTable, Factor

#: Points that an entry keeps.
MAX_POINTS = 24

#: Entries of all tables together, at most.
MAX_ENTRIES = 600

Tree = tuple[tuple[int, int], ...]
Option = tuple[Tree, float, np.ndarray]


def tree_options(arcs: Arcs, root: int, targets: Sequence[int]) -> list[Option]:
    """Every tree that no other beats in seconds and in all rows of bytes: the tree, seconds, bytes.

    The cheapest tree, and for each of its arcs that carry bytes the same without that arc, and so on: whatever set of
    arcs with bytes a tree may use, one of these is as cheap and uses no other.
    """
    held = np.zeros((0, len(arcs.ends))) if arcs.bytes is None else arcs.bytes
    heavy: np.ndarray = np.any(held > 0, axis=0)
    found: list[Option] = []
    todo: list[frozenset[int]] = [frozenset()]
    for without in todo:
        seconds = arcs.seconds.copy()
        seconds[list(without)] = np.inf
        graph = arcs.start, arcs.ends, seconds
        if math.isinf(tree_kernels.tree_costs(graph, [root], [tuple(targets)])[0, 0]):
            continue
        tree = cheapest_tree(Arcs(*graph), root, targets, range(len(arcs))).arcs
        taken = arcs.numbers(tree)
        found.append((tree, float(arcs.seconds[taken].sum()), held[:, taken].sum(axis=1)))
        more = [without | {int(arc)} for arc in taken if heavy[arc]]
        todo += [fewer for fewer in more if fewer not in todo]
    kept: list[Option] = []
    for option in sorted(found, key=lambda option: (option[1], *option[2])):
        if not any((other[2] <= option[2]).all() for other in kept):
            kept.append(option)
    return kept


@dataclass(frozen=True, eq=False)
class Points:
    """Some ways to make a part of all decisions: ``costs[points, 1 + rows]`` (seconds, bytes), and what they are."""

    costs: np.ndarray
    made: np.ndarray  # numbers in Fronts.made


@dataclass
class Fronts:
    """One elimination. ``made`` says what a point is: two other points, or a variable's choice, or a factor's tree."""

    problem: CostTable
    prices: np.ndarray
    made: list[tuple[int, ...] | tuple[int, int, Tree]] = field(default_factory=list)
    options: dict[tuple[int, int, tuple[int, ...]], list[Option]] = field(default_factory=dict)

    def run(self) -> list[tuple[tuple[int, ...], tuple[Tree | None, ...]]] | None:
        """Choices and trees of the points at the end; ``None`` if tables would have more than :data:`MAX_ENTRIES`."""
        sizes, scopes = self.problem.counts, [factor.variables for factor in self.problem.factors]
        order = elimination.elimination_order(sizes, scopes, MAX_ENTRIES)
        if order is None or order.entries > MAX_ENTRIES:
            return None
        live: dict[int, tuple[tuple[int, ...], dict[tuple[int, ...], Points]]] = {}
        for number, factor in enumerate(self.problem.factors):
            live[number] = factor.variables, self._factor(number, factor)
        whole = Points(np.zeros((1, 1 + self.problem.rows)), np.array([self._new((-1, 0))]))
        for variable in order.variables:
            mine = [number for number, (scope, _) in live.items() if variable in scope]
            parts = [live.pop(number) for number in mine]
            scope = tuple(sorted({other for part, _ in parts for other in part} - {variable}))
            table = {}
            for entry in product(*(range(sizes[other]) for other in scope)):
                points = self._least(variable, dict(zip(scope, entry, strict=True)), parts)
                if points is not None:
                    table[entry] = points
            if scope:
                live[len(self.problem.factors) + variable] = scope, table
            elif table:
                whole = self._both(whole, table[()])
            else:
                return []
        return [self._unfold(int(number)) for number in whole.made]

    def _new(self, what: tuple[int, ...] | tuple[int, int, Tree]) -> int:
        self.made.append(what)
        return len(self.made) - 1

    def _factor(self, number: int, factor: Factor) -> dict[tuple[int, ...], Points]:
        table = {}
        for entry in product(*(range(self.problem.counts[variable]) for variable in factor.variables)):
            if not factor.is_tree:
                seconds = factor.at(entry)
                options: list[Option] = [((), seconds, np.zeros(self.problem.rows))] if seconds < math.inf else []
            else:
                key = (id(factor.conversions), *factor.ends(entry))
                if key not in self.options:
                    self.options[key] = tree_options(factor.conversions, *key[1:])
                options = self.options[key]
            if options:
                costs = np.zeros((len(options), 1 + self.problem.rows))
                for at, (_, seconds, held) in enumerate(options):
                    costs[at, 0], costs[at, 1 : 1 + len(held)] = seconds, held
                made = [self._new((-2, number, option[0])) for option in options]
                table[entry] = self._thin(Points(costs * (factor.weight if factor.is_tree else 1.0), np.array(made)))
        return table

    def _least(
        self,
        variable: int,
        entry: dict[int, int],
        parts: Sequence[tuple[tuple[int, ...], dict[tuple[int, ...], Points]]],
    ) -> Points | None:
        """The front over all choices of a variable, with the others as ``entry`` says."""
        item = self.problem.variables[variable]
        fronts = []
        for choice, seconds in enumerate(item.costs):
            held = np.zeros(self.problem.rows) if item.bytes is None else item.bytes[:, choice]
            whole: Points | None = Points(np.array([[seconds, *held]]), np.array([self._new((-1, variable, choice))]))
            for scope, table in parts:
                part = table.get(tuple(choice if other == variable else entry[other] for other in scope))
                whole = None if part is None or whole is None else self._both(whole, part)
            if whole is not None and seconds < math.inf:
                fronts.append(whole)
        if not fronts:
            return None
        return self._thin(Points(*(np.concatenate(column) for column in zip(*((f.costs, f.made) for f in fronts),
                                                                             strict=True))))  # fmt: skip

    def _both(self, left: Points, right: Points) -> Points:
        costs = (left.costs[:, None] + right.costs[None]).reshape(-1, left.costs.shape[1])
        pairs = np.arange(len(costs))
        kept = self._thin(Points(costs, pairs))
        made = [
            self._new((int(left.made[pair // len(right.made)]), int(right.made[pair % len(right.made)])))
            for pair in kept.made.tolist()
        ]
        return Points(kept.costs, np.array(made))

    def _thin(self, points: Points) -> Points:
        """Without points that others beat in everything; of the rest, those that cost least at the prices."""
        if len(points.costs) == 1:
            return points
        order = np.lexsort(points.costs.T[::-1])
        costs = points.costs[order]
        if costs.shape[1] == 2:
            lowest = np.minimum.accumulate(costs[:, 1])
            good = np.concatenate([[True], costs[1:, 1] < lowest[:-1]])
        else:
            beats = (costs[:, None, :] <= costs[None, :, :]).all(axis=2)
            good = np.logical_not(np.triu(beats, 1).any(axis=0))
        order, costs = order[good], costs[good]
        if len(order) > MAX_POINTS:
            best = np.sort(np.argsort(costs[:, 0] + costs[:, 1:] @ self.prices, kind="stable")[:MAX_POINTS])
            order, costs = order[best], costs[best]
        return Points(costs, points.made[order])

    def _unfold(self, number: int) -> tuple[tuple[int, ...], tuple[Tree | None, ...]]:
        choice = [0] * len(self.problem.variables)
        trees: list[Tree | None] = [None] * len(self.problem.factors)
        todo = [number]
        while todo:
            what = self.made[todo.pop()]
            if what[0] == -1 and len(what) == 3:
                choice[what[1]] = what[2]  # type: ignore[assignment]
            elif what[0] == -2:
                trees[what[1]] = what[2] if self.problem.factors[what[1]].is_tree else None  # type: ignore[assignment]
            elif what[0] >= 0:
                todo += what  # type: ignore[arg-type]
        return tuple(choice), tuple(trees)
