"""Prove that nothing is cheaper: leave out what is too dear, split by memory, and give the rest to the integer program.

In: a :class:`~fxpar.solver.stages.Run` and its reduced graph. Out: its best choice and bound get better, or
:class:`~fxpar.solver.stages.Proven`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fxpar import kernels
from fxpar.solver.stages import MOVES_PER_STEP, Run, ascend, climb, reduced, search, walk

#: The integer program is given whole graphs with at most this many matrix entries.
MILP_ENTRIES = 60_000

#: One that is only a part may have so many, and at first this share of the time.
PART_ENTRIES, PART_SHARE = 320_000, 0.125

#: Least costs that are guessed, in parts of the way from the bound to the best.
GUESSES = (1 / 32, 1 / 8, 1 / 2)

#: Of the time there is: for the bound, before strategies are left out and each time some were.
PRUNING = 0.02

#: Of the time that is left: for splitting. By the share PATIENCE of that, the same share of the gap must be closed.
BRANCHING, PATIENCE = 0.85, 0.25

#: Of a limit on iterations: steps of the bound that splitting a part takes.
STEPS_PER_PART = 100

#: Moves of the search from a better choice that was met on the way, at most.
MOVES_PER_PART = 20_000


def prove(run: Run, problem: Any, most_entries: int) -> None:
    """Strategies that no better choice can have are left out, again and again; the rest is split or solved.

    The integer program is given graphs with at most ``most_entries`` matrix entries.
    """
    steps = max((run.iterations or 10**9) // 4, 1)
    climb(run, problem, PRUNING * run.time_limit_seconds, steps)
    size = min(1.0, problem.sizes()["entries"] / MILP_ENTRIES)  # small graphs are better off with the integer program
    walk(run, problem, 0.05 * size * run.time_limit_seconds, steps * MOVES_PER_STEP, 0)
    full = problem
    problem, possible = _prune(run, problem, run.cost - 1, run.raise_bound)
    if not possible:
        run.raise_bound(math.inf)
    if problem.sizes()["entries"] <= most_entries:
        _integer_program(run, problem, run.left)
    else:
        if math.isfinite(run.cost) and problem.sizes()["moments"]:
            _branch(run, problem, BRANCHING * run.left)
        _guess(run, problem)
    if run.left > 0:
        search(run, full)


def _prune(run: Run, problem: Any, most: float, found: Callable[[float], None]) -> tuple[Any, bool]:
    """The graph without strategies that no choice of at most ``most`` has, and whether any such choice may exist.

    ``found`` is told of lower bounds, of ``most + 1`` at most.
    """
    steps = max((run.iterations or 10**9) // 4, 1)
    allowed = np.ones(len(run.graph.costs), dtype=np.int8)
    while True:
        keep = allowed & (problem.bounds() <= most + 1e-6)
        if keep.sum() == allowed.sum() or run.left <= 0:
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


@dataclass
class _Parts:
    """Parts of all choices that together have everything that is cheaper than the best."""

    open: list[tuple[float, int, Any]]  # a heap: the least bound first, then the oldest
    hard: list[tuple[float, Any]] = field(default_factory=list)  # not worth splitting, and not solved yet
    split: int = 0
    made: int = 1

    @property
    def bound(self) -> float:
        """A lower bound of every choice in them."""
        return min([bound for bound, *_ in (*self.hard, *self.open[:1])], default=math.inf)

    def push(self, bound: float, part: Any) -> None:
        self.made += 1
        heapq.heappush(self.open, (bound, self.made, part))


def _branch(run: Run, problem: Any, seconds: float) -> None:
    """Split what variables may hold, always in the part with the least bound, until no part is left or time is up."""
    run.show("branching")
    branchers = [kernels.native().Brancher(problem) for _ in range(run.threads)]
    parts = _Parts([(problem.bound, 0, branchers[0].root())])
    start, first = time.perf_counter(), run.bound
    most_parts = max((run.iterations or 10**9) // STEPS_PER_PART, 1)
    with ThreadPoolExecutor(run.threads) as pool:
        try:
            while parts.open and (spent := time.perf_counter() - start) < seconds and parts.split < most_parts:
                if spent > PATIENCE * seconds and run.bound - first < PATIENCE * (run.cost - first):
                    break
                before = problem.cost
                _round(run, problem, parts, branchers, pool, start + seconds)
                for brancher in branchers:
                    brancher.offer(problem)
                if problem.cost < before:
                    walk(run, problem, PRUNING * run.time_limit_seconds, MOVES_PER_PART, parts.split)
                run.raise_bound(min(parts.bound, run.cost))
                run.show("branching")
            while parts.hard and not parts.open and (left := start + seconds - time.perf_counter()) > 0:
                bound, part = parts.hard.pop(0)
                bound = max(bound, _close(run, problem, part, left / (len(parts.hard) + 1)))
                run.raise_bound(min(bound, parts.bound, run.cost))
                if bound < run.cost:
                    parts.hard.append((bound, part))
                    break
        finally:
            for brancher in branchers:
                brancher.stop()
            run.log.append(f"{parts.split} parts split or solved, {len(parts.open)} left")


def _round(
    run: Run, problem: Any, parts: _Parts, branchers: Sequence[Any], pool: ThreadPoolExecutor, end: float
) -> None:
    """Split as many parts as there are threads; one that is better not split is given to the integer program."""
    taken = [heapq.heappop(parts.open) for _ in range(min(len(branchers), len(parts.open)))]
    tasks = [
        pool.submit(brancher.split, part, run.cost - 1 + 1e-6)
        for brancher, (_, _, part) in zip(branchers, taken, strict=False)
    ]
    if not _finished(tasks, end):
        for bound, _, part in taken:
            parts.push(bound, part)
        return
    for (bound, _, _), task in zip(taken, tasks, strict=True):
        parts.split += 1
        pieces = task.result()
        if len(pieces) == 1:
            left = end - time.perf_counter()
            if (bound := max(bound, _close(run, problem, pieces[0], PART_SHARE * left))) < run.cost:
                parts.hard.append((bound, pieces[0]))
            continue
        for piece in pieces:
            parts.push(max(bound, piece.bound), piece)


def _finished(tasks: Sequence[Future[Any]], end: float) -> bool:
    """Wait, but not beyond ``end``; an interruption is noticed."""
    while wait(tasks, timeout=0.1).not_done:
        if time.perf_counter() > end:
            return False
    return True


def _close(run: Run, problem: Any, part: Any, seconds: float) -> float:
    """A bound of what the part's choices cost, infinite if none is cheaper than the best; one that is, is taken."""
    most = run.cost - 1
    rest = reduced(run, problem.allowed(part), logged=False)
    if not rest.feasible:
        return math.inf
    rest.cost = float(most)
    rest.start(problem.prices())
    bounds: list[float] = [part.bound]
    ascend(run, rest, min(PRUNING * run.time_limit_seconds, seconds), 10**9, bounds.append)
    rest, possible = _prune(run, rest, most, bounds.append)
    if not possible or max(bounds) > most + 1e-6:
        return math.inf
    if rest.sizes()["entries"] > PART_ENTRIES:
        return max(bounds)
    return max(*bounds, _integer_program(run, rest, seconds, whole=False))


