"""Axes that carry the batch: every rank calls the model with its own part, and the gradients are those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from training import (
    VOCABULARY,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    ids,
    llama,
    mesh_of,
    rows,
    stack,
    train,
)

import fxpar
from fxpar.errors import CallError, LayoutError, PlanError, RankError
from fxpar.plans import Plan
from fxpar.precision import Float64Casts
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives

TOLERANCE = 1e-9
#: Parameters as DistributedDataParallel and as FSDP hold them, and as fxpar likes.
WAYS: dict[str, dict[str, str] | None] = {"ddp": {"*": "replicated"}, "fsdp": {"*.weight": "S0@dp"}, "free": None}


def part(tensor: torch.Tensor, mesh: DeviceMesh, *axes: str) -> torch.Tensor:
    """This rank's part of ``tensor``, whose dim 0 the axes cut one after the other."""
    for axis in axes:
        tensor = tensor.chunk(mesh[axis].size())[mesh.get_local_rank(axis)]
    return tensor


def gradients(model: nn.Module, loss: torch.Tensor) -> nn.Module:
    loss.backward()
    return model


def assert_executes_its_plan(model: nn.Module, step: Any) -> None:
    with record_collectives() as executed:
        step()
    assert len(executed) == sum(item.count for item in applied_plan(model).collectives) > 0


def outside(way: str) -> bool:
    """A loss outside with equal counts: gradients and three steps are those of the mean over the whole batch."""
    mesh, batch = mesh_of(2, names=("dp",)), rows(count=6)
    mine = part(batch, mesh, "dp")
    wanted, model = stack(), stack()
    fxpar.parallelize(model, mesh, example_args=(mine,), constraints=WAYS[way], cluster="toy")
    assert_executes_its_plan(model, lambda: gradients(model, model(mine).square().mean()))
    assert_same_gradients(model, gradients(wanted, wanted(batch).square().mean()), TOLERANCE)
    assert_close(model(mine), part(wanted(batch), mesh, "dp"), TOLERANCE)
    train(model, lambda m: m(mine).square().mean())
    train(wanted, lambda m: m(batch).square().mean())
    assert_same_parameters(model, wanted, TOLERANCE)
    plan = applied_plan(model)
    assert plan.boundary.data_axes == ("dp",) and Plan.from_json(plan.to_json()) == plan
    held = {str(state) for name, (state,) in plan.parameters.items() if name.endswith("weight")}
    assert held == {"ddp": {"I"}, "fsdp": {"S0"}}.get(way, held)
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_outside_is_averaged_over_the_ranks(way: str) -> None:
    assert all(run_ranks(2, outside, way))


def labels_of(tokens: torch.Tensor, *, unequal: bool = True) -> torch.Tensor:
    """Labels of which the first half of the rows has far fewer than the second."""
    labels = tokens.clone()
    if unequal:
        labels[: len(labels) // 2, 3:] = -100
        labels[0, :] = -100
    return labels


def inside(way: str) -> bool:
    """A loss that the model computes: over all tokens of the whole batch, however many each rank has."""
    mesh, tokens = mesh_of(2, names=("dp",)), ids()
    mine, labels = part(tokens, mesh, "dp"), part(labels_of(tokens), mesh, "dp")
    counts = [int((half[:, 1:] != -100).sum()) for half in labels_of(tokens).chunk(2)]
    assert counts[0] * 3 < counts[1]
    wanted, model = llama().double(), llama().double()
    with Float64Casts():
        fxpar.parallelize(
            model, mesh, example_args=(mine,), example_kwargs={"labels": labels}, constraints=WAYS[way], cluster="toy"
        )
        wanted_loss = wanted(tokens, labels=labels_of(tokens)).loss
        loss = model(mine, labels=labels).loss
        assert_executes_its_plan(model, lambda: gradients(model, model(mine, labels=labels).loss))
        gradients(wanted, wanted_loss)
    assert_close(loss, wanted_loss, TOLERANCE)
    assert_same_gradients(model, wanted, TOLERANCE)
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_inside_is_exact_over_the_whole_batch(way: str) -> None:
    assert all(run_ranks(2, inside, way, timeout=120))


def token_loss(output: Any, labels: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), weight)


