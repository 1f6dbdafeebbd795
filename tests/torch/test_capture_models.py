"""Models of transformers, small and random, captured and folded: equal to the eager model in float64."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fxpar.capture import Captured, capture
from fxpar.errors import CaptureError
from fxpar.precision import Float64Casts
from tests.torch.proving import ops, prove

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 53,
    "max_position_embeddings": 64,
}


def ids(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(0, 53, (batch, length), generator=torch.Generator().manual_seed(0))


def built(name: str, config: Any, training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(config).double().train(training)


#: What the capture does by itself.
NO_CACHE = {"use_cache": False}


def llama(**change: Any) -> nn.Module:
    config = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **change})
    return built("LlamaForCausalLM", config)


def calls(captured: Captured) -> list[str]:
    return [node.op.removeprefix("block:") for node in captured.program.top.nodes if node.op.startswith("block:")]


def test_llama_with_grouped_queries() -> None:
    with Float64Casts():
        captured = prove(llama(), input_ids=ids(), labels=ids(), eager=NO_CACHE)
    assert calls(captured) == ["LlamaDecoderLayer"] * 3
    assert captured.notes == ("use_cache was turned off: a captured program does not fill key/value caches",)
    (attention,) = [n for g in captured.program.graphs().values() for n in g.nodes if "scaled_dot" in n.op]
    assert attention.kwarg("is_causal") is True and attention.kwarg("attn_mask") is None


@pytest.mark.parametrize(("batch", "length"), [(2, 64), (32, 4096), (1, 131072)])
def test_nobody_builds_a_mask_for_plain_causal_attention(batch: int, length: int) -> None:
    """transformers looks whether positions start again in the middle: those of a whole batch are many numbers."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                vocab_size=32,
                max_position_embeddings=length,
                use_cache=False,
            )
        )
        captured = capture(model, (torch.zeros(batch, length, dtype=torch.int64),))
    (block,) = captured.program.blocks.values()
    (attention,) = (node for node in block.nodes if "attention" in node.op)
    assert len(attention.operands) == 3 and attention.kwarg("is_causal") is True


def test_llama_with_a_padding_mask_and_tied_weights() -> None:
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    captured = prove(llama(tie_word_embeddings=True), ids(), attention_mask=mask, eager=NO_CACHE)
    assert captured.program.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert calls(captured) == ["LlamaDecoderLayer"] * 3


def test_llama_with_gradient_checkpointing() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    assert calls(prove(model, ids(), eager=NO_CACHE)) == ["LlamaDecoderLayer"] * 3


def test_gpt2_in_training_mode_with_dropout() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=53, n_positions=64)
    with Float64Casts():
        captured = prove(built("GPT2LMHeadModel", config), ids(), labels=ids(), eager=NO_CACHE)
    assert calls(captured) == ["GPT2Block"] * 3


@pytest.mark.parametrize("training", [True, False])
def test_bert(training: bool) -> None:
    config = transformers.BertConfig(**SMALL)
    with Float64Casts():
        captured = prove(built("BertForMaskedLM", config, training), ids(), labels=ids())
    assert calls(captured) == ["BertLayer"] * 3


def test_vit() -> None:
    small = {name: value for name, value in SMALL.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**small, image_size=16, patch_size=4)
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert calls(prove(built("ViTForImageClassification", config), pixels)) == ["ViTLayer"] * 3


def test_t5() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=53)
    config.decoder_start_token_id = 0
    model = built("T5ForConditionalGeneration", config)
    captured = prove(model, input_ids=ids(), labels=ids(2, 6), eager=NO_CACHE)
    found = calls(captured)
    assert found.count("T5Block") == 2 and found.count("T5Block.2") == 2
    assert None in next(node for node in captured.program.top.nodes if node.op.startswith("block:T5Block")).outputs


def test_albert_calls_one_layer_many_times() -> None:
    config = transformers.AlbertConfig(**{**SMALL, "embedding_size": 16})
    found = calls(prove(built("AlbertModel", config, False), ids()))
    assert len(found) == 3 and len(set(found)) == 1


def test_mixtral() -> None:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    model = built("MixtralForCausalLM", config).float()
    captured = prove(model, ids(), whole=("*.experts",), tolerance=1e-4, eager=NO_CACHE)
    assert len(calls(captured)) == 3
    assert any(op.startswith("whole:") for op in ops(captured))
    with torch.no_grad():
        captured = prove(model.bfloat16(), ids(), tolerance=0.1, eager=NO_CACHE)
    assert calls(captured) == ["MixtralDecoderLayer"] * 3


def test_a_wrapper_around_a_model_turns_the_cache_off_too() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens).logits

    assert calls(prove(Wrapper(), ids())) == ["LlamaDecoderLayer"] * 3


def test_caches_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="past_key_values"):
        capture(llama(), (ids(),), {"past_key_values": transformers.DynamicCache()})
    with pytest.raises(CaptureError, match="DynamicCache"):
        capture(llama(), (ids(),), {"use_cache": True})


@functools.cache
def on_meta(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_a_big_model_takes_no_memory_and_hardly_more_time_when_deeper() -> None:
    tokens = torch.zeros(1, 2048, dtype=torch.int64, device="meta")

    def seconds(layers: int) -> float:
        model, best = on_meta(layers), float("inf")
        for _ in range(3):
            begin = time.process_time()
            captured = capture(model, (tokens,), {"labels": tokens})
            best = min(best, time.process_time() - begin)
            assert calls(captured) == ["LlamaDecoderLayer"] * layers
        return best

    seconds(2)
    assert seconds(32) < 1.0  # it takes 0.1 s on a quiet machine
    assert seconds(64) < 2.0 * seconds(16)
