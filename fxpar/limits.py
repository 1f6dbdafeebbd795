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
from fxpar.plans import Plan
from fxpar.solver import solve
from fxpar.solver.limited import Point, lower_bound

#: Corrections of the rows by what the exact walk finds.
MAX_ROUNDS = 8

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
    that it still needs.
    """
    end = time.perf_counter() + time_limit_seconds
    rows, best = memory_rows(priced, optimizer), None
    lower, prices = 0.0, like.prices if like else ()  # of all plans: further searches leave some out
    for number, allowed in enumerate(ever_smaller(priced, pins)):
        if best is not None and keeps(allowed, best.choice):
            continue  # the best so far is the best of these, too
        found, bound, paid = _plan_with(
            priced, rows, limit_bytes, optimizer, allowed, end, prove, start, None if number else like
        )
        if number == 0 and like is None:
            lower, prices = bound, paid
        if best is not None and (found is None or found.plan.objective_seconds >= best.plan.objective_seconds):
            break
        best = found or best
        if best is not None and time.perf_counter() > end:
            break
    if best is None:
        plan, needed, choice = least_memory(priced, rows, optimizer, pins)
        if needed.peak_bytes > limit_bytes:
            return None
        left_out = np.array([float(needed.transient_bytes), 0.0])
        least = Within(replace(plan, memory=needed), choice, lower, 0.0, (), left_out, prices)
        found, *_ = _plan_with(priced, rows, limit_bytes, optimizer, pins or {}, end, prove, choice, least)
        best = found or least
    return replace(best, plan=bounded(best.plan, lower), prices=prices)


def lower_bound_seconds(
    priced: Priced,
    limit_bytes: float,
    prices: Sequence[float],
    *,
    optimizer: str | None,
    pins: Pins | None = None,
) -> float:
    """A bound of all plans that fit, from prices of a byte that need not be the best ones."""
    unused = float(sum(priced.space.program.unused.values()))
    rows = memory_rows(priced, optimizer)
    return lower_bound(rows.problem, np.full(2, limit_bytes - unused), np.array(prices), pins=pins)


def bounded(plan: Plan, lower_seconds: float) -> Plan:
    """``plan`` with a lower bound of all plans, and the gap and status that follow."""
    bound = min(lower_seconds, plan.objective_seconds)
    gap = (plan.objective_seconds - bound) / plan.objective_seconds if plan.objective_seconds else 0.0
    status = "optimal" if gap <= PROVEN_TO else "within gap" if gap <= GAP else "feasible"
    return replace(plan, bound_seconds=bound, gap=gap, status=status)


def _plan_with(
    priced: Priced,
    rows: Rows,
    limit_bytes: float,
    optimizer: str | None,
    pins: Pins,
    end: float,
    prove: bool,
    start: Sequence[int] | None,
    like: Within | None,
) -> tuple[Within | None, float, tuple[float, ...]]:
    """The fastest plan that fits and takes only choices in ``pins``; a lower bound of all such plans, and its prices.

    The bound is 0 if nothing is known of them, and if the search began from what it is ``like``.
    """
    program, lower = priced.space.program, 0.0
    unused = np.full(2, float(sum(program.unused.values())))
    left_out, points = (unused, ()) if like is None else (like.left_out, like.points)
    prices: tuple[float, ...] = ()
    for _ in range(MAX_ROUNDS):
        limits = limit_bytes - left_out
        if (limits <= 0).any():
            break
        try:
            solution = solve(
                rows.problem,
                pins=pins,
                limits_bytes=limits.tolist(),
                time_limit_seconds=max(LEAST_SECONDS, end - time.perf_counter()),
                prove=prove,
                start=start,
                points=points,
            )
        except (InfeasibleError, SolverError):  # there is none, or none that the solver can find
            break
        points = solution.points
        if (left_out == unused).all():
            lower, prices = solution.bound, solution.prices
        plan = assemble(
            priced,
            solution.choice,
            status=solution.status,
            bound_seconds=solution.bound,
            gap=solution.gap,
            passages=passages_of(rows, solution.choice, solution.trees),
            objective_seconds=solution.cost,
        )
        needed = memory(program, plan, optimizer)
        if needed.peak_bytes <= limit_bytes:
            plan, gained = replace(plan, memory=needed), (solution.dual_bound, solution.share)
            return Within(plan, solution.choice, *gained, points, left_out, prices), lower, prices
        walked = np.array([max(needed.phases["forward"], needed.phases["backward"]), needed.phases["optimizer"]])
        left_out = np.maximum(left_out, walked - np.array(solution.bytes))
    return None, lower, prices
