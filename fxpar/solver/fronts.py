"""Seconds against bytes: the trees worth having, and elimination with a front of points in every entry.

In: a problem with bytes, in which few choices are left. Out: choices with trees, none of which beats another in both.
Fronts that grow too long are thinned to the points that cost least at given prices of a byte, so this finds good
choices under a limit and does not prove that there are no better ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from fxpar import kernels, tree_kernels
from fxpar.cost.trees import Arcs, cheapest_tree
from fxpar.solver.problem import CostTable, Factor

#: Points that an entry keeps.
MAX_POINTS = 64

Tree = tuple[tuple[int, int], ...]
Option = tuple[Tree | None, float, np.ndarray]
Found = tuple[tuple[int, ...], tuple[Tree | None, ...]]


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
class Table:
    """The options of a factor: entry ``e`` (row-major over ``scope``) has ``starts[e]`` to ``starts[e + 1]``.

    ``costs[options, 1 + rows]`` has seconds and bytes.
    """

    scope: tuple[int, ...]
    starts: np.ndarray
    costs: np.ndarray
    trees: list[Tree | None]


def fronts(
    problem: CostTable,
    prices: np.ndarray,
    grid: np.ndarray,
    order: Sequence[int],
    implementation: str | None = None,
) -> list[Found]:
    """The choices and trees that are left when all variables have been eliminated in ``order``.

    Of points that fall into one cell of the ``grid`` (bytes, per row) only the fastest is kept.
    """
    known: dict[tuple[int, int, tuple[int, ...]], list[Option]] = {}
    tables = [_table(factor, problem, known) for factor in problem.factors]
    own = []
    for variable in problem.variables:
        held = np.zeros((problem.rows, len(variable.costs))) if variable.bytes is None else variable.bytes
        own.append(np.column_stack([variable.costs, held.T]))
    run = _native_fronts if kernels.which(implementation) == "native" else _numpy_fronts
    choices, picks = run(problem.counts, own, tables, order, prices, grid)
    return [
        (tuple(choice), tuple(table.trees[at] for table, at in zip(tables, pick, strict=True)))
        for choice, pick in zip(choices, picks, strict=True)
    ]


def _table(factor: Factor, problem: CostTable, known: dict[tuple[int, int, tuple[int, ...]], list[Option]]) -> Table:
    starts, options, weight = [0], [], 1.0
    for entry in product(*(range(problem.counts[number]) for number in factor.variables)):
        if factor.is_tree:
            weight = factor.weight
            key = (id(factor.conversions), *factor.ends(entry))
            if key not in known:
                known[key] = tree_options(factor.conversions, *key[1:])
            options += known[key]
        elif (seconds := factor.at(entry)) < math.inf:
            options.append((None, seconds, np.zeros(0)))
        starts.append(len(options))
    costs = np.zeros((len(options), 1 + problem.rows))
    for at, (_, seconds, held) in enumerate(options):
        costs[at, 0], costs[at, 1 : 1 + len(held)] = weight * seconds, weight * held
    return Table(factor.variables, np.array(starts), costs, [option[0] for option in options])


Picked = tuple[list[list[int]], list[list[int]]]


def _native_fronts(
    sizes: Sequence[int],
    own: Sequence[np.ndarray],
    tables: Sequence[Table],
    order: Sequence[int],
    prices: np.ndarray,
    grid: np.ndarray,
) -> Picked:
    scopes, starts = [list(table.scope) for table in tables], [table.starts for table in tables]
    costs = [table.costs for table in tables]
    found: Picked = kernels.native().fronts(
        list(sizes), own, scopes, starts, costs, list(order), prices, grid, MAX_POINTS
    )
    return found


@dataclass(frozen=True, eq=False)
class _Front:
    """Points, and of each what it takes: ``(variable, choice)`` and ``(-1 - table, option)``."""

    costs: np.ndarray
    made: list[tuple[tuple[int, int], ...]]


def _numpy_fronts(
    sizes: Sequence[int],
    own: Sequence[np.ndarray],
    tables: Sequence[Table],
    order: Sequence[int],
    prices: np.ndarray,
    grid: np.ndarray,
) -> Picked:
    live: list[tuple[tuple[int, ...], dict[tuple[int, ...], _Front]]] = []
    for number, table in enumerate(tables):
        entries = {}
        for at, entry in enumerate(product(*(range(sizes[variable]) for variable in table.scope))):
            some = range(int(table.starts[at]), int(table.starts[at + 1]))
            entries[entry] = _thin(
                _Front(table.costs[some], [((-1 - number, option),) for option in some]), prices, grid
            )
        live.append((table.scope, entries))
    whole = _Front(np.zeros((1, 1 + len(prices))), [()])
    for variable in order:
        parts = [part for part in live if variable in part[0]]
        live = [part for part in live if variable not in part[0]]
        scope = tuple(sorted({other for part, _ in parts for other in part} - {variable}))
        entries = {}
        for entry in product(*(range(sizes[other]) for other in scope)):
            chosen = dict(zip(scope, entry, strict=True))
            fronts = [_Front(np.zeros((0, 1 + len(prices))), [])]
            for choice in range(sizes[variable]):
                if own[variable][choice, 0] == np.inf:
                    continue
                chosen[variable] = choice
                front = _Front(own[variable][choice : choice + 1], [((variable, choice),)])
                for part, fronts_of in parts:
                    front = _both(front, fronts_of[tuple(chosen[other] for other in part)], prices, grid)
                fronts.append(front)
            made = [what for front in fronts for what in front.made]
            entries[entry] = _thin(_Front(np.concatenate([front.costs for front in fronts]), made), prices, grid)
        if scope:
            live.append((scope, entries))
        else:
            whole = _both(whole, entries[()], prices, grid)
    choices, picks = [], []
    for what in whole.made:
        taken = dict(what)
        choices.append([taken[variable] for variable in range(len(sizes))])
        picks.append([taken[-1 - number] for number in range(len(tables))])
    return choices, picks


def _both(left: _Front, right: _Front, prices: np.ndarray, grid: np.ndarray) -> _Front:
    costs = (left.costs[:, None] + right.costs[None]).reshape(-1, left.costs.shape[1])
    return _thin(_Front(costs, [one + other for one in left.made for other in right.made]), prices, grid)


def _thin(front: _Front, prices: np.ndarray, grid: np.ndarray) -> _Front:
    """Without points that others beat in everything; of the rest, those that are cheap at the prices."""
    order = np.lexsort(front.costs.T[::-1])
    costs = front.costs[order]
    cells = np.floor(costs[:, 1:] / grid)
    kept: list[int] = []  # no later point is faster; one that was dropped does not drop others
    for point in range(len(costs)):
        beaten = (costs[kept, 1:] <= costs[point, 1:]).all(axis=1) | (cells[kept] == cells[point]).all(axis=1)
        if not beaten.any():
            kept.append(point)
    good = np.array(kept, dtype=np.int64)
    if len(good) > MAX_POINTS:
        value = costs[good, 0]
        for row, price in enumerate(prices):
            value = value + costs[good, 1 + row] * price
        good = good[np.sort(np.argsort(value, kind="stable")[:MAX_POINTS])]
    return _Front(costs[good], [front.made[at] for at in order[good]])
