"""The readable form of :class:`fxpar.tree_kernels.Bounds`: the native one does the same sums in the same order.

In: costs, graphs, trees, tables. Out: a lower bound and what each choice adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

#: A graph by rows: where each node's arcs start, and of each arc the node it ends at and its cost.
Graph = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class _Part:
    """A table, or a tree on graph number ``graph``, and the costs it has taken over from each variable's choices."""

    variables: tuple[int, ...]
    graph: int = -1
    states: list[np.ndarray] = field(default_factory=list)
    values: np.ndarray = field(default_factory=lambda: np.zeros(0))
    shifts: list[np.ndarray] = field(default_factory=list)
    least: float = 0.0
    #: Counts the changes of shifts; for each leaf, up to which of them costs have been taken through it.
    version: int = 1
    seen: list[int] = field(default_factory=list)


class ReferenceBounds:
    """See :class:`fxpar.tree_kernels.Bounds`."""

    def __init__(self, costs: Sequence[np.ndarray]) -> None:
        self.own = [np.array(row, dtype=np.float64) for row in costs]
        self.alive = [row < np.inf for row in self.own]
        self.least = [float(row.min()) for row in self.own]
        self.over = [row.copy() for row in self.own]
        self.graphs: list[np.ndarray] = []
        self.parts: list[_Part] = []
        self.places: list[list[tuple[_Part, int]]] = [[] for _ in costs]
        self.arcs: list[tuple[np.ndarray, np.ndarray]] = []
        self.toward: list[_Part | None] = []
        self.hanging: list[int] = []  # the variables that have a part in `toward`, outermost first

    def add_graph(self, start: np.ndarray, ends: np.ndarray, costs: np.ndarray) -> int:
        self.arcs.append((start, ends))
        self.graphs.append(matrix((start, ends, costs)))
        return len(self.graphs) - 1

    def set_costs(self, graph: int, costs: np.ndarray) -> None:
        self.graphs[graph] = matrix((*self.arcs[graph], costs))
        for part in self.parts:
            if part.graph == graph:
                part.version += 1
                part.least = float(self._marginal(part, 0)[self.alive[part.variables[0]]].min())

    def add_tree(self, graph: int, variables: Sequence[int], states: Sequence[np.ndarray]) -> None:
        self._add(_Part(tuple(variables), graph, [np.asarray(row) for row in states]))

    def add_table(self, variables: Sequence[int], values: np.ndarray) -> None:
        self._add(_Part(tuple(variables), values=np.asarray(values), least=float(values.min())))

    def add_costs(self, variable: int, more: np.ndarray) -> None:
        self.own[variable] = self.own[variable] + more
        self.least[variable] = float(self.own[variable][self.alive[variable]].min())

    def sweep(self, limit: float, backwards: bool) -> float:
        if not self.toward:
            self._find_trees()
        order = range(len(self.own))
        for variable in reversed(order) if backwards else order:
            if not self._visit(variable, limit, backwards):
                return np.inf
        return self._total()

    def excess(self) -> list[np.ndarray]:
        for variable in reversed(self.hanging if self.toward else []):
            part = self.toward[variable]
            assert part is not None
            leaf = part.variables.index(variable)
            shift = part.shifts[1 - leaf]
            part.shifts[1 - leaf] = shift + self.over[part.variables[1 - leaf]]
            self.over[variable] = np.where(self.alive[variable], self._marginal(part, leaf), np.inf)
            part.shifts[1 - leaf] = shift
        return self.over

    def _add(self, part: _Part) -> None:
        self.toward = []
        part.seen = [0] * len(part.variables)
        part.shifts = [np.zeros(len(self.own[variable])) for variable in part.variables]
        for leaf, variable in enumerate(part.variables):
            self.places[variable].append((part, leaf))
        self.parts.append(part)

    def _find_trees(self) -> None:
        """Which variables hang on the rest by one part of two leaves: they give it all they have and get nothing back.

        What is left without them has all the cycles, and converges faster alone.
        """
        self.toward, self.hanging = [None] * len(self.own), []
        left = [len(places) for places in self.places]
        ends = [variable for variable, count in enumerate(left) if count == 1]
        gone: list[_Part] = []
        for variable in ends:
            for part, leaf in self.places[variable]:
                if len(part.variables) != 2 or any(part is other for other in gone):
                    continue
                gone.append(part)
                self.toward[variable] = part
                self.hanging.append(variable)
                other = part.variables[1 - leaf]
                left[other] -= 1
                if left[other] == 1:
                    ends.append(other)

    def _total(self) -> float:
        return sum([*self.least, *(part.least for part in self.parts)], 0.0)

    def _visit(self, variable: int, limit: float, backwards: bool) -> bool:
        before = after = 0
        on = []
        for part, leaf in self.places[variable]:
            if part is self.toward[variable]:
                on.append((part, leaf))
                continue
            if part.seen[leaf] != part.version:
                self._take(variable, part, leaf)
            if any(part is self.toward[other] for other in part.variables):
                continue
            earlier, later = (any(sign * (other - variable) > 0 for other in part.variables) for sign in (-1, 1))
            before, after = before + earlier, after + later
            if earlier if backwards else later:
                on.append((part, leaf))
        alive = self.alive[variable]
        least = float(self.own[variable][alive].min(initial=np.inf))
        self.least[variable] = least
        if least == np.inf:
            return False
        rest = self._total()
        over = np.where(alive, self.own[variable] - least, np.inf)
        many = int(alive.sum())
        self.alive[variable] = alive = alive & (rest + over <= limit)
        self.over[variable] = np.where(alive, over, np.inf)
        if not rest <= limit:
            return False
        fewer = int(alive.sum()) < many
        for part, leaf in self.places[variable]:
            same = part.seen[leaf] == part.version
            part.version += fewer
            part.seen[leaf] = part.version if same else part.seen[leaf]
        share = 1.0 / max(before, after, 1)
        given = np.where(alive, share * self.own[variable], 0.0)
        for part, leaf in on:
            part.version += 1
            part.shifts[leaf] = part.shifts[leaf] + given
            self.own[variable] = self.own[variable] - given
            part.least += share * least
            self.least[variable] -= share * least
        return True

    def _take(self, variable: int, part: _Part, leaf: int) -> None:
        """Move what a part costs at least with each choice to the variable's own costs."""
        marginal = self._marginal(part, leaf)
        alive = self.alive[variable] = self.alive[variable] & (marginal < np.inf)
        marginal = np.where(alive, marginal, 0.0)
        self.own[variable] = np.where(alive, self.own[variable] + marginal, np.inf)
        part.shifts[leaf] = part.shifts[leaf] - marginal
        part.least = 0.0
        part.version += 1
        part.seen[leaf] = part.version

    def _marginal(self, part: _Part, leaf: int) -> np.ndarray:
        """Of a table or tree with what it has taken over, the least cost with each choice of one leaf."""
        return self._table_marginal(part, leaf) if part.graph < 0 else self._tree_marginal(part, leaf)

    def _table_marginal(self, part: _Part, leaf: int) -> np.ndarray:
        total = part.values
        for axis, (variable, shift) in enumerate(zip(part.variables, part.shifts, strict=True)):
            shape = [1] * total.ndim
            shape[axis] = len(shift)
            total = total + np.where(self.alive[variable], shift, np.inf).reshape(shape)
        return np.min(total, axis=tuple(axis for axis in range(total.ndim) if axis != leaf))

    def _tree_marginal(self, part: _Part, leaf: int) -> np.ndarray:
        arcs = self.graphs[part.graph]
        others = [other for other in range(1, len(part.variables)) if other != leaf]
        sets = 1 << len(others)
        below: list[np.ndarray] = [np.zeros(len(arcs))]  # of each set of the other leaves, by node: a tree to it
        for whole in range(1, sets):
            if whole & (whole - 1) == 0:
                values = self._entry(part, others[whole.bit_length() - 1])
            else:
                halves = [half for half in range(1, whole) if half & whole == half and half > whole ^ half]
                values = np.min([below[half] + below[whole ^ half] for half in halves], axis=0)
            below.append(spread(arcs.T, values))
        values = below[-1]
        if leaf > 0:
            above: list[np.ndarray] = []  # likewise: a tree from the root to it and to the node
            for whole in range(sets):
                halves = [half for half in range(1, whole + 1) if half & whole == half]
                values = self._entry(part, 0)
                if halves:
                    values = np.min([above[whole ^ half] + below[half] for half in halves], axis=0)
                above.append(spread(arcs, values))
            values = above[-1]
        return values[part.states[leaf]] + part.shifts[leaf]

    def _entry(self, part: _Part, leaf: int) -> np.ndarray:
        """At each node, the least cost taken over from a choice of the leaf that is there."""
        values = np.full(len(self.graphs[part.graph]), np.inf)
        np.minimum.at(values, part.states[leaf], np.where(self.alive[part.variables[leaf]], part.shifts[leaf], np.inf))
        return values


def matrix(graph: Graph) -> np.ndarray:
    """Costs ``[from, to]`` of a graph, infinite where there is no arc."""
    start, ends, costs = graph
    result = np.full((len(start) - 1, len(start) - 1), np.inf)
    result[np.repeat(np.arange(len(start) - 1), np.diff(start)), ends] = costs
    return result


def spread(arcs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """At each node, the least of its value and any other's plus the costs of a path from there, summed so."""
    while True:
        lower = np.minimum(values, (values[:, None] + arcs).min(axis=0))
        if (lower == values).all():
            return lower
        values = lower
