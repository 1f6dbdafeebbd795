"""Conversion trees: the cheapest way to have one value in several states at once.

In: the seconds of single conversions between states (:class:`Arcs`, or a matrix). Out: :func:`cheapest_tree` (one tree,
to be run) and :func:`tree_table` (the seconds of all trees a value may need). Both are exact and agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

import numpy as np

from fxpar import tree_kernels
from fxpar.errors import LayoutError, SolverError
from fxpar.layout import I, Layout, R

State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Arcs:
    """Single conversions between ``len(start) - 1`` states, by the state that they start from.

    Those out of ``state`` are the entries from ``start[state]`` to ``start[state + 1]`` of ``ends`` (states,
    ascending), ``seconds`` (not negative, finite) and ``bytes[rows, arcs]``: what taking the arc adds to each row of a
    memory limit (``None`` for nothing).

    >>> Arcs.of(np.array([[0.0, 1.0], [np.inf, 0.0]])).ends
    array([1], dtype=int32)
    """

    start: np.ndarray
    ends: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray | None = None

    @staticmethod
    def of(arcs: np.ndarray | Arcs) -> Arcs:
        """From a matrix ``[S, S]`` of seconds, infinite where there is no single conversion; the diagonal is free.

        Raises :class:`SolverError` on a matrix that is not square, negative or nan.
        """
        if isinstance(arcs, Arcs):
            return arcs
        arcs = np.asarray(arcs, dtype=np.float64)
        if arcs.ndim != 2 or arcs.shape[0] != arcs.shape[1] or not (arcs >= 0).all():
            raise SolverError(f"arc costs of shape {arcs.shape} must be square and nowhere negative or nan")
        there = np.isfinite(arcs)
        np.fill_diagonal(there, False)
        sources, ends = np.nonzero(there)
        start = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int32)
        return Arcs(start, ends.astype(np.int32), arcs[sources, ends])

    def __len__(self) -> int:
        """The number of states."""
        return len(self.start) - 1

    @property
    def sources(self) -> np.ndarray:
        """The state that each arc starts from."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.start))

    @property
    def graph(self) -> tree_kernels.Graph:
        """As :mod:`fxpar.tree_kernels` takes it."""
        return self.start, self.ends, self.seconds

    def numbers(self, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
        """Which arcs lead from state to state; each must be there."""
        found = [
            int(self.start[a] + np.searchsorted(self.ends[self.start[a] : self.start[a + 1]], b)) for a, b in pairs
        ]
        return np.array(found, dtype=np.int64)

    def priced(self, prices: Sequence[float] | np.ndarray) -> Arcs:
        """With the bytes of row ``i`` at ``prices[i]`` seconds each."""
        if self.bytes is None or not any(prices):
            return self
        return Arcs(self.start, self.ends, self.seconds + np.asarray(prices) @ self.bytes, self.bytes)


@dataclass(frozen=True, slots=True)
class Tree(Generic[State]):
    """Conversions ``(from, to)``, parents first, and the sum of their seconds."""

    seconds: float
    arcs: tuple[tuple[State, State], ...]


def cheapest_tree(
    arcs: np.ndarray | Arcs,
    src: int,
    targets: Iterable[int],
    states: Sequence[State],
    implementation: str | None = None,
) -> Tree[State]:
    """The cheapest tree from state ``src`` to all of ``targets``, by number (Dreyfus and Wagner, 1971).

    ``states`` are the names that it is written in. Among equally cheap trees it has the fewest conversions, and then
    the first states. Raises :class:`LayoutError` if there is none.

    >>> cheapest_tree(np.array([[0.0, 2.0, 9.0], [9.0, 0.0, 3.0], [9.0, 9.0, 0.0]]), 0, [1, 2], "abc")
    Tree(seconds=5.0, arcs=(('a', 'b'), ('b', 'c')))
    """
    wanted = sorted(set(targets))
    seconds, found = tree_kernels.cheapest_tree(Arcs.of(arcs).graph, src, wanted, implementation)
    if math.isinf(seconds):
        missing = ", ".join(str(states[target]) for target in wanted)
        raise LayoutError(f"no conversions lead from {states[src]} to all of {missing}")
    return Tree(seconds, tuple((states[a], states[b]) for a, b in _arborescence(set(found), src, wanted)))


def conversion_tree(
    src: Layout,
    targets: Iterable[Layout],
    arc_seconds: Callable[[Layout, Layout], float],
    *,
    states: Iterable[Layout] = (),
    grad: bool = True,
) -> Tree[Layout]:
    """:func:`cheapest_tree` with seconds from a function.

    It may pass through ``states``, or through the states that are ``I``, or with ``grad`` ``R``, on every axis.

    >>> from fxpar.layout import S
    >>> conversion_tree((S(0),), [(R,), (S(0),)], lambda a, b: 1.0)
    Tree(seconds=1.0, arcs=(((S0,), (R,)),))
    """
    wanted = set(targets)
    through = product((I, R) if grad else (I,), repeat=len(src))
    nodes = sorted({src, *wanted, *states, *through})
    number = {state: index for index, state in enumerate(nodes)}
    arcs = np.array([[0.0 if a == b else arc_seconds(a, b) for b in nodes] for a in nodes])
    return cheapest_tree(arcs, number[src], [number[state] for state in wanted], nodes)


def tree_table(
    arcs: np.ndarray | Arcs, roots: np.ndarray, targets: Sequence[np.ndarray], implementation: str | None = None
) -> np.ndarray:
    """Seconds ``T[r, c1, c2, ...]`` of the cheapest tree, for every choice of the producer and of each consumer.

    The producer's choice ``r`` gives state ``roots[r]``; consumer ``i``'s choice ``c`` needs state ``targets[i][c]``,
    or all the states ``targets[i][c, :]`` if it reads the value several times.
    """
    sets, places = union_sets(targets)
    made, root = np.unique(roots, return_inverse=True)
    costs = tree_kernels.tree_costs(Arcs.of(arcs).graph, made.tolist(), sets, implementation)
    return costs[root.reshape((-1,) + (1,) * places.ndim), places[None]]


def union_sets(targets: Sequence[np.ndarray]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The sets of states that choices ask for together, each once, and for each combination of choices which it is."""
    sets: list[tuple[int, ...]] = [()]
    places = np.zeros((), dtype=np.int64)
    for target in targets:
        own, choice = state_sets(target)
        number: dict[tuple[int, ...], int] = {}
        both = [
            [number.setdefault(tuple(sorted({*old, *new})), len(number)) for new in own] for old in sets
        ]  # [sets so far, sets of this consumer]
        places = np.array(both, dtype=np.int64).reshape(len(sets), len(own))[places[..., None], choice]
        sets = list(number)
    return sets, places


def state_sets(target: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Of one consumer: the different sets of states that its choices need, and for each choice which it is."""
    rows = np.asarray(target).reshape(len(target), -1)
    if rows.shape[1] == 1:  # much the most common, and much faster
        states, choice = np.unique(rows, return_inverse=True)
        return [(state,) for state in states.tolist()], choice.reshape(-1)
    rows = np.sort(rows, axis=1)
    different, choice = np.unique(rows, axis=0, return_inverse=True)
    return [tuple(sorted(set(row))) for row in different.tolist()], choice.reshape(-1)


def _arborescence(arcs: set[tuple[int, int]], src: int, targets: Iterable[int]) -> list[tuple[int, int]]:
    """Arcs in the order in which they are reached from ``src``; one per node, and none that leads to no target."""
    parent, queue = {src: src}, [src]
    for node in queue:
        for _, child in sorted(arc for arc in arcs if arc[0] == node):
            if child not in parent:
                parent[child] = node
                queue.append(child)
    useful = set(targets) & set(parent)
    for node in reversed(queue):
        if node in useful:
            useful.add(parent[node])
    return [(parent[node], node) for node in queue if node != src and node in useful]
