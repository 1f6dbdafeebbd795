"""Every method finds the same optimum; what cannot be taken, fitted or solved is said by name."""

import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pulp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import programs, random_program, transformer

from fxpar import kernels
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver import (
    METHODS,
    CostTable,
    Factor,
    Variable,
    elimination,
    milp,
    min_marginals,
    narrowing,
    reduce,
    solve,
    solving,
)

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def costs(*numbers):
    return np.array(numbers, dtype=float)


def answer(problem, method, **more):
    try:
        return solve(problem, method=method, **more)
    except InfeasibleError:
        return None


@SLOW
@given(programs())
def test_all_methods_agree(problem):
    found = {method: answer(problem, method) for method in METHODS}
    best = found["exhaustive"]
    if best is None:
        assert found == dict.fromkeys(METHODS)
        return
    for solution in found.values():
        assert solution.cost == pytest.approx(best.cost, rel=1e-9)
        assert solution.cost == problem.cost(solution.choice)
        assert solution.status == "optimal" and solution.gap == 0.0 and solution.bound == solution.cost


@SLOW
@given(programs())
def test_what_does_not_fit_goes_to_the_integer_program(problem):
    """With no table allowed, everything is reduced, collapsed and given to the MILP; the optimum stays."""
    best = answer(problem, "exhaustive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "tables_and_order", lambda problem: None)
        found = answer(problem, "auto")
    assert (found is None) == (best is None)
    if found is not None:
        assert found.cost == pytest.approx(best.cost, rel=1e-9)
        assert found.status == "optimal" and found.method.startswith("bounds")


@SLOW
@given(programs(), st.booleans())
def test_bounds_leave_the_optimum(problem, numpy):
    """As if every program were large: choices are dropped by bounds until elimination is trivial."""
    best = answer(problem, "exhaustive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "MAX_LOOK", -1)
        patch.setattr(narrowing, "SMALL", 1)
        if numpy:
            patch.setattr(kernels, "DEFAULT", "numpy")
        found = answer(problem, "auto")
    assert (found is None) == (best is None)
    if found is not None:
        assert found.method.startswith("bounds") and found.status == "optimal"
        assert found.cost == pytest.approx(best.cost, rel=1e-9)


@SLOW
@given(programs(variables=4), st.booleans())
def test_min_marginals_are_the_best_totals(problem, chained):
    with pytest.MonkeyPatch.context() as patch:
        if chained:
            patch.setattr(elimination, "MAX_TREE_ENTRIES", 0)
        try:
            totals = min_marginals(problem)
        except InfeasibleError:
            totals = [np.full(count, math.inf) for count in problem.counts]
    for number, row in enumerate(totals):
        for choice, total in enumerate(row):
            pinned = answer(problem, "exhaustive", pins={number: {choice}})
            assert total == pytest.approx(math.inf if pinned is None else pinned.cost, rel=1e-9)


@SLOW
@given(programs())
def test_reductions_keep_the_optimum(problem):
    best = answer(problem, "exhaustive")
    if best is None:
        return
    smaller = reduce.restrict(problem, reduce.possible_choices(problem))
    smaller = reduce.restrict(smaller, reduce.undominated_choices(smaller))
    assert solve(smaller, method="exhaustive").cost == pytest.approx(best.cost, rel=1e-9)
    rest = reduce.collapse(smaller)
    left = solve(rest.problem, method="exhaustive")
    assert left.cost + rest.constant == pytest.approx(best.cost, rel=1e-9)
    assert smaller.cost(rest.expand(left.choice, len(smaller.variables))) == pytest.approx(best.cost, rel=1e-9)


@SLOW
@given(programs())
def test_the_size_by_formula_is_the_size_that_is_built(problem):
    model = milp.build(problem)
    assert problem.size() == (len(model.objective), len(model.lp.constraints())) == (model.columns, model.rows)


def test_a_tree_with_many_readers_is_chained():
    """Ten readers would need a table of 3 * 4^10 entries; sets of states need little."""
    random = np.random.default_rng(3)
    arcs = random.random((4, 4))
    states = tuple(random.integers(0, 4, 4) for _ in range(11))
    variables = tuple(Variable(f"reader {i}", random.random(4) / 2) for i in range(11))
    problem = CostTable(variables, (Factor(tuple(range(11)), arcs=arcs, states=states),))
    found = solve(problem)
    assert found.method == "elimination" and found.cost == pytest.approx(solve(problem, method="milp").cost)
    assert min(min_marginals(problem)[5]) == pytest.approx(found.cost)


def test_a_dense_program_is_left_to_the_integer_program():
    random = np.random.default_rng(5)
    variables = tuple(Variable(f"v{i}", random.random(8)) for i in range(9))
    pairs = [(a, b) for a in range(9) for b in range(a)]
    problem = CostTable(variables, tuple(Factor(pair, random.random((8, 8)) / 8) for pair in pairs))
    assert elimination.tables_and_order(problem) is None and min_marginals(problem) is None
    found = solve(problem)
    assert found.status == "optimal" and found.method == "bounds and HiGHS"
    assert found.bound == pytest.approx(found.cost)
    with pytest.raises(SolverError, match="take 'auto'"):
        solve(problem, method="elimination")


@SLOW
@given(programs(), st.sampled_from([0.9, 1.0, 1.2, 3.0]))
def test_what_is_known_to_cost_less_is_not_looked_for(problem, share):
    best = answer(problem, "exhaustive")
    if best is None:
        return
    try:
        found = milp.solve_milp(problem, 60.0, share * best.cost)
    except InfeasibleError:
        assert share <= 1.0 or best.cost == 0
        return
    assert found is not None and problem.cost(found.choice) == pytest.approx(best.cost, rel=1e-9)
    assert share >= 1.0 and found.proven


def test_an_integer_program_that_would_be_huge_is_not_built(monkeypatch):
    random = np.random.default_rng(5)
    variables = tuple(Variable(f"v{i}", random.random(8)) for i in range(9))
    pairs = [(a, b) for a in range(9) for b in range(a)]
    problem = CostTable(variables, tuple(Factor(pair, random.random((8, 8))) for pair in pairs))
    monkeypatch.setattr(solving, "MAX_COLUMNS", 100)
    monkeypatch.setattr(milp, "build", None)
    found = solve(problem)
    assert found.status == "time limit" and "which is too large to be built" in found.log
    assert 0 < found.bound < found.cost == problem.cost(found.choice)


def test_the_time_limit_is_kept_and_reported():
    random = np.random.default_rng(5)
    variables = tuple(Variable(f"v{i}", random.random(12)) for i in range(14))
    pairs = [(a, b) for a in range(14) for b in range(a)]
    problem = CostTable(variables, tuple(Factor(pair, random.random((12, 12))) for pair in pairs))
    start = time.perf_counter()
    found = solve(problem, time_limit_seconds=0.5)
    assert time.perf_counter() - start < 15
    assert found.status == "time limit" and found.bound < found.cost and 0 < found.gap <= 1
    assert found.cost == problem.cost(found.choice) and found.gap == (found.cost - found.bound) / found.cost


def test_cbc_stands_in_and_without_either_it_is_said(monkeypatch):
    problem = random_program(np.random.default_rng(1), 4, 3, 4)
    monkeypatch.setitem(sys.modules, "highspy", None)
    if milp._cbc(1.0).available():
        found = solve(problem, method="milp")
        assert found.method == "CBC" and found.cost == pytest.approx(solve(problem).cost)
    for solver in (pulp.COIN_CMD, pulp.PULP_CBC_CMD):
        monkeypatch.setattr(solver, "available", lambda self: False)
    with pytest.raises(SolverError, match="install highspy"):
        solve(problem, method="milp")


def test_without_time_there_is_still_an_answer(monkeypatch):
    """A descent gives it, and the gap says how little is known of it."""
    problem = random_program(np.random.default_rng(8), 5, 3, 5)
    monkeypatch.setattr(milp, "solve_milp", lambda problem, seconds, below: None)
    found = solve(problem, method="milp")
    assert (found.status, found.method) == ("time limit", "descent")
    assert found.bound <= solve(problem).cost <= found.cost < math.inf
    last = [
        problem.cost((*found.choice[:at], other, *found.choice[at + 1 :]))
        for at, count in enumerate(problem.counts)
        for other in range(count)
    ]
    assert min(last) == pytest.approx(found.cost)
    differ = np.array([[math.inf, 0.0], [0.0, math.inf]])
    three = tuple(Variable(name, np.zeros(2)) for name in "abc")
    with pytest.raises(SolverError, match="allow more time"):
        solve(CostTable(three, tuple(Factor(pair, differ) for pair in ((0, 1), (1, 2), (0, 2)))), method="milp")


def test_the_integer_program_is_silent(capfd):
    solve(random_program(np.random.default_rng(1), 4, 3, 4), method="milp")
    assert capfd.readouterr() == ("", "")


def test_pins_restrict():
    problem = CostTable((Variable("a", costs(0, 1, 2)),), ())
    assert solve(problem, pins={0: {1, 2}}).choice == (1,)
    assert min_marginals(problem, pins={0: {1, 2}})[0].tolist() == [math.inf, 1, 2]


@pytest.mark.parametrize("method", METHODS)
def test_a_variable_without_choices_is_named(method):
    dead = CostTable((Variable("fine", costs(0)), Variable("linear of mlp.up", costs(math.inf, math.inf))), ())
    with pytest.raises(InfeasibleError, match=r"linear of mlp\.up: none of its 2 choices has a finite cost"):
        solve(dead, method=method)
    pair = (Variable("a", costs(0, math.inf)), Variable("b", costs(0, 0)))
    never = CostTable(pair, (Factor((0, 1), np.array([[math.inf] * 2, [0.0, 0.0]])),))
    with pytest.raises(InfeasibleError, match="a: none of its 2 choices fits together with"):
        solve(never, method=method)
    with pytest.raises(InfeasibleError, match="a: none of its 2 choices is left by its pin"):
        solve(CostTable(pair, ()), method=method, pins={0: {1}})


@pytest.mark.parametrize("method", METHODS)
def test_a_clash_of_several_names_them(method):
    """Every pair fits, all three do not: three variables that must all differ have two choices."""
    three = tuple(Variable(name, costs(0, 0)) for name in "abc")
    differ = np.array([[math.inf, 0.0], [0.0, math.inf]])
    problem = CostTable(three, tuple(Factor(pair, differ) for pair in ((0, 1), (1, 2), (0, 2))))
    with pytest.raises(InfeasibleError, match="no choices of a, b, c"):
        solve(problem, method=method)


def test_bad_problems_are_refused():
    a = Variable("a", costs(0, 1))
    for variables, factors, message in [
        ((Variable("a", np.zeros(0)),), (), "variable a"),
        ((Variable("a", costs(math.nan)),), (), "variable a"),
        ((a,), (Factor((1,), costs(0, 1)),), "each must exist"),
        ((a,), (Factor((0, 0), np.zeros((2, 2))),), "only once"),
        ((a,), (Factor((0,), costs(0, 1, 2)),), "its table of"),
        ((a,), (Factor((0,), costs(0, -math.inf)),), "without nan"),
        ((a,), (Factor((0,)),), "neither a table nor a tree"),
        ((a,), (Factor((0,), arcs=np.zeros((2, 2)), states=(np.array([0]),)),), "the states of"),
        ((a,), (Factor((0,), arcs=np.zeros((2, 2)), states=(np.array([0, 1]),), weight=0),), "must be positive"),
    ]:
        with pytest.raises(SolverError, match=message):
            solve(CostTable(variables, factors))
    with pytest.raises(SolverError, match="did you mean 'milp'"):
        solve(CostTable((a,), ()), method="mlip")
    with pytest.raises(SolverError, match="there is no such choice"):
        solve(CostTable((a,), ()), pins={0: {2}})
    many = CostTable(tuple(Variable("a", np.zeros(9)) for _ in range(9)), ())
    with pytest.raises(SolverError, match="too many to try"):
        solve(many, method="exhaustive")


def test_nothing_to_decide():
    assert solve(CostTable((), ())).choice == ()
    assert solve(CostTable((Variable("a", costs(3)),), ())).cost == 3.0


HASHED = """
import sys; sys.path[:0] = [{root!r}, {here!r}]
import numpy as np; from programs import transformer; from fxpar.solver import solve
print(solve(transformer(2)).choice, solve(transformer(1), method="milp").choice)
"""


def test_the_answer_does_not_depend_on_the_hash_seed():
    here = Path(__file__).parent
    script = HASHED.format(root=str(here.parents[1]), here=str(here))
    runs = [
        subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        for seed in ("0", "1")
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout != ""


@pytest.mark.parametrize("which", ["native", "numpy"])
def test_a_large_program_needs_no_integer_program(which, monkeypatch):
    """About 150 variables and 150 trees: elimination proves the optimum in tables of a few thousand entries."""
    if which == "native" and kernels._native is None:
        pytest.skip("the extension is not built")
    monkeypatch.setattr(kernels, "DEFAULT", which)
    problem = transformer(11)
    solution = solve(problem)
    assert (solution.method, solution.status) == ("elimination", "optimal")
    (largest,) = [int(re.search(r"the largest table has (\d+) entries", line)[1]) for line in solution.log[2:]]
    assert largest <= 10_000
    totals = min_marginals(problem)
    assert all(min(row) == pytest.approx(solution.cost) for row in totals)
