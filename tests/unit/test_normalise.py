"""The normal form, without torch: what is shared, dropped, detached and renumbered, and the exact arguments."""

from __future__ import annotations

from typing import Any

import pytest

from fxpar.errors import CaptureError
from fxpar.graph import Graph, Input, Node, Ref, Torch, Value
from fxpar.normalise import normalise


class Tape:
    """Writes a recorded graph, line by line."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []

    def value(self, *shape: int, grad: bool = True, dtype: str = "float32") -> Ref:
        self.values.append(Value(shape, dtype, grad))
        return Ref(len(self.values) - 1)

    def input(self, *shape: int, kind: str = "input", **how: Any) -> Ref:
        ref = self.value(*shape, **how)
        self.inputs.append(Input(kind, f"x{len(self.inputs)}", ref.value))
        return ref

    def op(self, op: str, *args: Any, out: Any, grad: bool = True, out_dtype: str = "float32", **kwargs: Any) -> Any:
        mode = {key: kwargs.pop(key) for key in ("grad_enabled", "autocast", "module") if key in kwargs}
        shapes = out if isinstance(out, list) else [out]
        refs = [self.value(*shape, grad=grad, dtype=out_dtype) for shape in shapes]
        outs = tuple(ref.value for ref in refs)
        self.nodes.append(Node(op, args, tuple(kwargs.items()), outs, **mode))
        return refs if isinstance(out, list) else refs[0]

    def normal(self, *outputs: Any, updates: tuple[tuple[str, int], ...] = ()) -> Graph:
        return normalise(
            Graph("g", tuple(self.values), tuple(self.inputs), tuple(self.nodes), outputs, updates).verify()
        )


def lines(graph: Graph) -> list[str]:
    """The nodes as text, without their outputs."""
    return [line.split(" = ")[1] for line in graph.text(canonical=True).splitlines() if " = aten" in line]


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "out", "want"),
    [
        ("aten.view.default", ((-1,),), {}, (24,), "aten.reshape.default(%0, (24,))"),
        ("aten.transpose.int", (-2, -1), {}, (2, 4, 3), "aten.permute.default(%0, (0, 2, 1))"),
        ("aten.select.int", (-1, -1), {}, (2, 3), "aten.select.int(%0, 2, 3)"),
        ("aten.slice.Tensor", (-1, -3, 2**63 - 1), {}, (2, 3, 3), "aten.slice.Tensor(%0, 2, 1, 4, 1)"),
        ("aten.slice.Tensor", (1, None, None, 2), {}, (2, 2, 4), "aten.slice.Tensor(%0, 1, 0, 3, 2)"),
        ("aten.unsqueeze.default", (-1,), {}, (2, 3, 4, 1), "aten.reshape.default(%0, (2, 3, 4, 1))"),
        ("aten.expand.default", ((7, -1, -1, -1),), {}, (7, 2, 3, 4), "aten.expand.default(%0, (7, 2, 3, 4))"),
        ("aten.mean.default", (), {}, (), "aten.mean.dim(%0, (0, 1, 2), False)"),
        ("aten.mean.dim", ((-1,), True), {}, (2, 3, 1), "aten.mean.dim(%0, (2,), True)"),
        ("aten.sum.dim_IntList", ((), True), {}, (1, 1, 1), "aten.sum.dim_IntList(%0, (0, 1, 2), True)"),
        ("aten.var.correction", ((-1,),), {"correction": 0}, (2, 3), "correction=0, keepdim=False)"),
        ("aten.softmax.int", (-1,), {}, (2, 3, 4), "aten.softmax.int(%0, 2)"),
        ("aten.softmax.int", (-1, Torch("dtype", "float32")), {}, (2, 3, 4), "aten.softmax.int(%0, 2)"),
        ("aten.rsub.Scalar", (1.0,), {}, (2, 3, 4), "aten.sub.Tensor(1.0, %0)"),
        ("aten.div.Tensor_mode", (2.0,), {"rounding_mode": None}, (2, 3, 4), "aten.div.Tensor(%0, 2.0)"),
        ("aten.cumsum.default", (-1,), {"dtype": None}, (2, 3, 4), "aten.cumsum.default(%0, 2)"),
        ("aten.dropout.default", (0.5, True), {}, (2, 3, 4), "aten.dropout.default(%0, 0.5, True)"),
        ("aten.pad.default", ((0, 1),), {}, (2, 3, 5), "aten.constant_pad_nd.default(%0, (0, 1), 0)"),
        ("aten.layer_norm.default", ([4], None, None, 1e-5), {}, (2, 3, 4), "layer_norm.default(%0, (4,), None, None"),
    ],
)
def test_canonical_arguments(op: str, args: Any, kwargs: Any, out: Any, want: str) -> None:
    tape = Tape()
    x = tape.input(2, 3, 4)
    (line,) = lines(tape.normal(tape.op(op, x, *args, out=out, **kwargs)))
    assert want in line


@pytest.mark.parametrize("op", ["aten.contiguous.default", "aten.clone.default", "aten.alias.default"])
def test_operations_that_change_nothing_vanish(op: str) -> None:
    tape = Tape()
    x = tape.input(2, 3)
    assert tape.normal(tape.op(op, x, out=(2, 3))).nodes == ()


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_vanishes(p: float, train: bool) -> None:
    tape = Tape()
    x = tape.input(2, 3)
    assert tape.normal(tape.op("aten.dropout.default", x, p, train, out=(2, 3))).nodes == ()


def test_casts_follow_the_recorded_dtype() -> None:
    tape = Tape()
    x = tape.input(2)
    same = tape.op("aten.to.dtype", x, Torch("dtype", "float32"), out=(2,))
    other = tape.op("aten.type_as.default", same, x, out=(2,), out_dtype="bfloat16")
    graph = tape.normal(other)
    assert lines(graph) == ["aten._to_copy.default(%0, dtype=dtype:bfloat16)"]


def test_split_becomes_slices_and_unused_pieces_are_dropped() -> None:
    tape = Tape()
    x = tape.input(2, 12)
    _, k, v = tape.op("aten.split.Tensor", x, 4, -1, out=[(2, 4)] * 3)
    assert lines(tape.normal(k, v)) == ["aten.slice.Tensor(%0, 1, 4, 8, 1)", "aten.slice.Tensor(%0, 1, 8, 12, 1)"]


def test_bias_is_split_off_and_cast_to_what_autocast_made() -> None:
    tape = Tape()
    x, w, b = tape.input(2, 3), tape.input(4, 3), tape.input(4)
    y = tape.op("aten.linear.default", x, w, b, out=(2, 4), out_dtype="bfloat16")
    assert lines(tape.normal(y)) == [
        "aten.linear.default(%0, %1)",
        "aten._to_copy.default(%2, dtype=dtype:bfloat16)",
        "aten.add.Tensor(%3, %4)",
    ]


def test_factories_have_one_form_and_no_operand() -> None:
    tape = Tape()
    x = tape.input(2, 3)
    ones = tape.op("aten.ones_like.default", x, out=(2, 3), grad=False, pin_memory=False)
    graph = tape.normal(ones)
    assert lines(graph) == ["aten.full.default((2, 3), 1, dtype=dtype:float32, device=device:cpu)"]


def test_equal_work_is_shared_unless_random_or_in_another_mode() -> None:
    tape = Tape()
    x = tape.input(4)
    a, b = (tape.op("aten.sin.default", x, out=(4,)) for _ in range(2))
    c, d = (tape.op("aten.dropout.default", x, 0.5, True, out=(4,)) for _ in range(2))
    e, f = (tape.op("call:f", x, out=(4,)) for _ in range(2))
    g = tape.op("aten.sin.default", x, out=(4,), autocast=(("cpu", "bfloat16", True),))
    graph = tape.normal(a, b, c, d, e, f, g)
    assert [node.op for node in graph.nodes].count("aten.sin.default") == 2
    assert len(graph.nodes) == 6
    assert graph.outputs[0] == graph.outputs[1] != graph.outputs[6]


def test_arguments_that_compare_equal_are_not_taken_for_the_same() -> None:
    tape = Tape()
    x = tape.input(4)
    outs = [tape.op("aten.div.Tensor", x, zero, out=(4,)) for zero in (0.0, -0.0)]
    assert len(tape.normal(*outs).nodes) == 2


def test_gradient_stops_at_one_shared_detach() -> None:
    tape = Tape()
    x = tape.input(4)
    y = tape.op("aten.sin.default", x, out=(4,))
    mask = tape.op("aten.gt.Scalar", y, 0, out=(4,), grad=False, out_dtype="bool")
    rank = tape.op("aten.argmax.default", y, out=(), grad=False, out_dtype="int64")
    own = tape.op("aten.detach.default", y, out=(4,), grad=False)
    out = tape.op("aten.mul.Tensor", y, own, out=(4,))
    graph = tape.normal(out, mask, rank)
    assert lines(graph) == [
        "aten.sin.default(%0)",
        "aten.detach.default(%1)",
        "aten.gt.Scalar(%2, 0)",
        "aten.argmax.default(%2)",
        "aten.mul.Tensor(%1, %2)",
    ]
    assert [value.grad for value in graph.values] == [True, True, False, False, False, True]


def test_grad_means_that_an_output_needs_it() -> None:
    tape = Tape()
    x, unneeded = tape.input(4), tape.input(4)
    a = tape.op("aten.sin.default", x, out=(4,))
    b = tape.op("aten.sin.default", unneeded, out=(4,))
    c = tape.op("aten.argmax.default", b, out=(), grad=False, out_dtype="int64")
    graph = tape.normal(a, c)
    assert [value.grad for value in graph.values] == [True, False, True, False, False]
    assert "detach" not in graph.text()


def test_view_without_gradient_does_not_let_one_through() -> None:
    tape = Tape()
    x = tape.input(4)
    same = tape.op("aten.view.default", x, (4,), out=(4,), grad=False, grad_enabled=False)
    flat = tape.op("aten.view.default", same, (2, 2), out=(2, 2), grad=False)
    back = tape.op("aten.reshape.default", flat, (4,), out=(4,), grad=False)
    graph = tape.normal(tape.op("aten.mul.Tensor", x, back, out=(4,)))
    assert lines(graph) == ["aten.detach.default(%0)", "aten.mul.Tensor(%0, %1)"]


def test_detach_of_a_value_without_gradient_is_the_value() -> None:
    tape = Tape()
    x = tape.input(4, grad=False)
    assert tape.normal(tape.op("aten.detach.default", x, out=(4,), grad=False)).nodes == ()


def test_dead_code_goes_with_its_parameters_and_inputs_stay() -> None:
    tape = Tape()
    x, _ignored, w = tape.input(4), tape.input(4), tape.input(4, kind="parameter")
    tape.op("aten.dropout.default", w, 0.5, True, out=(4,))
    tape.op("call:f", w, out=(4,))
    used, _unused = tape.op("block:b", x, out=[(4,), (4,)])
    graph = tape.normal(used)
    assert [item.name for item in graph.inputs] == ["x0", "x1"]
    assert [node.op for node in graph.nodes] == ["block:b"]
    assert graph.nodes[0].outputs == (2, 3)


def test_updates_are_alive_and_carry_no_gradient() -> None:
    tape = Tape()
    x, state = tape.input(4), tape.input(4, kind="buffer", grad=False)
    new = tape.op("aten.add.Tensor", state, x, out=(4,))
    graph = tape.normal(updates=(("state", new.value),))
    assert lines(graph) == ["aten.add.Tensor(%1, %0)"]
    assert graph.updates == (("state", 2),)
    assert not any(value.grad for value in graph.values)


def test_kept_operations_keep_where_they_came_from() -> None:
    tape = Tape()
    x = tape.input(2, 3)
    y = tape.op("aten.addmm.default", tape.input(3), x, tape.input(3, 3), out=(2, 3), module="layers.0.fc")
    assert {node.module for node in tape.normal(y).nodes} == {"layers.0.fc"}


def test_constant_outputs_are_kept() -> None:
    tape = Tape()
    x = tape.input(2)
    assert tape.normal(None, x, 3).outputs == (None, Ref(0), 3)


def test_a_rewrite_that_does_not_fit_says_where() -> None:
    tape = Tape()
    x = tape.input(2, 3)
    wrong = tape.op("aten.permute.default", x, (1, 0), out=(2, 3), module="model.head")
    with pytest.raises(CaptureError, match=r"permute.*model\.head"):
        tape.normal(wrong)


def test_writing_to_an_operand_is_refused() -> None:
    tape = Tape()
    x = tape.input(2)
    with pytest.raises(CaptureError, match=r"aten\.add_\.Tensor at model writes"):
        tape.normal(tape.op("aten.add_.Tensor", x, 1, out=(2,), module="model"))
