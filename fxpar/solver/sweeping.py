"""Lower bounds of a priced program: which variable is visited when, and how prices of bytes enter.

In: a :class:`~fxpar.solver.problem.CostTable`. Out: :class:`Sweeps`, over :class:`fxpar.tree_kernels.Bounds`.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from fxpar import tree_kernels
from fxpar.cost.trees import Arcs
from fxpar.solver.problem import CostTable

#: A tree with more leaves than this is bounded by its parts, each with a share of its seconds.
MAX_LEAVES = 5


class Sweeps:
    """A lower bound that grows with every pair of sweeps; a consumer counts as often as it reads a value.

    ``bound`` is that of the last pair, at the ``prices`` of a byte of each row; ``excess`` has, for each choice, about
    how far above it a total must be that has the choice, infinite if it was dropped.
    """

    def __init__(self, problem: CostTable, implementation: str | None = None) -> None:
        self.problem = problem
        self.order = program_order(problem)
        self.place = [0] * len(self.order)
        for at, number in enumerate(self.order):
            self.place[number] = at
        self.prices = np.zeros(problem.rows)
        self.bound = -math.inf
        self.bounds = tree_kernels.bounds([problem.variables[number].costs for number in self.order], implementation)
        self.graphs: list[tuple[int, Arcs, float]] = []
        self._fill()

    def _fill(self) -> None:
        known: dict[tuple[int, float], int] = {}
        for factor in self.problem.factors:
            if not factor.is_tree:
                self.bounds.add_table([self.place[number] for number in factor.variables], factor.values)
                continue
            leaves = [
                (number, np.ascontiguousarray(column))
                for number, states in zip(factor.variables[1:], factor.states[1:], strict=True)
                for column in states.reshape(len(states), -1).T
            ]
            parts = max(1, -(-len(leaves) // MAX_LEAVES))
            arcs, weight = factor.conversions, factor.weight / parts
            key = (id(arcs), weight)
            if key not in known:
                known[key] = self.bounds.add_graph(arcs.start, arcs.ends, weight * arcs.seconds)
                self.graphs.append((known[key], arcs, weight))
            for part in range(parts):
                some = [(factor.variables[0], factor.states[0]), *leaves[part::parts]]
                self.bounds.add_tree(
                    known[key], [self.place[number] for number, _ in some], [states for _, states in some]
                )

    def price(self, prices: np.ndarray) -> None:
        """Let a byte of each row cost so many seconds; what has been learnt so far is kept."""
        more = prices - self.prices
        for at, number in enumerate(self.order):
            held = self.problem.variables[number].bytes
            if held is not None:
                self.bounds.add_costs(at, more @ held)
        for graph, arcs, weight in self.graphs:
            if arcs.bytes is not None:
                self.bounds.set_costs(graph, weight * arcs.priced(prices).seconds)
        self.prices, self.bound = prices, -math.inf

    def pair(self, limit: float = math.inf) -> float:
        """Sweep forth and back, drop choices without totals up to ``limit``; by how much the bound has grown."""
        self.bounds.sweep(limit, False)
        before, self.bound = self.bound, self.bounds.sweep(limit, True)
        return self.bound - before

    def excess(self) -> list[np.ndarray]:
        """By variable of the problem."""
        found = self.bounds.excess()
        return [found[at] for at in self.place]


def program_order(problem: CostTable) -> list[int]:
    """Variables, producers before consumers and otherwise by number; cycles are cut where they close first."""
    after: list[list[int]] = [[] for _ in problem.variables]
    read: set[int] = set()
    for factor in problem.factors:
        if factor.is_tree:
            after[factor.variables[0]] += factor.variables[1:]
            read.update(factor.variables[1:])
    starts = sorted(range(len(after)), key=lambda variable: (variable in read, variable), reverse=True)
    finished: dict[int, int] = {}  # by depth first search: an arc to one that is finished later closes a cycle
    for start in starts:
        todo = [(start, iter(after[start]))]
        seen = set() if start in finished else {start}
        while seen and todo:
            variable, rest = todo[-1]
            following = next((other for other in rest if other not in finished and other not in seen), None)
            if following is None:
                finished[variable] = len(finished)
                todo.pop()
            else:
                seen.add(following)
                todo.append((following, iter(after[following])))
    waiting = [0] * len(after)
    forward = [[other for other in row if finished[other] < finished[variable]] for variable, row in enumerate(after)]
    for row in forward:
        for other in row:
            waiting[other] += 1
    ready = [variable for variable, count in enumerate(waiting) if not count]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for other in forward[order[-1]]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    return order
