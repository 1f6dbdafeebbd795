"""Prove that nothing is cheaper: leave out what is too dear, split by memory, and give the rest to the integer program.

In: a :class:`~fxpar.solver.stages.Run` and its reduced graph. Out: its best choice and bound get better, or
:class:`~fxpar.solver.stages.Proven`.
"""

from __future__ import annotations

import math
from typing import Any

from fxpar.solver.branching import branch
from fxpar.solver.pruning import PRUNING, integer_program, prune
from fxpar.solver.stages import MOVES_PER_STEP, Run, climb, search, walk

#: The integer program is given whole graphs with at most this many matrix entries, and guessed parts with so many.
MILP_ENTRIES, GUESSED_ENTRIES = 60_000, 320_000

#: Least costs that are guessed, in parts of the way from the bound to the best.
GUESSES = (1 / 32, 1 / 8, 1 / 2)

#: Of the time that is left: for splitting.
BRANCHING = 0.85


def prove(run: Run, problem: Any, most_entries: int) -> None:
    """Strategies that no better choice can have are left out, again and again; the rest is split or solved.

    The integer program is given graphs with at most ``most_entries`` matrix entries.
    """
    steps = max((run.iterations or 10**9) // 4, 1)
    climb(run, problem, PRUNING * run.time_limit_seconds, steps)
    size = min(1.0, problem.sizes()["entries"] / MILP_ENTRIES)  # small graphs are better off with the integer program
    walk(run, problem, 0.05 * size * run.time_limit_seconds, steps * MOVES_PER_STEP, 0)
    full = problem
    problem, possible = prune(run, problem, run.cost - 1, run.raise_bound)
    if not possible:
        run.raise_bound(math.inf)
    if problem.sizes()["entries"] <= most_entries:
        _whole(run, problem)
    else:
        if math.isfinite(run.cost) and problem.sizes()["moments"]:
            branch(run, problem, BRANCHING * run.left)
        _guess(run, problem)
    if run.left > 0:
        search(run, full)


def _guess(run: Run, problem: Any) -> None:
    """Too large for the integer program: guess that the least cost is near the bound, and leave out what that forbids.

    A guess that is too low gives a better bound, and often a good choice all the same.
    """
    for share in GUESSES:
        guess = math.floor(run.bound + share * (run.cost - run.bound if math.isfinite(run.cost) else run.bound))
        if guess >= run.cost - 1 or run.left <= 0:
            return
        guessed, possible = prune(run, problem, guess, run.raise_bound)
        if not possible:
            run.raise_bound(guess)
        elif guessed.sizes()["entries"] <= GUESSED_ENTRIES:
            _whole(run, guessed, guess)
        else:
            return


def _whole(run: Run, problem: Any, most: float = math.inf) -> None:
    """The integer program of what is left, which has every choice that costs at most ``most``."""
    run.raise_bound(min(integer_program(run, problem, run.left), most))
    run.show("integer program")
