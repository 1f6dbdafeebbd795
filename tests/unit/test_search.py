"""Space, price, solve and assemble agree with each other and with exhaustive search on small random graphs."""

import gc
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.assemble import assemble, random_choice, whole_choice
from fxpar.cluster import Cluster
from fxpar.cost.arcs import arc_seconds
from fxpar.cost.price import Priced, price
from fxpar.errors import InfeasibleError, PlanError
from fxpar.graph import Graph, Input, Node, Program, Ref, Value
from fxpar.layout import I, Mesh, S
from fxpar.legality import check_program
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.search import only_new_garbage
from fxpar.solver import min_marginals, solve
from fxpar.space import parameter_groups, space

TOY = Cluster.load("toy")


def chain(ops: list[str], batch: int, width: int, *, grad: bool = True) -> Program:
    """A program of linears (square, each with its own weight), activations and sums with the value before."""
    values = [Value((batch, width), "float32")]
    inputs, nodes = [Input("input", "x", 0)], []
    last, before = 0, 0

    def make(op: str, *args: int) -> int:
        values.append(Value((batch, width), "float32", grad))
        out = len(values) - 1
        nodes.append(Node(op, tuple(Ref(arg) for arg in args), (), (out,), f"m{len(nodes)}"))
        return out

    for index, op in enumerate(ops):
        if op == "linear":
            values.append(Value((width, width), "float32", grad))
            inputs.append(Input("parameter", f"w{index}", len(values) - 1))
            last, before = make("aten.linear.default", last, len(values) - 1), last
        elif op == "add" and index and values[before].grad == grad:
            last, before = make("aten.add.Tensor", last, before), last
        else:
            last, before = make("aten.relu.default", last), last
    order = sorted(inputs, key=lambda item: item.kind == "input")
    return Program(Graph("top", tuple(values), tuple(order), tuple(nodes), (Ref(last),)).verify()).verify()


def priced_chain(ops: list[str], batch: int, width: int, degree: int | Mesh, cluster: Cluster = TOY) -> Priced:
    mesh = Mesh.of({"tp": degree}) if isinstance(degree, int) else degree
    return price(space(chain(ops, batch, width), mesh), cluster)


def seconds_of(priced: Priced, plan: Plan) -> float:
    """What a plan costs, from the plan alone: its strategies' seconds and every conversion in its trees."""
    total = 0.0
    for slot, variable in zip(priced.space.slots, priced.problem.variables, strict=True):
        if slot.kind == "node":
            name = plan.graphs[slot.graph].nodes[slot.index].name
            total += float(variable.costs[[slot.ways.name(item) for item in range(len(slot.ways))].index(name)])
        elif slot.kind == "parameter":
            layout = plan.parameters[priced.space.program.top.inputs[slot.index].name]
            layouts = [slot.ways.layout(item, "outputs", 0) for item in range(len(slot.ways))]
            total += float(variable.costs[layouts.index(layout)])
    graph = priced.space.program.top
    for value, arcs in plan.graphs["top"].trees.items():
        for src, dst in arcs:
            arc = arc_seconds([src, dst], graph.values[value], plan.mesh, TOY)
            total += float(arc[0, 1])
    return total


