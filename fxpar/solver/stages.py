"""The stages of a search on a strategy graph: open (reduce), climb (bound), walk (tree moves), and these in turn.

In: a :class:`Run`. Out: its best choice and bound get better. The inner loops are native (``csrc/search``); how long
they run is decided here. Proving that nothing is cheaper is :mod:`fxpar.solver.proof`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fxpar import kernels
from fxpar.solver.strategy_graph import StrategyGraph, evaluate

#: Costs from here on stand for "forbidden" as long as there is a choice without them.
FORBIDDEN = 10**17

#: Native calls return after this long, so that an interruption is noticed and progress can be shown.
SLICE_SECONDS = 0.25

#: Of a limit on iterations: this many moves of the search for each step of the bound.
MOVES_PER_STEP = 100

#: Of a walk, until when memory has a price in what a move has to lower, and the weight of the price where the walk is
#: not within the limit yet.
PRICED_UNTIL, INFEASIBLE_WEIGHT = 0.8, 8.0

#: The temperature at which a walk begins, in mean costs of a variable; every other thread begins at twice that.
WARMEST = 1.0

#: Of the time there is: for the bound and for walks, in turn.
ROUNDS = ((0.2, 0.1), (0.15, 0.55))

#: Variables in the trees that a move re-solves, at most.
TREE_SIZE = 60


@dataclass(frozen=True)
class Progress:
    """What is known so far; ``cost`` is infinite while no choice within the limit has been found."""

    seconds: float
    cost: float
    bound: float
    stage: str


class Proven(Exception):  # noqa: N818  (not an error: it ends the search)
    """The best choice is optimal."""


@dataclass
class Run:
    """The state of one call of :func:`solve`."""

    graph: StrategyGraph
    time_limit_seconds: float
    iterations: int | None
    seed: int
    threads: int
    reductions: bool
    report: Callable[[Progress], None] | None
    start: float = field(default_factory=time.perf_counter)
    choice: np.ndarray | None = None
    cost: float = math.inf
    bound: float = 0.0
    forbidden: int = FORBIDDEN
    log: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        """Seconds that may still be spent."""
        return self.time_limit_seconds - self.seconds

    def offer(self, choice: Any) -> None:
        """Take a choice if it is within the limit and cheaper than the best."""
        found = evaluate(self.graph, choice)
        if found.feasible and found.cost < self.cost:
            self.choice, self.cost = np.asarray(choice, dtype=np.int64), found.cost

    def raise_bound(self, bound: float) -> None:
        """Costs are integers, and beyond the best cost nothing is of interest."""
        self.bound = min(max(self.bound, math.ceil(bound - 1e-6) if math.isfinite(bound) else bound), self.cost)
        if self.bound >= self.cost:
            raise Proven

    def show(self, stage: str) -> None:
        if self.report is not None:
            self.report(Progress(self.seconds, self.cost, self.bound, stage))


def opened(run: Run) -> Any:
    """The reduced graph; proven if nothing can be chosen."""
    problem = reduced(run, np.zeros(0, np.int8))
    if not problem.feasible:
        run.raise_bound(math.inf)
    return problem


def reduced(run: Run, allowed: np.ndarray) -> Any:
    """The graph without the strategies that are not ``allowed`` (empty: all are), reduced."""
    graph = run.graph
    problem = kernels.native().Problem(
        graph.first, graph.costs, graph.usages, graph.intervals[:, 0], graph.intervals[:, 1], graph.ends[:, 0],
        graph.ends[:, 1], graph.places, graph.edge_costs, graph.limit, run.forbidden, run.reductions, allowed,
    )  # fmt: skip
    if problem.feasible:
        run.log.append(", ".join(f"{value} {key}" for key, value in problem.sizes().items()))
    return problem


def climb(run: Run, problem: Any, seconds: float, steps: int) -> None:
    """Raise the bound of the whole graph."""
    ascend(run, problem, seconds, steps, run.raise_bound)


def ascend(run: Run, problem: Any, seconds: float, steps: int, found: Callable[[float], None]) -> None:
    """Raise a bound until it no longer moves or the time is spent; ``found`` is told of it."""
    end = time.perf_counter() + min(seconds, run.left)
    while steps > 0 and not problem.converged and (left := end - time.perf_counter()) > 0:
        before = problem.cost
        steps -= problem.ascend(min(SLICE_SECONDS, left), steps)
        if problem.cost < before:
            run.offer(problem.choice())
        found(problem.bound)
        run.show("bound")


def walk(run: Run, problem: Any, seconds: float, moves: int, seed: int) -> None:
    """Tree moves from the best choice, in every thread; every thread goes its own way."""
    native = kernels.native()
    walks = [native.Walk(problem, run.seed * 7919 + seed * 101 + number) for number in range(run.threads)]
    given = max(min(seconds, run.left), 1e-9)
    end = time.perf_counter() + given
    variables = max(problem.sizes()["nodes"], 1)

    def work(number: int) -> None:
        own, made = walks[number], 0
        while made < moves and (left := end - time.perf_counter()) > 0 and not stop:
            done = made / moves if run.iterations is not None else max(0.0, 1 - left / given)
            weight = max(0.0, 1 - done / PRICED_UNTIL) if own.feasible else INFEASIBLE_WEIGHT
            heat = WARMEST * (1 + number % 2) * own.cost / variables if own.feasible else 0.0
            piece = left if run.iterations is not None else min(SLICE_SECONDS / 2, left)
            made += own.run(piece, min(1000, moves - made), TREE_SIZE, weight, heat * (1 - done) ** 2)

    stop: list[bool] = []
    try:
        with ThreadPoolExecutor(run.threads) as pool:
            tasks = [pool.submit(work, number) for number in range(run.threads)]
            try:
                while not all(task.done() for task in tasks):
                    time.sleep(0.001)
                    if run.report is not None and (best := min(own.best_cost for own in walks)) < run.cost:
                        run.report(Progress(run.seconds, best, run.bound, "search"))
            finally:
                stop.append(True)
    finally:
        for own in walks:
            own.offer(problem)
        if (choice := problem.choice()) is not None:
            run.offer(choice)
    for task in tasks:
        task.result()
    run.raise_bound(run.bound)
    run.show("search")


def search(run: Run, problem: Any) -> None:
    """Bound and walks in turn. A long walk that cools slowly finds more than several short ones."""
    left, steps = run.left, max(1, (run.iterations or 10**9) // len(ROUNDS))
    for seed, (climbing, walking) in enumerate(ROUNDS):
        climb(run, problem, climbing * left, steps)
        walk(run, problem, walking * left, steps * MOVES_PER_STEP, seed)
