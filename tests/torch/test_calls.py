"""One rank's call as the program of the whole batch: shapes, names, placements, losses; `plan` and its flags."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import fxpar
from fxpar.boundary import BoundaryRule
from fxpar.calls import Calls, capture_call, enlarged
from fxpar.capture import capture
from fxpar.capture.evaluate import evaluate
from fxpar.errors import CallError, CaptureError, LayoutError, PlanError
from fxpar.layout import I, Mesh, S
from fxpar.placements import layouts_by_name
from tests.torch.proving import Of, f64

MESH = Mesh.of({"dp": 2, "tp": 4})
BATCH, WHOLE = (S(0), I), (I, I)


def calls(**options: Any) -> Calls:
    return Calls(MESH, BoundaryRule(("dp",)), **options)


class Several(nn.Module):
    """Reads a batch, a container of a batch and of something else, and a number; gives a batch and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6).double()

    def forward(self, x: Tensor, pair: dict[str, Tensor], scale: Tensor) -> Any:
        return self.lin(x) * scale, {"t": pair["t"] + 1, "n": 3}


def test_batches_are_enlarged_by_the_data_axes_and_nothing_else_is() -> None:
    args = (f64(3, 5, 4), {"t": f64(3, 2), "u": f64(5, 3)}, torch.tensor(2.0))
    captured, boundary = capture_call(Several(), args, {}, calls())
    inputs = [item for item in captured.program.top.inputs if item.kind == "input"]
    assert {item.name: captured.program.top.values[item.value].shape for item in inputs} == {
        "x": (6, 5, 4), "pair['t']": (6, 2), "pair['u']": (5, 3), "scale": ()
    }  # fmt: skip
    assert boundary.inputs == (BATCH, BATCH, WHOLE, WHOLE)
    assert captured.output_names == ("0", "1['t']") and boundary.outputs == (BATCH, BATCH, None)
    assert args[0].shape == (3, 5, 4)


def test_an_enlarged_tensor_keeps_its_dtype_order_of_strides_and_place_in_autograd() -> None:
    leaf, turned = f64(3, 4), f64(4, 3).t()
    grown, integers = leaf * 2, torch.zeros(3, dtype=torch.int32)
    (a, b, c, d), kwargs = enlarged((leaf, turned, grown, integers), {"k": 1}, [BATCH] * 4, MESH)
    assert a.shape == b.shape == c.shape == (6, 4) and d.shape == (6,) and kwargs == {"k": 1}
    assert (a.is_leaf, b.is_leaf, c.is_leaf) == (True, False, False) and a.requires_grad and c.requires_grad
    assert a.stride() == (4, 1) and b.stride() == (1, 6) and d.dtype == torch.int32 and not d.requires_grad


def test_the_program_of_the_whole_batch_computes_what_the_model_does() -> None:
    model = Of(lambda m, x: m.lin(x).mean(0).expand(x.shape[0], -1) + x.shape[0], lin=nn.Linear(4, 6).double())
    captured, _ = capture_call(model, (f64(3, 4),), {}, calls())
    x = f64(6, 4)
    assert torch.equal(evaluate(captured, model, (x,), {}), model(x))


SHARD, REPLICATE = (Shard(0), Replicate()), (Replicate(), Replicate())
TENSORS = [("x", 3), ("batch['ids']", 2), ("batch['mask']", 2)]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ([SHARD, None, REPLICATE], {"x": BATCH, "batch['mask']": WHOLE}),
        ([SHARD, {"ids": list(SHARD), "mask": None}], {"x": BATCH, "batch['ids']": BATCH}),
        ({"x": (Shard(-1), Shard(2))}, {"x": (S(2), S(2, 2))}),
        ({"batch": SHARD}, {"batch['ids']": BATCH, "batch['mask']": BATCH}),
        ({"batch": {"mask": SHARD}}, {"batch['mask']": BATCH}),
        ({"batch['mask']": REPLICATE}, {"batch['mask']": WHOLE}),
        ({0: SHARD, 2: REPLICATE}, {"x": BATCH, "batch['mask']": WHOLE}),
        ({}, {}),
    ],
)
def test_placements_by_position_and_by_name(asked: Any, found: dict[str, Any]) -> None:
    assert layouts_by_name(asked, TENSORS, MESH, "input_placements") == found


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            [SHARD],
            r"placements for 1 tensors, and there are 3: x, batch\['ids'\], batch\['mask'\]; .* a dict from names",
        ),
        ({"bacth": SHARD}, r"names 'bacth', which does not exist; nearest: batch"),
        ({7: SHARD}, r"names '7', which does not exist; nearest: x"),
        ({"batch": {"idx": SHARD}}, r"names \"batch\['idx'\]\", which does not exist; nearest: batch\['ids'\]"),
        ({"x": (Shard(0),)}, r"'x' has 1 placements; the mesh has 2: dp, tp"),
        ({"x": (Shard(3), Replicate())}, r"'x' is S\(3\), and the tensor has 3 dims"),
        ({"x": (Partial(), Replicate())}, r"'x' is P.*at the border of a model a tensor is Shard\(dim\) or Replicate"),
        ({"x": "S0"}, r"'x' is 'S0'; give a placement per mesh axis"),
    ],
)
def test_placements_that_cannot_be(asked: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=f"input_placements.*{message}"):
        layouts_by_name(asked, TENSORS, MESH, "input_placements")


