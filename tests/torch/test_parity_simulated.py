"""Programs put together at random, and modules that are put together oddly, under random plans on simulated ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import check

BATCH, LENGTH, WIDTH = 4, 8, 16

#: Steps from one tensor of (BATCH, LENGTH, WIDTH), or from two of them, to one; ``m`` has linears and norms.
ONE: tuple[Callable[[Any, Tensor], Tensor], ...] = (
    lambda m, x: m.a(x),
    lambda m, x: m.b(F.gelu(m.c(x))),
    lambda m, x: m.norm(x),
    lambda m, x: m.rms(x),
    lambda m, x: x.softmax(-1),
    lambda m, x: x.softmax(1) * x,
    lambda m, x: torch.tanh(x) + 0.5,
    lambda m, x: x * 0.7,
    lambda m, x: x - x.mean(1, keepdim=True),
    lambda m, x: x / (1 + x.pow(2).sum(-1, keepdim=True)),
    lambda m, x: x + m.vector,
    lambda m, x: x * m.vector[:, None][:, 0],
    lambda m, x: x.view(BATCH, LENGTH, 4, 4).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(x.shape),
    lambda m, x: torch.cat([x[..., 8:], -x[..., :8]], -1),
    lambda m, x: torch.stack(x.chunk(4, -1), 2).flatten(2),
    lambda m, x: sum(m.c(x).chunk(4, -1)),
    lambda m, x: m.c(x).view(BATCH, LENGTH, 4, WIDTH).unbind(2)[1],
    lambda m, x: x.flatten(0, 1).reshape(LENGTH, BATCH, WIDTH).transpose(0, 1),
    lambda m, x: x[:, :1].expand(x.shape) + x,
    lambda m, x: x.roll(1, 1),
    lambda m, x: x.flip(-1),
    lambda m, x: x.cumsum(1) / LENGTH,
    lambda m, x: x.clamp(-1, 1),
    lambda m, x: torch.where(x > 0, x, m.vector),
    lambda m, x: x.masked_fill(m.mask, 0.0),
    lambda m, x: x.detach() * 0.5 + x,
    lambda m, x: F.embedding(x.detach().abs().argmax(-1), m.table),
    lambda m, x: x.sort(-1).values,
    lambda m, x: F.one_hot(x.detach().argmax(-1), WIDTH) * x,
    lambda m, x: m.conv(x.mT).mT,
    lambda m, x: F.pad(x, (0, 2))[..., 2:],
    lambda m, x: x.index_select(1, m.order),
    lambda m, x: x.repeat(1, 2, 1)[:, LENGTH // 2 : LENGTH // 2 + LENGTH],
)
TWO: tuple[Callable[[Any, Tensor, Tensor], Tensor], ...] = (
    lambda m, x, y: x + y,
    lambda m, x, y: x * torch.sigmoid(y),
    lambda m, x, y: torch.maximum(x, y),
    lambda m, x, y: (x @ y.mT).softmax(-1) @ y,
    lambda m, x, y: torch.einsum("btw,bsw,bsv->btv", x, y, x) / 30,
    lambda m, x, y: attend(x, y),
    lambda m, x, y: torch.cat([x, y], 1)[:, ::2],
    lambda m, x, y: torch.lerp(x, y, 0.3),
    lambda m, x, y: torch.stack([x, y]).mean(0),
    lambda m, x, y: x.index_copy(1, m.order[:2], y[:, :2]),
)


def attend(x: Tensor, y: Tensor) -> Tensor:
    q, k = (h.view(BATCH, LENGTH, 4, 4).transpose(1, 2) for h in (x, y))
    return F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)


class Random(nn.Module):
    """Steps drawn with ``seed``, each reading any earlier results; the last few are the outputs."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        self.seed, self.length = seed, length
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.vector, self.table = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 == 0)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 6, 4, 5]))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(self.seed)
        made = [x]
        for _ in range(self.length):
            if draw.random() < 0.7:
                made.append(draw.choice(ONE)(self, draw.choice(made[-3:])))
            else:
                made.append(draw.choice(TWO)(self, draw.choice(made[-3:]), draw.choice(made)))
        return (*made[-2:], made[-1].mean((0, 1)), sum(made[1:]).square().mean())


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    check(Random(seed, 10), x, degrees=(2 if seed % 2 else 4,), seeds=12)


@pytest.mark.parametrize("step", range(len(ONE)))
def test_each_step_of_one_tensor(step: int) -> None:
    class Step(Random):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (self.a(ONE[step](self, self.a(x))),)

    torch.manual_seed(step)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    check(Step(0, 0), x, degrees=(4,), seeds=10)


class Layer(nn.Module):
    def __init__(self, inner: int = 32, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.act = act

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, order: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = order or tuple(range(len(layers)))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Forked(Stack):
    """Results of earlier blocks are read again, and a block is called with another constant."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](x)
        second = self.layers[1](first, scale=0.5)
        third = self.layers[2](first.detach() + second)
        with torch.no_grad():
            seen = self.layers[0](third)
        return self.layers[1](third) + first * seen, second.softmax(-1)


class Gate(nn.Module):
    """A block that reads one of its inputs without gradient only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.layer(x), 1, keepdim=True)
        return (self.layer(x) - mean) * variance.detach() * self.gate(y.detach()).sigmoid()


class Detached(Stack):
    """Gradients stop between blocks, inside blocks, and at one of two outputs of an operation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](x, x.sin())
        second = self.layers[1](x, first)
        third = self.layers[2](second, first).detach()
        return second * third, self.layers[2](third, x * first)


class Watching(nn.Module):
    """A parameter that is only read without gradient, and a buffer that every call updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.watch = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(self.watch(x).mean((0, 1)), alpha=0.1)
        return x * self.watch(x.detach()).detach().sigmoid() + self.mean


def tied() -> nn.Module:
    model = Stack(Layer(), Layer(), Layer())
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[1].down.bias = model.layers[1].norm.bias
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "equal": lambda: Stack(Layer(), Layer(), Layer()),
    "a b a b": lambda: Stack(Layer(), Layer(64), Layer(), Layer(64)),
    "one odd": lambda: Stack(Layer(), Layer(20), Layer()),
    "other function": lambda: Stack(Layer(), Layer(act=F.gelu), Layer(), Layer(act=F.gelu)),
    "called twice": lambda: Stack(Layer(), Layer(), order=(0, 1, 0, 1, 1)),
    "forked": lambda: Forked(Layer(), Layer(), Layer()),
    "detached": lambda: Detached(Gate(), Gate(), Gate()),
    "tied": tied,
    "watching": Watching,
    "batch norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Unflatten(-1, (2, 16)), nn.BatchNorm2d(LENGTH), nn.Flatten(2), nn.Linear(32, 8)
    ).double(),
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(LENGTH, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv1d(16, 8, 1, bias=False),
        nn.AvgPool1d(2), nn.Conv1d(8, 8, 3, groups=4), nn.MaxPool1d(2), nn.Flatten(), nn.LazyLinear(4),
    ).double(),
    "lstm": lambda: nn.LSTM(WIDTH, 16, batch_first=True).double(),
    "attention": lambda: SelfAttention(),
    "decoder": lambda: Decoder(),
}  # fmt: skip


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).double()

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        return self.decoder(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


@pytest.mark.parametrize("name", MODULES)
def test_odd_modules(name: str) -> None:
    torch.manual_seed(0)
    model = MODULES[name]()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    model(x)  # lazy layers get their sizes
    check(model, x.requires_grad_(), seeds=15)
