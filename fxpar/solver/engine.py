"""Find strategies for a strategy graph: exact reductions, bounds by prices on memory, tree moves, an integer program.

In: a :class:`~fxpar.solver.strategy_graph.StrategyGraph` and what may be spent. Out: :class:`Solution`. The stages are
:mod:`fxpar.solver.stages`'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Any

import numpy as np

from fxpar import kernels
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver.folding import colours, folded
from fxpar.solver.proof import MILP_ENTRIES, prove
from fxpar.solver.stages import FORBIDDEN, Progress, Proven, Run, climb, opened, search
from fxpar.solver.strategy_graph import MAX_COST, StrategyGraph, evaluate

__all__ = ["METHODS", "Progress", "Solution", "solve"]


#: No proof is tried on reduced graphs with more matrix entries.
PROVABLE_ENTRIES = 1_200_000

#: Reduced graphs from this size on are folded if at most this share of their nodes differ, for this share of the time.
FOLDED_NODES, FOLDED, FOLDING = 100, 0.5, 0.2

#: The most combinations that ``method="exhaustive"`` tries.
MAX_COMBINATIONS = 1_000_000


@dataclass(frozen=True)
class Solution:
    """A strategy per node, its ``cost``, a lower ``bound`` of every choice, and ``gap`` = (cost - bound) / cost.

    ``status`` is ``"optimal"`` (proven, by the integer program to a relative 1e-9), ``"time limit"``,
    ``"iteration limit"`` or ``"interrupted"``.
    """

    choice: tuple[int, ...]
    cost: int
    bound: float
    gap: float
    status: str
    seconds: float
    log: tuple[str, ...] = ()


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
    prices; ``local`` never builds the integer program; ``exhaustive`` tries everything, and is what ``auto`` does where
    the native core was not built (no other method works without it). With ``iterations`` (steps of
    the bound) and enough time, the answer depends on ``seed`` and ``threads`` alone. An interruption (Ctrl-C) gives
    the best so far. Raises :class:`InfeasibleError` if no choice is within the limit (proven, or none was found: the
    message says which), and :class:`SolverError`.

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
    method = _without_native(graph, method) if kernels.DEFAULT != "native" else method
    run = Run(graph, time_limit_seconds, iterations, seed, threads, reductions, report)
    status = _search(run, method)
    if run.choice is None and status == "optimal" and (relaxed := _tolerant(graph)) is not None:
        run = dataclasses.replace(run, graph=relaxed, bound=0.0, log=[*run.log, "every choice has a forbidden entry"])
        status = _search(run, method)
        if run.choice is not None:
            run.cost = evaluate(graph, run.choice).cost
            run.bound = float(FORBIDDEN)
    if run.choice is None:
        if status == "optimal":
            raise InfeasibleError(f"no choice of strategies is within the limit of {graph.limit} bytes (proven)")
        raise InfeasibleError(
            f"no choice within the limit of {graph.limit} bytes was found in {run.seconds:.1f} s; that proves nothing, "
            "allow more time"
        )
    cost = evaluate(graph, run.choice).cost
    bound = cost if status == "optimal" else min(run.bound, cost)
    return Solution(
        choice=tuple(run.choice.tolist()),
        cost=cost,
        bound=bound,
        gap=(cost - bound) / cost if cost else 0.0,
        status=status,
        seconds=run.seconds,
        log=tuple(run.log),
    )


def _without_native(graph: StrategyGraph, method: str) -> str:
    """Small graphs can be searched in Python."""
    if method == "auto" and math.prod(graph.counts.tolist()) <= MAX_COMBINATIONS:
        return "exhaustive"
    if method != "exhaustive":
        raise SolverError(
            f"a graph of {graph.nodes} nodes with method {method!r} needs fxpar's native core, which was not built; "
            "install fxpar again where a C++17 compiler is (from a checkout: pip install -e .)"
        )
    return method


def _search(run: Run, method: str) -> str:
    try:
        METHODS[method](run)
    except Proven:
        return "optimal"
    except KeyboardInterrupt:
        return "interrupted"
    return "time limit" if run.iterations is None else "iteration limit"


def _tolerant(graph: StrategyGraph) -> StrategyGraph | None:
    """The graph with a cost in place of forbidden entries that is just larger than all others can be together.

    It has the same best choices: those with the fewest forbidden entries, and among them the cheapest. ``None`` if
    nothing is forbidden. Raises :class:`SolverError` if that cannot be said in 64 bits.
    """
    marks = [graph.costs >= FORBIDDEN, graph.edge_costs >= FORBIDDEN]
    values = np.unique(np.concatenate([graph.costs[marks[0]], graph.edge_costs[marks[1]]]))
    if not len(values):
        return None
    plain = [np.where(mark, 0, costs) for mark, costs in zip(marks, (graph.costs, graph.edge_costs), strict=True)]
    largest = sum(int(np.maximum.reduceat(plain[0], graph.first[:-1])[node]) for node in range(graph.nodes))
    if graph.edges:
        largest += sum(np.maximum.reduceat(plain[1], graph.places[:-1]).tolist())
    dear = largest + 1
    if len(values) > 1 or dear > FORBIDDEN or dear * (graph.nodes + graph.edges) >= FORBIDDEN:
        raise SolverError(
            f"every choice within the limit has an entry of {FORBIDDEN} or more, and such costs differ or are too many "
            "to be added up in 64 bits; divide all costs"
        )
    costs, edge_costs = (np.where(mark, dear, part) for mark, part in zip(marks, plain, strict=True))
    return dataclasses.replace(graph, costs=costs, edge_costs=edge_costs)


def _auto(run: Run) -> None:
    problem = opened(run)
    _fold(run, problem)
    if problem.sizes()["entries"] > PROVABLE_ENTRIES:
        search(run, problem)
    else:
        prove(run, problem, MILP_ENTRIES)


def _fold(run: Run, problem: Any) -> None:
    """Where most of what is left repeats: the best choice that is the same in all copies, to start from."""
    nodes = problem.nodes()
    if len(nodes) < FOLDED_NODES or not run.reductions:
        return
    colour = colours(run.graph)
    if len(np.unique(colour[nodes])) > FOLDED * len(nodes):
        return
    part = dataclasses.replace(
        run, graph=folded(run.graph, colour), time_limit_seconds=run.seconds + FOLDING * run.left, report=None, log=[]
    )
    try:
        rest = opened(part)
        if rest.sizes()["entries"] > PROVABLE_ENTRIES:
            search(part, rest)
        else:
            prove(part, rest, MILP_ENTRIES)
    except Proven:
        pass
    finally:
        run.log += [f"folded: {line}" for line in part.log]
        if part.choice is not None:
            run.offer(part.choice)
            problem.adopt(part.choice.tolist())
            run.show("folded")


def _milp(run: Run) -> None:
    prove(run, opened(run), 10**9)


def _reduce(run: Run) -> None:
    climb(run, opened(run), run.left, run.iterations or 10**9)


def _local(run: Run) -> None:
    search(run, opened(run))


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
