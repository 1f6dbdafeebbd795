"""What rules offer and what they must not: the named traps of splitting, without torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import RuleError
from fxpar.graph import Graph, Input, Node, Ref, Value, refs
from fxpar.layout import I, P, R, S, State
from fxpar.rules import Strategy, dim_hint_to_factor, factor_hint_to_dim, hint_links, rule_for, strategies
from fxpar.rules.localise import localise
from fxpar.rules.work import flops

Shape = tuple[int, ...]


def one(op: str, *args: Any, ins: list[Shape], outs: list[Shape], grad: bool = True, **kwargs: Any) -> Graph:
    """A graph of one node; its operands are the refs 0, 1, ... in its arguments."""
    values = tuple(Value(shape, "float32", grad) for shape in ins + outs)
    made = tuple(range(len(ins), len(values)))
    node = Node(f"aten.{op}", args, tuple(kwargs.items()), made)
    assert len(list(refs(args))) == len(ins)
    inputs = tuple(Input("input", f"x{index}", index) for index in range(len(ins)))
    return Graph("one", values, inputs, (node,), tuple(map(Ref, made))).verify()


def offered(graph: Graph, degree: int, **hints: set[int]) -> dict[str, Strategy]:
    return {strategy.name: strategy for strategy in strategies(graph, graph.nodes[0], degree, hints)}


def states(graph: Graph, degree: int, **hints: set[int]) -> set[tuple[tuple[State, ...], tuple[State, ...]]]:
    return {(s.inputs, s.outputs) for s in offered(graph, degree, **hints).values()}


def attention(q: Shape, k: Shape, **kwargs: Any) -> Graph:
    causal = kwargs.pop("is_causal", False)
    args = (Ref(0), Ref(1), Ref(2), None, 0.0, causal)
    return one("scaled_dot_product_attention.default", *args, ins=[q, k, k], outs=[q], **kwargs)


def test_linear_offers_exactly_the_known_ways() -> None:
    graph = one("linear.default", Ref(0), Ref(1), ins=[(2, 8, 16), (32, 16)], outs=[(2, 8, 32)])
    assert list(offered(graph, 2)) == [
        *("whole:I", "whole:R", "split:_0", "split:_1", "split:i", "split:o", "partial:0", "partial:1"),
    ]
    found = offered(graph, 2)
    assert (found["split:i"].inputs, found["split:i"].outputs) == ((S(2), S(1)), (P,))
    assert (found["split:o"].inputs, found["split:o"].outputs) == ((R, S(0)), (S(2),))
    assert (found["split:_1"].inputs, found["split:_1"].outputs) == ((S(1), R), (S(1),))
    assert (found["partial:0"].inputs, found["partial:0"].outputs) == ((P, R), (P,))
    assert [strategy.divided for strategy in found.values()] == [False] * 2 + [True] * 4 + [False] * 2


def test_an_operation_without_a_rule_is_whole_only() -> None:
    graph = one("no_such.default", Ref(0), ins=[(4,)], outs=[(4,)])
    assert rule_for(graph, graph.nodes[0]) is None
    assert states(graph, 2) == {((I,), (I,)), ((R,), (R,))}
    assert hint_links(graph, graph.nodes[0]) == ()


def test_without_gradient_replicated_is_never_offered() -> None:
    graph = one("linear.default", Ref(0), Ref(1), ins=[(8, 16), (32, 16)], outs=[(8, 32)], grad=False)
    assert all(R not in strategy.inputs + strategy.outputs for strategy in offered(graph, 2).values())
    assert "whole:R" not in offered(graph, 2)


def test_detach_reads_any_state_and_gives_no_gradient() -> None:
    values = (Value((4, 8), "float32", True), Value((4, 8), "float32", False))
    node = Node("aten.detach.default", (Ref(0),), (), (1,))
    graph = Graph("one", values, (Input("input", "x", 0),), (node,), (Ref(1),)).verify()
    assert states(graph, 2) == {
        ((I,), (I,)),
        ((R,), (I,)),
        ((S(0),), (S(0),)),
        ((S(1),), (S(1),)),
        ((P,), (P,)),
    }


def test_split_queries_of_causal_attention_know_which_rows_they_are() -> None:
    shape = (4, 8, 16, 64)
    for causal in (False, True):
        graph = attention(shape, shape, is_causal=causal)
        split = offered(graph, 2)["split:q"]
        assert split.inputs == (S(2), R, R)
        local = localise(graph, graph.nodes[0], (split,), (2,), (1,))
        assert local.target == ("local.attention_rows" if causal else "aten.scaled_dot_product_attention.default")
        assert local.args[:2] == ((16, ((1, 2, 1),)) if causal else graph.nodes[0].args[:2])


def test_keys_are_never_split() -> None:
    shape = (4, 8, 16, 64)
    assert all(s.inputs[1] in (I, R, S(0), S(1)) for s in offered(attention(shape, shape), 2).values())


def test_grouped_heads_are_dealt_out_in_groups_or_inside_groups() -> None:
    graph = attention((2, 8, 16, 64), (2, 2, 16, 64), enable_gqa=True)
    assert offered(graph, 2)["split:g"].inputs == (S(1), S(1), S(1))
    four = offered(graph, 4)
    assert "split:g" not in four  # two key heads on four ranks
    assert four["split:r"].inputs == (S(1, 2), R, R)
    assert four["split:r"].outputs == (S(1, 2),)


def test_a_bias_inside_a_product_forbids_the_split_sum() -> None:
    graph = one("linear.default", Ref(0), Ref(1), Ref(2), ins=[(8, 16), (32, 16), (32,)], outs=[(8, 32)])
    assert not [name for name in offered(graph, 2) if name == "split:i" or name.startswith("partial")]


def test_partial_sums_pass_an_added_bias_only_if_both_are_partial() -> None:
    graph = one("add.Tensor", Ref(0), Ref(1), ins=[(8, 16), (16,)], outs=[(8, 16)])
    assert [strategy.inputs for strategy in offered(graph, 2).values() if P in strategy.inputs] == [(P, P)]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("add.Tensor", (Ref(0), 1.0)),
        ("pow.Tensor_Scalar", (Ref(0), 2)),
        ("clamp.default", (Ref(0), 0.0)),
        ("relu.default", (Ref(0),)),
        ("gelu.default", (Ref(0),)),
        ("abs.default", (Ref(0),)),
        ("masked_fill.Scalar", (Ref(0), Ref(1), -1.0)),
        ("maximum.default", (Ref(0), Ref(1))),
        ("div.Tensor", (1.0, Ref(0))),
    ],
)
def test_partial_sums_do_not_pass_what_is_not_linear(op: str, args: tuple[Any, ...]) -> None:
    graph = one(op, *args, ins=[(8, 16)] * len(list(refs(args))), outs=[(8, 16)])
    assert all(P not in strategy.inputs for strategy in offered(graph, 2).values())


def test_partial_sums_of_whole_numbers_or_lower_precision_do_not_pass() -> None:
    from fxpar.graph import Torch

    def cast(source: str, target: str) -> Graph:
        values = (Value((8,), source), Value((8,), target))
        node = Node("aten._to_copy.default", (Ref(0),), (("dtype", Torch("dtype", target)),), (1,))
        return Graph("one", values, (Input("input", "x", 0),), (node,), (Ref(1),)).verify()

    assert "partial:0" in offered(cast("bfloat16", "float32"), 2)
    assert "partial:0" not in offered(cast("float32", "bfloat16"), 2)
    assert "partial:0" not in offered(cast("float32", "int64"), 2)
    assert "partial:0" not in offered(cast("int64", "float32"), 2)


def test_broadcast_dims_of_size_one_carry_no_factor() -> None:
    graph = one("mul.Tensor", Ref(0), Ref(1), ins=[(4, 8, 16), (4, 1, 16)], outs=[(4, 8, 16)])
    assert offered(graph, 2)["split:b"].inputs == (S(1), R)
    assert offered(graph, 2)["split:a"].inputs == (S(0), S(0))


def test_uneven_cuts_are_offered_where_the_rule_says_so_and_every_rank_gets_something() -> None:
    table = one("embedding.default", Ref(0), Ref(1), ins=[(53, 8), (4,)], outs=[(4, 8)])
    assert offered(table, 4)["split:v"].inputs[0] == S(0)
    assert "split:v/2" not in offered(table, 4, v={2})
    heads = one("embedding.default", Ref(0), Ref(1), ins=[(12, 8), (4,)], outs=[(4, 8)])
    assert "split:v" not in offered(heads, 8)  # two each, and nothing for two ranks
    joined = one("reshape.default", Ref(0), (4, 26), ins=[(4, 13, 2)], outs=[(4, 26)])
    assert [name for name in offered(joined, 4) if name.startswith("split")] == ["split:f0"]  # pairs are no unit of 26
    rows = one("mean.dim", Ref(0), (0,), ins=[(10, 8)], outs=[(8,)])
    assert "split:d0" not in offered(rows, 4)
    assert "split:d0" in offered(rows, 2)


def test_a_split_mean_is_divided_by_the_degree() -> None:
    graph = one("mean.dim", Ref(0), (0,), ins=[(8, 6)], outs=[(6,)])
    found = offered(graph, 2)
    local = localise(graph, graph.nodes[0], (found["split:d0"],), (2,), (1,))
    assert (local.target, local.args) == ("local.mean_split", ("aten.mean.dim", 2, Ref(0), (0,)))
    assert localise(graph, graph.nodes[0], (found["split:d1"],), (2,), (1,)).target == "aten.mean.dim"


def test_a_hard_coded_head_count_becomes_local() -> None:
    graph = one("reshape.default", Ref(0), (2, 8, 8, 4), ins=[(2, 8, 32)], outs=[(2, 8, 8, 4)])
    heads = offered(graph, 4)["split:f2"]
    assert (heads.inputs, heads.outputs) == ((S(2),), (S(2),))
    assert localise(graph, graph.nodes[0], (heads,), (4,), (3,)).args == (Ref(0), (2, 8, 2, 4))


def test_the_thirds_of_a_fused_projection_are_each_cut() -> None:
    weight = one("linear.default", Ref(0), Ref(1), ins=[(4, 8), (24, 8)], outs=[(4, 24)])
    cut = offered(weight, 2, o={3})["split:o/3"]
    assert (cut.inputs, cut.outputs) == ((R, S(0, 3)), (S(1, 3),))
    third = one("slice.Tensor", Ref(0), 1, 8, 16, 1, ins=[(4, 24)], outs=[(4, 8)])
    found = offered(third, 2)["split:o"]
    assert (found.inputs, found.outputs) == ((S(1, 3),), (S(1),))
    assert localise(third, third.nodes[0], (found,), (2,), (0,)).args == (Ref(0), 1, 4, 8, 1)


def test_links_carry_strided_cuts_both_ways() -> None:
    third = one("slice.Tensor", Ref(0), 1, 8, 16, 1, ins=[(4, 24)], outs=[(4, 8)])
    rule = rule_for(third, third.nodes[0])
    assert rule is not None
    link = next(link for link in hint_links(third, third.nodes[0]) if link.factor == "o")
    operand, out = link.places
    assert (operand.leading, out.leading) == (3, 1)
    for parts in (1, 2, 4):
        assert dim_hint_to_factor(rule, operand.where, operand.dim, factor_hint_to_dim(operand, parts)) == ("o", parts)
        assert dim_hint_to_factor(rule, out.where, out.dim, factor_hint_to_dim(out, parts)) == ("o", parts)
    assert dim_hint_to_factor(rule, operand.where, operand.dim, 2) is None  # inside the pieces, which stay whole
    assert dim_hint_to_factor(rule, operand.where, operand.dim, 5) is None


def test_a_slice_that_cuts_no_equal_pieces_stays_whole() -> None:
    graph = one("slice.Tensor", Ref(0), 1, 1, 6, 1, ins=[(4, 24)], outs=[(4, 5)])
    assert [name for name in offered(graph, 2) if name.startswith("split")] == ["split:d0"]


def test_a_strategy_of_another_node_is_refused() -> None:
    graph = one("mean.dim", Ref(0), (0,), ins=[(8, 6)], outs=[(6,)])
    with pytest.raises(RuleError, match="split:zz"):
        localise(graph, graph.nodes[0], (Strategy("split:zz", (S(0),), (P,)),), (2,), (0,))


def test_flops_of_products_and_attention() -> None:
    graph = one("linear.default", Ref(0), Ref(1), ins=[(2, 8, 16), (32, 16)], outs=[(2, 8, 32)])
    assert flops(graph, graph.nodes[0]) == 2 * 2 * 8 * 16 * 32
    graph = attention((2, 8, 16, 64), (2, 2, 16, 64), enable_gqa=True)
    assert flops(graph, graph.nodes[0]) == 4 * 2 * 8 * 16 * 16 * 64
    graph = one("conv2d.default", Ref(0), Ref(1), ins=[(2, 8, 6, 6), (4, 8, 3, 3)], outs=[(2, 4, 4, 4)])
    assert flops(graph, graph.nodes[0]) == 2 * 2 * 4 * 4 * 4 * 8 * 9
    graph = one("reshape.default", Ref(0), (4, 4), ins=[(16,)], outs=[(4, 4)])
    assert flops(graph, graph.nodes[0]) == 0
    graph = one("relu.default", Ref(0), ins=[(4, 4)], outs=[(4, 4)])
    assert flops(graph, graph.nodes[0]) == 16


def cut(x: np.ndarray, state: State, degree: int, rank: int) -> np.ndarray:
    """One rank's piece, element by element."""
    if state.kind != "S":
        return x
    if x.shape[state.dim] % degree:
        most = -(-x.shape[state.dim] // degree)
        return x.take(range(x.shape[state.dim])[rank * most : (rank + 1) * most], axis=state.dim)
    size = x.shape[state.dim] // state.parts
    rows = [row for row in range(x.shape[state.dim]) if row % size // (size // degree) == rank]
    return x.take(rows, axis=state.dim)


def shapes_of(total: int, chooser: list[int]) -> Shape:
    """A shape with ``total`` elements, from a list of choices."""
    shape: list[int] = []
    for choice in chooser:
        divisors = [size for size in range(1, total + 1) if total % size == 0]
        shape.append(divisors[choice % len(divisors)])
        total //= shape[-1]
    return (*shape, total)


@settings(max_examples=150, deadline=None)
@given(
    total=st.sampled_from([16, 24, 36, 48, 64, 96, 144]),
    source=st.lists(st.integers(0, 100), max_size=4),
    target=st.lists(st.integers(0, 100), max_size=4),
)
def test_every_split_reshape_moves_no_element(total: int, source: list[int], target: list[int]) -> None:
    before, after = shapes_of(total, source), shapes_of(total, target)
    graph = one("reshape.default", Ref(0), after, ins=[before], outs=[after])
    x = np.arange(total).reshape(before)
    for degree in (2, 3, 4):
        hints = {link.factor: {2, 3} for link in hint_links(graph, graph.nodes[0])}
        for strategy in strategies(graph, graph.nodes[0], degree, hints):
            if not strategy.divided:
                continue
            for rank in range(degree):
                local = localise(graph, graph.nodes[0], (strategy,), (degree,), (rank,))
                found = cut(x, strategy.inputs[0], degree, rank).reshape(local.args[1])
                assert np.array_equal(found, cut(x.reshape(after), strategy.outputs[0], degree, rank))


@settings(max_examples=100, deadline=None)
@given(source=st.lists(st.integers(1, 6), max_size=5), split=st.integers(0, 5))
def test_a_reshape_that_only_joins_dims_keeps_every_factor(source: list[int], split: int) -> None:
    joined = (math.prod(source[:split]), math.prod(source[split:]))
    graph = one("reshape.default", Ref(0), joined, ins=[tuple(source)], outs=[joined])
    rule = rule_for(graph, graph.nodes[0])
    assert rule is not None
    assert not rule.whole
    assert sorted(size for _, size in rule.sizes) == sorted(size for size in source if size > 1)
