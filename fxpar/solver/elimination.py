"""Exact variable elimination: an order, the optimum, and the best total with each choice of each variable.

In: a :class:`~fxpar.solver.problem.CostTable`. Out: choices or totals, or ``None`` where the tables would not fit.
The arithmetic itself is :func:`fxpar.kernels.eliminate`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from fxpar import kernels, tree_kernels
from fxpar.cost.trees import state_sets
from fxpar.solver.problem import CostTable, Factor

#: The largest table that elimination may build, in entries of 8 bytes.
MAX_ENTRIES = 2_000_000

#: A tree over more choices than this is chained through sets of states at once, not only when nothing else fits.
MAX_TREE_ENTRIES = 20_000


#: Entries of all the tables that it takes, roughly, at most, to be eliminated as they are.
MAX_LOOK = 300_000

Part = tuple[tuple[int, ...], np.ndarray]


@dataclass(frozen=True, eq=False)
class Tables:
    """A problem as plain tables. Variables after the problem's own are auxiliary (sets of states)."""

    sizes: list[int]
    scopes: list[tuple[int, ...]]
    tables: list[np.ndarray]


@dataclass(frozen=True)
class Order:
    """An order of elimination, the entries of the largest table that it makes, and of all of them."""

    variables: list[int]
    largest: int
    entries: int


#: Of problems that are still in use: a solution and its runners-up are found with the same tables.
_FOUND: WeakKeyDictionary[CostTable, tuple[Tables, Order] | None] = WeakKeyDictionary()


def looks_small(problem: CostTable) -> bool:
    """Whether it is worth trying to write all costs as tables: not when variables have dozens of choices."""
    widest = [sorted(problem.counts[variable] for variable in factor.variables)[-3:] for factor in problem.factors]
    return sum(map(math.prod, widest)) <= MAX_LOOK


def tables_and_order(problem: CostTable) -> tuple[Tables, Order] | None:
    """Plain tables and the better of two orders that eliminate them within :data:`MAX_ENTRIES`, or ``None``."""
    if problem not in _FOUND:
        _FOUND[problem] = _tables_and_order(problem)
    return _FOUND[problem]


def _tables_and_order(problem: CostTable) -> tuple[Tables, Order] | None:
    for limit in (MAX_TREE_ENTRIES, 0):
        tables = flatten(problem, limit, MAX_ENTRIES)
        if tables is None:
            continue
        orders = [elimination_order(tables.sizes, tables.scopes, MAX_ENTRIES, fill=fill) for fill in (False, True)]
        found = [order for order in orders if order is not None]
        if found:
            return tables, min(found, key=lambda order: order.entries)
    return None


def flatten(problem: CostTable, tree_entries: int, max_entries: int) -> Tables | None:
    """Every cost as a plain table; trees with more than ``tree_entries`` are chained. ``None`` if one cannot fit."""
    flat = Tables(list(problem.counts), [], [])
    for number, variable in enumerate(problem.variables):
        flat.scopes.append((number,))
        flat.tables.append(variable.costs)
    for factor in problem.factors:
        entries = math.prod(flat.sizes[variable] for variable in factor.variables)
        if factor.is_tree and len(factor.variables) > 3 and entries > tree_entries:
            if not _chain(factor, flat, max_entries):
                return None
        elif entries > max_entries:
            return None
        else:
            flat.scopes.append(factor.variables)
            flat.tables.append(factor.values)
    return flat


def _chain(factor: Factor, flat: Tables, max_entries: int) -> bool:
    """Add a tree as small tables, by an auxiliary variable for the set of states needed up to each consumer."""
    order = sorted(range(1, len(factor.variables)), key=lambda axis: factor.variables[axis])
    before = factor.variables[order[0]]
    sets, reached = state_sets(factor.states[order[0]])  # choice `c` of the variable `before` needs sets[reached[c]]
    for axis in order[1:]:
        more, choice = state_sets(factor.states[axis])
        number: dict[tuple[int, ...], int] = {}
        both = [[number.setdefault(tuple(sorted({*old, *new})), len(number)) for new in more] for old in sets]
        union = np.array(both)[reached[:, None], choice[None, :]]
        sets = list(number)
        if axis == order[-1]:
            break
        if union.size * len(sets) > max_entries:
            return False
        flat.sizes.append(len(sets))
        flat.scopes.append((before, factor.variables[axis], len(flat.sizes) - 1))
        flat.tables.append(np.where(union[..., None] == np.arange(len(sets)), 0.0, np.inf))
        before, reached = len(flat.sizes) - 1, np.arange(len(sets))
    if len(factor.states[0]) * union.size > max_entries:
        return False
    made, root = np.unique(factor.states[0], return_inverse=True)
    costs = factor.weight * tree_kernels.tree_costs(factor.conversions.graph, made.tolist(), sets)
    flat.scopes.append((factor.variables[0], before, factor.variables[order[-1]]))
    flat.tables.append(costs[root[:, None, None], union])
    return True


