"""A strategy graph: nodes with strategies that cost and hold memory for a while, edges with cost matrices, one limit.

In: the JSON of the ASPLOS 2025 contest on intra-operator parallelism, or lists. Out: :class:`StrategyGraph`, and what a
choice of strategies costs and holds. Finding a choice is :mod:`fxpar.solver.engine`'s.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fxpar.errors import SolverError

#: Larger costs and usages are refused: two of them must fit into 64 bits.
MAX_COST = 2**61


@dataclass(frozen=True, eq=False)
class StrategyGraph:
    """Choose one strategy for every node: least cost, with the summed usage within ``limit`` at every moment.

    Node ``i`` has ``counts[i]`` strategies; ``costs`` and ``usages`` list those of all nodes, one node after another.
    Its usage is held at the moments ``intervals[i, 0] <= t < intervals[i, 1]``. Edge ``e`` joins the nodes
    ``ends[e]``; ``edge_costs`` lists the matrices of all edges, each row by row over the first node's strategies.
    All are ``int64``.
    """

    counts: np.ndarray
    costs: np.ndarray
    usages: np.ndarray
    intervals: np.ndarray
    ends: np.ndarray
    edge_costs: np.ndarray
    limit: int

    @classmethod
    def of(
        cls,
        costs: Sequence[Sequence[int]],
        usages: Sequence[Sequence[int]],
        intervals: Sequence[Sequence[int]],
        edges: Sequence[tuple[int, int, Sequence[int]]] = (),
        limit: int = MAX_COST,
    ) -> StrategyGraph:
        """A graph from lists; ``edges`` has ``(node, node, matrix row by row)``.

        Raises :class:`SolverError` naming the node or edge that does not fit.

        >>> StrategyGraph.of([[3, 1], [0, 0]], [[0, 5], [0, 0]], [[0, 9], [0, 9]], [(0, 1, [0, 7, 7, 0])]).counts
        array([2, 2])
        """
        nodes = {"costs": costs, "usages": usages, "intervals": intervals}
        lists = {"nodes": [list(edge[:2]) for edge in edges], "costs": [edge[2] for edge in edges]}
        return _graph({"problem": {"nodes": nodes, "edges": lists, "usage_limit": limit}}, "the graph")

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.counts)

    @property
    def edges(self) -> int:
        """The number of edges; several may join the same two nodes."""
        return len(self.ends)

    @cached_property
    def first(self) -> np.ndarray:
        """Where each node's strategies begin in ``costs``, and at the end the total ``[nodes + 1]``."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @cached_property
    def places(self) -> np.ndarray:
        """Where each edge's matrix begins in ``edge_costs``, and at the end the total ``[edges + 1]``."""
        sizes = self.counts[self.ends[:, 0]] * self.counts[self.ends[:, 1]]
        return np.concatenate([[0], np.cumsum(sizes)])


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs, the most it holds at once, the first moment of that, and whether it is within the limit."""

    cost: int
    peak: int
    moment: int
    feasible: bool


def evaluate(graph: StrategyGraph, choice: Sequence[int] | np.ndarray) -> Evaluation:
    """What a choice of one strategy per node costs and holds, in exact integers.

    Raises :class:`SolverError` if it is not one strategy for every node.

    >>> graph = StrategyGraph.of([[3, 1], [0, 0]], [[0, 5], [2, 2]], [[0, 9], [4, 6]], [(0, 1, [0, 7, 7, 0])], 6)
    >>> evaluate(graph, [1, 1])
    Evaluation(cost=1, peak=7, moment=4, feasible=False)
    """
    picked = np.asarray(choice, dtype=np.int64)
    if picked.shape != graph.counts.shape:
        raise SolverError(f"a choice of {len(picked)} strategies for {graph.nodes} nodes")
    wrong = np.flatnonzero((picked < 0) | (picked >= graph.counts))
    if len(wrong):
        node = int(wrong[0])
        raise SolverError(f"node {node} has {graph.counts[node]} strategies; strategy {picked[node]} was chosen")
    at = graph.first[:-1] + picked
    rows, columns = picked[graph.ends[:, 0]], picked[graph.ends[:, 1]]
    entries = graph.places[:-1] + rows * graph.counts[graph.ends[:, 1]] + columns
    cost = _sum(graph.costs[at]) + _sum(graph.edge_costs[entries])
    change: dict[int, int] = {}
    for (start, end), usage in zip(graph.intervals.tolist(), graph.usages[at].tolist(), strict=True):
        if start < end:
            change[start] = change.get(start, 0) + usage
            change[end] = change.get(end, 0) - usage
    used, peak, moment = 0, 0, 0
    for time in sorted(change):
        used += change[time]
        if used > peak:
            peak, moment = used, time
    return Evaluation(cost, peak, moment, peak <= graph.limit)


def _sum(values: np.ndarray) -> int:
    """The sum in Python's integers; halves of 32 bits add up without overflow."""
    low, high = values & 0xFFFFFFFF, values >> 32
    return int(low.sum()) + (int(high.sum()) << 32)