def with_loss_fn() -> bool:
    """The loss as a function: the model returns it, with the whole batch's gradients, and its output in eval mode."""
    mesh, tokens = mesh_of(2, names=("dp",)), ids()
    mine, labels = part(tokens, mesh, "dp"), part(labels_of(tokens), mesh, "dp")
    wanted, model = llama().double(), llama().double()
    keys, kind = list(model.state_dict()), type(model)
    with Float64Casts():
        made = fxpar.parallelize(
            model, mesh, example_args=(mine,), loss_fn=token_loss, example_loss_args=(labels,), cluster="toy"
        )
        assert made is model and type(model) is kind and list(model.state_dict()) == keys
        assert len([out for out in applied_plan(model).graphs["top"].outputs if out]) == 1
        loss = model(mine, loss_args=(labels,))
        assert_executes_its_plan(model, lambda: gradients(model, model(mine, loss_args=(labels,))))
        wanted_loss = token_loss(wanted(tokens), labels_of(tokens))
        assert_close(loss, wanted_loss, TOLERANCE)
        assert_same_gradients(model, gradients(wanted, wanted_loss), TOLERANCE)
        with pytest.raises(CallError, match=r"call it with loss_args=\(\.\.\.\).*only in eval mode"):
            model(mine)
        with pytest.raises(CallError, match=r"loss_args is a Tensor; pass a tuple"):
            model(mine, loss_args=labels)
        model.eval()
        wanted.eval()
        assert_close(model(mine).logits, part(wanted(tokens).logits, mesh, "dp"), TOLERANCE)
        weight = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        found = model(mine, loss_args=(labels, weight))  # another way of calling the loss
        assert_close(found, token_loss(wanted(tokens), labels_of(tokens), weight), TOLERANCE)
    return True


def test_a_loss_function_becomes_part_of_the_program() -> None:
    assert all(run_ranks(2, with_loss_fn, timeout=120))


def losses_refused() -> bool:
    mesh, x = mesh_of(2, names=("dp",)), rows()

    def refused(kind: type[Exception], message: str, **options: Any) -> None:
        model = stack()
        with pytest.raises(kind, match=message):
            fxpar.parallelize(model, mesh, example_args=(x,), cluster="toy", **options)
        assert all(type(p) is nn.Parameter for p in model.parameters())

    refused(CallError, r"loss_fn without example_loss_args", loss_fn=F.mse_loss)
    refused(CallError, r"example_loss_args without loss_fn", example_loss_args=(x,))
    refused(CallError, r"loss_fn is a Tensor; pass a function", loss_fn=x, example_loss_args=())
    refused(
        fxpar.FxparError, r"loss_fn is a PReLU with a parameter, 'weight'", loss_fn=nn.PReLU(), example_loss_args=()
    )
    place = r"raised RuntimeError in loss_fn at .*test_data_axes\.py:\d+"
    refused(fxpar.FxparError, place, loss_fn=lambda out: out.view(3, 5), example_loss_args=())
    model = fxpar.parallelize(stack(), mesh, example_args=(x,), cluster="toy")
    with pytest.raises(CallError, match="parallelized without loss_fn="):
        model(x, loss_args=(x,))
    modules = fxpar.parallelize(
        stack(), mesh, example_args=(x,), loss_fn=nn.SmoothL1Loss(), example_loss_args=(x,), cluster="toy"
    )
    assert_close(modules(x, loss_args=(x,)), F.smooth_l1_loss(stack()(x), x), TOLERANCE)
    nothing = fxpar.parallelize(
        stack(), mesh, example_args=(x,), loss_fn=lambda out: out.square().mean(), example_loss_args=(), cluster="toy"
    )
    assert_close(nothing(x, loss_args=()), stack()(x).square().mean(), TOLERANCE)
    return True


def test_losses_that_cannot_be_used_and_losses_that_are_modules() -> None:
    assert all(run_ranks(2, losses_refused))


