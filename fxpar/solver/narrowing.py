"""Fewer choices, exactly: a lower bound of every choice, and an upper bound from the most promising few.

In: a :class:`~fxpar.solver.problem.CostTable`. Out: :class:`Narrowed`: what may still be better than the best found.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpar import kernels, tree_kernels
from fxpar.solver import elimination, reduce
from fxpar.solver.problem import CostTable

#: A choice is dropped only if every total that has it is above the best known by more than this part of it.
TOLERANCE = 1e-9

#: A tree with more leaves than this is bounded by its parts, each with a share of its seconds.
MAX_LEAVES = 5

#: Choices of each variable among which the first upper bounds are looked for.
FEW = 6

#: Sweeping is slow once a pair of sweeps raises the bound by less than this part of it.
SLOW = 3e-3

#: Pairs of sweeps, at most.
MAX_ROUNDS = 100

#: What remains is small enough to be eliminated: all tables together have at most so many entries.
SMALL = 200_000


@dataclass(frozen=True, eq=False)
class Narrowed:
    """What narrowing leaves: for each variable, the choices in ``keep``; a lower ``bound`` of all totals.

    ``choice`` is the best that was found, with its ``cost``; where ``keep`` is empty, nothing is better. Every total
    with a choice that was left out is at least ``cost``.
    """

    keep: list[np.ndarray]
    bound: float
    choice: tuple[int, ...] | None
    cost: float
    rounds: int


def narrow(problem: CostTable, time_limit_seconds: float = math.inf) -> Narrowed:
    """Sweep until few choices remain, or sweeping no longer helps."""
    start = time.perf_counter()
    order = program_order(problem)
    bounds, place = lower_bounds(problem, order), np.argsort(order)
    keep = [np.arange(count) for count in problem.counts]
    best: tuple[int, ...] | None = None
    cost, bound, due, tries = math.inf, -math.inf, 0, 0
    for number in range(MAX_ROUNDS):
        limit = cost * (1 + TOLERANCE)
        bounds.sweep(limit, False)
        higher = bounds.sweep(limit, True)
        if math.isinf(higher):  # nothing is better than the best
            return Narrowed([], cost, best, cost, number + 1)
        gain, bound = higher - bound, max(bound, higher)
        if bound >= cost * (1 - TOLERANCE):
            return Narrowed([], bound, best, cost, number + 1)
        by_place = bounds.excess()
        excess = [by_place[at] for at in place]
        before, keep = sum(map(len, keep)), [np.flatnonzero(np.isfinite(row)) for row in excess]
        if affordable(problem, keep):
            break
        slow = gain < (SLOW if best is None else 0.1 * (cost - bound) / bound) * bound
        if number >= due and slow:
            known = best or [None] * len(keep)
            few = [_few(*about) for about in zip(keep, excess, known, strict=True)]
            found, due, tries = eliminated(problem, few), number + 2, tries + 1
            if found is not None and found[1] < cost:
                best, cost = found
            elif gain < 1e-7 * bound and before == sum(map(len, keep)):
                break
        if time.perf_counter() - start > time_limit_seconds:
            break
    return Narrowed(keep, min(bound, cost), best, cost, number + 1)


def _few(keep: np.ndarray, excess: np.ndarray, best: int | None) -> np.ndarray:
    """The most promising choices, and the one that is part of the best total so far."""
    first = keep[np.argsort(excess[keep], kind="stable")[:FEW]]
    return np.unique(first if best is None else np.append(first, best))


def affordable(problem: CostTable, keep: Sequence[np.ndarray]) -> bool:
    """Whether what is left can be eliminated at once."""
    sizes = [len(row) for row in keep]
    scopes = [factor.variables for factor in problem.factors]
    order = elimination.elimination_order(sizes, scopes, SMALL)
    return order is not None and order.entries <= SMALL


def eliminated(problem: CostTable, keep: Sequence[np.ndarray]) -> tuple[tuple[int, ...], float] | None:
    """The best of the choices in ``keep``, and its cost; ``None`` if they do not fit together or are too many."""
    smaller = reduce.restrict(problem, keep)
    fit = elimination.tables_and_order(smaller)
    if fit is None:
        return None
    tables, order = fit
    index, total = kernels.eliminate(tables.sizes, tables.scopes, tables.tables, order.variables)
    if math.isinf(total):
        return None
    return tuple(int(row[at]) for row, at in zip(keep, index, strict=False)), total


def program_order(problem: CostTable) -> list[int]:
    """Variables, producers before consumers and otherwise by number; cycles are cut where they close first."""
    after: list[list[int]] = [[] for _ in problem.variables]
    read: set[int] = set()
    for factor in problem.factors:
        if factor.is_tree:
            after[factor.variables[0]] += factor.variables[1:]
            read.update(factor.variables[1:])
    starts = sorted(range(len(after)), key=lambda variable: (variable in read, variable), reverse=True)
    finished: dict[int, int] = {}  # by depth first search: an arc to one that is finished later closes a cycle
    for start in starts:
        todo = [(start, iter(after[start]))]
        seen = set() if start in finished else {start}
        while seen and todo:
            variable, rest = todo[-1]
            following = next((other for other in rest if other not in finished and other not in seen), None)
            if following is None:
                finished[variable] = len(finished)
                todo.pop()
            else:
                seen.add(following)
                todo.append((following, iter(after[following])))
    waiting = [0] * len(after)
    forward = [[other for other in row if finished[other] < finished[variable]] for variable, row in enumerate(after)]
    for row in forward:
        for other in row:
            waiting[other] += 1
    ready = [variable for variable, count in enumerate(waiting) if not count]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for other in forward[order[-1]]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    return order


def lower_bounds(problem: CostTable, order: Sequence[int], implementation: str | None = None) -> tree_kernels.Bounds:
    """The bounds of a problem, with its variables in ``order``; a consumer counts as often as it reads a value."""
    place = {variable: at for at, variable in enumerate(order)}
    found = tree_kernels.bounds([problem.variables[number].costs for number in order], implementation)
    graphs: dict[tuple[int, float], int] = {}
    for factor in problem.factors:
        if not factor.is_tree:
            found.add_table([place[number] for number in factor.variables], factor.values)
            continue
        leaves = [
            (number, np.ascontiguousarray(column))
            for number, states in zip(factor.variables[1:], factor.states[1:], strict=True)
            for column in states.reshape(len(states), -1).T
        ]
        parts = max(1, -(-len(leaves) // MAX_LEAVES))
        between, weight = factor.conversions, factor.weight / parts
        key = (id(between), weight)
        if key not in graphs:
            graphs[key] = found.add_graph(between.start, between.ends, weight * between.seconds)
        for part in range(parts):
            some = [(factor.variables[0], factor.states[0]), *leaves[part::parts]]
            found.add_tree(graphs[key], [place[number] for number, _ in some], [states for _, states in some])
    return found
