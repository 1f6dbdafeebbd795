"""The published sizes of the zoo's models, where they stand, and small sizes of the same architecture.

In: nothing. Out: :data:`ENTRIES`. Building a model from an entry is :mod:`fxpar.zoo.models`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """How to build a model: transformers' class names, published sizes, small sizes, and a batch."""

    source: str
    auto: str
    config: str
    sizes: dict[str, Any]
    small: dict[str, Any]
    batch: int
    sequence: int = 0  # 0: it reads images
    dtype: str = "bfloat16"
    both: dict[str, Any] = field(default_factory=dict)


_GPT_SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 8, "n_positions": 32, "vocab_size": 256}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA_SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 32,
    **_TOKENS,
}
_LLAMA3 = "Llama 3 (arXiv 2407.21783, table 3)"


def _llama3(layers: int, hidden: int, intermediate: int, heads: int, batch: int = 1) -> Entry:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    both = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    return Entry(_LLAMA3, "AutoModelForCausalLM", "LlamaConfig", sizes, _LLAMA_SMALL, batch, 8192, both=both)


ENTRIES: dict[str, Entry] = {
    "gpt2": Entry(
        "GPT-2 small (Radford et al. 2019, Language Models are Unsupervised Multitask Learners; model card gpt2)",
        "AutoModelForCausalLM",
        "GPT2Config",
        {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        {**_GPT_SMALL, **_NO_DROPOUT, **_TOKENS},
        batch=8,
        sequence=1024,
    ),
    "gpt3-175b": Entry(
        "GPT-3 175B (arXiv 2005.14165, table 2.1), all layers with dense attention",
        "AutoModelForCausalLM",
        "GPT2Config",
        {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048, "vocab_size": 50257},
        {**_GPT_SMALL, "n_layer": 3, **_TOKENS},
        batch=1,
        sequence=2048,
        both=_NO_DROPOUT,
    ),
    "llama3-8b": _llama3(32, 4096, 14336, 32),
    "llama3-70b": _llama3(80, 8192, 28672, 64),
    "llama3-405b": _llama3(126, 16384, 53248, 128),
    "bert-large": Entry(
        "BERT large (arXiv 1810.04805, section 3; model card bert-large-uncased)",
        "AutoModelForMaskedLM",
        "BertConfig",
        {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "intermediate_size": 128,
            "vocab_size": 256,
            "max_position_embeddings": 32,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        batch=8,
        sequence=512,
    ),
    "t5-11b": Entry(
        "T5 11B (arXiv 1910.10683, section 3.7; model card t5-11b)",
        "AutoModelForSeq2SeqLM",
        "T5Config",
        {"num_layers": 24, "d_model": 1024, "d_ff": 65536, "num_heads": 128, "d_kv": 128, "vocab_size": 32128},
        {
            "num_layers": 2,
            "d_model": 64,
            "d_ff": 128,
            "num_heads": 8,
            "d_kv": 8,
            "vocab_size": 256,
            "dropout_rate": 0.0,
        },
        batch=8,
        sequence=512,
        both={"decoder_start_token_id": 0},
    ),
    "vit-large": Entry(
        "ViT-L/16 (arXiv 2010.11929, table 1)",
        "AutoModelForImageClassification",
        "ViTConfig",
        {
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "image_size": 224,
            "patch_size": 16,
            "num_labels": 1000,
        },
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "intermediate_size": 128,
            "image_size": 32,
            "patch_size": 8,
            "num_labels": 16,
        },
        batch=64,
        both={"problem_type": "single_label_classification"},
    ),
    "mixtral-8x7b": Entry(
        "Mixtral 8x7B (arXiv 2401.04088, table 1)",
        "AutoModelForCausalLM",
        "MixtralConfig",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {**_LLAMA_SMALL, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        batch=1,
        sequence=8192,
        both={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}
