"""Wishes about states: what they leave open, which names they reach, and why some cannot be had."""

from __future__ import annotations

import pytest

from fxpar.errors import InfeasibleError, LayoutError, PlanError
from fxpar.graph import Graph, Input, Node, Program, Ref, Value
from fxpar.layout import I, Mesh, P, S
from fxpar.pins import Pins, parse_wish, pin
from fxpar.space import Space, space

MESH = Mesh.of({"dp": 2, "tp": 4})


def feed_forward() -> Graph:
    """Linear of 8 to 16 in module ``up``, relu, linear of 16 to 8 in module ``down``, and a sum with the input."""
    shapes = [(16, 8), (8, 16), (4, 8), (4, 16), (4, 16), (4, 8), (4, 8)]
    inputs = (Input("parameter", "up.weight", 0), Input("parameter", "down.weight", 1), Input("input", "x", 2))
    nodes = (
        Node("aten.linear.default", (Ref(2), Ref(0)), (), (3,), "mlp.up"),
        Node("aten.relu.default", (Ref(3),), (), (4,), "mlp"),
        Node("aten.linear.default", (Ref(4), Ref(1)), (), (5,), "mlp.down"),
        Node("aten.add.Tensor", (Ref(2), Ref(5)), (), (6,), ""),
    )
    return Graph("Block", tuple(Value(shape, "float32", True) for shape in shapes), inputs, nodes, (Ref(6),))


def model(mesh: Mesh) -> Space:
    """Two calls of the block, and a relu."""
    values = tuple(Value((4, 8), "float32", True) for _ in range(4))
    nodes = (
        *(Node("block:Block", (Ref(at),), (), (at + 1,), f"layers.{at}") for at in range(2)),
        Node("aten.relu.default", (Ref(2),), (), (3,), "act"),
    )
    top = Graph("top", values, (Input("input", "x", 0),), nodes, (Ref(3),))
    return space(Program(top, {"Block": feed_forward()}).verify(), mesh)


def layouts(found: Space, pins: Pins, name: str) -> set[tuple[object, ...]]:
    slot = found.parameter_slots[name]
    return {found.slots[slot].ways.layout(choice, "outputs", 0) for choice in pins[slot]}


def test_an_axis_that_is_not_named_is_left_open() -> None:
    found = model(MESH)
    assert layouts(found, pin(found, constraints={"*.up.weight": "S0@tp"}), "layers.0.up.weight") == {
        (I, S(0)), (S(1), S(0)), (S(0), S(0, 2)), (S(0, 4), S(0)),
    }  # fmt: skip
    assert layouts(found, pin(found, constraints={"*.up.weight": "I@dp S0@tp"}), "layers.1.up.weight") == {(I, S(0))}


def test_cuts_of_one_dim_are_made_in_the_order_of_the_text() -> None:
    found = model(MESH)
    assert layouts(found, pin(found, constraints={"*.up.*": "S0@dp S0@tp"}), "layers.0.up.weight") == {(S(0), S(0, 2))}
    assert layouts(found, pin(found, constraints={"*.up.*": "S0@tp S0@dp"}), "layers.0.up.weight") == {(S(0, 4), S(0))}
    any_cut = layouts(found, pin(found, constraints={"*.up.*": "S@dp I@tp"}), "layers.0.up.weight")
    assert any_cut == {(S(0), I), (S(1), I)}


def test_a_layout_is_taken_as_it_stands() -> None:
    found = model(MESH)
    assert layouts(found, pin(found, constraints={"*.up.*": (I, S(1))}), "layers.0.up.weight") == {(I, S(1))}


def test_a_modules_output_is_held_where_it_is_read() -> None:
    found = model(Mesh.of({"tp": 2}))
    pins = pin(found, constraints={"layers.*.mlp": "S0@tp"})
    (slot,) = pins
    add = found.slots[slot]
    assert add.name == "aten.add.Tensor"
    assert {add.ways.layout(choice, "inputs", 1) for choice in pins[slot]} == {(S(0),)}
    down = found.node_slots["Block", 2]
    assert down not in pins, "the module itself may work in any way, for example leave partial sums"


def test_a_blocks_output_is_held_where_it_leaves() -> None:
    found = model(Mesh.of({"tp": 2}))
    pins = pin(found, constraints={"layers.1": "S1@tp"})
    assert set(pins) == {found.output_slots["Block", 0]}
    assert set(pin(found, constraints={"act": "I"})) == {found.output_slots["top", 0]}


def test_inputs_of_blocks_have_names() -> None:
    found = model(Mesh.of({"tp": 2}))
    pins = pin(found, enter={"Block.x": "P"})
    (slot,) = pins
    assert slot == found.input_slots["Block", 2]
    assert {found.slots[slot].ways.layout(choice, "outputs", 0) for choice in pins[slot]} == {(P,)}


def test_two_wishes_for_one_place_narrow_it_or_name_each_other() -> None:
    found = model(MESH)
    both = pin(found, constraints={"*.up.weight": "S0@tp", "layers.0.up.weight": "I@dp"})
    assert layouts(found, both, "layers.0.up.weight") == {(I, S(0))}
    with pytest.raises(InfeasibleError, match=r"cannot be S1@tp \('layers.0.up.weight'\) and what '\*.up.weight' asks"):
        pin(found, constraints={"*.up.weight": "S0@tp", "layers.0.up.weight": "S1@tp"})


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        ({"*.up.weight": "S2@tp"}, "it has 2 dims, and no dim 2"),
        ({"*.up.weight": "S1/4@tp"}, r"dim 1 of size 8 does not divide by 4 parts times 4 \(tp\)"),
        ({"*.up.weight": "R@tp"}, "a parameter at rest is cut"),
        ({"*.up.weight": "P@tp"}, "a parameter at rest is cut"),
        ({"layers.*.mlp.up": "S0/2@tp"}, r"dim 0 of size 4 does not divide by 2 parts times 4 \(tp\)"),
        ({"layers.*.mlp.up": "P@tp"}, "aten.relu.default cannot work so"),
    ],
)
def test_an_impossible_wish_says_why(wishes: dict[str, str], reason: str) -> None:
    with pytest.raises(InfeasibleError, match=reason):
        pin(model(MESH), constraints=wishes)


def test_no_dim_divides() -> None:
    with pytest.raises(InfeasibleError, match="the cuts do not go together"):
        pin(model(Mesh.of({"dp": 4, "tp": 4})), constraints={"*.up.weight": "S1@dp S1@tp"})
    with pytest.raises(InfeasibleError, match="no dim divides by 7, the degree of tp"):
        pin(model(Mesh.of({"tp": 7})), constraints={"*.up.weight": "S@tp"})
    assert pin(model(Mesh.of({"tp": 3})), constraints={"*.up.weight": "S@tp"})  # 8 rows as 3, 3 and 2


def test_unknown_names_are_refused_with_the_nearest() -> None:
    found = model(MESH)
    with pytest.raises(PlanError, match=r"'layers.0.up.wieght' matches no parameter and no module; nearest: layers"):
        pin(found, constraints={"layers.0.up.wieght": "S0@tp"})
    with pytest.raises(PlanError, match=r"matches no block input; nearest: Block\.x"):
        pin(found, enter={"Block.y": "S0@tp"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S0@pp", "names axis 'pp'; the mesh has dp, tp"),
        ("S0", "does not say on which axis: write S0@tp"),
        ("Q@tp", "'Q' is not a state"),
        ("", "says nothing"),
    ],
)
def test_unreadable_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_wish(text, MESH)
