"""Inputs that broke other tools, as small modules: every strategy of every operation gives the unsharded numbers.

Each case runs under the optimal plan, under plans of random strategies, and is asked what it may be split into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import Of, check

BATCH, LENGTH, WIDTH = 4, 8, 32


def x(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (BATCH, LENGTH, WIDTH)), dtype=torch.float64).requires_grad_(grad)


def heads(h: Tensor, count: int) -> Tensor:
    return h.view(*h.shape[:2], count, -1).transpose(1, 2)


def joined(h: Tensor) -> Tensor:
    return h.transpose(1, 2).flatten(2)


def attention(module: Any, x: Tensor, **options: Any) -> Tensor:
    q, k, v = (heads(linear(x), 4) for linear in (module.q, module.k, module.v))
    return module.o(joined(F.scaled_dot_product_attention(q, k, v, **options)))


ATTENTION = {"q": (32, 32), "k": (32, 32), "v": (32, 32), "o": (32, 32)}
MASK = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
PADDING = torch.arange(LENGTH)[None, None, None] < torch.tensor([8, 5, 8, 3])[:, None, None, None]


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"attn_mask": MASK},
        {"attn_mask": PADDING},
        {"attn_mask": torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64)},
        {"attn_mask": torch.randn(4, 1, 1, LENGTH, dtype=torch.float64)},
        {"scale": 0.3, "dropout_p": 0.0},
    ],
    ids=["causal", "mask", "padding", "bias", "row", "scale"],
)
def test_attention(options: dict[str, Any]) -> None:
    check(Of(lambda m, x: attention(m, x, **options), **ATTENTION), x())


def grouped(m: Any, x: Tensor) -> Tensor:
    q, k, v = heads(m.q(x), 8), heads(m.k(x), 4), heads(m.v(x), 4)
    return m.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


def repeated(m: Any, x: Tensor) -> Tensor:
    q, k, v = heads(m.q(x), 8), heads(m.k(x), 4), heads(m.v(x), 4)
    k, v = (h[:, :, None].expand(BATCH, 4, 2, LENGTH, 4).reshape(BATCH, 8, LENGTH, 4) for h in (k, v))
    return m.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@pytest.mark.parametrize("function", [grouped, repeated])
def test_grouped_query_attention(function: Callable[..., Tensor]) -> None:
    plan = check(Of(function, q=(32, 32), k=(32, 16), v=(32, 16), o=(32, 32)), x())
    assert {plan.parameters[f"{name}.weight"][0].kind for name in "qkvo"} == {"S"}


def eager(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(linear(x), 4) for linear in (m.q, m.k, m.v))
    scores = torch.matmul(q, k.transpose(2, 3)) / 8**0.5
    scores = scores.masked_fill(~MASK, torch.finfo(scores.dtype).min)
    return m.o(joined(torch.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype) @ v))


def test_attention_written_out() -> None:
    check(Of(eager, **ATTENTION), x())


def fused(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part, 4) for part in m.qkv(x).chunk(3, -1))
    return m.o(joined(F.scaled_dot_product_attention(q, k, v)))


def fused_by_view(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(BATCH, LENGTH, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return m.o(joined(F.scaled_dot_product_attention(q, k, v)))


def fused_by_head(m: Any, x: Tensor) -> Tensor:
    """The order of Megatron and of GPT-NeoX: q, k and v of one head stand together."""
    q, k, v = m.qkv(x).view(BATCH, LENGTH, 4, 24).transpose(1, 2).split(8, -1)
    return m.o(joined(F.scaled_dot_product_attention(q, k, v)))


@pytest.mark.parametrize(("function", "wanted"), [(fused, "S0/3"), (fused_by_view, "S0/3"), (fused_by_head, "S0")])
def test_fused_qkv_is_split_by_heads(function: Callable[..., Tensor], wanted: str) -> None:
    plan = check(Of(function, qkv=(32, 96), o=(32, 32)), x())
    assert str(plan.parameters["qkv.weight"][0]) == wanted
    assert str(plan.parameters["o.weight"][0]) == "S1"


def test_fused_gate_and_up_projection() -> None:
    def gated(m: Any, x: Tensor) -> Tensor:
        gate, up = m.gate_up(x).chunk(2, -1)
        return m.down(F.silu(gate) * up)

    plan = check(Of(gated, gate_up=(32, 128), down=(64, 32)), x())
    assert str(plan.parameters["gate_up.weight"][0]) == "S0/2"


def test_a_hard_coded_head_count_in_a_view() -> None:
    def hard(m: Any, x: Tensor) -> Tensor:
        q = m.q(x).view(BATCH, -1, 4, 8).transpose(1, 2)
        k = m.k(x).reshape(-1, LENGTH, 4, 8).transpose(1, 2)
        return m.o((q.softmax(-1) * k.tanh()).transpose(1, 2).reshape(BATCH, LENGTH, 32))

    check(Of(hard, q=(32, 32), k=(32, 32), o=(32, 32)), x())


def test_complex_rotary_embedding() -> None:
    angles = torch.outer(torch.arange(LENGTH, dtype=torch.float64), torch.rand(4, dtype=torch.float64))
    turns = torch.polar(torch.ones_like(angles), angles)

    def rotary(m: Any, x: Tensor) -> Tensor:
        q, k = (m.q(x).view(BATCH, LENGTH, 4, 8), m.k(x).view(BATCH, LENGTH, 4, 8))
        q, k = (torch.view_as_complex(h.reshape(BATCH, LENGTH, 4, 4, 2)) * turns[None, :, None] for h in (q, k))
        q, k = (torch.view_as_real(h).flatten(3) for h in (q, k))
        return m.o((q * k.softmax(1)).flatten(2))

    check(Of(rotary, q=(32, 32), k=(32, 32), o=(32, 32)), x())


NO_RULE = {
    "select": lambda m, x: m.b(m.a(x)[:, 2]),
    "masked_fill": lambda m, x: m.b(m.a(x).masked_fill(x > 0, 0.5)),
    "amax": lambda m, x: m.b(m.a(x) / m.a(x).amax(-1, keepdim=True)),
    "topk": lambda m, x: m.b(m.a(x).topk(32, -1).values),
    "cumsum": lambda m, x: m.b(m.a(x).cumsum(1)),
    "sort": lambda m, x: m.b(m.a(x).sort(-1)[0]),
    "flip": lambda m, x: m.b(m.a(x).flip(1)),
    "roll": lambda m, x: m.b(m.a(x).roll(1, 2)),
    "gather": lambda m, x: m.b(m.a(x).gather(1, x.argsort(1))),
    "list index": lambda m, x: m.b(m.a(x)[..., [-1], :]),
    "boolean where": lambda m, x: m.b(torch.where(x > 0, m.a(x), m.a(x).new_zeros(()))),
    "cdist": lambda m, x: m.b(torch.cdist(m.a(x), x).repeat(1, 1, 4)),
    "einsum": lambda m, x: torch.einsum("bth,bsh->bts", m.a(x), m.b(x)),
    "logsumexp": lambda m, x: torch.logsumexp(m.a(x), -1) + m.b(x).norm(dim=-1),
    "var": lambda m, x: (m.a(x) - m.a(x).mean(-1, keepdim=True)) * torch.rsqrt(m.b(x).var(-1, keepdim=True) + 1e-5),
    "prod": lambda m, x: m.a(x).prod(1) + m.b(x).sum(1),
    "stack": lambda m, x: torch.stack([m.a(x), m.b(x)], 1).transpose(1, 2).reshape(BATCH, LENGTH, 64),
    "cat": lambda m, x: torch.cat([m.a(x), m.b(x).tanh()], -1),
    "pad": lambda m, x: F.pad(m.a(x), (1, 3)) + F.pad(m.b(x), (2, 2), value=1.0),
    "tril": lambda m, x: (m.a(x) @ m.b(x).mT).tril(),
    "conv1d": lambda m, x: F.conv1d(m.a(x).mT, m.b.weight[:, :, None]),
    "group_norm": lambda m, x: m.b(F.group_norm(m.a(x).mT, 4).mT),
    "bucketize": lambda m, x: m.a(x) * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5, dtype=x.dtype)) + m.b(x),
    "one_hot": lambda m, x: m.b(m.a(x) * F.one_hot(x.detach().argmax(-1), WIDTH)),
    "scatter": lambda m, x: m.b(torch.zeros_like(m.a(x)).scatter_(-1, x.detach().topk(2, -1).indices, 1.0) * m.a(x)),
    "scatter source": lambda m, x: m.b(torch.zeros_like(x).scatter(-1, x.detach().argsort(-1), m.a(x))),
    "index_add": lambda m, x: m.b(m.a(x).index_add(1, torch.tensor([0, 3]), x[:, :2])),
    "slice assignment": lambda m, x: assigned(m, x),
    "clamp_": lambda m, x: m.b(m.a(x).clamp_(0)),
    "in place on a view": lambda m, x: in_place_view(m, x),
}


def assigned(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).clone()
    y[:, 2:4] = m.b(x)[:, :2]
    y[:, 0, :] = 0.5
    return m.b(y)


def in_place_view(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[..., :16].mul_(2)
    y.view(BATCH, LENGTH, 2, 16)[:, :, 1].add_(1)
    return m.b(y)


@pytest.mark.parametrize("name", NO_RULE)
def test_operations_around_row_and_column_layers(name: str) -> None:
    check(Of(NO_RULE[name], a=(32, 32), b=(32, 32)), x())


@torch.library.custom_op("fxpar_tests::wave", mutates_args=())
def wave(x: Tensor) -> Tensor:
    return torch.sin(x) * x.flip(-1)


@wave.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def wave_backward(context: Any, grad: Tensor) -> Tensor:
    (x,) = context.saved_tensors
    return grad * torch.cos(x) * x.flip(-1) + (grad * torch.sin(x)).flip(-1)


wave.register_autograd(wave_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def test_an_operation_without_a_rule_is_computed_whole_and_reported() -> None:
    plan = check(Of(lambda m, x: m.b(wave(m.a(x))), a=(32, 32), b=(32, 32)), x())
    assert [(op, count) for op, _, count in plan.unruled_ops] == [("fxpar_tests.wave.default", 1)]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.b(m.a(x)).max(-1).values,
        lambda m, x: m.b(m.a(x)).clamp(-0.1, 0.1),
        lambda m, x: m.b(m.a(x)).pow(3),
        lambda m, x: m.b(m.a(x)).relu() + 1,
        lambda m, x: m.b(m.a(x)).softmax(-1) * 2 + m.b(x),
        lambda m, x: (m.b(m.a(x)) + 1) * 3 - x,
        lambda m, x: m.b(m.a(x)).clamp_(0),
        lambda m, x: m.b(m.a(x)) * m.b(m.a(x)),
        lambda m, x: m.b(m.a(x)) / m.b(m.a(x)).detach().abs().amax(),
        lambda m, x: torch.maximum(m.b(m.a(x)), x),
    ],
    ids=["max", "clamp", "pow", "relu", "softmax", "affine", "clamp_", "square", "divide", "maximum"],
)
def test_after_a_row_parallel_layer(function: Callable[..., Tensor]) -> None:
    """``b`` ends in partial sums: they must be summed before what is not linear, and a bias must be added once."""
    row = {"a.weight": "S0@tp", "a.bias": "S0@tp", "b.weight": "S1@tp", "b.bias": "I@tp"}
    check(Of(function, a=(32, 32), b=(32, 32)), x(), parameters=row)
