"""Priced space + a memory limit -> the fastest plan that fits it.

In: :class:`~fxpar.cost.price.Priced`, bytes per device. Out: a :class:`~fxpar.plans.Plan`. The solver bounds the rows
of :mod:`fxpar.cost.rows`; a found plan is then walked through exactly (:mod:`fxpar.cost.memory`), and where the rows
had left something out, it is added to them and the search goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.assemble import assemble
from fxpar.cost.memory import memory
from fxpar.cost.price import Priced
from fxpar.cost.rows import Rows, memory_rows
from fxpar.errors import InfeasibleError, SolverError
from fxpar.least import Pins, ever_smaller, keeps, least_memory, passages_of, why_nothing_fits
from fxpar.plans import Memory, Plan
from fxpar.solver import Solution, solve
from fxpar.solver.limited import lower_bound
from fxpar.solver.outcomes import Point

#: Corrections of the rows by what the exact walk finds; and plans tried between the least one and what does not fit.
MAX_ROUNDS, HALVES = 8, 5

#: A plan this near to the bound is within the gap that the solver aims at; this near, it is proven.
GAP, PROVEN_TO = 1e-3, 1e-9

#: What a solution gets when the time is up and there is none yet.
LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class Within:
    """A plan that fits, the choice that it was made of, and the seconds that mixtures of plans come near to.

    Plans that do not fit have the part ``share`` in those. For further searches: ``points`` are what was looked at,
    ``left_out`` is what the rows were found to lack, in bytes, and ``prices`` of a byte give a bound of all plans.
    """

    plan: Plan
    choice: tuple[int, ...]
    dual_bound_seconds: float
    share: float
    points: tuple[Point, ...]
    left_out: np.ndarray
    prices: tuple[float, ...]


def plan_within(
    priced: Priced,
    limit_bytes: float,
    *,
    optimizer: str | None,
    pins: Pins | None = None,
    time_limit_seconds: float = 60.0,
) -> Plan:
    """The fastest plan whose step takes at most ``limit_bytes`` on each device.

    Raises :class:`InfeasibleError` with the least that is needed, what needs it, and what would make it fit.
    """
    found = search_within(priced, limit_bytes, optimizer=optimizer, pins=pins, time_limit_seconds=time_limit_seconds)
    if found is None:
        raise InfeasibleError(why_nothing_fits(priced, limit_bytes, optimizer, pins))
    return found.plan


def search_within(
    priced: Priced,
    limit_bytes: float,
    *,
    optimizer: str | None,
    pins: Pins | None = None,
    time_limit_seconds: float = 60.0,
    prove: bool = True,
    start: Sequence[int] | None = None,
    like: Within | None = None,
) -> Within | None:
    """The fastest plan found that fits; ``None`` if none was. ``start`` is a choice to begin with.

    Without ``prove`` the integer program is left out, which takes most of the time and finds little more. ``like`` is
    what another search found, all of whose plans are among those that are searched here; it leaves their bound open
    (:func:`lower_bound_seconds`). At the time limit the search takes what it has, and a second more for each solution
    that it still needs. Where nothing is found, the plan that needs least is looked for, and one near it.
    """
    ask = _Asked(
        priced, memory_rows(priced, optimizer), limit_bytes, optimizer, time.perf_counter() + time_limit_seconds, prove
    )
    best: Within | None = None
    lower, prices = 0.0, like.prices if like else ()  # of all plans: further searches leave some out
    for number, allowed in enumerate(ever_smaller(priced, pins)):
        if best is not None and keeps(allowed, best.choice):
            continue  # the best so far is the best of these, too
        found, bound, paid = _plan_with(ask, allowed, start, None if number else like)
        if number == 0 and like is None:
            lower, prices = bound, paid
        if best is not None and (found is None or found.plan.objective_seconds >= best.plan.objective_seconds):
            break
        best = found or best
        if best is not None and time.perf_counter() > ask.end:
            break
    if best is None and like is None and time.perf_counter() < ask.end:
        best = _from_the_least(ask, pins)
    if best is None:
        return None
    return replace(best, plan=bounded(best.plan, lower), prices=prices)


@dataclass(frozen=True)
class _Asked:
    """What one search is to find; ``end`` is a time of :func:`time.perf_counter`."""

    priced: Priced
    rows: Rows
    limit_bytes: float
    optimizer: str | None
    end: float
    prove: bool

    @property
    def unused(self) -> np.ndarray:
        """What is there and in no row."""
        return np.full(2, float(sum(self.priced.space.program.unused.values())))

    def solve(
        self, left_out: np.ndarray, pins: Pins | None, start: Sequence[int] | None, points: Sequence[Point]
    ) -> tuple[Solution, Plan, Memory] | None:
        """The best plan whose rows leave so many bytes of the limit, and what it needs; ``None`` if none is found."""
        limits = self.limit_bytes - left_out
        if (limits <= 0).any():
            return None
        try:
            solution = solve(
                self.rows.problem,
                pins=pins,
                limits_bytes=limits.tolist(),
                time_limit_seconds=max(LEAST_SECONDS, self.end - time.perf_counter()),
                prove=self.prove,
                start=start,
                points=points,
            )
        except (InfeasibleError, SolverError):  # there is none, or none that the solver can find
            return None
        plan = assemble(
            self.priced,
            solution.choice,
            status=solution.status,
            bound_seconds=solution.bound,
            gap=solution.gap,
            passages=passages_of(self.rows, solution.choice, solution.trees),
            objective_seconds=solution.cost,
        )
        needed = memory(self.priced.space.program, plan, self.optimizer)
        return solution, replace(plan, memory=needed), needed


def _from_the_least(ask: _Asked, pins: Pins | None) -> Within | None:
    """The plan that needs least, if it fits, or a faster one between it and what did not fit.

    Fast plans have transients that leave no room for any plan; the least one does not, nor have those of operations
    with as small working sets. How much is to be left out of the rows is looked for by halves: at most so much that
    just the least plan fits.
    """
    try:
        plan, needed, choice, allowed = least_memory(ask.priced, ask.rows, ask.optimizer, pins)
    except (InfeasibleError, SolverError):
        return None
    if needed.peak_bytes > ask.limit_bytes:
        return None
    loose = ask.unused
    tight = loose + np.array([needed.transient_bytes + ask.limit_bytes - needed.peak_bytes, 0.0])
    best = Within(replace(plan, memory=needed), choice, 0.0, 0.0, (), tight, ())
    for _ in range(HALVES):
        middle = (loose + tight) / 2
        found = ask.solve(middle, allowed, best.choice, best.points)
        if found is not None and found[2].peak_bytes > ask.limit_bytes:
            loose = middle
            continue
        tight = middle
        if found is not None and found[1].objective_seconds < best.plan.objective_seconds:
            best = _within(found[0], found[1], middle)
    return best


def _within(solution: Solution, plan: Plan, left_out: np.ndarray) -> Within:
    return Within(
        plan, solution.choice, solution.dual_bound, solution.share, solution.points, left_out, solution.prices
    )


def lower_bound_seconds(
    priced: Priced,
    limit_bytes: float,
    prices: Sequence[float],
    *,
    optimizer: str | None,
    pins: Pins | None = None,
) -> float:
    """A bound of all plans that fit, from prices of a byte that need not be the best ones (none: a byte is free)."""
    unused = float(sum(priced.space.program.unused.values()))
    rows = memory_rows(priced, optimizer)
    paid = np.array(prices) if prices else np.zeros(2)
    return lower_bound(rows.problem, np.full(2, limit_bytes - unused), paid, pins=pins)


def bounded(plan: Plan, lower_seconds: float) -> Plan:
    """``plan`` with a lower bound of all plans, and the gap and status that follow."""
    bound = min(lower_seconds, plan.objective_seconds)
    gap = (plan.objective_seconds - bound) / plan.objective_seconds if plan.objective_seconds else 0.0
    status = "optimal" if gap <= PROVEN_TO else "within gap" if gap <= GAP else "feasible"
    return replace(plan, bound_seconds=bound, gap=gap, status=status)


def _plan_with(
    ask: _Asked, pins: Pins, start: Sequence[int] | None, like: Within | None
) -> tuple[Within | None, float, tuple[float, ...]]:
    """The fastest plan that fits and takes only choices in ``pins``; a lower bound of all such plans, and its prices.

    The bound is 0 and there are no prices if nothing is known of them: a search that began from what it is ``like`` has
    less room than there is.
    """
    lower, prices = 0.0, tuple[float, ...]()
    left_out, points = (ask.unused, ()) if like is None else (like.left_out, like.points)
    for _ in range(MAX_ROUNDS):
        found = ask.solve(left_out, pins, start, points)
        if found is None:
            break
        solution, plan, needed = found
        points = solution.points
        if (left_out == ask.unused).all():
            lower, prices = solution.bound, solution.prices
        if needed.peak_bytes <= ask.limit_bytes:
            return _within(solution, plan, left_out), lower, prices
        walked = np.array([max(needed.phases["forward"], needed.phases["backward"]), needed.phases["optimizer"]])
        left_out = np.maximum(left_out, walked - np.array(solution.bytes))
    return None, lower, prices
