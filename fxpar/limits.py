"""Priced space + a memory limit -> the fastest plan that fits it.

In: :class:`~fxpar.cost.price.Priced`, bytes per device. Out: a :class:`~fxpar.plans.Plan`. The solver bounds the rows
of :mod:`fxpar.cost.rows`; a found plan is then walked through exactly (:mod:`fxpar.cost.memory`), and where the rows
had left something out, it is added to them and the search goes on.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from fxpar.assemble import assemble
from fxpar.cost.memory import memory
from fxpar.cost.price import Priced
from fxpar.cost.rows import Rows, memory_rows
from fxpar.errors import InfeasibleError, SolverError
from fxpar.least import Pins, ever_smaller, keeps, passages_of, why_nothing_fits
from fxpar.plans import Plan
from fxpar.solver import solve

#: Corrections of the rows by what the exact walk finds.
MAX_ROUNDS = 8

#: A plan this near to the bound is within the gap that the solver aims at; this near, it is proven.
GAP, PROVEN_TO = 1e-3, 1e-9

#: What a solution gets when the time is up and there is none yet.
LEAST_SECONDS = 1.0


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
    return search_within(priced, limit_bytes, optimizer=optimizer, pins=pins, time_limit_seconds=time_limit_seconds)[0]


def search_within(
    priced: Priced,
    limit_bytes: float,
    *,
    optimizer: str | None,
    pins: Pins | None = None,
    time_limit_seconds: float = 60.0,
    prove: bool = True,
) -> tuple[Plan, float]:
    """What :func:`plan_within` gives, and the seconds that mixtures of such plans come near to.

    Without ``prove`` the integer program is left out, which takes most of the time and finds little more. At the time
    limit the search takes what it has, and a second more for each solution that it still needs.
    """
    end = time.perf_counter() + time_limit_seconds
    rows, best, taken = memory_rows(priced, optimizer), None, None
    dual_bound = 0.0
    bounds: list[float] = []  # the first is one of all plans; further searches leave some out
    for allowed in ever_smaller(priced, pins):
        if taken is not None and keeps(allowed, taken):
            continue  # the best so far is the best of these, too
        found = _plan_with(priced, rows, limit_bytes, optimizer, allowed, end, prove, bounds)
        if best is not None and (found is None or found[0].objective_seconds >= best.objective_seconds):
            break
        if found and time.perf_counter() > end:
            best, taken, dual_bound = found
            break
        best, taken, dual_bound = found or (best, taken, dual_bound)
    if best is None:
        raise InfeasibleError(why_nothing_fits(priced, rows, limit_bytes, optimizer, pins))
    bound = min(bounds[0], best.objective_seconds)
    gap = (best.objective_seconds - bound) / best.objective_seconds if best.objective_seconds else 0.0
    status = "optimal" if gap <= PROVEN_TO else "within gap" if gap <= GAP else "feasible"
    return replace(best, bound_seconds=bound, gap=gap, status=status), dual_bound


def _plan_with(
    priced: Priced,
    rows: Rows,
    limit_bytes: float,
    optimizer: str | None,
    pins: Pins,
    end: float,
    prove: bool,
    bounds: list[float],
) -> tuple[Plan, tuple[int, ...], float] | None:
    """The fastest plan that fits and takes only choices in ``pins``, its choices, and the dual bound of its search."""
    program = priced.space.program
    left_out = np.full(2, float(sum(program.unused.values())))
    for _ in range(MAX_ROUNDS):
        limits = limit_bytes - left_out
        if (limits <= 0).any():
            return None
        try:
            solution = solve(
                rows.problem,
                pins=pins,
                limits_bytes=limits.tolist(),
                time_limit_seconds=max(LEAST_SECONDS, end - time.perf_counter()),
                prove=prove,
            )
        except (InfeasibleError, SolverError):  # there is none, or none that the solver can find
            return None
        bounds.append(solution.bound)
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
            return replace(plan, memory=needed), solution.choice, solution.dual_bound
        walked = np.array([max(needed.phases["forward"], needed.phases["backward"]), needed.phases["optimizer"]])
        left_out = np.maximum(left_out, walked - np.array(solution.bytes))
    return None
