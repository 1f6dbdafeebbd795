"""Branch and bound on what variables may hold: parts of all choices are split until none can have anything cheaper.

In: a :class:`~fxpar.solver.stages.Run`, its reduced graph and seconds. Out: its best choice and bound get better, or
:class:`~fxpar.solver.stages.Proven`. Splitting is native (``csrc/search/branch.cpp``).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from fxpar import kernels
from fxpar.solver.pruning import PRUNING, integer_program, prune
from fxpar.solver.stages import Run, ascend, reduced, walk

#: A part may have so many matrix entries in an integer program, and at first this share of the time.
PART_ENTRIES, PART_SHARE = 320_000, 0.2

#: By this share of the time, the same share of the gap must be closed.
PATIENCE = 0.25

#: Of a limit on iterations: steps of the bound that splitting a part takes.
STEPS_PER_PART = 100

#: Moves of the search from a better choice that was met on the way, at most.
MOVES_PER_PART = 20_000

#: A part and a lower bound of every choice in it.
Bounded = tuple[float, Any]


@dataclass
class _Parts:
    """Parts of all choices that together have everything that is cheaper than the best."""

    open: list[tuple[float, int, Any]]  # a heap: the least bound first, then the oldest
    whole: list[Bounded] = field(default_factory=list)  # not worth splitting
    hard: list[Bounded] = field(default_factory=list)  # not worth splitting, and not solved in the time they had
    split: int = 0
    made: int = 1

    @property
    def bound(self) -> float:
        """A lower bound of every choice in them."""
        return min([bound for bound, *_ in (*self.hard, *self.whole, *self.open[:1])], default=math.inf)

    def push(self, bound: float, part: Any) -> None:
        self.made += 1
        heapq.heappush(self.open, (bound, self.made, part))


def branch(run: Run, problem: Any, seconds: float) -> None:
    """Split always the parts with the least bounds, until no part is left or time is up.

    Parts that are not worth splitting are solved as many at once as there are threads.
    """
    run.show("branching")
    branchers = [kernels.native().Brancher(problem) for _ in range(run.threads)]
    parts = _Parts([(problem.bound, 0, branchers[0].root())])
    start, first = time.perf_counter(), run.bound
    end = start + seconds
    most_parts = max((run.iterations or 10**9) // STEPS_PER_PART, 1)
    with ThreadPoolExecutor(run.threads) as pool:
        try:
            while (spent := time.perf_counter() - start) < seconds and parts.split < most_parts:
                if spent > PATIENCE * seconds and run.bound - first < PATIENCE * (run.cost - first):
                    break
                before = run.cost
                if len(parts.whole) >= run.threads or (parts.whole and not parts.open):
                    _close(run, problem, parts, parts.whole, pool, PART_SHARE * (end - time.perf_counter()))
                elif parts.open:
                    _split(run, parts, branchers, pool, end)
                    for brancher in branchers:
                        brancher.offer(problem)
                    if (choice := problem.choice()) is not None:
                        run.offer(choice)
                elif not parts.hard or not _retry(run, problem, parts, pool, end):
                    run.raise_bound(min(parts.bound, run.cost))
                    break
                if run.choice is not None and run.cost < before and problem.adopt(run.choice.tolist()):
                    walk(run, problem, PRUNING * run.time_limit_seconds, MOVES_PER_PART, parts.split)
                run.raise_bound(min(parts.bound, run.cost))
                run.show("branching")
        finally:
            for brancher in branchers:
                brancher.stop()
            run.log.append(f"{parts.split} parts split or solved, {len(parts.open + parts.whole + parts.hard)} left")


def _split(run: Run, parts: _Parts, branchers: Sequence[Any], pool: ThreadPoolExecutor, end: float) -> None:
    """Split as many parts as there are threads."""
    taken = [heapq.heappop(parts.open) for _ in range(min(len(branchers), len(parts.open)))]
    tasks = [
        pool.submit(brancher.split, part, run.cost - 1 + 1e-6)
        for brancher, (_, _, part) in zip(branchers, taken, strict=False)
    ]
    if not _finished(tasks, end):
        for brancher in branchers:
            brancher.stop()
        wait(tasks)
        for bound, _, part in taken:
            parts.push(bound, part)
        return
    for (bound, _, _), task in zip(taken, tasks, strict=True):
        parts.split += 1
        pieces = task.result()
        if len(pieces) == 1:
            parts.whole.append((max(bound, pieces[0].bound), pieces[0]))
            continue
        for piece in pieces:
            parts.push(max(bound, piece.bound), piece)


def _close(
    run: Run, problem: Any, parts: _Parts, todo: list[Bounded], pool: ThreadPoolExecutor, seconds: float
) -> None:
    """Solve the first of ``todo``, one in each thread. What could not be solved is hard now."""
    taken = todo[: run.threads]
    del todo[: run.threads]
    own = [replace(run, report=None, log=[]) for _ in taken]
    run.show("integer programs")
    parts.hard += taken
    try:
        tasks = [
            pool.submit(_solved, alone, problem.allowed(part), problem.prices(), bound, seconds)
            for alone, (bound, part) in zip(own, taken, strict=True)
        ]
        _finished(tasks, math.inf)
    finally:
        for alone in own:
            alone.time_limit_seconds = 0.0  # makes it stop, if it has not
            if alone.choice is not None:
                run.offer(alone.choice)
    bounds = [max(bound, task.result()) for task, (bound, _) in zip(tasks, taken, strict=True)]
    unsolved = [(bound, part) for bound, (_, part) in zip(bounds, taken, strict=True) if bound < run.cost]
    parts.hard[-len(taken) :] = unsolved


def _solved(run: Run, allowed: Any, prices: Any, bound: float, seconds: float) -> float:
    """A bound of what the allowed choices cost, infinite if none is cheaper than the best; one that is, is taken."""
    end = time.perf_counter() + seconds
    most = run.cost - 1
    rest = reduced(run, allowed)
    if not rest.feasible:
        return math.inf
    rest.cost = float(most)
    rest.start(prices)
    bounds: list[float] = [bound]
    ascend(run, rest, min(PRUNING * run.time_limit_seconds, seconds), 10**9, bounds.append)
    rest, possible = prune(run, rest, most, bounds.append, end)
    if not possible or max(bounds) > most + 1e-6:
        return math.inf
    if rest.sizes()["entries"] > PART_ENTRIES or time.perf_counter() > end:
        return max(bounds)
    return max(*bounds, integer_program(run, rest, end - time.perf_counter()))


def _retry(run: Run, problem: Any, parts: _Parts, pool: ThreadPoolExecutor, end: float) -> bool:
    """Give every hard part a share of the time that is left. False if some remain hard."""
    todo, parts.hard = parts.hard, []
    while todo:
        _close(run, problem, parts, todo, pool, (end - time.perf_counter()) / -(-len(todo) // run.threads))
    return not parts.hard


def _finished(tasks: Sequence[Future[Any]], end: float) -> bool:
    """Wait, but not beyond ``end``; an interruption is noticed."""
    while wait(tasks, timeout=0.1).not_done:
        if time.perf_counter() > end:
            return False
    return True
