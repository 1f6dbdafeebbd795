"""The native kernels equal their numpy reference to the last bit, and are faster."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import random_arcs, random_program

from fxpar import kernels
from fxpar.errors import SolverError
from fxpar.solver import elimination

native = pytest.mark.skipif(kernels._native is None, reason="the extension is not built")
SEEDS = st.integers(0, 2**32 - 1)


@native
@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(1, 8), st.integers(0, 8), st.booleans())
def test_conversion_costs_are_equal(seed, size, most, whole):
    random = np.random.default_rng(seed)
    arcs = random_arcs(random, size, whole=whole) * 10.0 ** float(random.integers(-9, 9))
    targets = random.permutation(size)[: random.integers(0, size + 1)]
    both = [kernels.conversion_costs(arcs, most, targets, which) for which in ("numpy", "native")]
    assert both[0].shape == (size, 2 ** len(targets)) and (both[0] == both[1]).all()


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
def test_conversion_costs_are_faster():
    arcs = random_arcs(np.random.default_rng(0), 12)
    numpy, native = (
        _best(lambda which=which: kernels.conversion_costs(arcs, 5, range(12), which)) for which in ("numpy", "native")
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
    with pytest.raises(IndexError):
        kernels._native.conversion_costs(np.zeros((2, 2)), 1, [2])


def test_an_unknown_implementation_is_refused():
    with pytest.raises(SolverError, match="'fortran' is not available"):
        kernels.conversion_costs(np.zeros((2, 2)), 1, [0], "fortran")
