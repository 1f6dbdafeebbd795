"""Solve a priced program: reduce it, eliminate what can be, and give the rest to the integer program.

In: a :class:`~fxpar.solver.problem.CostTable`. Out: :class:`~fxpar.solver.problem.Solution`, or the price of every
choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import product

import numpy as np

from fxpar import kernels
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver import elimination, limited, narrowing, reduce
from fxpar.solver.problem import CostTable, Solution

#: The most combinations that ``method="exhaustive"`` tries.
MAX_COMBINATIONS = 1_000_000

#: An integer program with more columns is not built by "auto": it would take gigabytes, and longer than anyone waits.
MAX_COLUMNS = 500_000

#: A choice, a lower bound, whether it is proven, what proved it, and notes.
Found = tuple[tuple[int, ...], float, bool, str, list[str]]

Conversions = tuple[tuple[int, int], ...]
Pins = Mapping[int, set[int]]


def solve(
    problem: CostTable,
    *,
    method: str = "auto",
    time_limit_seconds: float = 60.0,
    pins: Pins | None = None,
    limits_bytes: Sequence[float] | None = None,
    gap: float = 1e-3,
    prove: bool = True,
    start: Sequence[int] | None = None,
    points: Sequence[tuple[float, np.ndarray]] = (),
) -> Solution:
    """The choices of least total cost; ``pins`` restricts variables to some of their choices.

    ``method`` is a key of :data:`METHODS`. ``"auto"`` eliminates variables exactly. If there are too many choices for
    that, lower bounds drop those that cannot be part of an optimum first; if tables are still too large, it builds the
    integer program, which may stop at the time limit with the best choice so far. An optimum is proven to a relative
    1e-9. The same problem always gets the same answer, unless the time limit stops it.

    ``limits_bytes`` has the most that each row of bytes may come to (infinite for any number). The search then stops
    when the best is proven to be within ``gap`` of the optimum, and goes on to the integer program only if it is not
    (and if it is to ``prove`` what it can). ``start`` is a choice, which need not fit, to begin with;
    ``points`` are those of an earlier solution with the same choices, or fewer.
    Raises :class:`InfeasibleError` naming a variable without a possible choice, or the fewest bytes that are needed,
    and :class:`SolverError`.

    >>> from fxpar.solver import Factor, Variable
    >>> left, right = Variable("left", np.array([0.0, 1.0])), Variable("right", np.array([0.0, 1.0]))
    >>> solve(CostTable((left, right), (Factor((0, 1), np.array([[9.0, 9.0], [0.0, 9.0]])),))).choice
    (1, 0)
    >>> small = Variable("small", np.array([0.0, 1.0]), bytes=np.array([[8.0, 2.0]]))
    >>> solve(CostTable((small,), ()), limits_bytes=[4.0]).choice
    (1,)
    """
    begun = time.perf_counter()
    if method not in METHODS:
        near = get_close_matches(method, METHODS, n=1)
        raise SolverError(f"there is no method {method!r}; {f'did you mean {near[0]!r}? ' if near else ''}{[*METHODS]}")
    problem.verify()
    keep = reduce.possible_choices(problem, pins)
    smaller = reduce.restrict(problem, keep)
    limits = _limits(problem, limits_bytes)
    columns, rows = problem.size()
    left_out = sum(problem.counts) - sum(smaller.counts)
    size = f"{len(problem.variables)} variables, {sum(problem.counts)} choices, {len(problem.factors)} factors"
    notes = [size, f"{left_out} choices are impossible or not allowed"]
    if limits is None:
        index, bound, proven, by, more = METHODS[method](smaller, time_limit_seconds)
        choice = tuple(int(choices[at]) for choices, at in zip(keep, index, strict=True))
        cost = problem.cost(choice)
        if math.isinf(cost) and not proven:
            raise SolverError(f"no solution was found in {time_limit_seconds:g} s; allow more time")
        if math.isinf(cost):
            raise InfeasibleError(_clash(problem))
        bound = cost if proven else min(bound, cost)
        status = "optimal" if proven else "time limit"
        held: tuple[float, ...] = ()
        prices: tuple[float, ...] = ()
        seen: tuple[tuple[float, np.ndarray], ...] = ()
        trees: tuple[Conversions | None, ...] = ()
        dual_bound, share = -math.inf, 0.0
    else:
        found = limited.solve_limited(
            smaller,
            limits,
            _least,
            gap=gap,
            time_limit_seconds=time_limit_seconds,
            prove=prove,
            start=_within(keep, start),
            points=points,
        )
        choice = tuple(int(choices[at]) for choices, at in zip(keep, found.best.choice, strict=True))
        cost, bound, by, more = found.best.seconds, found.bound, found.by, list(found.notes)
        status, held, trees = found.status, tuple(found.best.bytes.tolist()), found.best.trees
        dual_bound, share = found.dual_bound, found.share
        prices, seen = tuple(found.prices.tolist()), found.points
    return Solution(
        choice=choice,
        cost=cost,
        bound=bound,
        gap=(cost - bound) / cost if cost > 0 else 0.0,
        status=status,
        method=by,
        seconds=time.perf_counter() - begun,
        variables=columns,
        constraints=rows,
        log=(*notes, *more),
        bytes=held,
        trees=trees,
        dual_bound=dual_bound,
        share=share,
        prices=prices,
        points=seen,
    )


def _within(keep: Sequence[np.ndarray], choice: Sequence[int] | None) -> tuple[int, ...] | None:
    """A choice by its places in ``keep``; ``None`` if it is not all there."""
    if choice is None or not all((own == index).any() for own, index in zip(keep, choice, strict=True)):
        return None
    return tuple(int(np.flatnonzero(own == index)[0]) for own, index in zip(keep, choice, strict=True))


def _limits(problem: CostTable, limits_bytes: Sequence[float] | None) -> np.ndarray | None:
    """The limits as an array, one per row of the problem; ``None`` if there are none."""
    if limits_bytes is None or not np.isfinite(limits_bytes).any():
        return None
    limits = np.array(limits_bytes, dtype=np.float64)
    if len(limits) < problem.rows or not (limits >= 0).all():
        raise SolverError(f"limits of {limits.tolist()} bytes: each must be from 0, for {problem.rows} rows")
    return limits[: problem.rows]


def _least(problem: CostTable) -> tuple[Sequence[int], float]:
    """A choice of least cost, and a lower bound; it need not be proven, so no integer program is built for that."""
    index, bound, proven, _, _ = _auto(problem, 60.0, prove=False)
    return index, problem.cost(index) if proven else bound


def min_marginals(problem: CostTable, *, pins: Pins | None = None) -> list[np.ndarray] | None:
    """For every variable, the least total cost with each of its choices; infinite where there is none.

    Exact, by elimination up and down; ``None`` where a table would be too large for that.

    >>> from fxpar.solver import Factor, Variable
    >>> min_marginals(CostTable((Variable("a", np.array([0.0, 2.0])),), ()))
    [array([0., 2.])]
    """
    problem.verify()
    keep = reduce.possible_choices(problem, pins)
    smaller = reduce.restrict(problem, keep)
    fit = elimination.tables_and_order(smaller) if elimination.looks_small(smaller) else None
    if fit is None:
        return None
    result = [np.full(count, np.inf) for count in problem.counts]
    totals = elimination.marginals(*fit, len(smaller.variables))
    for full, choices, total in zip(result, keep, totals, strict=True):
        full[choices] = total
    return result


def _auto(problem: CostTable, time_limit_seconds: float, *, prove: bool = True) -> Found:
    start = time.perf_counter()
    found = _eliminate(problem) if elimination.looks_small(problem) else None
    if found is not None:
        return found
    narrowed = narrowing.narrow(problem, time_limit_seconds)
    best, keep = narrowed.choice, narrowed.keep
    notes = [f"{narrowed.rounds} rounds of bounds leave {sum(map(len, keep))} choices"]
    if best is not None and not keep:
        return best, narrowed.cost, True, "bounds", notes
    if not keep:
        raise InfeasibleError(_clash(problem))
    smaller = reduce.restrict(problem, keep)
    found = _eliminate(smaller)
    if found is None and best is not None and not prove:
        return best, narrowed.bound, False, "bounds", notes
    if found is None:
        found = _reduce_and_milp(smaller, time_limit_seconds - (time.perf_counter() - start), narrowed.cost)
    index, bound, proven, solver, more = found
    choice = tuple(int(choices[at]) for choices, at in zip(keep, index, strict=True)) if index else best
    if best is not None and (choice is None or problem.cost(choice) >= narrowed.cost):
        choice = best
    assert choice is not None
    return choice, max(min(bound, narrowed.cost), narrowed.bound), proven, f"bounds and {solver}", notes + more


def _reduce_and_milp(problem: CostTable, time_limit_seconds: float, below: float) -> Found:
    """Without dominated choices and variables of few neighbours; no choice if all are above ``below``."""
    keep = reduce.undominated_choices(problem)
    left_out = sum(problem.counts) - sum(map(len, keep))
    rest = reduce.collapse(reduce.restrict(problem, keep))
    columns, rows = rest.problem.size()
    notes = [
        f"{left_out} choices are dominated, {len(rest.steps)} variables eliminated",
        f"the integer program has {columns} variables, {rows} constraints",
    ]
    try:
        if columns > MAX_COLUMNS:
            notes.append("which is too large to be built")
            small, bound, proven, by = *_descended(rest.problem), False, "descent"
        else:
            small, bound, proven, by, _ = _milp(rest.problem, max(1.0, time_limit_seconds), below - rest.constant)
    except InfeasibleError:
        if math.isinf(below):
            raise
        return (), below, True, "HiGHS", notes
    index = rest.expand(small, len(problem.variables))
    choice = tuple(int(choices[at]) for choices, at in zip(keep, index, strict=True))
    return choice, bound + rest.constant, proven, by, notes


def _eliminate(problem: CostTable) -> Found | None:
    fit = elimination.tables_and_order(problem)
    if fit is None:
        return None
    tables, order = fit
    choice, total = kernels.eliminate(tables.sizes, tables.scopes, tables.tables, order.variables)
    note = (
        f"eliminated {len(tables.sizes)} variables ({kernels.DEFAULT}), the largest table has {order.largest} entries"
    )
    return tuple(choice[: len(problem.variables)]), total, True, "elimination", [note]


def _elimination(problem: CostTable, time_limit_seconds: float) -> Found:
    found = _eliminate(problem)
    if found is None:
        raise SolverError(f"elimination needs a table of more than {elimination.MAX_ENTRIES} entries; take 'auto'")
    return found


def _descended(problem: CostTable) -> tuple[tuple[int, ...], float]:
    """A choice that no other choice of one variable makes better, and a bound from looking at every cost alone."""
    from fxpar.solver.milp import floor

    return reduce.descend(problem, [int(variable.costs.argmin()) for variable in problem.variables]), floor(problem)


def _milp(problem: CostTable, time_limit_seconds: float, below: float = math.inf) -> Found:
    # PuLP takes longer to import than most programs take to solve.
    from fxpar.solver.milp import solve_milp

    best = solve_milp(problem, time_limit_seconds, below)
    if best is None:
        return *_descended(problem), False, "descent", []
    choice = best.choice if best.proven else reduce.descend(problem, best.choice)
    return choice, best.bound, best.proven, best.solver, []


def _exhaustive(problem: CostTable, time_limit_seconds: float) -> Found:
    if math.prod(problem.counts) > MAX_COMBINATIONS:
        raise SolverError(f"{math.prod(problem.counts)} combinations are too many to try; take 'auto'")
    best = min(product(*map(range, problem.counts)), key=problem.cost)
    return best, problem.cost(best), True, "exhaustive", []


METHODS: dict[str, Callable[[CostTable, float], Found]] = {
    "auto": _auto,
    "elimination": _elimination,
    "milp": _milp,
    "exhaustive": _exhaustive,
}


def _clash(problem: CostTable) -> str:
    strict = [factor for factor in problem.factors if factor.table is not None and np.isinf(factor.table).any()]
    named = dict.fromkeys(problem.variables[number].name for factor in strict for number in factor.variables)
    return f"no choices of {', '.join(list(named)[:4])} fit together; loosen what is asked of them"
