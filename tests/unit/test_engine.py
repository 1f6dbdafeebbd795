"""Strategies for strategy graphs: every method against exhaustive search, and what is promised of answers."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar import kernels
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver import CostTable, Factor, Variable
from fxpar.solver import solve as solve_program
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


@settings(max_examples=60, deadline=None)
@given(graphs(), st.booleans())
def test_the_search_for_plans_agrees(graph: StrategyGraph, limited: bool) -> None:
    """The same as a program of decisions and tables, with a row of bytes for every moment (or without a limit)."""
    graph = graph if limited else dataclasses.replace(graph, limit=10**6)
    rows = np.arange(7)[:, None]

    def parts(values: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
        return [
            np.where(part >= SENTINEL, np.inf, part)
            for part in np.split(values.astype(float), places[1:-1])
            if len(places) > 1
        ]

    held = [
        usage * ((start <= rows) & (rows < end))
        for usage, (start, end) in zip(np.split(graph.usages, graph.first[1:-1]), graph.intervals, strict=True)
    ]
    variables = [
        Variable(f"v{number}", costs, bytes=usage.astype(float))
        for number, (costs, usage) in enumerate(zip(parts(graph.costs, graph.first), held, strict=True))
    ]
    factors = []
    for (a, b), flat in zip(graph.ends.tolist(), parts(graph.edge_costs, graph.places), strict=True):
        table = flat.reshape(graph.counts[a], graph.counts[b])
        factors.append(Factor((a,), table.diagonal().copy()) if a == b else Factor((a, b), table))
    try:
        found = solve_program(CostTable(tuple(variables), tuple(factors)), limits_bytes=[graph.limit] * 7, gap=0.0).cost
    except InfeasibleError:
        found = math.inf
    best = optimum(graph)
    assert found == (best if best < SENTINEL else math.inf)


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


def contested(nodes: int, strategies: int) -> StrategyGraph:
    """A graph that no method is done with soon: random costs on a random graph, and half of the memory wanted."""
    draw = np.random.default_rng(7)
    costs = draw.integers(0, 1000, (nodes, strategies)).tolist()
    usages = np.sort(draw.integers(0, 500, (nodes, strategies)))[:, ::-1].tolist()
    spans = [[at, at + 20] for at in range(nodes)]
    pairs = sorted({tuple(sorted(pair)) for pair in draw.integers(0, nodes, (3 * nodes, 2)).tolist()})
    edges = [(a, b, draw.integers(0, 1000, strategies**2).tolist()) for a, b in pairs if a != b]
    return StrategyGraph.of(costs, usages, spans, edges, min(nodes, 20) * 200)


STAGES = [
    ("reduce", "bound", 1500, 15),
    ("local", "search", 150, 15),
    ("milp", "integer program", 40, 12),
    ("auto", "branching", 150, 15),
]


@pytest.mark.parametrize(("method", "stage", "nodes", "strategies"), STAGES, ids=[stage for _, stage, *_ in STAGES])
def test_ctrl_c_prints_the_best_so_far(tmp_path: Path, method: str, stage: str, nodes: int, strategies: int) -> None:
    graph = contested(nodes, strategies)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document(graph)))
    command = [sys.executable, "-m", "fxpar", "solve", str(path), "--method", method, "--time-limit", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            lines.append(line)
            if f"({stage})" in line and " feasible" in line.replace("not feasible", ""):
                break
        start = time.perf_counter()
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate(timeout=60)
        taken = time.perf_counter() - start
    assert running.returncode == 0, errors
    *_, summary, choice = rest.splitlines()
    assert summary.startswith("interrupted"), lines[-1] + summary
    assert evaluate(graph, json.loads(choice)).feasible
    assert taken < 20  # about one second on a machine that does nothing else


def document(graph: StrategyGraph) -> dict[str, object]:
    """The graph in the contest's format."""
    nodes = {
        "costs": [part.tolist() for part in np.split(graph.costs, graph.first[1:-1])],
        "usages": [part.tolist() for part in np.split(graph.usages, graph.first[1:-1])],
        "intervals": graph.intervals.tolist(),
    }
    edges = {
        "nodes": graph.ends.tolist(),
        "costs": [part.tolist() for part in np.split(graph.edge_costs, graph.places[1:-1])],
    }
    return {"problem": {"nodes": nodes, "edges": edges, "usage_limit": graph.limit}}


def test_without_the_native_core_small_graphs_are_solved_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    best = solve(chain(4)).cost
    monkeypatch.setattr(kernels, "DEFAULT", "numpy")
    monkeypatch.setattr(kernels, "_native", None)
    assert solve(chain(4)).cost == best
    for method in ("auto", "milp"):
        with pytest.raises(SolverError, match=r"native core, which was not built.*pip install"):
            solve(chain(16), method=method)


def test_strategies_and_pairs_without_room_are_left_out() -> None:
    # Node 0 holds at least 4 of the 10 all the time: neither may node 1 hold 7, nor may nodes 1 and 2 hold 5 and 4.
    usages = [[4, 4], [7, 5, 1], [4, 2]]
    edges = [(0, 1, [0, 3, 5, 2, 0, 1]), (1, 2, [0, 1, 0, 2, 3, 0])]
    graph = StrategyGraph.of([[2, 1], [0, 1, 9], [0, 8]], usages, [[0, 9], [2, 5], [4, 6]], edges, 10)
    found = solve(graph)
    assert found.status == "optimal" and found.cost == solve(graph, method="exhaustive").cost
    assert ", 1 oversized" in found.log[0] or ", 2 oversized" in found.log[0]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_splitting_by_memory_proves_the_same(seed: int) -> None:
    """Graphs that would go to the integer program at once are split first."""
    draw = np.random.default_rng(seed)
    nodes = 7
    usages = draw.integers(0, 9, (nodes, 4)).tolist()
    edges = [(a, b, draw.integers(0, 20, 16).tolist()) for a in range(nodes) for b in range(a)]
    graph = StrategyGraph.of(draw.integers(0, 20, (nodes, 4)).tolist(), usages, [[0, 5]] * nodes, edges, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxpar.solver.engine.MILP_ENTRIES", 0)
        found = solve(graph, iterations=2000)
    assert found.status == "optimal" and found.cost == optimum(graph)


def test_parts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = contested(14, 5)
    best = solve(graph)
    monkeypatch.setattr("fxpar.solver.engine.MILP_ENTRIES", 0)
    found = solve(graph)
    assert (found.status, found.cost) == ("optimal", best.cost)
    assert any(line.endswith("parts split or solved, 0 left") and not line.startswith("1 ") for line in found.log)


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
