"""Seconds of collectives, conversions and operations, against formulas written out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.cluster import Cluster, Link
from fxpar.cost.comm import arc_seconds, collective_seconds, wire_bytes
from fxpar.cost.compute import node_seconds, optimizer_seconds
from fxpar.errors import LayoutError
from fxpar.graph import Value
from fxpar.layout import COLLECTIVES, CONVERSIONS, I, M, P, R, S

LINK = Link("wire", 1e-6, 1e9)
TOY = Cluster.load("toy")
H100 = Cluster.load("h100")


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_reduce", 2 * 3 * 1e-6 + 2 * 3 / 4 * 4e6 / 1e9),
        ("all_gather", 3 * 1e-6 + 3 / 4 * 4e6 / 1e9),
        ("reduce_scatter", 3 * 1e-6 + 3 / 4 * 4e6 / 1e9),
        ("all_to_all", 3 * 1e-6 + 3 / 16 * 4e6 / 1e9),
    ],
)
def test_collectives_by_hand(kind, seconds):
    assert collective_seconds(kind, 4e6, 4, LINK) == pytest.approx(seconds, rel=1e-12)


@given(st.sampled_from(COLLECTIVES), st.integers(2, 64), st.floats(0, 1e12), st.floats(0, 1e12), st.sampled_from("ha"))
def test_more_bytes_never_take_less(kind, degree, one, other, preset):
    link = Cluster.load({"h": "h100", "a": "a100"}[preset]).link(degree)
    small, large = sorted([one, other])
    assert collective_seconds(kind, small, degree, link) <= collective_seconds(kind, large, degree, link)


def test_latency_counts_and_grows_with_the_degree():
    assert collective_seconds("all_gather", 0, 2, LINK) == 1e-6
    assert collective_seconds("all_gather", 0, 8, LINK) == 7e-6
    assert collective_seconds("all_reduce", 1e9, 1, LINK) == 0.0
    value = Value((8, 8), "float32", grad=True)
    assert arc_seconds(P, I, value, 8, H100.link(8), H100) > 14 * H100.link(8).alpha_seconds


def test_an_unknown_collective_is_refused():
    with pytest.raises(LayoutError, match="'gather' is not a collective"):
        wire_bytes("gather", 1, 2)


@pytest.mark.parametrize("kinds", CONVERSIONS)
def test_an_arc_is_its_forward_and_its_backward_step(kinds):
    """On a cluster with a huge memory rate and no launch time, only what crosses the link is left."""
    link = TOY.link(4)
    made = {"S": S(0), "R": R, "I": I, "P": P, "M": M}
    src, dst = made[kinds[0]], S(1) if kinds == ("S", "S") else made[kinds[1]]
    fast = Cluster("fast", TOY.peaks, 1.0, 1e9, 1e30, 1e-30, TOY.levels)
    steps = CONVERSIONS[kinds]
    both = (steps.forward, steps.backward)
    wire = [collective_seconds(step, 4 * 64, 4, link) if step in COLLECTIVES else 0.0 for step in both]
    assert arc_seconds(src, dst, Value((8, 8), "float32", True), 4, link, fast) == pytest.approx(sum(wire))
    if R not in (src, dst):
        assert arc_seconds(src, dst, Value((8, 8), "float32"), 4, link, fast) == pytest.approx(wire[0])


@pytest.mark.parametrize(
    ("src", "dst", "shape", "grad"),
    [
        (I, S(0), (6, 8), True),  # 6 does not divide by 4
        (I, S(0, 3), (16, 8), True),
        (S(0), I, (2, 8), True),
        (I, R, (8, 8), False),  # R is I without gradients
        (S(0), S(0, 2), (8, 8), True),  # two cuts of one dim
        (S(0, 2), S(1), (8, 8), True),  # a strided cut for another
        (S(0), S(1, 2), (8, 8), True),
        (I, S(2), (8, 8), True),
        (M, S(0), (8, 8), False),  # a maximum is taken whole
        (I, M, (8, 8), False),
    ],
)
def test_arcs_that_do_not_exist(src, dst, shape, grad):
    assert arc_seconds(src, dst, Value(shape, "float32", grad), 4, TOY.link(4), TOY) == math.inf


def test_pieces_that_are_not_contiguous_are_copied():
    link, value = H100.link(4), Value((4096, 4096), "float32", True)
    outer, inner, strided = (arc_seconds(state, I, value, 4, link, H100) for state in (S(0), S(1), S(0, 2)))
    copy = 2 * value.bytes / H100.memory_bytes_per_second
    assert inner == pytest.approx(strided) == pytest.approx(outer + copy)


def test_nothing_crosses_an_axis_of_one():
    value, link = Value((8, 8), "float32", True), TOY.link(1)
    for src in (I, P, R, S(0)):
        for dst in (I, P, R, S(1)):
            assert arc_seconds(src, dst, value, 1, link, TOY) == 0.0


def test_operations_are_bound_by_work_or_memory_or_launch():
    assert node_seconds(1e15, 1e6, "bfloat16", H100) == 1e15 / (0.7 * 989e12)
    assert node_seconds(1e6, 3e12, "bfloat16", H100) == 1.0
    assert node_seconds(1, 1, "bfloat16", H100) == H100.launch_seconds
    assert node_seconds(1, 1, "bfloat16", H100, grad=True) == 2 * H100.launch_seconds
    assert node_seconds(1e15, 1e6, "bfloat16", H100, grad=True) == pytest.approx(3e15 / (0.7 * 989e12))
    assert node_seconds(0, 3e12, "float32", H100, op="aten.reshape.default", grad=True) == 0.0


def test_the_optimizer_moves_seven_times_the_parameter():
    assert optimizer_seconds(3e12, H100) == 7.0
    assert optimizer_seconds(4, H100) == H100.launch_seconds
