"""Numbers that other tools get wrong: means, biases, gradients that need a sum over the ranks, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.assemble import assemble, random_choice
from fxpar.plans import Plan
from tests.cases import Case, Of, check
from tests.simulated import Simulation, cotangents

BATCH, LENGTH, WIDTH = 4, 8, 16


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, LENGTH, WIDTH)), dtype=torch.float64, requires_grad=True)


def ran(plan: Plan) -> set[tuple[str, str]]:
    return {(item.phase, item.kind) for item in plan.collectives}


def test_a_row_parallel_bias_is_added_once() -> None:
    model = Of(lambda m, x: m.down(torch.relu(m.up(x))), up=(16, 64), down=(64, 16))
    held = {"up.*": "S0@tp", "down.weight": "S1@tp", "down.bias": "I@tp"}
    plan = check(model, x(), parameters=held, nodes={"top:down:aten.linear.default": "P@tp"})
    assert ran(plan) & {("forward", "all_reduce"), ("forward", "reduce_scatter")}


def test_the_gradient_of_the_input_of_a_column_parallel_layer_is_summed() -> None:
    model = Of(lambda m, x: m.up(x), up=(16, 64))
    plan = check(model, x(), parameters={"up.*": "S0@tp"})
    assert ("backward", "all_reduce") in ran(plan) or ("backward", "reduce_scatter") in ran(plan)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16), nn.LayerNorm(16, bias=False)])
def test_norm_gradients_under_sequence_parallelism_are_summed(norm: nn.Module) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = norm, nn.Linear(16, 64), nn.Linear(64, 16)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    held = {"norm.weight": "I@tp", "up.*": "S0@tp", "down.weight": "S1@tp"}
    check(Block(), x(), parameters=held, nodes={"top:norm:*norm*": "S1@tp"}, seeds=30)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x).mean(),
        lambda m, x: m.a(x).mean(0),
        lambda m, x: m.a(x).mean((0, 1), keepdim=True),
        lambda m, x: m.a(x).sum(1) / 7,
        lambda m, x: m.a(x).var(0) + m.a(x).std(0, unbiased=False),
        lambda m, x: (m.a(x) ** 2).mean(-1, keepdim=True).rsqrt() * x,
        lambda m, x: m.a(x).norm() + m.a(x).norm(p=1, dim=1).sum(),
        lambda m, x: m.a(x).logsumexp((0, 1)),
        lambda m, x: m.a(x).softmax(0) + m.a(x).log_softmax(1),
        lambda m, x: m.a(x).abs().max() + m.a(x).min(),
        lambda m, x: F.normalize(m.a(x), dim=-1),
        lambda m, x: F.cosine_similarity(m.a(x), x, dim=-1),
    ],
    ids=["mean", "rows", "dims", "sum", "var", "rms", "norm", "logsumexp", "softmax", "max", "normalize", "cosine"],
)
@pytest.mark.parametrize("rows", [4, 10])
def test_reductions(function: Callable[[Any, Tensor], Tensor], rows: int) -> None:
    """Ten rows on four ranks cannot be split by rows, eight words can."""
    check(Of(function, a=(16, 16)), x(rows, LENGTH, 16))


TARGETS = torch.randint(16, (BATCH * LENGTH,), generator=torch.Generator().manual_seed(0))
SOME = torch.where(torch.arange(BATCH * LENGTH) % 3 == 0, -100, TARGETS)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, z: F.cross_entropy(y, TARGETS),
        lambda y, z: F.cross_entropy(y, SOME),
        lambda y, z: F.cross_entropy(y, SOME, reduction="sum"),
        lambda y, z: F.cross_entropy(y, SOME, reduction="none").square().mean(),
        lambda y, z: F.cross_entropy(y, SOME, label_smoothing=0.1),
        lambda y, z: F.cross_entropy(y, SOME, weight=torch.arange(1.0, 17.0, dtype=y.dtype)),
        lambda y, z: F.cross_entropy(y, z.softmax(-1)),
        lambda y, z: F.cross_entropy(y, z.softmax(-1), label_smoothing=0.2, reduction="sum"),
        lambda y, z: F.nll_loss(y.log_softmax(-1), SOME),
        lambda y, z: F.mse_loss(y, z),
        lambda y, z: F.l1_loss(y, z, reduction="sum"),
        lambda y, z: F.smooth_l1_loss(y, z, beta=0.3),
        lambda y, z: F.huber_loss(y, z),
        lambda y, z: F.binary_cross_entropy_with_logits(y, z.sigmoid()),
        lambda y, z: F.kl_div(y.log_softmax(-1), z.softmax(-1), reduction="batchmean"),
        lambda y, z: -y.log_softmax(-1).gather(-1, TARGETS[:, None]).mean(),
    ],
    ids=[
        "plain", "ignored", "sum", "none", "smoothing", "weights", "soft", "soft smoothing", "nll", "mse", "l1",
        "smooth l1", "huber", "binary", "kl", "by hand",
    ],
)  # fmt: skip
def test_losses(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.a(x).flatten(0, 1)
        return loss(y, m.b(x).flatten(0, 1)), y

    check(Of(forward, a=(16, 16), b=(16, 16)), x(), seeds=20)


def test_values_read_many_times_and_gradients_that_join() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.a(x)
        parts = [y.softmax(dim) * y for dim in range(3)]
        return (*parts, y.mT @ m.b(y), y.detach() * y, y.sum((0, 1)) + m.b.bias)

    check(Of(forward, a=(16, 16), b=(16, 16)), x(), seeds=40)


def test_parts_without_gradient_read_values_that_have_one() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.a(x)
        with torch.no_grad():
            target = m.b(y).softmax(-1)
            best = y.argmax(-1)
        return (y.log_softmax(-1) * target).sum(-1).mean(), best, y.gather(-1, best[..., None]), (y > 0).sum()

    check(Of(forward, a=(16, 16), b=(16, 16)), x(), seeds=40)


def test_frozen_parameters() -> None:
    model = Of(lambda m, x: m.c(torch.relu(m.b(m.a(x)))) + m.a(x), a=(16, 16), b=(16, 64), c=(64, 16))
    model.a.requires_grad_(False)
    model.c.weight.requires_grad_(False)
    check(model, x(), seeds=30)
    check(model, x().detach(), seeds=30)


def test_dropout_is_one_mask_seen_by_all_ranks_and_shards_draw_their_own() -> None:
    """Under any plan the result is the input times one mask, everywhere the same, and so is the gradient."""
    case = Case(Of(lambda m, x: F.dropout(x * 1.0, 0.5)), (x(8, 8),))
    priced = case.priced(2)
    (whole,) = case.tensors.values()
    place = next(index for index, node in enumerate(case.program.top.nodes) if "dropout" in node.op)
    chosen = set()
    for seed in range(30):
        plan = assemble(priced, random_choice(priced.space, seed))
        chosen.add(plan.graphs["top"].nodes[place].name)
        torch.manual_seed(seed)
        first, second = Simulation(case.program, plan).run(case.tensors)
        (out,), (gradient,) = first.outputs, first.gradients.values()
        assert torch.equal(out, second.outputs[0])
        mask = out != 0
        assert 16 <= int(mask.sum()) <= 48
        torch.testing.assert_close(out, torch.where(mask, 2 * whole, 0.0))
        cotangent = cotangents(case.program.top, [out], 0)[0]
        torch.testing.assert_close(gradient, torch.where(mask, 2 * cotangent, 0.0))
        assert not torch.equal(mask[:4], mask[4:]) and not torch.equal(mask[:, :4], mask[:, 4:])
    assert {name.partition(":")[0] for name in chosen} >= {"whole", "split"}


def test_attention_dropout_gives_gradients_of_what_was_computed() -> None:
    """The mask is not known: the output is linear in the values, so it is their gradient's product with them."""

    def forward(m: Any, q: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, v, dropout_p=0.3)

    case = Case(Of(forward), (x(4, 4, 8, 8).detach(), x(4, 4, 8, 8)))
    priced = case.priced(2)
    key = ("input", "args[1]")
    for seed in range(12):
        plan = assemble(priced, random_choice(priced.space, seed))
        torch.manual_seed(seed)
        first, second = Simulation(case.program, plan).run(case.tensors)
        out = first.outputs[0].detach()
        assert torch.equal(out, second.outputs[0])
        through = (first.gradients[key] * case.tensors[key].detach()).sum()
        torch.testing.assert_close(through, (out * cotangents(case.program.top, [out], 0)[0]).sum())
