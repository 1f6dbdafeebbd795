"""Random small priced programs, and brute-force answers, for the tests of trees and solvers."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from fxpar.solver import CostTable, Factor, Variable


@st.composite
def arc_costs(draw, most=5):
    """Costs between 2 to ``most`` states: small whole numbers (many ties), some infinite, or any floats."""
    size = draw(st.integers(2, most))
    seed = draw(st.integers(0, 2**32 - 1))
    return random_arcs(np.random.default_rng(seed), size, whole=draw(st.booleans()))


def random_arcs(random, size, whole=False):
    arcs = random.integers(1, 6, (size, size)).astype(float) if whole else random.random((size, size))
    arcs[random.random((size, size)) < 0.15] = np.inf
    np.fill_diagonal(arcs, 0.0)
    return arcs


def brute_force_tree(arcs, src, targets):
    """The cheapest arborescence by trying every parent of every node."""
    size, best = len(arcs), np.inf
    nodes = [node for node in range(size) if node != src]
    for parents in product(range(-1, size), repeat=len(nodes)):
        parent = dict(zip(nodes, parents, strict=True))
        cost = sum(arcs[above, node] for node, above in parent.items() if above >= 0)
        if cost < best and all(_reaches(parent, src, target) for target in targets):
            best = cost
    return best


def _reaches(parent, src, node):
    seen = set()
    while node != src:
        if node in seen or parent[node] < 0:
            return False
        seen.add(node)
        node = parent[node]
    return True


@st.composite
def programs(draw, variables=5, choices=3, factors=5):
    """A program of up to ``variables`` variables, with plain tables, trees with several readers, and infinities."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, variables))
    number = draw(st.integers(0, factors))
    return random_program(random, count, choices, number, infinite=draw(st.sampled_from([0.0, 0.1])))


def random_program(random, count, choices, factors, infinite=0.0):
    sizes = random.integers(1, choices + 1, count)
    table = []
    for size in sizes:
        costs = random.random(size)
        costs[random.random(size) < infinite] = np.inf
        table.append(costs)
    joined = []
    for _ in range(factors):
        scope = tuple(int(v) for v in random.permutation(count)[: random.integers(1, 5)])
        if random.random() < 0.4 or len(scope) == 1:
            values = random.random([sizes[v] for v in scope])
            values[random.random(values.shape) < infinite] = np.inf
            joined.append(Factor(scope, values))
        else:
            arcs = random_arcs(random, random.integers(2, 5))
            reads = [random.integers(1, 3) for _ in scope]
            states = [random.integers(0, len(arcs), (sizes[v], n)) for v, n in zip(scope, reads, strict=True)]
            states = [states[0][:, 0], *(s[:, 0] if s.shape[1] == 1 else s for s in states[1:])]
            joined.append(Factor(scope, arcs=arcs, states=tuple(states), weight=float(random.integers(1, 4))))
    return CostTable(tuple(Variable(f"v{i}", costs) for i, costs in enumerate(table)), tuple(joined))


def transformer(blocks, seed=0):
    """A program with the shape of a transformer: 13 variables and 13 trees per block."""
    random = np.random.default_rng(seed)
    arcs = random.random((8, 8))
    np.fill_diagonal(arcs, 0.0)
    variables, factors = [], []

    def decide(count):
        variables.append(Variable(f"v{len(variables)}", random.random(count) * 0.3))
        return len(variables) - 1

    def flow(*scope):
        states = tuple(random.integers(0, 8, len(variables[number].costs)) for number in scope)
        factors.append(Factor(scope, arcs=arcs, states=states))

    stream = decide(6)
    for _ in range(blocks):
        norm, add, query, key, value, attend, out = (decide(count) for count in (5, 6, 6, 6, 6, 6, 7))
        rotated = decide(5), decide(5)
        flow(stream, norm, add)
        flow(norm, query, key, value)
        for projection in (query, key, value, out):
            flow(decide(4), projection)
        for before, after in ((query, rotated[0]), (key, rotated[1])):
            flow(before, after)
        for before in (*rotated, value):
            flow(before, attend)
        flow(attend, out)
        flow(out, add)
        stream = add
    return CostTable(tuple(variables), tuple(factors))
