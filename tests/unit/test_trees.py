"""Conversion trees against brute force, and the table of all trees against single trees."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import arc_costs, brute_force_tree

from fxpar.cost.trees import Arcs, cheapest_tree, conversion_tree, tree_table
from fxpar.errors import LayoutError, SolverError
from fxpar.layout import I, P, R, S

STATES = (I, P, R, S(0), S(1))


def tree(arcs, src, targets, size):
    """The tree on the first ``size`` states, by number."""
    number = {(state,): index for index, state in enumerate(STATES)}
    layouts = [(state,) for state in STATES[:size]]

    def seconds(a, b):
        inside = number[a] < size and number[b] < size
        return float(arcs[number[a], number[b]]) if inside else math.inf

    return conversion_tree(layouts[src], [layouts[t] for t in targets], seconds, states=layouts)


@settings(max_examples=60, deadline=None)
@given(arc_costs(), st.data())
def test_a_tree_is_the_cheapest_arborescence(arcs, data):
    size = len(arcs)
    src = data.draw(st.integers(0, size - 1))
    targets = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    expected = brute_force_tree(arcs, src, set(targets))
    if math.isinf(expected):
        with pytest.raises(LayoutError, match="no conversions lead from"):
            tree(arcs, src, targets, size)
        return
    found = tree(arcs, src, targets, size)
    assert found.seconds == pytest.approx(expected)
    reached = {(STATES[src],)}
    for parent, child in found.arcs:
        assert parent in reached and child not in reached  # parents first, every state made once
        reached.add(child)
    assert {(STATES[target],) for target in targets} <= reached
    number = {(state,): index for index, state in enumerate(STATES)}
    assert sum(arcs[number[a], number[b]] for a, b in found.arcs) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(arc_costs(), st.data())
def test_the_table_agrees_with_single_trees_to_the_bit(arcs, data):
    size = len(arcs)
    index = st.integers(0, size - 1)
    roots = np.array(data.draw(st.lists(index, min_size=1, max_size=3)))
    targets = [
        np.array(data.draw(st.lists(index, min_size=1, max_size=3))) for _ in range(data.draw(st.integers(1, 3)))
    ]
    table = tree_table(arcs, roots, targets)
    for entry, seconds in np.ndenumerate(table):
        needed = [int(target[choice]) for target, choice in zip(targets, entry[1:], strict=True)]
        if math.isinf(seconds):
            with pytest.raises(LayoutError):
                tree(arcs, int(roots[entry[0]]), needed, size)
        else:
            assert tree(arcs, int(roots[entry[0]]), needed, size).seconds == seconds


def test_equal_targets_are_paid_once_and_a_state_may_serve_several():
    seconds = {(S(0), I): 5.0, (I, S(1)): 1.0, (I, P): 1.0, (S(0), S(1)): 5.5, (S(0), P): 5.5}

    def arc(a, b):
        return seconds.get((a[0], b[0]), math.inf)

    found = conversion_tree((S(0),), [(S(1),), (P,), (P,)], arc)
    assert found.seconds == 7.0
    assert found.arcs == (((S(0),), (I,)), ((I,), (P,)), ((I,), (S(1),)))


def test_among_equally_cheap_trees_the_shortest():
    def arc(a, b):
        return 2.0 if (a, b) == ((P,), (S(0),)) else 1.0

    assert conversion_tree((P,), [(S(0),)], arc).arcs == (((P,), (S(0),)),)


def test_nothing_to_convert():
    assert conversion_tree((I,), [(I,)], lambda a, b: 1.0).arcs == ()
    assert conversion_tree((I,), [], lambda a, b: 1.0).seconds == 0.0


def test_without_gradient_r_is_not_passed_through():
    asked = set()

    def arc(a, b):
        asked.update((a[0], b[0]))
        return 1.0

    conversion_tree((S(0),), [(S(1),)], arc, grad=False)
    assert R not in asked and I in asked


def test_zero_costs_still_make_a_tree():
    found = conversion_tree((I,), [(state,) for state in STATES], lambda a, b: 0.0)
    assert found.seconds == 0.0 and len(found.arcs) == 4
    assert [child for _, child in found.arcs] == sorted((state,) for state in STATES if state != I)


def test_a_consumer_may_read_a_value_in_two_states():
    arcs = np.array([[0.0, 1.0, 4.0], [np.inf, 0.0, 1.0], [np.inf, np.inf, 0.0]])
    table = tree_table(arcs, np.array([0]), [np.array([[1, 1], [1, 2], [2, 2]])])
    assert table.tolist() == [[1.0, 2.0, 2.0]]


def test_a_matrix_and_arcs_are_the_same():
    matrix = np.array([[0.0, 2.0, np.inf], [np.inf, 5.0, 3.0], [1.0, np.inf, 0.0]])
    arcs = Arcs.of(matrix)
    assert (len(arcs), arcs.sources.tolist(), arcs.ends.tolist()) == (3, [0, 1, 2], [1, 2, 0])
    assert arcs.seconds.tolist() == [2.0, 3.0, 1.0] and Arcs.of(arcs) is arcs
    assert cheapest_tree(arcs, 0, [2], "abc") == cheapest_tree(matrix, 0, [2], "abc")


def test_bytes_are_added_at_their_price():
    arcs = Arcs(np.array([0, 1, 1]), np.array([1]), np.array([2.0]), np.array([[10.0], [0.5]]))
    assert arcs.priced([0.1, 4.0]).seconds.tolist() == [5.0] and arcs.priced([0.0, 0.0]) is arcs


def test_too_many_states_at_once_are_refused():
    with pytest.raises(SolverError, match="13 different states at once; at most 12"):
        cheapest_tree(np.ones((14, 14)), 0, range(1, 14), range(14))
    with pytest.raises(SolverError, match="13 different states at once; at most 12"):
        tree_table(np.ones((14, 14)), np.array([0]), [np.arange(1, 14)[None]])


@pytest.mark.parametrize("arcs", [-np.ones((2, 2)), np.full((2, 2), np.nan), np.ones((2, 3))])
def test_bad_arcs_are_refused(arcs):
    with pytest.raises(SolverError, match="square and nowhere negative"):
        Arcs.of(arcs)