OPS = st.lists(st.sampled_from(["linear", "relu", "add"]), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(OPS, st.sampled_from([2, 6, 64]), st.sampled_from([4, 6, 64]), st.sampled_from([2, 4]))
def test_objective_is_that_of_exhaustive_search(ops: list[str], batch: int, width: int, degree: int) -> None:
    priced = priced_chain(ops, batch, width, degree)
    counts = [range(len(slot.ways)) for slot in priced.space.slots]
    if np.prod([len(count) for count in counts]) > 40_000:
        return
    best = min(priced.seconds(choice) for choice in product(*counts))
    solution = solve(priced.problem)
    assert solution.status == "optimal"
    assert solution.cost == pytest.approx(best, rel=1e-12)


MESHES = st.sampled_from(
    [Mesh.of({"tp": 2}), Mesh.of({"tp": 4}), Mesh.of({"dp": 2, "tp": 2}), Mesh.of({"dp": 2, "tp": 3})]
)


@settings(max_examples=40, deadline=None)
@given(OPS, st.sampled_from([2, 6, 64]), st.sampled_from([4, 6, 64]), MESHES, st.integers(0, 9))
def test_a_plan_is_legal_and_costs_what_it_says(ops: list[str], batch: int, width: int, mesh: Mesh, seed: int) -> None:
    priced = priced_chain(ops, batch, width, mesh)
    for choice in (random_choice(priced.space, seed), whole_choice(priced.space), solve(priced.problem).choice):
        plan = assemble(priced, choice)
        check_program(priced.space.program, plan)
        assert plan.objective_seconds == pytest.approx(seconds_of(priced, plan), rel=1e-12)
        assert plan.objective_seconds == pytest.approx(priced.problem.cost(choice), rel=1e-12)
        assert Plan.from_json(plan.to_json()) == plan


def test_min_marginals_are_the_cost_of_a_pinned_search() -> None:
    priced = priced_chain(["linear", "relu", "linear"], 64, 64, 4)
    marginals = min_marginals(priced.problem)
    assert marginals is not None
    for number, slot in enumerate(priced.space.slots):
        for item in range(len(slot.ways)):
            pinned = solve(priced.problem, pins={number: {item}})
            assert marginals[number][item] == pytest.approx(pinned.cost, rel=1e-12)


def test_two_linears_become_column_and_row() -> None:
    priced = priced_chain(["linear", "relu", "linear"], 6, 256, 4)
    plan = assemble(priced, solve(priced.problem).choice)
    assert plan.parameters == {"w0": (S(0),), "w2": (S(1),)}
    assert [(item.kind, item.phase) for item in plan.collectives] == [("all_reduce", "forward")]


def test_nothing_is_split_where_that_is_faster_and_both_times_are_told() -> None:
    slow = Cluster.load("cpu-gloo")
    priced = priced_chain(["linear", "relu", "linear"], 4, 8, 4, slow)
    solution = solve(priced.problem)
    plan = assemble(priced, solution.choice, marginals=min_marginals(priced.problem))
    assert set(plan.parameters.values()) == {(I,)}
    assert not plan.collectives
    assert plan.split_seconds is not None and plan.split_seconds > plan.objective_seconds
    text = str(plan)
    assert "nothing is split, because that is faster" in text
    assert "100 % of the parameter bytes are not split" in text
    assert "any split would make the step" in text


def test_a_parameter_that_no_degree_divides_says_so() -> None:
    priced = priced_chain(["linear"], 4, 6, 4)
    plan = assemble(priced, solve(priced.problem).choice)
    assert plan.unsplit[0].reason == "no dim of [6, 6] divides by 4"


def test_pins_hold_and_are_refused_with_what_is_possible() -> None:
    open_space = space(chain(["linear", "relu", "linear"], 64, 64), Mesh.of({"tp": 4}))
    priced = price(open_space, TOY)
    pins = pin(open_space, parameters={"w*": "S1@tp"})
    plan = assemble(priced, solve(priced.problem, pins=pins).choice)
    assert set(plan.parameters.values()) == {(S(1),)}
    with pytest.raises(PlanError, match="'v0' matches no parameter; nearest: w0"):
        pin(open_space, parameters={"v0": "S0@tp"})
    reason = r"w0 of shape \[64, 64\] cannot be S3@tp .*: it has 2 dims, and no dim 3. It can be I@tp, S0@tp, S1@tp"
    with pytest.raises(InfeasibleError, match=reason):
        pin(open_space, parameters={"w0": "S3@tp"})


def test_folded_and_tied_parameters_share_a_decision() -> None:
    block = chain(["linear"], 4, 8).top
    block = Graph("Block", block.values, block.inputs, block.nodes, block.outputs)
    values = (Value((4, 8), "float32"), Value((4, 8), "float32", True), Value((4, 8), "float32", True))
    calls = tuple(Node("block:Block", (Ref(i),), (), (i + 1,), f"layers.{i}") for i in range(2))
    top = Graph("top", values, (Input("input", "x", 0),), calls, (Ref(2),))
    program = Program(top, {"Block": block}, {"layers.1.w0": "layers.0.w0"}).verify()
    assert parameter_groups(program) == {("Block", "w0"): ("layers.0.w0",)}
    free = Program(top, {"Block": block}).verify()
    assert parameter_groups(free) == {("Block", "w0"): ("layers.0.w0", "layers.1.w0")}
    plan = assemble(priced := price(space(free, Mesh.of({"tp": 2})), TOY), solve(priced.problem).choice)
    check_program(free, plan)
    assert plan.parameters["layers.0.w0"] == plan.parameters["layers.1.w0"]


def test_on_one_rank_everything_is_whole_and_nothing_communicates() -> None:
    priced = priced_chain(["linear", "relu", "linear"], 64, 64, 1)
    plan = assemble(priced, solve(priced.problem).choice, marginals=min_marginals(priced.problem))
    assert set(plan.parameters.values()) == {(I,)}
    assert not plan.collectives
    assert plan.unsplit[0].reason == "axis tp has degree 1"


def test_objects_are_set_aside_for_the_length_of_a_search_only() -> None:
    inside: list[int] = []

    def look() -> None:
        with only_new_garbage():
            inside.append(gc.get_freeze_count())
            raise PlanError("and also when it fails")

    with pytest.raises(PlanError):
        look()
    assert inside[0] > 1000 and gc.get_freeze_count() == 0
    gc.freeze()  # the program's own
    try:
        with pytest.raises(PlanError):
            look()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
