"""The integer program under a memory limit: for every tree, its ways to trade seconds for bytes are columns.

In: a problem with bytes, in which few choices are left. Out: choices with trees, and a proven bound. It is the program
of :mod:`fxpar.solver.milp`, whose trees are tables here, with a row per limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pulp

from fxpar.cost.trees import state_sets
from fxpar.solver import milp
from fxpar.solver.fronts import Option, Tree, tree_options
from fxpar.solver.problem import CostTable, Factor

#: The most columns for trees: with more the program takes longer than anyone would wait.
MAX_COLUMNS = 6_000


class Ends:
    """The different states and sets of states of a tree factor's choices, and of each combination its options."""

    def __init__(self, factor: Factor) -> None:
        self.factor = factor
        roots, root = np.unique(factor.states[0], return_inverse=True)
        sets = [state_sets(states) for states in factor.states[1:]]
        self.kinds: list[Sequence[tuple[int, ...]]] = [[(int(state),) for state in roots], *(own for own, _ in sets)]
        self.of_choice = [root, *(choice for _, choice in sets)]
        self.count = math.prod(map(len, self.kinds))

    def options(self) -> Iterator[tuple[tuple[int, ...], Tree | None, float, np.ndarray]]:
        """For each combination of kinds: its number on every axis, and a tree with weighted seconds and bytes."""
        known: dict[tuple[int, tuple[int, ...]], list[Option]] = {}
        for entry in product(*(range(len(own)) for own in self.kinds)):
            (root,), *needed = (own[at] for own, at in zip(self.kinds, entry, strict=True))
            key = root, tuple(sorted({state for own in needed for state in own}))
            if key not in known:
                known[key] = tree_options(self.factor.conversions, *key)
            for tree, seconds, held in known[key]:
                yield entry, tree, self.factor.weight * seconds, self.factor.weight * held


def solve_limited_milp(
    problem: CostTable, limits: np.ndarray, *, gap: float, time_limit_seconds: float
) -> tuple[tuple[int, ...] | None, list[Tree | None], float] | None:
    """Choice, trees and bound; the choice is ``None`` if nothing was found in time (or there is nothing).

    ``None`` if the program would have too many columns.
    """
    trees = [factor for factor in problem.factors if factor.is_tree]
    ends = {id(factor): Ends(factor) for factor in trees}
    if sum(item.count for item in ends.values()) > MAX_COLUMNS:
        return None
    model = milp.Model(pulp.LpProblem("fxpar", pulp.LpMinimize), milp.scale_of(problem))
    held: list[tuple[pulp.LpVariable, np.ndarray]] = []
    for variable in problem.variables:
        milp.add_variable(model, variable)
        if variable.bytes is not None:
            held += zip(model.choices[-1], variable.bytes.T, strict=True)
    taken: list[list[tuple[pulp.LpVariable, Tree | None]] | None] = []
    for factor in problem.factors:
        if factor.is_tree:
            taken.append(_add_tree(model, ends[id(factor)], held))
        else:
            milp.add_table(model, factor)
            taken.append(None)
    for row, limit in enumerate(limits):
        if math.isfinite(limit):
            per = limit if limit > 0 else 1.0
            terms = [(column, float(kept[row]) / per) for column, kept in held if kept[row]]
            model.row(terms, pulp.LpConstraintLE, limit / per)
    model.lp.setObjective(pulp.LpAffineExpression(model.objective))
    name, solver = milp._solver(time_limit_seconds, gap)
    model.lp.solve(solver)
    if model.lp.status == pulp.LpStatusInfeasible:
        return None, [], math.inf
    bound = milp.bound_of(model, name)
    values = [[column.value() or 0.0 for column in one_hot] for one_hot in model.choices]
    if any(abs(max(row) - 1.0) > 1e-3 for row in values):
        return None, [], bound
    picked = [
        None if columns is None else max(columns, key=lambda pair: pair[0].value() or 0.0)[1] for columns in taken
    ]
    return tuple(int(np.argmax(row)) for row in values), picked, bound


def _add_tree(
    model: milp.Model, ends: Ends, held: list[tuple[pulp.LpVariable, np.ndarray]]
) -> list[tuple[pulp.LpVariable, Tree | None]]:
    """A column per option; those with each state (or set of states) of a variable sum to its choices that have it."""
    columns: list[tuple[pulp.LpVariable, Tree | None]] = []
    sums: dict[tuple[int, int], milp.Terms] = {}
    for axis, (number, own) in enumerate(zip(ends.factor.variables, ends.of_choice, strict=True)):
        for choice, kind in zip(model.choices[number], own.tolist(), strict=True):
            sums.setdefault((axis, kind), []).append((choice, -1.0))
    for entry, tree, seconds, kept in ends.options():
        # Which of several options is taken is a decision of its own, also where all choices are made.
        column = model.column(seconds, integer=True)
        columns.append((column, tree))
        if kept.any():
            held.append((column, kept))
        for axis, kind in enumerate(entry):
            sums[axis, kind].append((column, 1.0))
    for terms in sums.values():
        model.row(terms, pulp.LpConstraintEQ, 0)
    return columns
