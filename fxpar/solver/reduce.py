"""Reductions: choices that cannot be taken, choices never worth taking, variables with few neighbours; and a descent.

In: a :class:`~fxpar.solver.problem.CostTable`. Out: a smaller one with the same optimum, and the way back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar import kernels
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver.problem import CostTable, Factor

#: Tables larger than this are not searched for infinite entries or dominated choices.
MAX_ENTRIES = 100_000

#: Likewise for trees, whose tables would have to be made first.
MAX_TREE_ENTRIES = 5_000

#: What :func:`descend` takes for infinity, so that fewer infinite costs are better than more.
PENALTY = 1e9


def possible_choices(problem: CostTable, pins: Mapping[int, set[int]] | None = None) -> list[np.ndarray]:
    """For each variable, the choices that are pinned (if any are), finite, and finite together with others'.

    Raises :class:`InfeasibleError` naming a variable that has none left, :class:`SolverError` on a bad pin.
    """
    keep = [np.flatnonzero(np.isfinite(variable.costs)) for variable in problem.variables]
    for number, allowed in (pins or {}).items():
        if not 0 <= number < len(keep) or not all(0 <= choice < problem.counts[number] for choice in allowed):
            raise SolverError(f"pin of variable {number} to choices {sorted(allowed)}: there is no such choice")
        keep[number] = keep[number][np.isin(keep[number], sorted(allowed))]
    for number, choices in enumerate(keep):
        _some(problem, number, choices, "has a finite cost" if not (pins and number in pins) else "is left by its pin")
    suspects = [
        factor
        for factor in problem.factors
        if _entries(problem, factor) <= (MAX_ENTRIES if factor.table is not None else MAX_TREE_ENTRIES)
    ]
    suspects = [factor for factor in suspects if not np.isfinite(factor.values).all()]
    changed = bool(suspects)
    while changed:
        changed = False
        for factor in suspects:
            finite = np.isfinite(factor.values[np.ix_(*(keep[variable] for variable in factor.variables))])
            for axis, number in enumerate(factor.variables):
                good = finite.any(axis=tuple(other for other in range(finite.ndim) if other != axis))
                if not good.all():
                    keep[number], changed = keep[number][good], True
                    _some(problem, number, keep[number], "fits together with any choice of its neighbours")
                    finite = np.compress(good, finite, axis=axis)
    return keep


def _some(problem: CostTable, number: int, choices: np.ndarray, what: str) -> None:
    if not len(choices):
        variable = problem.variables[number]
        raise InfeasibleError(
            f"{variable.name}: none of its {len(variable.costs)} choices {what}; loosen what is asked of it"
        )


def restrict(problem: CostTable, keep: Sequence[np.ndarray]) -> CostTable:
    """The problem over the choices in ``keep`` only."""
    if all(len(choices) == count for choices, count in zip(keep, problem.counts, strict=True)):
        return problem
    less = [len(choices) < count for choices, count in zip(keep, problem.counts, strict=True)]
    return CostTable(
        tuple(item.restrict(index) for item, index in zip(problem.variables, keep, strict=True)),
        tuple(
            factor.restrict([keep[variable] for variable in factor.variables])
            if any(less[variable] for variable in factor.variables)
            else factor
            for factor in problem.factors
        ),
    )


def undominated_choices(problem: CostTable) -> list[np.ndarray]:
    """For each variable, the choices that no other choice beats or equals whatever all the others choose."""
    touching: list[list[tuple[Factor, int]]] = [[] for _ in problem.variables]
    for factor in problem.factors:
        for axis, number in enumerate(factor.variables):
            touching[number].append((factor, axis))
    keep = [np.arange(count) for count in problem.counts]
    for number, variable in enumerate(problem.variables):
        if any(_entries(problem, factor) > MAX_ENTRIES for factor, _ in touching[number]):
            continue
        worse = _difference(variable.costs[:, None])  # [a, b]: at most so much is lost by taking b instead of a
        for factor, axis in touching[number]:
            index = [keep[other] for other in factor.variables]
            index[axis] = np.arange(len(variable.costs))
            table = np.moveaxis(factor.values[np.ix_(*index)], axis, 0)
            worse = worse + _difference(table.reshape(len(table), -1))
        alive = np.ones(len(worse), dtype=bool)
        for choice in range(len(worse)):
            others = alive.copy()
            others[choice] = False
            alive[choice] = not (worse[choice, others] <= 0).any()
        keep[number] = np.flatnonzero(alive)
    return keep


def _difference(table: np.ndarray) -> np.ndarray:
    """``[a, b]``: the most by which row ``b`` exceeds row ``a`` anywhere; where ``a`` is infinite it never does."""
    with np.errstate(invalid="ignore"):
        gap = table[None, :, :] - table[:, None, :]
    return np.where(np.isnan(gap), -np.inf, gap).max(axis=2)


@dataclass(frozen=True, eq=False)
class Collapsed:
    """A problem without the variables of at most two neighbours; ``constant`` is what it leaves out of the total."""

    problem: CostTable
    kept: tuple[int, ...]
    steps: tuple[tuple[int, tuple[int, ...], np.ndarray], ...]
    constant: float

    def expand(self, choice: Sequence[int], count: int) -> tuple[int, ...]:
        """The best choice of all ``count`` variables, given those of the remaining ones."""
        full = [0] * count
        for number, index in zip(self.kept, choice, strict=True):
            full[number] = index
        for number, scope, best in reversed(self.steps):
            full[number] = int(best[tuple(full[other] for other in scope)])
        return tuple(full)


def collapse(problem: CostTable) -> Collapsed:
    """Eliminate every variable that has at most two neighbours, also those that come to have so few."""
    factors = dict(enumerate(problem.factors))
    costs = {number: variable.costs for number, variable in enumerate(problem.variables)}
    steps: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    constant, fresh = 0.0, len(factors)
    queue = list(costs)
    while queue:
        number = queue.pop(0)
        if number not in costs:
            continue
        mine = [key for key, factor in factors.items() if number in factor.variables]
        scope = tuple(sorted({other for key in mine for other in factors[key].variables} - {number}))
        if len(scope) > 2:
            continue
        parts = [((number,), costs.pop(number)), *((factors[key].variables, factors[key].values) for key in mine)]
        table = kernels.join((*scope, number), parts)
        steps.append((number, scope, table.argmin(axis=-1)))
        for key in mine:
            del factors[key]
        rest = table.min(axis=-1)
        if scope:
            factors[fresh] = Factor(scope, rest)
            fresh += 1
        else:
            constant += float(rest)
        queue += scope
    kept = tuple(costs)
    position = {number: at for at, number in enumerate(kept)}
    return Collapsed(
        CostTable(
            tuple(problem.variables[number] for number in kept),
            tuple(_renumbered(factor, position) for factor in factors.values()),
        ),
        kept,
        tuple(steps),
        constant,
    )


def _renumbered(factor: Factor, position: Mapping[int, int]) -> Factor:
    variables = tuple(position[variable] for variable in factor.variables)
    return Factor(variables, factor.table, factor.arcs, factor.states, factor.weight)


def _entries(problem: CostTable, factor: Factor) -> int:
    return math.prod(problem.counts[variable] for variable in factor.variables)


def descend(problem: CostTable, start: Sequence[int]) -> tuple[int, ...]:
    """Change one variable at a time for the better until none helps. Not exact: for when time has run out."""
    choice = list(start)
    touching: list[list[Factor]] = [[] for _ in choice]
    for factor in problem.factors:
        for number in factor.variables:
            touching[number].append(factor)

    def total(number: int, index: int) -> float:
        choice[number] = index
        parts = [float(problem.variables[number].costs[index])]
        parts += [factor.at([choice[variable] for variable in factor.variables]) for factor in touching[number]]
        return sum(PENALTY if math.isinf(part) else part for part in parts)

    changed = True
    while changed:
        changed = False
        for number, count in enumerate(problem.counts):
            before = choice[number]
            totals = [total(number, index) for index in range(count)]
            best = min(range(count), key=totals.__getitem__)
            choice[number] = best if totals[best] < totals[before] else before
            changed |= choice[number] != before
    return tuple(choice)
