"""Conversion trees: the cheapest way to have one value in several states at once.

In: the seconds of single conversions between states. Out: :func:`conversion_tree` (one tree, to be run) and
:func:`tree_table` (the seconds of all trees a value may need, for the program). Both are exact and agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from fxpar import kernels
from fxpar.errors import LayoutError
from fxpar.layout import I, Layout, R


@dataclass(frozen=True, slots=True)
class Tree:
    """Conversions ``(from, to)``, parents first, and the sum of their seconds."""

    seconds: float
    arcs: tuple[tuple[Layout, Layout], ...]


def conversion_tree(
    src: Layout,
    targets: Iterable[Layout],
    arc_seconds: Callable[[Layout, Layout], float],
    *,
    states: Iterable[Layout] = (),
    grad: bool = True,
) -> Tree:
    """The cheapest tree of conversions from ``src`` that reaches every one of ``targets`` (Dreyfus and Wagner, 1971).

    It may pass through ``states``, or through the states that are ``I``, or with ``grad`` ``R``, on every axis. Among
    equally cheap trees it has the fewest conversions, and then the first states. Raises :class:`LayoutError` if there
    is none.

    >>> from fxpar.layout import S
    >>> conversion_tree((S(0),), [(R,), (S(0),)], lambda a, b: 1.0)
    Tree(seconds=1.0, arcs=(((S0,), (R,)),))
    """
    wanted = sorted(set(targets))
    through = product((I, R) if grad else (I,), repeat=len(src))
    nodes = sorted({src, *wanted, *states, *through})
    number = {state: index for index, state in enumerate(nodes)}
    arcs = np.array([[0.0 if a == b else arc_seconds(a, b) for b in nodes] for a in nodes])
    costs, pairs = _cheapest(arcs, number[src], [number[state] for state in wanted])
    if math.isinf(costs):
        raise LayoutError(f"no conversions lead from {src} to all of {', '.join(map(str, wanted))}")
    return Tree(costs, tuple((nodes[a], nodes[b]) for a, b in pairs))


def subset_costs(arcs: np.ndarray, most: int, targets: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """Seconds ``[S, 2^T]`` of the cheapest tree from each state to each set of ``targets`` (all states by default).

    Bit ``i`` of a set stands for ``targets[i]``. Sets of more than ``most`` states are left infinite.
    """
    return kernels.conversion_costs(arcs, most, range(len(arcs)) if targets is None else targets)


def tree_table(
    arcs: np.ndarray, roots: np.ndarray, targets: Sequence[np.ndarray], implementation: str | None = None
) -> np.ndarray:
    """Seconds ``T[r, c1, c2, ...]`` of the cheapest tree, for every choice of the producer and of each consumer.

    ``arcs`` is ``[S, S]``; the producer's choice ``r`` gives state ``roots[r]``; consumer ``i``'s choice ``c`` needs
    state ``targets[i][c]``, or all the states ``targets[i][c, :]`` if it reads the value several times.
    """
    costs, masks = set_costs(arcs, targets, implementation)
    union = np.zeros((), dtype=np.int64)
    for mask in masks:
        union = union[..., None] | mask
    return costs[np.asarray(roots).reshape((-1,) + (1,) * union.ndim), union[None]]


def set_costs(
    arcs: np.ndarray, targets: Sequence[np.ndarray], implementation: str | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Seconds ``[S, 2^T]`` over the ``T`` states that ``targets`` name at all, and each choice's set of states."""
    reads = [np.asarray(target).reshape(len(target), -1) for target in targets]
    wanted = np.unique(np.concatenate([read.ravel() for read in reads])) if reads else np.zeros(0, dtype=np.int64)
    masks = [np.bitwise_or.reduce(1 << np.searchsorted(wanted, read), axis=1) for read in reads]
    most = sum(read.shape[1] for read in reads)
    return kernels.conversion_costs(arcs, most, wanted, implementation), masks


def _cheapest(arcs: np.ndarray, src: int, targets: list[int]) -> tuple[float, list[tuple[int, int]]]:
    """The tree's seconds and its arcs; the same sums in the same order as :func:`fxpar.kernels.conversion_costs`."""
    dist, hops, first = _paths(arcs)
    costs = {1 << bit: dist[:, target] for bit, target in enumerate(targets)}
    sizes = {1 << bit: hops[:, target] for bit, target in enumerate(targets)}
    splits: dict[int, tuple[list[int], np.ndarray, np.ndarray]] = {}
    full = (1 << len(targets)) - 1
    for mask in range(1, full + 1):
        if mask in costs:
            continue
        halves = [half for half in range(1, mask) if half & mask == half and half < mask ^ half]
        merged, joined = np.array([costs[h] + costs[mask ^ h] for h in halves]), np.array(
            [sizes[h] + sizes[mask ^ h] for h in halves]
        )  # fmt: skip
        which = _least(merged, joined, 0)
        here = np.arange(len(arcs))
        merged, joined = merged[which, here], joined[which, here]
        grown, longer = dist + merged, hops + joined
        where = _least(grown, longer, 1)
        costs[mask], sizes[mask] = grown[here, where], longer[here, where]
        splits[mask] = halves, which, where

    found: set[tuple[int, int]] = set()

    def walk(node: int, end: int) -> None:
        while node != end:
            found.add((node, int(first[node, end])))
            node = int(first[node, end])

    def collect(mask: int, node: int) -> None:
        if mask not in splits:
            walk(node, targets[mask.bit_length() - 1])
            return
        halves, which, where = splits[mask]
        parting = int(where[node])
        walk(node, parting)
        half = halves[int(which[parting])]
        collect(half, parting)
        collect(mask ^ half, parting)

    if not targets:
        return 0.0, []
    seconds = float(costs[full][src])
    if not math.isinf(seconds):
        collect(full, src)
    return seconds, _arborescence(found, src, targets)


def _paths(arcs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cheapest paths between all pairs: seconds, number of arcs (the fewest), and the first node after the start."""
    dist = np.array(arcs)
    np.fill_diagonal(dist, 0.0)
    hops = 1.0 - np.eye(len(dist))
    first = np.tile(np.arange(len(dist)), (len(dist), 1))
    for k in range(len(dist)):
        other, longer = dist[:, k, None] + dist[None, k, :], hops[:, k, None] + hops[None, k, :]
        better = (other < dist) | ((other == dist) & (longer < hops))
        dist, hops = np.where(better, other, dist), np.where(better, longer, hops)
        first = np.where(better, first[:, k, None], first)
    return dist, hops, first


def _least(costs: np.ndarray, sizes: np.ndarray, axis: int) -> np.ndarray:
    """Where ``costs`` are least along ``axis``, and among those ``sizes``, and among those the first."""
    return np.where(costs == costs.min(axis=axis, keepdims=True), sizes, np.inf).argmin(axis=axis)


def _arborescence(arcs: set[tuple[int, int]], src: int, targets: list[int]) -> list[tuple[int, int]]:
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
