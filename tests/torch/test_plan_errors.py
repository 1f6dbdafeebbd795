"""Plans of real models: what they say of themselves, what is wrong with one that does not fit, the same every time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fxpar
from fxpar.capture import capture
from fxpar.errors import InfeasibleError, LayoutError, PlanError
from fxpar.layout import P, R, S
from fxpar.legality import check_program
from fxpar.plans import GraphPlan, NodePlan, Plan
from fxpar.rules.strategy import Strategy
from tests.models import MODELS, mlp

LINE = r"tests/models\.py:\d+"


def mlp_plan(degree: int = 4) -> tuple[fxpar.graph.Program, Plan]:
    model, args, kwargs = mlp()
    captured = capture(model, args, kwargs)
    return captured.program, fxpar.plan(model, {"tp": degree}, example_args=args, cluster="toy")


def changed(plan: Plan, graph: str, **changes: object) -> Plan:
    return replace(plan, graphs={**plan.graphs, graph: replace(plan.graphs[graph], **changes)})


def first(program: fxpar.graph.Program, graph: str, op: str) -> int:
    return next(number for number, node in enumerate(program.graphs()[graph].nodes) if node.op == op)


def with_strategy(plan: Plan, graph: str, number: int, strategy: Strategy) -> Plan:
    nodes = list(plan.graphs[graph].nodes)
    nodes[number] = NodePlan((strategy,))
    return changed(plan, graph, nodes=tuple(nodes))


def refused(program: fxpar.graph.Program, plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        check_program(program, plan)
    return str(caught.value)


def test_a_good_plan_passes() -> None:
    check_program(*mlp_plan())


def test_a_split_that_does_not_divide_names_module_line_shape_state_and_axis() -> None:
    program, plan = mlp_plan()
    block = next(iter(program.blocks))
    number = first(program, block, "aten.linear.default")
    old = plan.graphs[block].nodes[number].strategies[0]
    text = refused(program, with_strategy(plan, block, number, replace(old, outputs=(S(1, 7),))))
    assert re.search(rf"aten\.linear\.default in module 'ups\.0' \({LINE}\)", text), text
    assert "float64[4,8,64]" in text and "S1/7@tp" in text and "degree 4 does not divide it" in text, text


def test_a_missing_conversion_names_the_reader_and_what_there_is() -> None:
    program, plan = mlp_plan()
    block = next(iter(program.blocks))
    trees = plan.graphs[block].trees
    reader = {
        value: node
        for node in program.blocks[block].nodes
        for value in node.operands
        if value in trees and node.source.startswith("tests/")
    }
    value = next(iter(reader))
    text = refused(program, changed(plan, block, trees={key: arcs for key, arcs in trees.items() if key != value}))
    assert re.search(rf"aten\.\w+\.\w+ in module '[\w.]*' \({LINE}\)", text), text
    assert f"reads %{value} float64[" in text and "tp=4" in text and "it is only there as" in text, text


def test_an_impossible_conversion_a_wrong_count_and_a_wrong_block_are_refused() -> None:
    program, plan = mlp_plan()
    block = next(iter(program.blocks))
    graph: GraphPlan = plan.graphs[block]
    value, held = program.blocks[block].inputs[-1].value, graph.inputs[-1]
    text = refused(program, changed(plan, block, trees={value: ((held, (P,)), ((R,), (S(1),)))}))
    assert re.search(rf"%{value} float64\[4,8,32\]~ \(input x\) from R to S1.*not in that state there on tp=4", text), (
        text
    )
    text = refused(program, changed(plan, block, trees={value: ((held, held),)}))
    assert "is not one conversion on one axis of tp=4" in text, text
    made = program.blocks[block].nodes[0]
    number = next(out for out in made.outputs if out is not None)
    text = refused(program, changed(plan, block, trees={number: (((S(9),), (P,)),)}))
    assert re.search(rf"result of {made.op} in module 'norms\.0' \({LINE}\)\) from S9 to P", text), text
    assert "nodes, the plan has" in refused(program, changed(plan, block, nodes=graph.nodes[:-1]))
    assert "no choices for graph" in refused(program, replace(plan, graphs={"top": plan.graphs["top"]}))
    assert "for another program" in refused(program, replace(plan, program="0"))


def test_what_cannot_be_made_again_is_refused() -> None:
    program, plan = mlp_plan()
    block = next(iter(program.blocks))
    value, arcs = next(iter(plan.graphs[block].trees.items()))
    (produced, _), (_, reached) = arcs[0], arcs[-1]
    check_program(program, changed(plan, block, again={value: (reached,)}))
    message = refused(program, changed(plan, block, again={value: (produced,)}))
    assert "is to be made again in backward" in message and "the one it is produced in; leave it out" in message
    message = refused(program, changed(plan, block, again={value: ((S(0, 7),),)}))
    assert f"%{value}" in message and "as S0/7 on tp=4, but that layout is none that its conversions reach" in message
    assert "%999 again, which nothing produces" in refused(program, changed(plan, block, again={999: (reached,)}))


def test_constraints_that_match_nothing_or_cannot_be_name_the_nearest_and_what_there_is() -> None:
    model, args, _ = mlp()
    for pattern, message in (
        (
            "blocks.*.up.weight",
            r"'blocks\.\*\.up\.weight' matches no parameter and no module; nearest: blocks\.\d\.ups\.\d\.weight",
        ),
        ("hed.weight", r"nearest: head\.weight"),
    ):
        with pytest.raises(PlanError, match=message):
            fxpar.plan(model, {"tp": 4}, example_args=args, cluster="toy", constraints={pattern: "S0"})
    with pytest.raises(InfeasibleError, match=r"head\.weight .* cannot be S5 .*no dim 5\. It can be I@tp, S0@tp"):
        fxpar.plan(model, {"tp": 4}, example_args=args, cluster="toy", constraints={"head.weight": "S5"})
    with pytest.raises(LayoutError, match=r"names axis 'dp'; the mesh has tp"):
        fxpar.plan(model, {"tp": 4}, example_args=args, cluster="toy", constraints={"head.weight": "S0@dp"})
    with pytest.raises(PlanError, match=r"no operation runs in 'block\.0'; nearest: blocks\.0"):
        fxpar.plan(model, {"tp": 4}, example_args=args, cluster="toy").explain("block.0")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cluster", ["toy", "cpu-gloo"])
def test_every_plan_says_which_share_is_not_split_and_why(name: str, cluster: str) -> None:
    model, args, kwargs = MODELS[name]()
    plan = fxpar.plan(model, {"tp": 4}, example_args=args, example_kwargs=kwargs, cluster=cluster)
    share = re.search(r"^([\d.e-]+) % of the parameter bytes are not split(, because:)?$", str(plan), re.MULTILINE)
    assert share is not None, str(plan)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    whole = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if plan.parameters[n][0].kind != "S")
    assert plan.parameter_bytes == total
    assert float(share[1]) == pytest.approx(100 * whole / total, rel=1e-2)
    assert {item.name for item in plan.unsplit} == {
        n for n, _ in model.named_parameters() if plan.parameters[n][0].kind != "S"
    }
    assert all(item.reason for item in plan.unsplit) and bool(share[2]) == bool(whole)
    if whole == total:
        assert "nothing is split, because that is faster" in str(plan) and "without any split" in str(plan)


SCRIPT = """
import torch, fxpar
from tests.models import MODELS
from fxpar.plans import Plan
for name in ("mlp", "transformer_encoder", "gpt2"):
    model, args, kwargs = MODELS[name]()
    plan = fxpar.plan(model, {"tp": 4}, example_args=args, example_kwargs=kwargs, cluster="toy")
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    print(plan.program, plan.digest, plan.objective_seconds)
"""


def test_the_same_model_gives_the_same_plan_whatever_the_hash_seed() -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**environment, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert runs[0] == runs[1] and len(runs[0].splitlines()) == 3, runs


def test_planning_changes_nothing() -> None:
    model, args, _ = mlp()
    before = {name: p for name, p in model.named_parameters()}
    values = {name: p.detach().clone() for name, p in before.items()}
    fxpar.plan(model, {"tp": 4}, example_args=args, cluster="toy")
    assert all(model.get_parameter(name) is p and torch.equal(p, values[name]) for name, p in before.items())
    assert "forward" not in model.__dict__ and all("forward" not in m.__dict__ for m in model.modules())
