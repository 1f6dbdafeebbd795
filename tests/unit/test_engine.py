"""Strategies for strategy graphs: every method against exhaustive search, and what is promised of answers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar import kernels
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver.engine import METHODS, Progress, solve
from fxpar.solver.strategy_graph import StrategyGraph, evaluate, read_graph

CONTEST = Path(__file__).parents[3] / "shared/data/iopddl"
SENTINEL = 10**18

pytestmark = pytest.mark.skipif(kernels.DEFAULT != "native", reason="the native core was not built")


@st.composite
def graphs(draw: st.DrawFn, most_nodes: int = 8) -> StrategyGraph:
    """Up to 8 nodes of up to 4 strategies; equality edges, forbidden entries, parallel edges and loops among them."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most_nodes))
    small = st.integers(0, 12)

    def several(entry: st.SearchStrategy[int], count: int) -> list[int]:
        return draw(st.lists(entry, min_size=count, max_size=count))

    costs = [several(small, count) for count in counts]
    usages = [several(small, count) for count in counts]
    intervals = [sorted(several(st.integers(0, 6), 2)) for _ in counts]
    edges = []
    for _ in range(draw(st.integers(0, 12))):
        a, b = several(st.integers(0, len(counts) - 1), 2)
        if draw(st.booleans()) and counts[a] == counts[b]:
            edges.append((a, b, [0 if i == j else SENTINEL for i in range(counts[a]) for j in range(counts[b])]))
        else:
            entry = st.one_of(small, st.just(0), st.just(SENTINEL))
            edges.append((a, b, several(entry, counts[a] * counts[b])))
    return StrategyGraph.of(costs, usages, intervals, edges, draw(st.integers(0, 40)))


def optimum(graph: StrategyGraph) -> float:
    """The least cost within the limit; infinite if there is none."""
    try:
        return solve(graph, method="exhaustive").cost
    except InfeasibleError:
        return math.inf


def chain(nodes: int = 16, limit: int = 150) -> StrategyGraph:
    """A graph too large to try everything on: a ladder of nodes that trade cost for memory."""
    draw = np.random.default_rng(3)
    rows = draw.integers(0, 50, (nodes, 4)).tolist()
    usages = [sorted(row, reverse=True) for row in draw.integers(0, 30, (nodes, 4)).tolist()]
    spans = [[at, at + 12] for at in range(nodes)]
    ends = [(at, at + step) for at in range(nodes) for step in (1, 3) if at + step < nodes]
    edges = [(a, b, draw.integers(0, 80, 16).tolist()) for a, b in ends]
    return StrategyGraph.of(rows, usages, spans, edges, limit)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from(["auto", "milp"]), st.booleans())
def test_optimal_equals_exhaustive_search(graph: StrategyGraph, method: str, reductions: bool) -> None:
    best = optimum(graph)
    if math.isinf(best):
        with pytest.raises(InfeasibleError, match="proven"):
            solve(graph, method=method, iterations=200, reductions=reductions)
        return
    found = solve(graph, method=method, iterations=200, reductions=reductions)
    assert found.status == "optimal"
    assert found.cost == found.bound == best
    check = evaluate(graph, found.choice)
    assert check.feasible and check.cost == found.cost


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from(["local", "reduce"]), st.booleans())
def test_search_without_proof_stays_between_bound_and_limit(
    graph: StrategyGraph, method: str, reductions: bool
) -> None:
    best = optimum(graph)
    try:
        found = solve(graph, method=method, iterations=100, reductions=reductions, threads=1)
    except InfeasibleError as error:
        assert math.isinf(best) or "proves nothing" in str(error)
        return
    check = evaluate(graph, found.choice)
    assert check.feasible and check.cost == found.cost
    assert found.bound <= best <= found.cost
    assert found.status != "optimal" or found.cost == best


def test_the_methods_agree_and_the_seed_decides() -> None:
    graph = chain()
    first = solve(graph, method="local", iterations=40, seed=1, threads=2)
    again = solve(graph, method="local", iterations=40, seed=1, threads=2)
    assert (again.choice, again.cost, again.bound) == (first.choice, first.cost, first.bound)
    proven = solve(graph, method="auto", time_limit_seconds=60)
    assert proven.status == "optimal" and proven.cost == proven.bound <= first.cost
    assert evaluate(graph, proven.choice).feasible


def test_more_memory_never_costs_more() -> None:
    costs = [solve(chain(), limit).cost for limit in (110, 150, 190, 10_000)]
    assert costs == sorted(costs, reverse=True)


def test_progress_tells_bound_and_cost() -> None:
    seen: list[Progress] = []
    found = solve(chain(), report=seen.append)
    assert seen and all(step.bound <= found.cost for step in seen)
    assert seen[-1].cost >= found.cost


def test_interruption_gives_the_best_so_far() -> None:
    def interrupt(step: Progress) -> None:
        if math.isfinite(step.cost):
            raise KeyboardInterrupt

    found = solve(chain(), method="local", report=interrupt)
    assert found.status == "interrupted"
    assert evaluate(chain(), found.choice).feasible and found.bound <= found.cost


def test_sums_beyond_64_bits_are_exact() -> None:
    dear = [SENTINEL] * 2
    graph = StrategyGraph.of([dear] * 30, [[0, 0]] * 30, [[0, 0]] * 30, [(0, 1, [SENTINEL] * 4)])
    assert evaluate(graph, [0] * 30).cost == 31 * SENTINEL
    found = solve(graph)
    assert found.cost == 31 * SENTINEL and found.status == "optimal"


def test_forbidden_entries_that_cannot_be_avoided_are_counted() -> None:
    # One of the two edges must be forbidden; the node's own costs decide which.
    edges = [(0, 1, [0, SENTINEL]), (0, 2, [SENTINEL, 0])]
    graph = StrategyGraph.of([[5, 3], [0], [0]], [[0, 0], [0], [0]], [[0, 1]] * 3, edges)
    found = solve(graph)
    assert found.choice[0] == 1 and found.cost == SENTINEL + 3 and found.status == "optimal"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "exhaustive"])
def test_a_limit_that_cannot_be_met_is_said(method: str) -> None:
    with pytest.raises(InfeasibleError, match="5 bytes"):
        solve(StrategyGraph.of([[1, 2]], [[9, 7]], [[0, 3]]), 5, method=method, iterations=10)


def test_what_is_asked_is_checked() -> None:
    graph = StrategyGraph.of([[1]], [[0]], [[0, 0]])
    with pytest.raises(SolverError, match="did you mean 'milp'"):
        solve(graph, method="mlip")
    with pytest.raises(SolverError, match="must be positive"):
        solve(graph, threads=0)
    with pytest.raises(SolverError, match="limit of -1"):
        solve(graph, -1)
    with pytest.raises(SolverError, match="too many to try"):
        solve(chain(), method="exhaustive")


@pytest.mark.skipif(not CONTEST.is_dir(), reason=f"the contest's graphs are not in {CONTEST}")
def test_a_graph_of_the_contest() -> None:
    graph = read_graph(CONTEST / "asplos-2025-iopddl-G.json.gz")
    found = solve(graph, time_limit_seconds=20)
    check = evaluate(graph, found.choice)
    assert check.feasible and check.cost == found.cost
    assert found.bound <= 217039 <= found.cost  # the published optimum