def elimination_order(
    sizes: Sequence[int], scopes: Sequence[Sequence[int]], max_entries: int, *, fill: bool = False
) -> Order | None:
    """Always the variable whose table is smallest, or with ``fill`` that joins the fewest strangers; ties by number.

    ``None`` if some table would have more than ``max_entries``.
    """
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable, around in enumerate(near):
        around.discard(variable)

    def entries(variable: int) -> int:
        return math.prod([sizes[other] for other in near[variable]]) * sizes[variable]

    def rank(variable: int) -> tuple[int, int]:
        if not fill:
            return entries(variable), variable
        return sum(len(near[variable] - near[other]) - 1 for other in near[variable]), variable

    queue = [rank(variable) for variable in range(len(sizes))]
    current = dict(zip(range(len(sizes)), queue, strict=True))
    heapq.heapify(queue)
    order, largest, total = [], 1, 0
    while queue:
        key = heapq.heappop(queue)
        variable = key[1]
        if current.get(variable) != key:
            continue
        del current[variable]
        size = entries(variable)
        largest, total = max(largest, size), total + size
        if largest > max_entries:
            return None
        order.append(variable)
        around = near[variable]
        for other in around:
            near[other] |= around
            near[other] -= {variable, other}
        # With fill, the neighbours' neighbours may have fewer strangers now, too.
        touched = around if not fill else around.union(*(near[other] for other in around))
        for other in touched:
            key = rank(other)
            if current[other] != key:
                current[other] = key
                heapq.heappush(queue, key)
    return Order(order, largest, total)


def marginals(tables: Tables, order: Order, count: int) -> list[np.ndarray]:
    """For each of the first ``count`` variables, the least total with each of its choices.

    Up the tree of eliminations as usual, then down again, with what the rest of the problem asks of each table.
    """
    position = {variable: at for at, variable in enumerate(order.variables)}
    own: list[list[Part]] = [[] for _ in order.variables]
    loose = 0.0
    for scope, table in zip(tables.scopes, tables.tables, strict=True):
        if scope:
            own[min(position[variable] for variable in scope)].append((scope, table))
        else:
            loose += float(table)
    scopes: list[tuple[int, ...]] = []
    children: list[list[int]] = [[] for _ in order.variables]
    up: list[Part] = []
    roots: dict[int, float] = {}  # one for each part of the problem that hangs together, with its least total
    for at, variable in enumerate(order.variables):
        parts = own[at] + [up[child] for child in children[at]]
        rest = tuple(sorted({other for part, _ in parts for other in part} - {variable}))
        scopes.append((*rest, variable))
        up.append((rest, _join(scopes[at], parts, tables.sizes).min(axis=-1)))
        if rest:
            children[min(position[other] for other in rest)].append(at)
        else:
            roots[at] = float(up[at][1])
    down: dict[int, Part] = {
        at: ((), np.array(loose + sum(cost for root, cost in roots.items() if root != at))) for at in roots
    }
    result: list[np.ndarray] = [np.zeros(0)] * count
    for at in reversed(range(len(order.variables))):
        scope, variable = scopes[at], order.variables[at]
        for child in children[at]:
            parts = [*own[at], down[at], *(up[other] for other in children[at] if other != child)]
            kept = tuple(other for other in scope if other in up[child][0])
            away = tuple(axis for axis, other in enumerate(scope) if other not in kept)
            down[child] = kept, _join(scope, parts, tables.sizes).min(axis=away)
        if variable < count:
            parts = [*own[at], down[at], *(up[child] for child in children[at])]
            result[variable] = _join(scope, parts, tables.sizes).min(axis=tuple(range(len(scope) - 1)))
    return result


def _join(scope: tuple[int, ...], parts: Sequence[Part], sizes: Sequence[int]) -> np.ndarray:
    """Like :func:`fxpar.kernels.join`, but over all of ``scope`` even if no table has some of it."""
    shape = tuple(sizes[variable] for variable in scope)
    return np.broadcast_to(kernels.join(scope, parts), shape) if parts else np.zeros(shape)
