"""Repeated parts of strategy graphs: the hash against networkx's, and searches that start from one copy."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar import kernels
from fxpar.errors import InfeasibleError
from fxpar.solver.engine import FORBIDDEN, solve
from fxpar.solver.folding import colours, folded
from fxpar.solver.strategy_graph import StrategyGraph, evaluate

needs_native = pytest.mark.skipif(kernels.DEFAULT != "native", reason="the native core was not built")


def alike(seed: int, nodes: int = 12) -> StrategyGraph:
    """A random graph in which many things are the same."""
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, 2, nodes)
    costs = [[[4, 1], [2, 2]][kind] for kind in kinds]
    usages = [[[1, 6], [1, 3]][kind] for kind in kinds]
    pairs = sorted({(int(a), int(b)) for a, b in draw.integers(0, nodes, (nodes + 2, 2)) if a != b})
    tables = [[0, 3, 5, 0], [1, 0, 0, 1]]
    edges = [(a, b, tables[draw.integers(0, 2)]) for a, b in pairs if (b, a) not in pairs or a < b]
    return StrategyGraph.of(costs, usages, [[0, 4]] * nodes, edges, 3 * nodes)


def reference(graph: StrategyGraph, rounds: int) -> list[str]:
    """networkx's hashes; every edge is a node between its ends, which tells them apart, so it takes two rounds."""
    whole = nx.Graph()
    for node in range(graph.nodes):
        part = slice(graph.first[node], graph.first[node + 1])
        whole.add_node(node, label=f"{graph.costs[part]} {graph.usages[part]}")
    for edge, (tail, head) in enumerate(graph.ends.tolist()):
        whole.add_node(("edge", edge), label=f"{graph.edge_costs[graph.places[edge] : graph.places[edge + 1]]}")
        whole.add_edge(tail, ("edge", edge), label="tail")
        whole.add_edge(head, ("edge", edge), label="head")
    hashes = nx.weisfeiler_lehman_subgraph_hashes(whole, "label", "label", iterations=2 * rounds)
    return [hashes[node][-1] for node in range(graph.nodes)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_colours_are_those_of_networkx(seed: int, rounds: int) -> None:
    graph = alike(seed)
    ours, theirs = colours(graph, rounds), reference(graph, rounds)
    assert len(set(zip(ours.tolist(), theirs, strict=True))) == len(set(theirs)) == len(set(ours.tolist()))


@needs_native
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_the_folded_graph_gives_copies_the_same_strategy(seed: int) -> None:
    graph = alike(seed, 8)
    colour = colours(graph)
    try:
        found = solve(folded(graph, colour))
    except InfeasibleError:
        return
    choice = np.array(found.choice)
    assert all(len(set(choice[colour == one])) == 1 for one in set(colour.tolist()))
    check = evaluate(graph, choice)
    assert check.feasible and check.cost == found.cost >= solve(graph, method="exhaustive").cost


@needs_native
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_choice_is_adopted_by_the_reduced_graph(seed: int) -> None:
    """Also where its strategies were left out because others are at least as good."""
    graph = alike(seed, 9)
    draw = np.random.default_rng(seed)
    problem = kernels.native().Problem(
        graph.first, graph.costs, graph.usages, graph.intervals[:, 0], graph.intervals[:, 1], graph.ends[:, 0],
        graph.ends[:, 1], graph.places, graph.edge_costs, graph.limit, FORBIDDEN, True, np.zeros(0, np.int8),
    )  # fmt: skip
    choices = draw.integers(0, 2, (20, graph.nodes))
    within = [choice for choice in choices if evaluate(graph, choice).feasible]
    for choice in within:
        assert problem.adopt(choice.tolist())
        taken = evaluate(graph, problem.choice())
        assert taken.feasible and taken.cost == problem.cost <= evaluate(graph, choice).cost


@needs_native
def test_a_graph_of_copies_starts_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpar.solver.engine.FOLDED_NODES", 4)
    draw = np.random.default_rng(5)
    block = [draw.integers(0, 30, 9).tolist() for _ in range(4)]
    costs, usages = draw.integers(0, 30, (4, 3)).tolist(), [[9, 4, 1]] * 4
    edges = []
    for copy in range(12):
        at = 4 * copy
        edges += [(at + a, at + b, block[a]) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))]
        edges += [(at - 1, at, block[3])] * (copy > 0) + [(at - 2, at + 1, block[1])] * (copy > 0)
    graph = StrategyGraph.of(costs * 12, usages * 12, [[at, at + 9] for at in range(48)], edges, 40)
    found = solve(graph)
    assert any(line.startswith("folded: ") for line in found.log)
    check = evaluate(graph, found.choice)
    assert check.feasible and check.cost == found.cost
    monkeypatch.setattr("fxpar.solver.engine.FOLDED", 0.0)
    assert found.status == "optimal" and solve(graph).cost == found.cost
