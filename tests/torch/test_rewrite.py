"""Rewritten graphs of a small hand-made graph, all ranks simulated in this process, against the graph run whole."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from fxpar.errors import PlanError
from fxpar.graph import Graph, Input, Node, Ref, Torch, Value
from fxpar.layout import I, Mesh, P, R, S, State
from fxpar.plans import GraphPlan, NodePlan
from fxpar.rewrite import Place, rewrite
from fxpar.rules.strategy import Strategy
from fxpar.runtime.collectives import join, split
from fxpar.runtime.simulate_ranks import run_simulated


def mlp(*, no_grad: bool = False) -> Graph:
    """relu(x w1 + b1) w2 + b2, its maximum without gradient, and a half-precision copy."""
    values = [
        *(Value(shape, "float64", True) for shape in ((16, 8), (16,), (8, 16), (8,), (4, 8))),
        *(Value(shape, "float64", True) for shape in ((4, 16), (4, 16), (4, 16), (4, 8), (4, 8))),
        Value((4, 8), "float64"),
        Value((4,), "float64"),
        Value((4,), "int64"),
        Value((4,), "float32"),
    ]
    names = (("parameter", "up.weight"), ("parameter", "up.bias"), ("parameter", "down.weight"))
    names += (("parameter", "down.bias"), ("input", "x"))

    def node(op: str, args: tuple[object, ...], *outputs: int, **more: object) -> Node:
        kwargs = tuple(more.pop("kwargs", {}).items())  # type: ignore[attr-defined]
        return Node(f"aten.{op}", args, kwargs, outputs, "mlp", "model.py:7", **more)  # type: ignore[arg-type]

    nodes = (
        node("linear.default", (Ref(4), Ref(0)), 5),
        node("add.Tensor", (Ref(5), Ref(1)), 6),
        node("relu.default", (Ref(6),), 7),
        node("linear.default", (Ref(7), Ref(2)), 8),
        node("add.Tensor", (Ref(8), Ref(3)), 9),
        node("detach.default", (Ref(9),), 10, grad_enabled=not no_grad),
        node("max.dim", (Ref(10), 1), 11, 12, grad_enabled=not no_grad),
        node("_to_copy.default", (Ref(11),), 13, kwargs={"dtype": Torch("dtype", "float32")}),
    )
    inputs = tuple(Input(kind, name, number) for number, (kind, name) in enumerate(names))
    return Graph("mlp", tuple(values), inputs, nodes, (Ref(9), Ref(13), Ref(12), 3.5), (("seen", 10),)).verify()


_LINEAR = (
    ("whole:I", (I, I), (I,)), ("whole:R", (R, R), (R,)), ("split:b", (S(0), R), (S(0),)),
    ("split:o", (R, S(0)), (S(1),)), ("split:o/2", (R, S(0, 2)), (S(1, 2),)), ("split:i", (S(1), S(1)), (P,)),
    ("partial:0", (P, R), (P,)),
)  # fmt: skip
_ADD = (
    ("whole:I", (I, I), (I,)), ("whole:R", (R, R), (R,)), ("split:b", (S(0), R), (S(0),)),
    ("split:o", (S(1), S(0)), (S(1),)), ("split:o/2", (S(1, 2), S(0, 2)), (S(1, 2),)), ("partial:0,1", (P, P), (P,)),
)  # fmt: skip
_RELU = (("whole:I", (I,), (I,)), ("whole:R", (R,), (R,)), ("split:b", (S(0),), (S(0),)), ("split:o", (S(1),), (S(1),)))
_DETACH = (("whole:I", (I,), (I,)), *_RELU[1:2], *_RELU[2:], ("partial:0", (P,), (P,)))
_MAX = (("whole:I", (I,), (I, I)), ("split:b", (S(0),), (S(0), S(0))))
_COPY = (("whole:I", (I,), (I,)), ("split:b", (S(0),), (S(0),)), ("partial:0", (P,), (P,)))
CHOICES = (_LINEAR, _ADD, _RELU, _LINEAR, _ADD, (_DETACH[0], *_DETACH[2:]), _MAX, _COPY)
AT_REST = ((I, S(0), S(1), S(0, 2)), (I, S(0)), (I, S(0), S(1)), (I, S(0)), (I,))


def planned(graph: Graph, chosen: list[Strategy], at_rest: list[State], outputs: tuple[State, ...]) -> GraphPlan:
    """A plan with the simplest trees: every needed state straight from the produced one."""
    produced = {item.value: state for item, state in zip(graph.inputs, at_rest, strict=True)}
    trees: dict[int, dict[tuple[tuple[State], tuple[State]], None]] = {}

    def need(value: int, state: State) -> None:
        if not graph.values[value].grad:
            state = I if state == R else state
        if state != produced[value]:
            trees.setdefault(value, {})[(produced[value],), (state,)] = None

    for node, strategy in zip(graph.nodes, chosen, strict=True):
        for value, state in zip(node.operands, strategy.inputs, strict=True):
            need(value, state)
        produced.update(zip(node.outputs, strategy.outputs, strict=True))  # type: ignore[arg-type]
    finals = [out for out in graph.outputs if isinstance(out, Ref)]
    for out, state in zip(finals, outputs, strict=True):
        need(out.value, state)
    for _, value in graph.updates:
        need(value, I)
    wanted = iter(outputs)
    return GraphPlan(
        graph.digest(),
        tuple((state,) for state in at_rest),
        tuple(NodePlan((strategy,)) for strategy in chosen),
        tuple((next(wanted),) if isinstance(out, Ref) else None for out in graph.outputs),
        tuple((I,) for _ in graph.updates),
        {value: tuple(arcs) for value, arcs in trees.items()},
    )


def random_plan(graph: Graph, seed: int) -> GraphPlan:
    draw = random.Random(seed)
    chosen = [Strategy(*draw.choice(choices)) for choices in CHOICES]
    return planned(graph, chosen, [draw.choice(states) for states in AT_REST], (I, I, I))


def places(degree: int) -> list[Place]:
    mesh = Mesh.of({"tp": degree})
    return [Place(mesh, (rank,), ("unused",), torch.device("cpu")) for rank in range(degree)]


def whole_inputs(graph: Graph) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(graph.values[item.value].shape, dtype=torch.float64) for item in graph.inputs]


def reference(graph: Graph) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients of every input, of the unsharded graph."""
    plan = planned(graph, [Strategy(*choices[0]) for choices in CHOICES], [I] * 5, (I, I, I))
    inputs = [x.requires_grad_() for x in whole_inputs(graph)]
    out = rewrite(graph, plan, places(1)[0])(*inputs)
    out[0].square().sum().backward()
    return out, [x.grad for x in inputs]  # type: ignore[misc]


