"""Inputs derived from a model run it; a model that does not tell is refused with what its forward takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxpar.errors import CaptureError
from fxpar.inputs import derive_inputs


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * mask * scale


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)  # registered first, used last
        self.embedding = nn.Embedding(16, 8)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not hasattr(self, "positions"):
            self.positions = torch.arange(tokens.shape[1])
        return self.head(self.embedding(tokens) + self.positions[:, None])


class Fixed(nn.Module):
    """Takes one length only, and says so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(7, 11, 4))


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (nn.Linear(6, 2), [(8, 6)]),
        (nn.Sequential(nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 2)), [(8, 6)]),
        (nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)), [(8, 128)]),
        (nn.Sequential(nn.Conv1d(3, 4, 3)), [(8, 3, 128)]),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 2)), [(8, 3, 32, 32)]),
        (nn.Sequential(nn.Conv3d(3, 4, 3)), [(8, 3, 32, 32, 32)]),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), [(8, 3, 32, 32)]),
        (nn.LSTM(4, 4), [(8, 128, 4)]),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), [(8, 128, 8)]),
        (nn.MultiheadAttention(8, 2), [(8, 128, 8)] * 3),
        (nn.Transformer(8, 2, 1, 1, 16), [(8, 128, 8)] * 2),
        (Raw(), [(8, 3)]),
    ],
)
def test_first_layer_tells(model: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    args, kwargs, description = derive_inputs(model.double())
    model(*args, **kwargs)
    assert [tuple(arg.shape) for arg in args] == shapes
    assert str(shapes[0]) in description
    assert all(arg.dtype in (torch.float64, torch.int64) for arg in args)


def test_one_candidate_after_another_is_tried_and_leaves_no_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(4 * 32, 2))
    args, _, _ = derive_inputs(model)
    assert args[0].shape == (8, 4, 32)
    assert int(model[0].num_batches_tracked) == 0


def test_a_forward_that_keeps_a_cache_is_left_as_it_was() -> None:
    model = Language()
    args, _, _ = derive_inputs(model)
    assert (args[0].shape, args[0].dtype) == ((8, 128), torch.int64)
    assert model.calls == 0
    assert not hasattr(model, "positions")


def test_inputs_lie_where_the_model_is() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 2, dtype=torch.bfloat16)
    args, _, _ = derive_inputs(model)
    assert (args[0].device.type, args[0].dtype) == ("meta", torch.bfloat16)
    assert derive_inputs(model, device="cpu")[0][0].device.type == "cpu"


@pytest.mark.parametrize("model", [TwoInputs(), nn.Identity(), Fixed()])
def test_refusal_names_the_arguments(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match=r"forward\(.*example_args=\(torch.zeros"):
        derive_inputs(model)


TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "causal": (
        "AutoModelForCausalLM",
        "LlamaConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32},
        {"input_ids": (8, 32)},
    ),
    "long": (
        "AutoModelForCausalLM",
        "LlamaConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 131072},
        {"input_ids": (8, 2048)},
    ),
    "encoder_decoder": (
        "AutoModelForSeq2SeqLM",
        "T5Config",
        {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16},
        {"input_ids": (8, 512), "decoder_input_ids": (8, 512)},
    ),
    "image": (
        "AutoModelForImageClassification",
        "ViTConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        {"pixel_values": (8, 3, 32, 32)},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_config_tells(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    auto, config, sizes, want = TRANSFORMERS[name]
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(getattr(transformers, config)(**sizes))
    args, kwargs, description = derive_inputs(model)
    assert args == ()
    assert {key: tuple(value.shape) for key, value in kwargs.items()} == want
    assert all(key in description for key in want)
    model(**kwargs)
