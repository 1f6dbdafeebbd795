"""Repeated parts of a strategy graph: found by a hash of what is around each node, given the same strategies to begin.

In: a :class:`~fxpar.solver.strategy_graph.StrategyGraph`. Out: which nodes look alike, and the graph in which those
take the same strategy: the reductions make one copy of it. A search on that starts the search on the whole.
"""

from __future__ import annotations

import numpy as np

from fxpar.solver.strategy_graph import StrategyGraph

#: How far around a node one looks: parts that repeat differ where the row of them begins and ends.
ROUNDS = 4

#: An entry that the search takes for forbidden.
FORBIDDEN = 10**18


def colours(graph: StrategyGraph, rounds: int = ROUNDS) -> np.ndarray:
    """A number per node ``[nodes]``: the same for nodes that look the same up to ``rounds`` edges away.

    Colours are refined by those of the neighbours, together with the edges' matrices (Weisfeiler and Lehman, 1968). A
    hash of 64 bits may make two colours one; that costs a worse start of the search, never a wrong answer.

    >>> graph = StrategyGraph.of([[3, 1]] * 3, [[0, 0]] * 3, [[0, 9]] * 3, [(0, 1, [0, 7, 7, 0]), (1, 2, [0, 7, 7, 0])])
    >>> [int(colour) for colour in colours(graph, 0)], [int(colour) for colour in colours(graph, 1)]
    ([0, 0, 0], [0, 2, 1])
    """
    own = _mixed(3 * _rows(graph.costs, graph.first) + 5 * _rows(graph.usages, graph.first) + graph.counts.view("u8"))
    edges = _rows(graph.edge_costs, graph.places)
    (tails, heads), hashes = graph.ends.T, own
    for _ in range(rounds):
        around = np.zeros(graph.nodes, dtype=np.uint64)
        np.add.at(around, tails, _mixed(_mixed(edges + np.uint64(1)) + np.uint64(7) * hashes[heads]))
        np.add.at(around, heads, _mixed(_mixed(edges + np.uint64(2)) + np.uint64(11) * hashes[tails]))
        hashes = _mixed(np.uint64(13) * hashes + around)
    return np.unique(hashes, return_inverse=True)[1]


def folded(graph: StrategyGraph, colour: np.ndarray) -> StrategyGraph:
    """The graph with edges that let nodes of one colour take only the same strategy."""
    order = np.argsort(colour, kind="stable")
    alike = np.flatnonzero(colour[order][1:] == colour[order][:-1])
    ties = np.stack([order[alike], order[alike + 1]], axis=1)
    equal = [np.where(np.eye(count, dtype=bool), 0, FORBIDDEN).ravel() for count in graph.counts[ties[:, 0]].tolist()]
    return StrategyGraph(
        graph.counts,
        graph.costs,
        graph.usages,
        graph.intervals,
        np.concatenate([graph.ends, ties]),
        np.concatenate([graph.edge_costs, *equal]),
        graph.limit,
    )


def _rows(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A hash of the numbers from each place to the next; every number counts with its position."""
    sizes = np.diff(places)
    position = np.arange(len(values)) - np.repeat(places[:-1], sizes)
    terms = _mixed(values.view("u8") + np.uint64(0x9E3779B97F4A7C15) * (position + 1).view("u8"))
    return np.add.reduceat(terms, places[:-1]) if len(sizes) else np.zeros(0, dtype=np.uint64)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Numbers of 64 bits, well mixed (the finish of splitmix64; Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
