"""Fewer choices, exactly: a lower bound of every choice, and an upper bound from the most promising few.

In: a :class:`~fxpar.solver.problem.CostTable`. Out: :class:`Narrowed`: what may still be better than the best found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpar import kernels
from fxpar.solver import elimination, reduce
from fxpar.solver.problem import CostTable
from fxpar.solver.sweeping import Sweeps

#: A choice is dropped only if every total that has it is above the best known by more than this part of it.
TOLERANCE = 1e-9

#: Choices of each variable among which the first upper bounds are looked for.
FEW = 6

#: Sweeping is slow once a pair of sweeps raises the bound by less than this part of it.
SLOW = 3e-3

#: Once a total is known: by less than this part of what lies between the two.
NEAR = 0.1

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
    sweeps = Sweeps(problem)
    keep = [np.arange(count) for count in problem.counts]
    best: tuple[int, ...] | None = None
    cost, due = math.inf, 0
    for number in range(MAX_ROUNDS):
        gain = sweeps.pair(cost * (1 + TOLERANCE))
        if sweeps.bound >= cost * (1 - TOLERANCE):  # nothing is better than the best
            return Narrowed([], cost, best, cost, number + 1)
        excess = sweeps.excess()
        before, keep = sum(map(len, keep)), [np.flatnonzero(np.isfinite(row)) for row in excess]
        if affordable(problem, keep):
            break
        slow = gain < (SLOW * sweeps.bound if best is None else NEAR * (cost - sweeps.bound))
        if number >= due and slow:
            found, due = eliminated(problem, promising(excess, best)), number + 2
            if found is not None and found[1] < cost:
                best, cost = found
            elif gain < 1e-7 * sweeps.bound and before == sum(map(len, keep)):
                break
        if time.perf_counter() - start > time_limit_seconds:
            break
    return Narrowed(keep, min(sweeps.bound, cost), best, cost, number + 1)


def promising(excess: Sequence[np.ndarray], best: Sequence[int] | None) -> list[np.ndarray]:
    """For each variable, the :data:`FEW` choices of least excess, and that of the best total so far."""
    few = []
    for number, row in enumerate(excess):
        keep = np.flatnonzero(np.isfinite(row))
        first = keep[np.argsort(row[keep], kind="stable")[:FEW]]
        few.append(np.unique(first if best is None else np.append(first, best[number])))
    return few


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