def test_a_single_placement_will_do_on_one_axis() -> None:
    one: dict[str, Placement] = {"x": Shard(1)}
    assert layouts_by_name(one, [("x", 2)], Mesh.of({"dp": 2}), "input_placements") == {"x": (S(1),)}


def test_the_loss_is_part_of_the_program_only_when_it_gets_its_arguments() -> None:
    model, x, y = nn.Linear(4, 6).double(), f64(3, 4), f64(3, 6, grad=False)
    captured = capture(
        model, (x,), {"loss_args": (y, "sum")}, loss_fn=lambda out, y, how: F.mse_loss(out, y, reduction=how)
    )
    assert (
        captured.output_names == ("output",)
        and captured.program.top.values[captured.program.top.outputs[0].value].shape == ()
    )
    found = evaluate(captured, model, (x,), {"loss_args": (y, "sum")})
    assert torch.allclose(found, F.mse_loss(model(x), y, reduction="sum"), rtol=1e-12)
    plain = capture(model, (x,), {}, loss_fn=F.mse_loss)
    assert plain.program.digest() == capture(model, (x,)).program.digest()


def test_a_forward_with_an_argument_of_that_name_keeps_it() -> None:
    model = Of(lambda m, x, loss_args: x * loss_args[0])
    x, y = f64(3), f64(3)
    captured = capture(model, (x,), {"loss_args": (y,)})
    assert torch.equal(evaluate(captured, model, (x,), {"loss_args": (y,)}), x * y)


def test_a_loss_that_is_a_module_with_a_buffer() -> None:
    model, x, y = nn.Linear(4, 6).double(), f64(8, 4), torch.randint(6, (8,))
    weighted = nn.CrossEntropyLoss(torch.rand(6, dtype=torch.float64))
    before = copy.deepcopy(weighted.state_dict())
    captured = capture(model, (x,), {"loss_args": (y,)}, loss_fn=weighted)
    assert torch.allclose(evaluate(captured, model, (x,), {"loss_args": (y,)}), weighted(model(x), y), rtol=1e-12)
    assert weighted.state_dict().keys() == before.keys()
    several = capture(
        model, (x,), {"loss_args": (y,)}, loss_fn=lambda out, y: {"loss": F.cross_entropy(out, y), "out": out}
    )
    assert several.output_names == ("loss", "out")


def test_a_tensor_in_the_loss_that_would_be_trained_is_refused() -> None:
    temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(CaptureError, match="requires grad and is neither a parameter nor an input"):
        capture(nn.Linear(4, 6), (torch.zeros(3, 4),), {"loss_args": ()}, loss_fn=lambda out: (out * temperature).sum())


def mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def planned(mesh: dict[str, int], **options: Any) -> fxpar.Plan:
    with torch.device("meta"):
        return fxpar.plan(mlp(), mesh, example_args=(torch.empty(16, 64),), cluster="toy", **options)


def test_a_plan_for_data_axes_needs_no_processes() -> None:
    plan = planned({"dp": 4})
    assert plan.boundary.data_axes == ("dp",)
    assert plan.graphs["top"].inputs[-1] == (S(0),) and plan.graphs["top"].outputs == ((S(0),),)
    tensor = planned({"dp": 4}, data_axes=())
    assert tensor.graphs["top"].outputs == ((I,),) and tensor.program != plan.program
    assert planned({"tp": 4}).program == tensor.program
    whole = planned({"dp": 4}, output_placements=(Replicate(),))
    assert whole.graphs["top"].outputs == ((I,),) and whole.program == plan.program


def test_inputs_that_are_derived_are_those_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    plan = fxpar.plan(mlp(), {"dp": 4}, cluster="toy")
    assert "assuming input = float32 (8, 64) on each rank" in capsys.readouterr().out
    assert plan.boundary.data_axes == ("dp",)


def test_a_loss_and_its_arguments_come_together() -> None:
    def square(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean()

    with torch.device("meta"):
        target = torch.empty(16, 64)
    plan = planned({"dp": 4}, loss_fn=square, example_loss_args=(target,))
    assert plan.graphs["top"].inputs[-2:] == ((S(0),), (S(0),)) and plan.graphs["top"].outputs == ((I,),)
    with pytest.raises(CallError, match="loss_fn without example_loss_args"):
        planned({"dp": 4}, loss_fn=square)
    with pytest.raises(CallError, match="example_loss_args without loss_fn"):
        planned({"dp": 4}, example_loss_args=(target,))


def test_an_output_that_every_rank_gets_whole_is_noted() -> None:
    model = Of(lambda m, x: m.lin(x).flatten(), lin=nn.Linear(4, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = fxpar.plan(model, {"dp": 2}, example_args=(torch.zeros(8, 4),), cluster="toy")
    assert any("output 'output' of shape (96,) depends on the batch" in note for note in plan.notes)


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    with pytest.raises(PlanError, match="optimizer='adamax2'"):
        planned({"dp": 4}, optimizer="adamax2")
