"""Sizes that do not divide by the ranks: something else is split, or nothing, and the numbers stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import Of, check

BATCH, LENGTH = 4, 8


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def grouped(heads: int, kv_heads: int, q_view: int, kv_view: int) -> Callable[[Any, Tensor], Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q = m.q(x).view(BATCH, LENGTH, q_view, 8).transpose(1, 2)
        k, v = (layer(x).view(BATCH, LENGTH, kv_view, 8).transpose(1, 2) for layer in (m.k, m.v))
        repeat = heads // kv_heads
        k, v = (h[:, :, None].expand(BATCH, kv_heads, repeat, LENGTH, 8).flatten(1, 2) for h in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.o(out.transpose(1, 2).reshape(BATCH, LENGTH, -1))

    return forward


@pytest.mark.parametrize("view", [-1, 2])
def test_two_key_value_heads_on_four_ranks(view: int) -> None:
    layers = {"q": (32, 64), "k": (32, 16), "v": (32, 16), "o": (64, 32)}
    check(Of(grouped(8, 2, 8, view), **layers), x(BATCH, LENGTH, 32))


def test_six_heads_on_four_ranks() -> None:
    layers = {"q": (32, 48), "k": (32, 48), "v": (32, 48), "o": (48, 32)}
    check(Of(grouped(6, 6, -1, 6), **layers), x(BATCH, LENGTH, 32))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_nothing_divides(rows: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    plan = check(model, x(rows, 6))
    assert plan.unsplit_share == 1.0
    assert all("divides by 4" in item.reason for item in plan.unsplit)


@pytest.mark.parametrize("shape", [(1, 8, 16), (4, 1, 16), (1, 1, 16), (16,), (2, 3, 16)])
def test_batches_and_lengths_of_one(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1)).double()
    check(model, x(*shape))


class Tied(nn.Module):
    """Embedding, a layer, and a head over ``vocabulary`` words, with the loss inside; the last words are ignored."""

    def __init__(self, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.silu(self.layer(self.embed(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


@pytest.mark.parametrize("vocabulary", [53, 64])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide(vocabulary: int, tied: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (BATCH, LENGTH))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[1] = -100
    plan = check(Tied(vocabulary, tied), ids, labels)
    weight = plan.parameters["embed.weight"][0]
    assert weight.kind == "S"


def test_everything_ignored_gives_the_same_nan() -> None:
    torch.manual_seed(0)
    ids = torch.randint(64, (BATCH, LENGTH))
    model = Of(lambda m, ids, x: F.cross_entropy(m.a(x).flatten(0, 1), ids.flatten(), ignore_index=3), a=(16, 64))
    check(model, ids.clamp(4), x(BATCH, LENGTH, 16))
    model = Of(lambda m, ids, x: m.a(x).sum() + F.cross_entropy(m.a(x).flatten(0, 1), ids.flatten()), a=(16, 64))
    check(model, ids, x(BATCH, LENGTH, 16))
