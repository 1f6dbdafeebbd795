"""Layouts of inputs and outputs: which carry the batch, by rule and as asked; and what a plan keeps of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.boundary import (
    Boundary,
    BoundaryRule,
    averaging_share,
    boundary_of,
    data_axes_of,
    global_shape,
    input_layouts,
    whole_boundary,
)
from fxpar.cluster import Cluster
from fxpar.commands.options import byte_count
from fxpar.errors import LayoutError
from fxpar.graph import Graph, Input, Node, Program, Ref, Value
from fxpar.layout import I, Mesh, P, S, fits, local_sizes
from fxpar.plans import Plan
from fxpar.search import search

MESH = Mesh.of({"dp": 2, "tp": 4, "fsdp": 3})
RULE = BoundaryRule(("dp", "fsdp"))
BATCH = (S(0), I, S(0, 2))
WHOLE = (I, I, I)


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        (("dp", "tp"), None, ("dp",)),
        (("tp", "dp"), None, ("dp",)),
        (("dp_replicate", "dp_shard", "tp"), None, ("dp_replicate", "dp_shard")),
        (("DP", "x"), None, ("DP",)),
        (("dim_0", "dim_1"), None, ()),
        (("dim_0", "dim_1"), ("dim_1",), ("dim_1",)),
        (("dp", "fsdp"), ("fsdp", "dp"), ("dp", "fsdp")),
        (("dp", "tp"), (), ()),
        (("dp", "tp"), "tp", ("tp",)),
    ],
)
def test_data_axes(names: tuple[str, ...], asked: object, found: tuple[str, ...]) -> None:
    assert data_axes_of(Mesh.of(dict.fromkeys(names, 2)), asked) == found  # type: ignore[arg-type]


def test_a_data_axis_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(LayoutError, match=r"'batch', which is no axis of the mesh; it has dp, tp, fsdp"):
        data_axes_of(MESH, ["dp", "batch"])


def test_inputs_as_long_as_the_first_carry_the_batch() -> None:
    tensors = [("scale", ()), ("ids", (5, 7)), ("mask", (5,)), ("table", (7, 5)), ("labels", (5, 7))]
    assert input_layouts(tensors, RULE, MESH) == (WHOLE, BATCH, BATCH, WHOLE, BATCH)
    asked = replace(RULE, inputs={"labels": WHOLE, "table": (I, I, S(1))})
    assert input_layouts(tensors, asked, MESH) == (WHOLE, BATCH, BATCH, (I, I, S(1)), WHOLE)
    assert input_layouts(tensors, BoundaryRule(), MESH) == (WHOLE,) * 5


def test_layouts_that_an_input_cannot_have() -> None:
    with pytest.raises(LayoutError, match=r"input 'x' has 1 dims .* cannot be S1"):
        input_layouts([("x", (4,))], replace(RULE, inputs={"x": (S(1), I, I)}), MESH)
    with pytest.raises(LayoutError, match=r"input 'x' cannot be P at the border"):
        input_layouts([("x", (4,))], replace(RULE, inputs={"x": (P, I, I)}), MESH)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_every_rank_gets_the_local_shape_back(degrees: list[int], size: int, data: st.DataObject) -> None:
    mesh = Mesh.of({f"a{number}": degree for number, degree in enumerate(degrees)})
    rule = BoundaryRule(tuple(name for name in mesh.names if data.draw(st.booleans())))
    (layout,) = input_layouts([("x", (size, 3))], rule, mesh)
    whole = global_shape((size, 3), layout, mesh)
    assert fits(whole, layout, mesh.degrees) and local_sizes(whole, layout, mesh.degrees) == (size, 3)
    share = averaging_share(layout, rule.data_axes, mesh)
    assert whole == (size * share, 3)


def program(batch: int = 12) -> Program:
    """``y = x w`` (batch, 8); its transpose; its sum; a table that is as long as the batch, and one that is not."""
    values = (
        Value((batch, 6), "float32"),
        Value((batch, 3), "float32"),
        Value((8, 6), "float32", grad=True),
        Value((batch, 8), "float32", grad=True),
        Value((8, batch), "float32", grad=True),
        Value((), "float32", grad=True),
        Value((batch, 3), "float32"),
    )
    inputs = (Input("input", "x", 0), Input("input", "table", 1), Input("parameter", "w", 2))
    nodes = (
        Node("aten.linear.default", (Ref(0), Ref(2)), (), (3,)),
        Node("aten.permute.default", (Ref(3), (1, 0)), (), (4,)),
        Node("aten.sum.dim_IntList", (Ref(3), (0, 1)), (), (5,)),
        Node("aten.relu.default", (Ref(1),), (), (6,)),
    )
    return Program(Graph("top", values, inputs, nodes, (Ref(3), None, Ref(4), Ref(5), Ref(6)))).verify()


NAMES = ("y", "turned", "total", "table")


def test_outputs_that_depend_on_the_batch_and_are_as_long_are_cut_like_it() -> None:
    found = boundary_of(program(), (BATCH, WHOLE), NAMES, RULE, MESH)
    assert found == Boundary((BATCH, WHOLE), (BATCH, None, WHOLE, WHOLE, WHOLE), RULE)
    assert len(found.notes) == 1 and "'turned'" in found.notes[0]
    both = boundary_of(program(), (BATCH, BATCH), NAMES, RULE, MESH)
    assert both.outputs == (BATCH, None, WHOLE, WHOLE, BATCH)


def test_outputs_as_asked() -> None:
    asked = replace(RULE, outputs={"y": (S(0), S(1), I), "turned": (I, I, S(1))})
    found = boundary_of(program(), (BATCH, WHOLE), NAMES, asked, MESH)
    assert found.outputs[:3] == ((S(0), S(1), I), None, (I, I, S(1))) and not found.notes
    assert [averaging_share(layout, RULE.data_axes, MESH) for layout in found.outputs if layout] == [2, 3, 1, 1]
    with pytest.raises(
        LayoutError, match=r"output 'turned' has the global shape \(8, 12\) and cannot be S0@dp, I@tp, S0/2@"
    ):
        boundary_of(program(), (BATCH, WHOLE), NAMES, replace(RULE, outputs={"turned": (S(0), I, S(0, 2))}), MESH)


def test_without_data_axes_everything_is_whole() -> None:
    layouts = input_layouts([("x", (12, 6)), ("table", (12, 3))], BoundaryRule(), MESH)
    assert boundary_of(program(), layouts, NAMES, BoundaryRule(), MESH) == whole_boundary(program(), MESH)


def test_a_plan_has_its_inputs_and_outputs_as_the_boundary_says_and_keeps_the_rule() -> None:
    mesh = Mesh.of({"dp": 2})
    rule = BoundaryRule(("dp",), inputs={"table": (I,)}, outputs={"total": (I,)})
    boundary = boundary_of(program(), ((S(0),), (I,)), NAMES, rule, mesh)
    plan = search(program(), mesh, Cluster.load("toy"), boundary=boundary)
    top = plan.graphs["top"]
    assert top.inputs[:2] == boundary.inputs and top.outputs == boundary.outputs
    assert plan.boundary == rule
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert replace(plan, boundary=BoundaryRule()).digest != plan.digest


def test_a_plan_without_a_boundary_reads_back_from_text_that_has_none() -> None:
    import json

    plan = search(program(), Mesh.of({"tp": 2}), Cluster.load("toy"))
    data = json.loads(plan.to_json())
    assert data.pop("boundary") == {"data_axes": [], "inputs": {}, "outputs": {}}
    assert Plan.from_json(json.dumps(data)) == plan


@pytest.mark.parametrize(
    ("text", "found"), [("70GiB", 70 * 2**30), ("80e9", 80 * 10**9), ("512 MiB", 2**29), ("7B", 7)]
)
def test_numbers_of_bytes(text: str, found: int) -> None:
    assert byte_count(text) == found


@pytest.mark.parametrize("text", ["", "GiB", "70Gi", "-1GiB", "0", "70 gigs", "inf"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(Exception, match="is not a number of bytes; write for example 70GiB"):
        byte_count(text)