class Masked(nn.Module):
    """A batch in a dict with a mask of its own shape, a table that all ranks share, and results of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.double()

    def forward(self, batch: dict[str, torch.Tensor], table: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.up(batch["x"])) * batch["mask"][..., None]
        return {"rows": self.down(hidden), "table": table * 2, "mean": hidden.mean(), "sums": hidden.sum(0)}


def other_calls() -> bool:
    """Inputs and outputs of several kinds; a smaller last batch; eval; a plan that is given; another axis' name."""
    mesh = mesh_of(2, names=("dp",))
    x, mask = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.ones(8, 6)
    mask[:3, 2:] = 0
    table = torch.rand(5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def call(model: nn.Module, rows: int, mesh: DeviceMesh | None = None, axis: str = "dp") -> dict[str, torch.Tensor]:
        batch = {"x": x[:rows], "mask": mask[:rows]}
        mine = {name: part(value, mesh, axis) if mesh else value for name, value in batch.items()}
        return model(mine, table)

    def check(model: nn.Module, rows: int, mesh: DeviceMesh, axis: str = "dp") -> None:
        found, expected = call(model, rows, mesh, axis), call(wanted, rows)
        for name in ("table", "mean", "sums"):
            assert_close(found[name], expected[name], TOLERANCE, name)
        assert_close(found["rows"], part(expected["rows"], mesh, axis), TOLERANCE)

    def example(rows: int = 8) -> tuple[Any, ...]:
        return {"x": part(x[:rows], mesh, "dp"), "mask": part(mask[:rows], mesh, "dp")}, table

    torch.manual_seed(0)
    wanted = Masked()
    states = wanted.state_dict()

    def fresh() -> nn.Module:
        made = Masked()
        made.load_state_dict(states)
        return made

    model = fxpar.parallelize(fresh(), mesh, example_args=example(), cluster="toy")
    assert list(map(str, applied_plan(model).graphs["top"].inputs[-3:])) == ["(S0,)", "(S0,)", "(I,)"]
    check(model, 8, mesh)
    check(model, 4, mesh)
    model.eval()
    check(model, 8, mesh)
    plan = Plan.from_json(applied_plan(model).to_json())
    check(fxpar.parallelize(fresh(), mesh, example_args=example(), plan=plan), 4, mesh)
    with pytest.raises(PlanError, match=r"data axes \('dp',\); asked for are .* data axes \(\)|another program"):
        fxpar.parallelize(fresh(), mesh, example_args=example(), plan=plan, data_axes=())
    renamed = mesh_of(2, names=("copies",))
    check(
        fxpar.parallelize(fresh(), renamed, example_args=example(), data_axes=["copies"], cluster="toy"),
        8,
        renamed,
        "copies",
    )
    alone = fxpar.parallelize(fresh(), mesh, example_args=({"x": x, "mask": mask}, table), data_axes=(), cluster="toy")
    for name, value in call(alone, 8).items():  # no data axis: the same inputs on all ranks
        assert_close(value, call(wanted, 8)[name], TOLERANCE, name)
    return True


def test_other_batches_modes_plans_and_names() -> None:
    assert all(run_ranks(2, other_calls, timeout=120))


def uneven() -> tuple[str, str]:
    """Ranks whose parts of the batch differ in length, at the start and later."""
    mesh = mesh_of(2, names=("dp",))
    rank = mesh.get_local_rank()
    own = rows(count=4 + rank)
    model = stack()
    with pytest.raises(RankError) as first:
        fxpar.parallelize(model, mesh, example_args=(own,), cluster="toy")
    fxpar.parallelize(model, mesh, example_args=(rows(),), cluster="toy")
    with pytest.raises(RankError) as later:
        model(rows(count=6 + 2 * rank))
    assert_close(model(rows()), stack()(rows()), TOLERANCE)
    return str(first.value), str(later.value)


def test_parts_of_unequal_length_are_refused_on_every_rank() -> None:
    for first, later in run_ranks(2, uneven):
        assert "rank 0 has" in first and "for x float64[4,8], rank 1 has" in first and "for x float64[5,8]; " in first
        assert "the way the model is called" in later and "x float64[6,8]" in later and "x float64[8,8]" in later


def placed() -> bool:
    """A batch cut along its length, an output that is asked for whole, and one that the other axis cuts."""
    mesh, x = (
        mesh_of(2, 2, names=("dp", "tp")),
        torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).double(),
    )
    whole = (Replicate(), Replicate())
    wanted = stack()
    model = fxpar.parallelize(
        stack(),
        mesh,
        example_args=(x.chunk(2, 1)[mesh.get_local_rank("dp")],),
        input_placements=((Shard(1), Replicate()),),
        output_placements={0: (Shard(-2), Shard(-1))},
        cluster="toy",
    )
    found, expected = model(x.chunk(2, 1)[mesh.get_local_rank("dp")]), wanted(x)
    mine = expected.chunk(2, 1)[mesh.get_local_rank("dp")].chunk(2, 2)[mesh.get_local_rank("tp")]
    assert_close(found, mine, TOLERANCE)
    # Over dp the ranks' losses are averaged; those of tp are the parts of one sum.
    gradients(model, found.square().sum() * 4 / x.numel())
    assert_same_gradients(model, gradients(wanted, expected.square().mean() * 2), TOLERANCE)

    model = fxpar.parallelize(
        stack(), mesh, example_args=(part(x, mesh, "dp"),), output_placements={"output": whole}, cluster="toy"
    )
    assert_close(model(part(x, mesh, "dp")), expected, TOLERANCE)

    for options, message in (
        ({"input_placements": {"y": whole}}, r"input_placements names 'y', which does not exist; nearest: x"),
        ({"output_placements": {"logits": whole}}, r"output_placements names 'logits'.*nearest: output"),
        ({"input_placements": [whole, whole]}, r"input_placements has placements for 2 tensors, and there are 1: x"),
        ({"input_placements": [(Shard(0),)]}, r"'x' has 1 placements; the mesh has 2: dp, tp"),
        ({"output_placements": {0: (Shard(3), Replicate())}}, r"'output' is S\(3\), and the tensor has 3 dims"),
        ({"output_placements": {0: (Replicate(), Shard(1))}, "data_axes": ()}, r"cannot be I@dp, S1@tp: .* divide"),
        ({"data_axes": ["batch"]}, r"data_axes has 'batch', which is no axis of the mesh; it has dp, tp"),
    ):
        odd = x if "data_axes" not in options else x[:, :1]  # one rank would have nothing
        with pytest.raises(LayoutError, match=message):
            fxpar.parallelize(stack(), mesh, example_args=(odd,), cluster="toy", **options)
    return True


