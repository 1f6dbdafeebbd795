"""Small models with real architectures, in float64 and training mode without dropout: ``MODELS[name]()``.

Each builder returns ``(model, args, kwargs)`` and always makes the same numbers. Sizes divide by 4 ranks; floating
inputs are leaves. ``ODD`` has models whose sizes do not. All run under :class:`fxpar.precision.Float64Casts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

BATCH, LENGTH, VOCABULARY = 4, 8, 64


def _ready(model: nn.Module) -> nn.Module:
    """Float64, training mode, and no parameter or bias at zero or one, where a mistake might not be seen."""
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.1)
    return model


def _ids(*shape: int, high: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(high, shape)


class FeedForward(nn.Module):
    """Two rounds of norm, up, GELU, down, each added to what came in."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, inner) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(inner, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x


class MLP(nn.Module):
    """Two :class:`FeedForward` blocks between an embedding and a head that are plain linears."""

    def __init__(self, width: int = 32, inner: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(FeedForward(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp() -> Built:
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64, requires_grad=True)
    return _ready(MLP()), (x,), {}


def llama(*, heads: int = 8, kv_heads: int = 4, vocabulary: int = VOCABULARY, layers: int = 2) -> Built:
    """Grouped-query attention, RMS norms, rotary embeddings, gated feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=heads * 8, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return _ready(LlamaForCausalLM(config)), (_ids(BATCH, LENGTH, high=vocabulary),), {}


def gpt2(*, vocabulary: int = VOCABULARY, heads: int = 4, width: int = 32) -> Built:
    """Tied head, Conv1D, fused qkv."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(
        n_embd=width, n_layer=2, n_head=heads, vocab_size=vocabulary, n_positions=16, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _ready(GPT2LMHeadModel(config)), (_ids(BATCH, LENGTH, high=vocabulary),), {}


def bert() -> Built:
    """Norms after the sums, tied head with a transform, token types and a mask."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(3)
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 5:] = 0
    kwargs = {"attention_mask": mask, "token_type_ids": _ids(BATCH, LENGTH, high=2)}
    return _ready(BertForMaskedLM(config)), (_ids(BATCH, LENGTH),), kwargs


def vit() -> Built:
    """A convolution cuts an image into 15 patches; with the class token the length is 16."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(4)
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=(12, 20),
        patch_size=4, num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    x = torch.randn(BATCH, 3, 12, 20, dtype=torch.float64, requires_grad=True)
    return _ready(ViTForImageClassification(config)), (x,), {}


def t5() -> Built:
    """Encoder and decoder, relative position biases shared by the layers, tied embeddings."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(5)
    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=VOCABULARY,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    kwargs = {"input_ids": _ids(BATCH, LENGTH), "decoder_input_ids": _ids(BATCH, LENGTH)}
    return _ready(T5ForConditionalGeneration(config)), (), kwargs


def transformer_encoder() -> Built:
    """``torch.nn.TransformerEncoder``: ``nn.MultiheadAttention`` with its fused, packed projection."""
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(BATCH, LENGTH, 32, dtype=torch.float64, requires_grad=True)
    return _ready(model), (x,), {}


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": mlp,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "transformer_encoder": transformer_encoder,
}


def llama_odd_heads() -> Built:
    """Key and value heads (2), heads (6) and vocabulary (53) that 4 ranks do not divide."""
    return llama(heads=6, kv_heads=2, vocabulary=53)


class Gate(nn.Module):
    """A block in which gradients stop: at an input, at one of two results of an operation, and at a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gate, self.watch = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        variance, mean = torch.var_mean(h, 1, keepdim=True)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(self.watch(h).mean((0, 1)), alpha=0.1)
        return x + (h - mean) * variance.detach() * self.gate(y.detach()).sigmoid() + self.mean


class Gates(nn.Module):
    """Blocks whose results are read with and without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gate(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.blocks[0](x, x.sin())
        second = self.blocks[1](first, first)
        third = self.blocks[2](second, first).detach()
        return second * third, first.softmax(-1)


def gates() -> Built:
    torch.manual_seed(7)
    x = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64, requires_grad=True)
    return _ready(Gates()), (x,), {}


ODD: dict[str, Callable[[], Built]] = {"llama_odd_heads": llama_odd_heads, "gates": gates}
