"""The stages of a search on a strategy graph: open (reduce), climb (bound), walk (tree moves), prune, integer program.

In: a :class:`Run`. Out: its best choice and bound get better. The inner loops are native (``csrc/search``); which of
them runs when, and for how long, is decided here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from fxpar import kernels
from fxpar.errors import SolverError
from fxpar.solver.strategy_graph import StrategyGraph, evaluate

#: Costs from here on stand for "forbidden" as long as there is a choice without them.
FORBIDDEN = 10**17

#: The most combinations that ``method="exhaustive"`` tries.
MAX_COMBINATIONS = 1_000_000

#: The integer program is given graphs with at most this many matrix entries.
MILP_ENTRIES = 60_000

#: One whose least cost is only guessed may have so many; the guesses, in parts of the way from the bound to the best.
GUESSED_ENTRIES = 320_000
GUESSES = (1 / 32, 1 / 8, 1 / 2)

#: Of the time there is: for the bound, before strategies are left out and each time some were.
PRUNING = 0.02

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


def _open(run: Run) -> Any:
    """The reduced graph; proven if nothing can be chosen."""
    problem = _reduced(run, np.zeros(0, np.int8))
    if not problem.feasible:
        run.raise_bound(math.inf)
    return problem


def _reduced(run: Run, allowed: np.ndarray) -> Any:
    """The graph without the strategies that are not ``allowed`` (empty: all are), reduced."""
    graph = run.graph
    problem = kernels.native().Problem(
        graph.first, graph.costs, graph.usages, graph.intervals[:, 0], graph.intervals[:, 1], graph.ends[:, 0],
        graph.ends[:, 1], graph.places, graph.edge_costs, graph.limit, run.forbidden, run.reductions, allowed,
    )  # fmt: skip
    if problem.feasible:
        run.log.append(", ".join(f"{value} {key}" for key, value in problem.sizes().items()))
    return problem


def _climb(run: Run, problem: Any, seconds: float, steps: int) -> None:
    """Raise the bound of the whole graph."""
    _ascend(run, problem, seconds, steps, run.raise_bound)


def _ascend(run: Run, problem: Any, seconds: float, steps: int, found: Callable[[float], None]) -> None:
    """Raise a bound until it no longer moves or the time is spent; ``found`` is told of it."""
    end = time.perf_counter() + min(seconds, run.left)
    while steps > 0 and not problem.converged and (left := end - time.perf_counter()) > 0:
        before = problem.cost
        steps -= problem.ascend(min(SLICE_SECONDS, left), steps)
        if problem.cost < before:
            run.offer(problem.choice())
        found(problem.bound)
        run.show("bound")


def _walk(run: Run, problem: Any, seconds: float, moves: int, seed: int) -> None:
    """Tree moves from the best choice, in every thread; every thread goes its own way."""
    native = kernels.native()
    walks = [native.Walk(problem, run.seed * 7919 + seed * 101 + number) for number in range(run.threads)]
    for walk in walks:
        walk.start()
    given = max(min(seconds, run.left), 1e-9)
    end = time.perf_counter() + given
    variables = max(problem.sizes()["nodes"], 1)

    def work(number: int) -> None:
        walk, made = walks[number], 0
        while made < moves and (left := end - time.perf_counter()) > 0 and not stop:
            done = made / moves if run.iterations is not None else max(0.0, 1 - left / given)
            weight = max(0.0, 1 - done / PRICED_UNTIL) if walk.feasible else INFEASIBLE_WEIGHT
            heat = WARMEST * (1 + number % 2) * walk.cost / variables if walk.feasible else 0.0
            piece = left if run.iterations is not None else min(SLICE_SECONDS / 2, left)
            made += walk.run(piece, min(1000, moves - made), TREE_SIZE, weight, heat * (1 - done) ** 2)

    stop: list[bool] = []
    try:
        with ThreadPoolExecutor(run.threads) as pool:
            tasks = [pool.submit(work, number) for number in range(run.threads)]
            try:
                while not all(task.done() for task in tasks):
                    time.sleep(0.001)
                    if run.report is not None and (best := min(walk.best_cost for walk in walks)) < run.cost:
                        run.report(Progress(run.seconds, best, run.bound, "search"))
            finally:
                stop.append(True)
    finally:
        for walk in walks:
            if walk.offer(problem):
                run.offer(problem.choice())
    for task in tasks:
        task.result()
    run.raise_bound(run.bound)
    run.show("search")


def _reduce(run: Run) -> None:
    _climb(run, _open(run), run.left, run.iterations or 10**9)


def _local(run: Run) -> None:
    _search(run, _open(run))


def _search(run: Run, problem: Any) -> None:
    """Bound and walks in turn. A long walk that cools slowly finds more than several short ones."""
    left, steps = run.left, max(1, (run.iterations or 10**9) // len(ROUNDS))
    for seed, (climb, walk) in enumerate(ROUNDS):
        _climb(run, problem, climb * left, steps)
        _walk(run, problem, walk * left, steps * MOVES_PER_STEP, seed)


def _auto(run: Run) -> None:
    problem = _open(run)
    if problem.sizes()["entries"] > 20 * MILP_ENTRIES:
        _search(run, problem)
    else:
        _prove(run, problem)


def _milp(run: Run) -> None:
    _prove(run, _open(run), most_entries=10**9)


def _prove(run: Run, problem: Any, most_entries: int = MILP_ENTRIES) -> None:
    """Strategies that no better choice can have are left out, again and again; the rest goes to the integer program."""
    steps = (run.iterations or 10**9) // 4
    _climb(run, problem, PRUNING * run.time_limit_seconds, max(steps, 1))
    size = min(1.0, problem.sizes()["entries"] / MILP_ENTRIES)  # small graphs are better off with the integer program
    _walk(run, problem, 0.05 * size * run.time_limit_seconds, max(steps, 1) * MOVES_PER_STEP, 0)
    full = problem
    problem, possible = _prune(run, problem, run.cost - 1)
    if not possible:
        run.raise_bound(math.inf)
    if problem.sizes()["entries"] <= most_entries:
        _integer_program(run, problem, run.left)
    else:
        _guess(run, problem)
    if run.left > 0:
        _search(run, full)


def _prune(run: Run, problem: Any, most: float) -> tuple[Any, bool]:
    """The graph without strategies that no choice of at most ``most`` has, and whether any such choice may exist."""
    steps = max((run.iterations or 10**9) // 4, 1)
    allowed = np.ones(len(run.graph.costs), dtype=np.int8)
    while True:
        keep = allowed & problem.promising(most + 1e-6)
        if keep.sum() == allowed.sum() or run.left <= 0:
            return problem, True
        before, allowed = problem.sizes()["entries"], keep
        problem = _reduced(run, allowed)
        if not problem.feasible:
            return problem, False
        if math.isfinite(most):
            problem.cost = float(most)
        if problem.sizes()["entries"] > 0.98 * before:
            return problem, True
        _ascend(
            run, problem, PRUNING * run.time_limit_seconds, steps, lambda bound: run.raise_bound(min(bound, most + 1))
        )


def _guess(run: Run, problem: Any) -> None:
    """Too large for the integer program: guess that the least cost is near the bound, and leave out what that forbids.

    A guess that is too low gives a better bound, and often a good choice all the same.
    """
    for share in GUESSES:
        guess = math.floor(run.bound + share * (run.cost - run.bound if math.isfinite(run.cost) else run.bound))
        if guess >= run.cost - 1 or run.left <= 0:
            return
        guessed, possible = _prune(run, problem, guess)
        if not possible:
            run.raise_bound(guess)
        elif guessed.sizes()["entries"] <= GUESSED_ENTRIES:
            _integer_program(run, guessed, run.left, guess)
        else:
            return


def _integer_program(run: Run, problem: Any, seconds: float, most: float = math.inf) -> None:
    """Solve what is left, which has every choice that costs at most ``most`` and less than the best."""
    # PuLP takes longer to import than most graphs take to solve.
    from fxpar.solver.graph_milp import Remainder, prove

    run.show("integer program")
    proof = prove(Remainder.of(problem.program()), min(run.cost, float(run.forbidden)), seconds)
    if proof.choice is not None:
        run.offer(problem.expand(proof.choice))
    run.raise_bound(min(proof.bound + 1e-9 * abs(proof.bound), most))
    run.show("integer program")


def _exhaustive(run: Run) -> None:
    count = math.prod(run.graph.counts.tolist())
    if count > MAX_COMBINATIONS:
        raise SolverError(f"{count} combinations are too many to try; take 'auto'")
    for choice in product(*map(range, run.graph.counts.tolist())):
        run.offer(choice)
    raise Proven


METHODS: dict[str, Callable[[Run], None]] = {
    "auto": _auto,
    "milp": _milp,
    "reduce": _reduce,
    "local": _local,
    "exhaustive": _exhaustive,
}
