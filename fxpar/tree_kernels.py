"""Kernels on graphs of states, as readable Python and, when built, as ``fxpar._native``; equal to the last bit.

In: a graph by rows (``start``, ``ends``, ``costs``: the arcs out of ``node`` are ``start[node]`` to
``start[node + 1]``). Out: costs of cheapest trees, one such tree, and :class:`Bounds`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from fxpar import kernels
from fxpar.bounds_reference import Graph, ReferenceBounds, matrix, spread
from fxpar.errors import SolverError

#: A tree to more different nodes than this is refused: its cost takes the cheapest trees to all 2^n subsets.
MAX_TARGETS = 12


def tree_costs(
    graph: Graph, roots: Sequence[int], sets: Sequence[tuple[int, ...]], implementation: str | None = None
) -> np.ndarray:
    """Cost ``[roots, sets]`` of the cheapest tree from each root to all nodes of each set (Dreyfus and Wagner, 1971).

    Sets hold different nodes in ascending order. Paths are summed from their end. Raises :class:`SolverError` on a
    set of more than :data:`MAX_TARGETS`.
    """
    largest = max(map(len, sets), default=0)
    if largest > MAX_TARGETS:
        raise SolverError(f"a value is needed in {largest} different states at once; at most {MAX_TARGETS}")
    if kernels.which(implementation) == "native":
        return kernels.native().tree_costs(*graph, roots, sets)
    back = matrix(graph).T
    known: dict[tuple[int, ...], np.ndarray] = {(): np.zeros(len(back))}
    for whole in sets:
        for part in _parts(whole):
            if part in known:
                continue
            values = np.full(len(back), np.inf)
            if len(part) == 1:
                values[part[0]] = 0.0
            for left, right in _halves(part):
                values = np.minimum(values, known[left] + known[right])
            known[part] = spread(back, values)
    rows = np.array(roots, dtype=np.int64)
    columns = [known[whole][rows] for whole in sets]
    return np.stack(columns, axis=1) if columns else np.zeros((len(rows), 0))


def cheapest_tree(
    graph: Graph, root: int, targets: Sequence[int], implementation: str | None = None
) -> tuple[float, list[tuple[int, int]]]:
    """The cheapest tree from ``root`` to different ``targets``: its cost and arcs (infinite and none if there is none).

    Among equally cheap ones it has the fewest arcs, and then the first nodes. Arcs that two of its branches share are
    listed for both.
    """
    if len(targets) > MAX_TARGETS:
        raise SolverError(f"a value is needed in {len(targets)} different states at once; at most {MAX_TARGETS}")
    if kernels.which(implementation) == "native":
        return kernels.native().cheapest_tree(*graph, root, list(targets))
    if not targets:
        return 0.0, []
    start, ends, costs = (column.tolist() for column in _reversed(graph))
    count, everything = len(start) - 1, (1 << len(targets)) - 1
    #: Of a set and node: cost, number of arcs, the next node or -1, and the half that one of two trees reaches or 0.
    labels: list[list[tuple[float, int, int, int]]] = [[]]
    for whole in range(1, everything + 1):
        here = [(np.inf, 0, -1, 0)] * count
        if whole & (whole - 1) == 0:
            here[targets[whole.bit_length() - 1]] = (0.0, 0, -1, 0)
        for half in range(1, whole):
            if half & whole != half or half > whole ^ half:
                continue
            for node, (left, right) in enumerate(zip(labels[half], labels[whole ^ half], strict=True)):
                both = left[0] + right[0], left[1] + right[1]
                if both[0] < np.inf and both < here[node][:2]:
                    here[node] = (*both, -1, half)
        queue = [(*label[:2], node) for node, label in enumerate(here) if label[0] < np.inf]
        heapq.heapify(queue)
        while queue:
            cost, arcs, node = heapq.heappop(queue)
            if (cost, arcs) != here[node][:2]:
                continue
            for arc in range(start[node], start[node + 1]):
                longer, before = (cost + costs[arc], arcs + 1), ends[arc]
                if longer < here[before][:2]:
                    here[before] = (*longer, node, 0)
                    heapq.heappush(queue, (*longer, before))
                elif longer == here[before][:2] and here[before][2] > node:
                    here[before] = (*longer, node, 0)
        labels.append(here)
    found: list[tuple[int, int]] = []
    todo = [(everything, root)] if labels[everything][root][0] < np.inf else []
    while todo:
        whole, node = todo.pop()
        _, _, following, half = labels[whole][node]
        if half:
            todo += [(whole ^ half, node), (half, node)]
        elif following >= 0:
            found.append((node, following))
            todo.append((whole, following))
    return labels[everything][root][0], found


class Bounds(Protocol):
    """A lower bound of a sum of costs of choices, tables and trees, and of what each choice adds to it.

    Costs are moved between the three kinds so that the sum of their least costs grows: block coordinate ascent on the
    dual of the local polytope, as in sequential reweighted message passing (Kolmogorov, 2015).
    """

    def add_graph(self, start: np.ndarray, ends: np.ndarray, costs: np.ndarray) -> int:
        """A graph for trees; returns its number."""

    def set_costs(self, graph: int, costs: np.ndarray) -> None:
        """Other costs for the arcs of a graph; every tree on it keeps what it has taken over."""

    def add_tree(self, graph: int, variables: Sequence[int], states: Sequence[np.ndarray]) -> None:
        """A tree from the node of the first variable's choice to those of the others' choices."""

    def add_table(self, variables: Sequence[int], values: np.ndarray) -> None:
        """A cost for each combination of choices."""

    def add_costs(self, variable: int, more: np.ndarray) -> None:
        """Raise the costs of a variable's choices."""

    def sweep(self, limit: float, backwards: bool) -> float:
        """Visit every variable, in order or backwards, and return the bound.

        Choices with which no total up to ``limit`` is possible are dropped for good; the bound is infinite if nothing
        is left.
        """

    def excess(self) -> list[np.ndarray]:
        """Of each choice, about how far above the bound a total must be that has it; infinite if dropped."""


def bounds(costs: Sequence[np.ndarray], implementation: str | None = None) -> Bounds:
    """:class:`Bounds` over variables with these costs of their choices."""
    if kernels.which(implementation) == "native":
        made: Bounds = kernels.native().Bounds([row.tolist() for row in costs])
        return made
    return ReferenceBounds(costs)


def _reversed(graph: Graph) -> Graph:
    start, ends, costs = graph
    order = np.argsort(ends, kind="stable")
    counts = np.bincount(ends, minlength=len(start) - 1)
    starts = np.repeat(np.arange(len(start) - 1), np.diff(start))
    return np.concatenate([[0], np.cumsum(counts)]), starts[order], costs[order]


@lru_cache(maxsize=4096)
def _parts(whole: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The subsets of a set that are not empty, smaller ones first."""
    chosen = range(1, 1 << len(whole))
    parts = [tuple(item for bit, item in enumerate(whole) if part >> bit & 1) for part in chosen]
    return tuple(sorted(parts, key=len))


def _halves(whole: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to part a set in two; the first half has its first item."""
    rest = whole[1:]
    found = []
    for chosen in range((1 << len(rest)) - 1):
        left = tuple(item for bit, item in enumerate(rest) if chosen >> bit & 1)
        found.append(((whole[0], *left), tuple(item for item in rest if item not in left)))
    return found
