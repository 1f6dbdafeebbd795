"""Plans: JSON round trip, refusal of damaged text, digests that see choices and nothing else."""

import json
from dataclasses import replace

import pytest

from fxpar.errors import PlanError
from fxpar.layout import I, Mesh, P, R, S
from fxpar.plans import Choice, Collective, GraphPlan, NodePlan, Plan, Unsplit
from fxpar.rules.strategy import Strategy

NODE = NodePlan((Strategy("split:o/3", (R, S(0, 3)), (S(2, 3),), divided=True),))
GRAPH = GraphPlan("abc", ((I,), (S(0, 3),)), (NODE,), ((I,), None), ((I,),), {0: (((I,), (R,)), ((R,), (S(1),)))})
PLAN = Plan(
    mesh=Mesh.of({"tp": 4}),
    cluster="toy",
    program="123",
    graphs={"top": GRAPH},
    calls=(("layers.0", "Block"),),
    parameters={"w": (S(0, 3),)},
    collectives=(Collective("layers.0", "backward", "all_reduce", "tp", 96, 2),),
    objective_seconds=0.25,
    status="optimal",
    parameter_bytes=64,
    unsplit=(Unsplit("b", 16, "no dim of [2] divides by 4"),),
    unruled_ops=(("aten.foo", "layers.0", 2),),
    choices=(Choice("top", "layers.0", "aten.linear.default", "m.py:3", "split:o/3", 1e-3, 1, "whole:I", 2e-3),),
    timings={"capture": 0.1},
    stats={"variables": 7},
    notes=("use_cache turned off",),
)


def test_json_round_trip_is_the_same_plan() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.digest == PLAN.digest


def test_digest_sees_choices_and_not_prices() -> None:
    assert replace(PLAN, objective_seconds=9.0, timings={}).digest == PLAN.digest
    assert replace(PLAN, parameters={"w": (S(0),)}).digest != PLAN.digest
    assert replace(PLAN, mesh=Mesh.of({"tp": 2})).digest != PLAN.digest
    other = replace(GRAPH, nodes=(NodePlan((Strategy("whole:P", (I, P), (P,)),)),))
    assert replace(PLAN, graphs={"top": other}).digest != PLAN.digest


def test_what_is_made_again_is_part_of_the_text_and_of_the_digest() -> None:
    graph = PLAN.graphs["top"]
    value, arcs = next(iter(graph.trees.items()))
    plan = replace(PLAN, graphs={**PLAN.graphs, "top": replace(graph, again={value: (arcs[-1][1],)})})
    assert Plan.from_json(plan.to_json()) == plan and plan.digest != PLAN.digest
    assert "again" not in PLAN.to_json()  # so texts of earlier versions are those of plans that keep everything


def test_unsplit_share() -> None:
    assert PLAN.unsplit_share == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(schema="other"), "schema"),
        (lambda data: data.update(version=99), "version"),
        (lambda data: data.pop("graphs"), "damaged"),
        (lambda data: data["parameters"].update(w=["S9"]), "digest"),
    ],
)
def test_damaged_text_is_refused(change, message) -> None:
    data = json.loads(PLAN.to_json())
    change(data)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


def test_explain_names_the_nearest_module() -> None:
    assert "split:o/3" in PLAN.explain("layers.0")
    with pytest.raises(PlanError, match=r"nearest: layers\.0"):
        PLAN.explain("layer.0")


def test_summary_says_what_is_not_split_and_why() -> None:
    text = str(PLAN)
    assert "25 % of the parameter bytes are not split" in text
    assert "no dim of [2] divides by 4" in text
    assert "aten.foo" in text