def test_placements_of_inputs_and_outputs() -> None:
    assert all(run_ranks(4, placed, timeout=120))


class Noisy(nn.Module):
    """Statistics over the batch, a buffer that follows them, and dropout."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(share)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.up(x)))


def noisy() -> tuple[bool, list[bool]]:
    """Statistics are those of the whole batch (as with SyncBatchNorm); every rank drops elements of its own."""
    mesh, batch = mesh_of(2, names=("dp",)), rows(count=16)
    mine = part(batch, mesh, "dp")
    torch.manual_seed(0)
    wanted = Noisy(0.0)
    torch.manual_seed(0)
    model = fxpar.parallelize(Noisy(0.0), mesh, example_args=(mine,), cluster="toy")
    assert_close(model(mine), part(wanted(batch), mesh, "dp"), TOLERANCE)
    for name in ("running_mean", "running_var"):
        assert_close(getattr(model.norm, name), getattr(wanted.norm, name), TOLERANCE, name)
    gradients(model, model(mine).pow(3).mean())
    assert_same_gradients(model, gradients(wanted, wanted(batch).pow(3).mean()), TOLERANCE)
    torch.manual_seed(0)
    dropping = fxpar.parallelize(Noisy(0.5), mesh, example_args=(mine,), cluster="toy")
    out = dropping(mine)
    dropped = [bool(value == 0) for value in out.detach().flatten()]
    assert 0.3 < sum(dropped) / len(dropped) < 0.7
    return True, dropped


def test_batch_norm_and_dropout() -> None:
    (_, first), (_, second) = run_ranks(2, noisy)
    assert sum(a != b for a, b in zip(first, second, strict=True)) > len(first) / 4


def two_axes(names: tuple[str, str], constraints: dict[str, str] | None) -> bool:
    """Both kinds of loss on a (2, 2) mesh, of which one or both axes carry the batch."""
    mesh, tokens = mesh_of(2, 2, names=names), ids(batch=8)
    carriers = [name for name in names if name != "tp"]
    mine, labels = part(tokens, mesh, *carriers), part(labels_of(tokens), mesh, *carriers)
    wanted, model = llama().double(), llama().double()
    with Float64Casts():
        fxpar.parallelize(
            model, mesh, example_args=(mine,), example_kwargs={"labels": labels}, constraints=constraints, cluster="toy"
        )
        assert_executes_its_plan(model, lambda: gradients(model, model(mine, labels=labels).loss))
        assert_same_gradients(model, gradients(wanted, wanted(tokens, labels=labels_of(tokens)).loss), TOLERANCE)
        model.zero_grad()
        wanted.zero_grad()
        found, expected = model(mine).logits, wanted(tokens).logits
        assert_close(found, part(expected, mesh, *carriers), TOLERANCE)
        gradients(model, found.square().mean())
        assert_same_gradients(model, gradients(wanted, expected.square().mean()), TOLERANCE)
    return True


@pytest.mark.parametrize(
    ("names", "constraints"),
    [
        (("dp", "tp"), None),
        (("dp", "fsdp"), None),
        (("replicate", "shard"), {"*.weight": "S0@shard"}),  # HSDP
        (("fsdp", "tp"), {"*.weight": "S0@fsdp"}),
    ],
)
def test_two_axes(names: tuple[str, str], constraints: dict[str, str] | None) -> None:
    assert all(run_ranks(4, two_axes, names, constraints, timeout=180))


def changed_before_backward() -> bool:
    """An optimizer step between a forward and its backward is an error, not a wrong gradient."""
    mesh, model = mesh_of(), stack()
    fxpar.parallelize(model, mesh, example_args=(rows(),), cluster="toy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows()).square().mean().backward()
    loss = model(rows()).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return True


def test_a_parameter_changed_before_backward_is_noticed() -> None:
    assert all(run_ranks(2, changed_before_backward))
