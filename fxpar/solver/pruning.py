"""Leave out strategies that no choice up to a cost can have, and give what is left to the integer program.

In: a :class:`~fxpar.solver.stages.Run` and a reduced graph of its graph. Out: a smaller one, bounds and choices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fxpar.solver.stages import Run, ascend, reduced

#: Of the time there is: for the bound, before strategies are left out and each time some were.
PRUNING = 0.02


def prune(
    run: Run, problem: Any, most: float, found: Callable[[float], None], end: float = math.inf
) -> tuple[Any, bool]:
    """The graph without strategies that no choice of at most ``most`` has, and whether any such choice may exist.

    ``found`` is told of lower bounds, of ``most + 1`` at most. At ``end`` (of :func:`time.perf_counter`) it stops.
    """
    steps = max((run.iterations or 10**9) // 4, 1)
    allowed = np.ones(len(run.graph.costs), dtype=np.int8)
    while True:
        keep = allowed & (problem.bounds() <= most + 1e-6)
        if keep.sum() == allowed.sum() or run.left <= 0 or time.perf_counter() > end:
            return problem, True
        before, prices, allowed = problem.sizes()["entries"], problem.prices(), keep
        problem = reduced(run, allowed)
        if not problem.feasible:
            return problem, False
        if math.isfinite(most):
            problem.cost = float(most)
        problem.start(prices)
        ascend(run, problem, PRUNING * run.time_limit_seconds, steps, lambda bound: found(min(bound, most + 1)))
        if problem.sizes()["entries"] > 0.98 * before:
            return problem, True


def integer_program(run: Run, problem: Any, seconds: float) -> float:
    """Solve what is left, which has every choice of interest that costs less than the best; returns a lower bound.

    It is infinite if there is none. A choice that is found goes to ``run``.
    """
    # PuLP takes longer to import than most graphs take to solve.
    from fxpar.solver.graph_milp import Remainder, prove

    run.show("integer program")
    below = min(run.cost, float(run.forbidden))
    proof = prove(Remainder.of(problem.program()), below, seconds, lambda: run.left <= 0)
    if proof.choice is not None:
        run.offer(problem.expand(proof.choice))
    if proof.interrupted:
        raise KeyboardInterrupt
    return proof.bound
