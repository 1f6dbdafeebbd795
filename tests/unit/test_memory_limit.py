"""A memory limit: what is chosen fits, nothing that fits is faster than the bound, and what cannot fit is said."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from programs import random_arcs

from fxpar import kernels
from fxpar.cost.trees import Arcs
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver import CostTable, Factor, Variable, elimination, fronts, solve
from fxpar.solver.fronts import tree_options
from fxpar.solver.limited import lower_bound
from fxpar.solver.outcomes import at_prices, measured, outcome

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def heavy_program(random, rows):
    """A few variables whose choices hold bytes, and trees some of whose conversions do."""
    count = int(random.integers(1, 5))
    sizes = random.integers(1, 4, count)
    variables = [Variable(f"v{i}", random.random(n), random.integers(0, 9, (rows, n)).astype(float))
                 for i, n in enumerate(sizes)]  # fmt: skip
    factors = []
    for _ in range(random.integers(0, 4)):
        scope = tuple(int(v) for v in random.permutation(count)[: random.integers(1, 4)])
        if len(scope) == 1:
            factors.append(Factor(scope, random.random(sizes[scope[0]])))
            continue
        arcs = Arcs.of(random_arcs(random, random.integers(2, 5)))
        held = random.integers(0, 5, (rows, len(arcs.ends))) * (random.random(len(arcs.ends)) < 0.4)
        arcs = Arcs(arcs.start, arcs.ends, arcs.seconds, held.astype(float))
        states = tuple(random.integers(0, len(arcs), sizes[v]) for v in scope)
        factors.append(Factor(scope, arcs=arcs, states=states, weight=float(random.integers(1, 4))))
    return CostTable(tuple(variables), tuple(factors))


def every_outcome(problem):
    """All choices with all trees that are not beaten."""
    for choice in product(*map(range, problem.counts)):
        options = []
        for factor in problem.factors:
            mine = [choice[number] for number in factor.variables]
            options.append([(None,)] if not factor.is_tree else tree_options(factor.conversions, *factor.ends(mine)))
        for trees in product(*options):
            yield measured(problem, choice, [tree[0] for tree in trees])


#: Neither prices nor mixtures find what fits here: the integer program has to.
@example(2741, 2, 0.5, 0.0)
@SLOW
@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.sampled_from([0.3, 0.5, 0.8, 1.0]), st.sampled_from([0.0, 0.2]))
def test_the_best_that_fits(seed, rows, share, gap):
    random = np.random.default_rng(seed)
    problem = heavy_program(random, rows)
    outcomes = [found for found in every_outcome(problem) if found.seconds < math.inf]
    limits = share * np.max([found.bytes for found in outcomes], axis=0) if outcomes else np.ones(rows)
    best = min((found.seconds for found in outcomes if found.fits(limits)), default=None)
    try:
        found = solve(problem, limits_bytes=limits, gap=gap)
    except InfeasibleError:
        assert best is None
        return
    assert found.bytes == pytest.approx(measured(problem, found.choice, found.trees).bytes)
    assert (np.array(found.bytes) <= limits).all()
    assert found.bound <= best * (1 + 1e-9) and best * (1 - 1e-9) <= found.cost
    assert found.gap <= gap + 1e-6 and found.status in ("optimal", "within gap")


@SLOW
@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.sampled_from([0.5, 0.8, 1.0]))
def test_what_one_search_saw_helps_another_and_bounds_hold_at_any_price(seed, rows, share):
    random = np.random.default_rng(seed)
    problem = heavy_program(random, rows)
    outcomes = [found for found in every_outcome(problem) if found.seconds < math.inf]
    most = share * np.max([found.bytes for found in outcomes], axis=0) if outcomes else np.ones(rows)
    try:
        first = solve(problem, limits_bytes=most, gap=0.0)
    except InfeasibleError:
        return
    assert all(any(found.seconds == pytest.approx(seconds) for found in outcomes) for seconds, _ in first.points)
    limits = random.uniform(0.6, 1.0) * most
    best = min((found.seconds for found in outcomes if found.fits(limits)), default=math.inf)
    assert lower_bound(problem, limits, random.random(rows)) <= best + 1e-9
    assert lower_bound(problem, most, np.array(first.prices)) == pytest.approx(first.dual_bound, rel=1e-4, abs=1e-4)
    try:
        again = solve(problem, limits_bytes=limits, gap=0.0, points=first.points)
    except InfeasibleError:
        assert best == math.inf
        return
    assert again.cost == pytest.approx(best) and again.bound <= best * (1 + 1e-9)
    assert 0 <= again.share < 1


@SLOW
@given(st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_no_tree_is_better_than_its_options(seed, rows):
    """At any prices, the cheapest tree costs as much as the cheapest option."""
    random = np.random.default_rng(seed)
    arcs = Arcs.of(random_arcs(random, random.integers(2, 6)))
    held = random.integers(0, 5, (rows, len(arcs.ends))) * (random.random(len(arcs.ends)) < 0.5)
    arcs = Arcs(arcs.start, arcs.ends, arcs.seconds, held.astype(float))
    targets = tuple(sorted(set(random.integers(0, len(arcs), 3).tolist())))
    options = tree_options(arcs, 0, targets)
    variables = (Variable("a", np.zeros(1)), Variable("b", np.zeros(1)))
    problem = CostTable(variables, (Factor((0, 1), arcs=arcs, states=(np.array([0]), np.array([targets]))),))
    for prices in random.random((4, rows)):
        least = at_prices(problem, prices).cost((0, 0))
        assert min((s + prices @ b for _, s, b in options), default=math.inf) == pytest.approx(least)
        if options:
            found = outcome(problem, (0, 0), prices)
            assert found.seconds + prices @ found.bytes == pytest.approx(least)


@pytest.mark.skipif(kernels._native is None, reason="the extension is not built")
@SLOW
@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.sampled_from([1, 3, 64]), st.sampled_from([1e-9, 4.0]))
def test_fronts_are_equal(seed, rows, most, cell):
    random = np.random.default_rng(seed)
    problem = heavy_program(random, rows)
    order = random.permutation(len(problem.variables)).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fronts, "MAX_POINTS", most)
        both = [
            fronts.fronts(problem, np.full(problem.rows, 0.1), np.full(problem.rows, cell), order, which)
            for which in ("numpy", "native")
        ]
    assert both[0] == both[1]


@SLOW
@given(st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_fronts_that_are_not_thinned_have_every_outcome_that_no_other_beats(seed, rows):
    random = np.random.default_rng(seed)
    problem = heavy_program(random, rows)
    order = list(range(len(problem.variables)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fronts, "MAX_POINTS", 10**6)
        found = fronts.fronts(problem, np.zeros(problem.rows), np.full(problem.rows, 1e-9), order)
    points = [measured(problem, *point) for point in found]
    for other in every_outcome(problem):
        if other.seconds < math.inf:
            assert any(p.seconds <= other.seconds + 1e-9 and (p.bytes <= other.bytes).all() for p in points)


def test_a_limit_that_does_not_bind_changes_nothing():
    problem = heavy_program(np.random.default_rng(4), 2)
    free = solve(problem)
    for limits in ([1e6, 1e6], [math.inf, 1e6]):
        found = solve(problem, limits_bytes=limits)
        assert (found.cost, found.status) == (pytest.approx(free.cost), "optimal")
    assert solve(problem, limits_bytes=[math.inf, math.inf]).bytes == ()


def test_what_cannot_fit_says_how_much_is_needed():
    problem = CostTable(
        (Variable("a", np.zeros(2), np.array([[3e9, 2e9]])), Variable("b", np.zeros(1), np.array([[1e9]]))), ()
    )
    with pytest.raises(InfeasibleError, match=r"at least 3,000,000,000 bytes in row 0 are needed"):
        solve(problem, limits_bytes=[2.5e9])
    with pytest.raises(SolverError, match="each must be from 0, for 1 rows"):
        solve(problem, limits_bytes=[-1.0])


def test_rows_that_only_clash_together():
    """Either row alone can be kept, both cannot."""
    problem = CostTable((Variable("a", np.zeros(2), np.array([[2.0, 0.0], [0.0, 2.0]])),), ())
    with pytest.raises(InfeasibleError, match="over all rows"):
        solve(problem, limits_bytes=[0.9, 0.9])


def test_a_limit_on_a_program_of_many_choices(monkeypatch):
    """Prices alone, without the integer program: the bound holds, and what was found fits."""
    monkeypatch.setattr(elimination, "MAX_LOOK", -1)
    random = np.random.default_rng(2)
    variables = tuple(
        Variable(f"v{i}", random.random(20), random.integers(1, 100, (1, 20)).astype(float)) for i in range(30)
    )
    problem = CostTable(variables, tuple(Factor((i, i + 1), random.random((20, 20)) / 4) for i in range(29)))
    free = solve(problem)
    held = sum(v.bytes[0, c] for v, c in zip(variables, free.choice, strict=True))
    found = solve(problem, limits_bytes=[held / 2], gap=0.05)
    assert found.status == "within gap" and found.bytes[0] <= held / 2
    assert free.cost <= found.bound <= found.cost <= found.bound * 1.06