def simulated(graph: Graph, plan: GraphPlan, degree: int) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor]]:
    """Outputs per rank, and whole gradients of every input put together from the ranks'."""
    layouts = [str(layout[0]) for layout in plan.inputs]
    pieces = [
        [(split(x, state, degree)[rank] if state[0] == "S" else x).clone().requires_grad_()
         for x, state in zip(whole_inputs(graph), layouts, strict=True)]
        for rank in range(degree)
    ]  # fmt: skip
    outs = run_simulated([rewrite(graph, plan, place) for place in places(degree)], pieces)
    # Every rank's own loss sees the whole output: the gradients of one rank's are the true ones.
    torch.autograd.backward([out[0] for out in outs], [2 * out[0].detach() for out in outs])
    grads = []
    for index, state in enumerate(layouts):
        found = [piece[index].grad for piece in pieces]
        if state[0] != "S":
            assert all(torch.allclose(grad, found[0], atol=1e-12) for grad in found)
        grads.append(join(torch.stack(found), state) if state[0] == "S" else found[0])
    return outs, grads


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("no_grad", [False, True])
def test_random_plans_compute_the_same_numbers(degree: int, no_grad: bool) -> None:
    graph = mlp(no_grad=no_grad)
    wanted, wanted_grads = reference(graph)
    for seed in range(60):
        outs, grads = simulated(graph, random_plan(graph, seed), degree)
        for out in outs:
            assert out[3] == 3.5
            for index in (0, 1, 2, 4):
                assert out[index].dtype == wanted[index].dtype
                torch.testing.assert_close(out[index], wanted[index], rtol=1e-12, atol=1e-12)
            assert torch.is_grad_enabled()
        for grad, want in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


def test_conversions_run_once_per_arc_and_just_before_their_first_reader() -> None:
    graph = mlp()
    plan = planned(graph, [Strategy(*choices[0]) for choices in CHOICES], [S(0), I, I, I, I], (I, I, I))
    names = [node.name for node in rewrite(graph, plan, places(2)[0]).graph.nodes]
    assert names[5] == "up_weight_i" and names[6].startswith("mlp_linear")
    seen: list[tuple[str, ...]] = []
    modules = [rewrite(graph, plan, place) for place in places(2)]
    inputs = [[x.chunk(2)[rank] if i == 0 else x for i, x in enumerate(whole_inputs(graph))] for rank in range(2)]
    run_simulated(modules, inputs, watch=lambda *what: seen.append(what))
    assert seen == [("all_gather", "S0", "I", "forward")]


