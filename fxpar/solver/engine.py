"""Find strategies for a strategy graph: exact reductions, bounds by prices on memory, tree moves, an integer program.

In: a :class:`~fxpar.solver.strategy_graph.StrategyGraph` and what may be spent. Out: :class:`Solution`. The inner loops
are native (``csrc/search``); which of them runs when is decided here.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from typing import Any

import numpy as np

from fxpar import kernels
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver.strategy_graph import MAX_COST, StrategyGraph, evaluate

#: Costs from here on stand for "forbidden" as long as there is a choice without them.
FORBIDDEN = 10**17

#: The most combinations that ``method="exhaustive"`` tries.
MAX_COMBINATIONS = 1_000_000

#: The integer program is given graphs with at most this many matrix entries.
MILP_ENTRIES = 60_000

#: Native calls return after this long, so that an interruption is noticed and progress can be shown.
SLICE_SECONDS = 0.25

#: Of a limit on iterations: this many moves of the search for each step of the bound.
MOVES_PER_STEP = 100

#: Variables in the trees that a move re-solves, at most.
TREE_SIZE = 60


@dataclass(frozen=True)
class Progress:
    """What is known so far; ``cost`` is infinite while no choice within the limit has been found."""

    seconds: float
    cost: float
    bound: float
    stage: str


@dataclass(frozen=True)
class Solution:
    """A strategy per node, its ``cost``, a lower ``bound`` of every choice, and ``gap`` = (cost - bound) / cost.

    ``status`` is ``"optimal"`` (proven), ``"time limit"``, ``"iteration limit"`` or ``"interrupted"``.
    """

    choice: tuple[int, ...]
    cost: int
    bound: float
    gap: float
    status: str
    seconds: float
    log: tuple[str, ...] = ()


class _Proven(Exception):  # noqa: N818  (not an error: it ends the search)
    """The best choice is optimal."""


@dataclass
class _Run:
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
            raise _Proven

    def show(self, stage: str) -> None:
        if self.report is not None:
            self.report(Progress(self.seconds, self.cost, self.bound, stage))


def solve(
    graph: StrategyGraph,
    limit_bytes: int | None = None,
    *,
    time_limit_seconds: float = 60.0,
    method: str = "auto",
    seed: int = 0,
    threads: int = 2,
    iterations: int | None = None,
    reductions: bool = True,
    report: Callable[[Progress], None] | None = None,
) -> Solution:
    """Strategies of least cost within the memory limit, as good as the time allows, and a bound on how good that is.

    ``limit_bytes`` replaces the graph's own limit. ``method`` is a key of :data:`METHODS`: ``auto`` decides by size;
    ``milp`` gives the reduced graph to the integer program whatever its size; ``reduce`` stops after reductions and
    prices; ``local`` never builds the integer program; ``exhaustive`` tries everything. With ``iterations`` (steps of
    the bound) and enough time, the answer depends on ``seed`` and ``threads`` alone. An interruption (Ctrl-C) gives the
    best so far. Raises :class:`InfeasibleError` if no choice is within the limit (proven, or none was found: the message
    says which), and :class:`SolverError`.

    >>> solve(StrategyGraph.of([[3, 1]], [[0, 5]], [[0, 9]]), 4, method="exhaustive").choice
    (0,)
    """
    if method not in METHODS:
        near = get_close_matches(method, METHODS, n=1)
        raise SolverError(f"there is no method {method!r}; {f'did you mean {near[0]!r}? ' if near else ''}{[*METHODS]}")
    if threads < 1 or time_limit_seconds <= 0 or (iterations is not None and iterations < 1):
        raise SolverError(f"{threads} threads, {time_limit_seconds} s, {iterations} iterations: all must be positive")
    if limit_bytes is not None:
        if not 0 <= limit_bytes <= MAX_COST:
            raise SolverError(f"a limit of {limit_bytes} bytes; it must be from 0 to 2^61")
        graph = dataclasses.replace(graph, limit=int(limit_bytes))
    run = _Run(graph, time_limit_seconds, iterations, seed, threads, reductions, report)
    status = "time limit" if iterations is None else "iteration limit"
    try:
        METHODS[method](run)
    except _Proven:
        status = "optimal"
    except KeyboardInterrupt:
        status = "interrupted"
    if run.choice is None:
        if status == "optimal":
            raise InfeasibleError(f"no choice of strategies is within the limit of {graph.limit} bytes (proven)")
        raise InfeasibleError(
            f"no choice within the limit of {graph.limit} bytes was found in {run.seconds:.1f} s, which proves nothing; "
            "allow more time"
        )
    cost = int(run.cost)
    bound = float(cost) if status == "optimal" else min(run.bound, cost)
    return Solution(
        choice=tuple(run.choice.tolist()),
        cost=cost,
        bound=bound,
        gap=(cost - bound) / cost if cost else 0.0,
        status=status,
        seconds=run.seconds,
        log=tuple(run.log),
    )


def _open(run: _Run, allowed: np.ndarray | None = None) -> Any:
    """The reduced graph; proven if nothing is left of it."""
    native = kernels.native()
    graph = run.graph
    problem = native.Problem(
        graph.first, graph.costs, graph.usages, graph.intervals[:, 0], graph.intervals[:, 1], graph.ends[:, 0],
        graph.ends[:, 1], graph.places, graph.edge_costs, graph.limit, run.forbidden, run.reductions,
        np.zeros(0, np.int8) if allowed is None else allowed,
    )  # fmt: skip
    if not problem.feasible:
        run.raise_bound(math.inf)
    sizes = problem.sizes()
    run.log.append(", ".join(f"{value} {key}" for key, value in sizes.items()))
    if math.isfinite(run.cost):
        problem.cost = float(run.cost)
    return problem


def _climb(run: _Run, problem: Any, seconds: float, steps: int) -> None:
    """Raise the bound until it no longer moves or the time is spent."""
    end = time.perf_counter() + min(seconds, run.left)
    while steps > 0 and not problem.converged and (left := end - time.perf_counter()) > 0:
        before = problem.cost
        steps -= problem.ascend(min(SLICE_SECONDS, left), steps)
        if problem.cost < before:
            run.offer(problem.choice())
        run.raise_bound(problem.bound)
        run.show("bound")


def _walk(run: _Run, problem: Any, seconds: float, moves: int, seed: int) -> None:
    """Tree moves from the best choice, in every thread; every thread goes its own way."""
    native = kernels.native()
    walks = [native.Walk(problem, run.seed * 7919 + seed * 101 + number) for number in range(run.threads)]
    end = time.perf_counter() + min(seconds, run.left)
    for walk in walks:
        walk.start()

    def work(number: int) -> None:
        walk, made, began = walks[number], 0, time.perf_counter()
        while made < moves and (left := end - time.perf_counter()) > 0 and not stop:
            done = (
                made / moves if run.iterations is not None else (time.perf_counter() - began) / max(end - began, 1e-9)
            )
            weight = max(0.0, 1.0 - done / 0.6) if number % 2 and walk.feasible else 0.0 if walk.feasible else 8.0
            warm = 0.0
            made += walk.run(min(SLICE_SECONDS / 2, left), min(1000, moves - made), TREE_SIZE, weight, warm)

    stop: list[bool] = []
    with ThreadPoolExecutor(run.threads) as pool:
        tasks = [pool.submit(work, number) for number in range(run.threads)]
        try:
            while not all(task.done() for task in tasks):
                time.sleep(0.02 if run.iterations is None else 0.001)
                best = min([walk.best_cost for walk in walks] + [run.cost])
                if run.report is not None and best < run.cost:
                    run.report(Progress(run.seconds, best, run.bound, "search"))
        finally:
            stop.append(True)
    for task in tasks:
        task.result()
    for walk in walks:
        if walk.offer(problem):
            run.offer(problem.choice())
    run.raise_bound(run.bound)
    run.show("search")


def _reduce(run: _Run) -> None:
    _climb(run, _open(run), run.left, run.iterations or 10**9)


def _local(run: _Run) -> None:
    _search(run, _open(run))


def _search(run: _Run, problem: Any) -> None:
    """Bound and walks in turn; later rounds are longer."""
    share, seed = 0.12, 0
    steps = max(1, (run.iterations or 10**9) // 4)
    for _ in range(4 if run.iterations is not None else 10**6):
        _climb(run, problem, share * run.time_limit_seconds, steps)
        _walk(run, problem, share * run.time_limit_seconds, steps * MOVES_PER_STEP, seed)
        seed += 1
        if run.left <= 0:
            return


def _auto(run: _Run) -> None:
    problem = _open(run)
    if problem.sizes()["entries"] > 20 * MILP_ENTRIES:
        _search(run, problem)
    else:
        _prove(run, problem)


def _milp(run: _Run) -> None:
    _prove(run, _open(run), most_entries=10**9)


def _prove(run: _Run, problem: Any, most_entries: int = MILP_ENTRIES) -> None:
    """Strategies that no better choice can have are left out, again and again; the rest goes to the integer program."""
    steps = (run.iterations or 10**9) // 4
    _climb(run, problem, 0.05 * run.time_limit_seconds, max(steps, 1))
    _walk(run, problem, 0.05 * run.time_limit_seconds, max(steps, 1) * MOVES_PER_STEP, 0)
    allowed = np.ones(len(run.graph.costs), dtype=np.int8)
    full = problem
    while True:
        keep = allowed & problem.promising(run.cost - 1 + 1e-6 if math.isfinite(run.cost) else math.inf)
        run.raise_bound(problem.bound)
        if keep.sum() == allowed.sum() or run.left <= 0:
            break
        allowed = keep
        problem = _open(run, allowed)
        _climb(run, problem, 0.05 * run.time_limit_seconds, max(steps, 1))
    if problem.sizes()["entries"] <= most_entries:
        _integer_program(run, problem)
    if run.left > 0:
        _search(run, full)


def _integer_program(run: _Run, problem: Any) -> None:
    # PuLP takes longer to import than most graphs take to solve.
    from fxpar.solver.graph_milp import Remainder, prove

    run.show("integer program")
    proof = prove(Remainder.of(problem.program()), min(run.cost, float(run.forbidden)), run.left)
    if proof.choice is not None:
        run.offer(problem.expand(proof.choice))
    run.raise_bound(proof.bound + 1e-9 * abs(proof.bound))
    run.show("integer program")


def _exhaustive(run: _Run) -> None:
    count = math.prod(run.graph.counts.tolist())
    if count > MAX_COMBINATIONS:
        raise SolverError(f"{count} combinations are too many to try; take 'auto'")
    for choice in product(*map(range, run.graph.counts.tolist())):
        run.offer(choice)
    raise _Proven


METHODS: dict[str, Callable[[_Run], None]] = {
    "auto": _auto,
    "milp": _milp,
    "reduce": _reduce,
    "local": _local,
    "exhaustive": _exhaustive,
}