def read_graph(path: str | Path) -> StrategyGraph:
    """Read a graph in the contest's format, gzipped if the name ends in ``.gz``.

    Raises :class:`SolverError` naming the place that is wrong, and :class:`OSError` if the file cannot be read.
    """
    path = Path(path)
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SolverError(f"{path} is not JSON: {error.msg}, line {error.lineno}, column {error.colno}") from None
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SolverError(f"{path} cannot be read: {error}") from None
    return _graph(data, str(path))


def _graph(data: Any, source: str) -> StrategyGraph:
    problem = _part(data, "problem", dict, source, "")
    nodes, edges = (_part(problem, key, dict, source, "problem.") for key in ("nodes", "edges"))
    costs, usages, spans = (
        _part(nodes, key, list, source, "problem.nodes.") for key in ("costs", "usages", "intervals")
    )
    ends, matrices = (_part(edges, key, list, source, "problem.edges.") for key in ("nodes", "costs"))
    limit = problem.get("usage_limit", MAX_COST)
    if type(limit) is not int or not 0 <= limit <= MAX_COST:
        raise SolverError(f"{source}: problem.usage_limit is {limit!r}; it must be a whole number of bytes from 0")
    if not costs:
        raise SolverError(f"{source}: problem.nodes.costs is empty; a graph needs a node")
    for key, rows in (("usages", usages), ("intervals", spans)):
        if len(rows) != len(costs):
            raise SolverError(f"{source}: problem.nodes.{key} has {len(rows)} entries for {len(costs)} nodes")
    if len(ends) != len(matrices):
        raise SolverError(f"{source}: problem.edges.costs has {len(matrices)} matrices for {len(ends)} edges")
    counts = _lengths(costs, source, "problem.nodes.costs")
    wrong = np.flatnonzero((counts == 0) | (counts != _lengths(usages, source, "problem.nodes.usages")))
    if len(wrong):
        node = int(wrong[0])
        raise SolverError(f"{source}: node {node} has {counts[node]} costs and {len(usages[node])} usages")
    pairs = _pairs(ends, source, "problem.edges.nodes", len(costs))
    sizes = _lengths(matrices, source, "problem.edges.costs")
    if len(pairs):
        wrong = np.flatnonzero(sizes != counts[pairs[:, 0]] * counts[pairs[:, 1]])
        if len(wrong):
            edge = int(wrong[0])
            shape = " x ".join(str(counts[node]) for node in pairs[edge])
            raise SolverError(
                f"{source}: problem.edges.costs[{edge}] has {sizes[edge]} entries; "
                f"nodes {pairs[edge].tolist()} need {shape}"
            )
    return StrategyGraph(
        counts,
        _numbers(costs, source, "problem.nodes.costs"),
        _numbers(usages, source, "problem.nodes.usages"),
        _pairs(spans, source, "problem.nodes.intervals", None),
        pairs,
        _numbers(matrices, source, "problem.edges.costs"),
        limit,
    )


def _part(data: Any, key: str, kind: type, source: str, where: str) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        word = "an object" if kind is dict else "a list"
        raise SolverError(f"{source}: {where}{key} is missing or not {word}")
    return data[key]


def _lengths(rows: Sequence[Any], source: str, where: str) -> np.ndarray:
    for number, row in enumerate(rows):
        if not isinstance(row, (list, tuple)):
            raise SolverError(f"{source}: {where}[{number}] is {row!r}, not a list")
    return np.array([len(row) for row in rows], dtype=np.int64)


def _numbers(rows: Sequence[Sequence[Any]], source: str, where: str) -> np.ndarray:
    """All rows in one array; each entry must be an integer from 0 to :data:`MAX_COST`."""
    flat = [entry for row in rows for entry in row]
    if set(map(type, flat)) <= {int} and (not flat or (min(flat) >= 0 and max(flat) <= MAX_COST)):
        return np.array(flat, dtype=np.int64)
    for number, row in enumerate(rows):
        for place, entry in enumerate(row):
            if type(entry) is not int or not 0 <= entry <= MAX_COST:
                raise SolverError(
                    f"{source}: {where}[{number}][{place}] is {entry!r}; it must be an integer from 0 to 2^61"
                )
    raise AssertionError("unreachable: some entry was found wrong")


def _pairs(rows: Sequence[Any], source: str, where: str, below: int | None) -> np.ndarray:
    """Pairs of integers ``[n, 2]``; from 0, and below ``below`` if it is given."""
    for number, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) or len(row) != 2 or any(type(entry) is not int for entry in row):
            raise SolverError(f"{source}: {where}[{number}] is {row!r}; it must be two integers")
        if min(row) < 0 or max(row) > MAX_COST:
            raise SolverError(f"{source}: {where}[{number}] is {list(row)}; times and nodes count from 0")
        if below is not None and max(row) >= below:
            raise SolverError(f"{source}: {where}[{number}] is {list(row)}, but there are only nodes 0 to {below - 1}")
    return np.array(rows, dtype=np.int64).reshape(-1, 2)