def test_regions_without_gradient_are_entered_once_and_left_for_conversions_that_carry_one() -> None:
    graph = mlp(no_grad=True)
    chosen = [Strategy(*choices[0]) for choices in CHOICES]
    text = rewrite(graph, planned(graph, chosen, [I] * 5, (I, I, I)), places(2)[0]).code
    assert text.count("enter_no_grad()") == text.count("leave_no_grad(") == 1
    chosen[5] = Strategy("split:b", (S(0),), (S(0),))
    code = rewrite(graph, planned(graph, chosen, [I] * 5, (I, I, I)), places(2)[0]).code
    assert code.index("'I', 'S0', True") < code.index("enter_no_grad") < code.index("'S0', 'I', False")


def test_a_bias_is_put_back_into_its_product() -> None:
    graph = mlp()
    chosen = [Strategy(*choices[0]) for choices in CHOICES]
    code = rewrite(graph, planned(graph, chosen, [I] * 5, (I, I, I)), places(2)[0]).code
    assert "add.Tensor" not in code and "linear.default(x, up_weight, up_bias)" in code
    chosen[0], chosen[3] = Strategy(*_LINEAR[5]), Strategy(*_LINEAR[5])  # reduced before the bias is added
    assert rewrite(graph, planned(graph, chosen, [I] * 5, (I, I, I)), places(2)[0]).code.count("add.Tensor") == 2


def test_autocast_regions_surround_what_ran_in_them() -> None:
    values = tuple(Value((4, 4), dtype) for dtype in ("float32", "bfloat16", "float32", "bfloat16"))
    cast = (("cpu", "bfloat16", True),)
    ops = (("mm", cast), ("mm", ()), ("mm", cast))
    nodes = tuple(
        Node(f"aten.{op}.default", (Ref(0), Ref(0)), (), (1 + index,), autocast=regions, grad_enabled=index != 2)
        for index, (op, regions) in enumerate(ops)
    )
    graph = Graph("casts", values, (Input("input", "x", 0),), nodes, (Ref(1), Ref(2), Ref(3))).verify()
    whole = NodePlan((Strategy("whole:I", (I, I), (I,)),))
    plan = GraphPlan(graph.digest(), ((I,),), (whole,) * 3, ((I,),) * 3)
    module = rewrite(graph, plan, places(2)[0])
    assert [out.dtype for out in module(torch.ones(4, 4))] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_readable_code_names_modules_and_source_lines() -> None:
    graph = mlp()
    shown = rewrite(graph, random_plan(graph, 0), places(2)[1]).print_readable(print_output=False)
    assert "mlp_relu" in shown and "model.py:7" in shown


def without(plan: GraphPlan, value: int) -> GraphPlan:
    return dataclasses.replace(plan, trees={k: v for k, v in plan.trees.items() if k != value})


def test_a_plan_that_does_not_fit_is_refused_by_name() -> None:
    graph = mlp()
    chosen = [Strategy(*choices[0]) for choices in CHOICES]
    good = planned(graph, chosen, [S(0), I, I, I, I], (I, I, I))
    place = places(2)[0]
    with pytest.raises(PlanError, match=r"aten.linear.default in module 'mlp' \(model.py:7\).*reads %0 .*as I.*S0"):
        rewrite(graph, without(good, 0), place)
    with pytest.raises(PlanError, match="another graph"):
        rewrite(graph, dataclasses.replace(good, digest="0"), place)
    with pytest.raises(PlanError, match="degree 64 does not divide"):
        rewrite(graph, good, places(64)[0])
    with pytest.raises(PlanError, match="5 inputs, the plan has 4"):
        rewrite(graph, dataclasses.replace(good, inputs=good.inputs[1:]), place)
    with pytest.raises(PlanError, match="not in that state there"):
        rewrite(graph, dataclasses.replace(good, trees={0: (((P,), (I,)),)}), place)
    with pytest.raises(PlanError, match="not one conversion"):
        rewrite(graph, dataclasses.replace(good, trees={0: (((S(0),), (S(0),)),)}), place)