def _guess(run: Run, problem: Any) -> None:
    """Too large for the integer program: guess that the least cost is near the bound, and leave out what that forbids.

    A guess that is too low gives a better bound, and often a good choice all the same.
    """
    for share in GUESSES:
        guess = math.floor(run.bound + share * (run.cost - run.bound if math.isfinite(run.cost) else run.bound))
        if guess >= run.cost - 1 or run.left <= 0:
            return
        guessed, possible = _prune(run, problem, guess, run.raise_bound)
        if not possible:
            run.raise_bound(guess)
        elif guessed.sizes()["entries"] <= PART_ENTRIES:
            _integer_program(run, guessed, run.left, guess)
        else:
            return


def _integer_program(run: Run, problem: Any, seconds: float, most: float = math.inf, *, whole: bool = True) -> float:
    """Solve what is left, which has every choice that costs at most ``most`` and less than the best; returns a bound.

    Of a part (``whole`` is false) the bound says nothing about the rest of the graph.
    """
    # PuLP takes longer to import than most graphs take to solve.
    from fxpar.solver.graph_milp import TOLERANCE, Remainder
    from fxpar.solver.graph_milp import prove as solved

    run.show("integer program")
    proof = solved(Remainder.of(problem.program()), min(run.cost, float(run.forbidden)), seconds)
    if proof.choice is not None:
        run.offer(problem.expand(proof.choice))
    if proof.interrupted:
        raise KeyboardInterrupt
    if whole:
        run.raise_bound(min(proof.bound + TOLERANCE * abs(proof.bound), most))
        run.show("integer program")
    return proof.bound
