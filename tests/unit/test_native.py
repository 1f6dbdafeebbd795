"""The native kernels equal their numpy reference to the last bit, and are faster."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import random_arcs, random_program

from fxpar import kernels, tree_kernels
from fxpar.cost.trees import Arcs
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver import elimination, solve
from fxpar.solver.sweeping import Sweeps

native = pytest.mark.skipif(kernels._native is None, reason="the extension is not built")
SEEDS = st.integers(0, 2**32 - 1)


@native
@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(1, 8), st.booleans())
def test_trees_are_equal(seed, size, whole):
    random = np.random.default_rng(seed)
    graph = Arcs.of(random_arcs(random, size, whole=whole) * 10.0 ** float(random.integers(-9, 9))).graph
    sets = [tuple(sorted(random.permutation(size)[: random.integers(0, min(size, 5) + 1)].tolist())) for _ in range(4)]
    roots = random.integers(0, size, 3).tolist()
    both = [tree_kernels.tree_costs(graph, roots, sets, which) for which in ("numpy", "native")]
    assert both[0].shape == (3, 4) and (both[0] == both[1]).all()
    for root, row in zip(roots, both[0], strict=True):
        for whole_set, cost in zip(sets, row, strict=True):
            trees = [tree_kernels.cheapest_tree(graph, root, whole_set, which) for which in ("numpy", "native")]
            assert trees[0] == trees[1] and trees[0][0] == cost


@native
@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(0, 6))
def test_bounds_are_equal_and_below_the_optimum(seed, variables, factors):
    random = np.random.default_rng(seed)
    problem = random_program(random, variables, 4, factors, infinite=0.1)
    try:
        best = solve(problem, method="exhaustive").cost
    except InfeasibleError:
        best = np.inf
    both = [Sweeps(problem, which).bounds for which in ("numpy", "native")]
    for step in range(6):
        limit = np.inf if step < 4 else best * (1 + 1e-9)
        found = [bounds.sweep(limit, step % 2 == 1) for bounds in both]
        assert found[0] == found[1] and (found[0] <= best * (1 + 1e-9) or np.isinf(best))
        assert all((a == b).all() for a, b in zip(*(bounds.excess() for bounds in both), strict=True))
        if np.isinf(found[0]):
            assert np.isinf(best)
            break


@native
@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(1, 8), st.integers(0, 8))
def test_eliminations_are_equal(seed, variables, factors):
    random = np.random.default_rng(seed)
    problem = random_program(random, variables, 4, factors, infinite=0.1)
    flat = elimination.flatten(problem, int(random.integers(0, 100)), 10**6)
    order = random.permutation(len(flat.sizes)).tolist()
    both = [kernels.eliminate(flat.sizes, flat.scopes, flat.tables, order, which) for which in ("numpy", "native")]
    assert both[0] == both[1]


def test_variables_without_tables_and_tables_without_variables():
    for which in ("numpy", *(["native"] if kernels._native else [])):
        assert kernels.eliminate([2, 3], [()], [np.array(5.0)], [1, 0], which) == ([0, 0], 5.0)


@native
def test_trees_are_faster():
    graph = Arcs.of(random_arcs(np.random.default_rng(0), 12)).graph
    sets = list(combinations(range(12), 3))
    numpy, native = (
        _best(lambda which=which: tree_kernels.tree_costs(graph, range(12), sets, which))
        for which in ("numpy", "native")
    )
    assert native * 3 < numpy


def _best(run, times=7):
    best = np.inf
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


@native
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2], [[0]], [np.zeros(3)], [0]), "as many entries"),
        (([2], [[0]], [np.zeros((2, 2))], [0]), "an axis for every variable"),
        (([2], [[1]], [np.zeros(2)], [0]), "unknown variable"),
        (([2, 2], [[0]], [np.zeros(2)], [0, 0]), "every variable once"),
        (([2, 2], [[0]], [np.zeros(2)], [0]), "every variable once"),
        (([2], [[0], [0]], [np.zeros(2)], [0]), "scope for every table"),
        (([0], [], [], [0]), "needs a choice"),
    ],
)
def test_the_extension_checks_what_could_crash(arguments, message):
    with pytest.raises((ValueError, IndexError), match=message):
        kernels._native.eliminate(*arguments)
    one = np.array([0, 1, 1]), np.array([1]), np.ones(1)
    native = kernels._native
    for run, message in [
        (lambda: native.tree_costs(*one, [2], [(0,)]), "not a node"),
        (lambda: native.tree_costs(*one, [0], [(-1,)]), "not a node"),
        (lambda: native.tree_costs(*one, [0], [tuple(range(13))]), "not a node|too many"),
        (lambda: native.cheapest_tree(*one, 0, [2]), "not a node"),
        (lambda: native.tree_costs(one[0], np.array([2]), one[2], [0], [(0,)]), "ends at no node"),
        (lambda: native.tree_costs(one[0], one[1], np.ones(2), [0], [(0,)]), "a cost per arc"),
        (lambda: native.tree_costs(np.array([0, 2, 1]), *one[1:], [0], [(0,)]), "must not fall"),
        (lambda: native.Bounds([[0.0]]).add_tree(0, [0], [[0]]), "range"),
        (lambda: native.Bounds([[0.0]]).add_table([1], np.zeros(1)), "unknown variable"),
        (lambda: native.Bounds([[0.0]]).add_table([0], np.zeros(2)), "another shape"),
        (lambda: native.Bounds([[0.0]]).add_costs(0, [0.0, 0.0]), "a cost per choice"),
    ]:
        with pytest.raises((ValueError, IndexError), match=message):
            run()
    bounds = native.Bounds([[0.0]])
    bounds.add_graph(*one)
    with pytest.raises(IndexError, match="not a node"):
        bounds.add_tree(0, [0, 0], [[0], [2]])


def test_an_unknown_implementation_is_refused():
    with pytest.raises(SolverError, match="'fortran' is not available"):
        kernels.eliminate([1], [(0,)], [np.zeros(1)], [0], "fortran")
