"""A model of 128 layers takes little more work to search than one of 8: counted, not timed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch

from fxpar.zoo import ZooModel
from tests.torch.search_work import Work, search_work

transformers = pytest.importorskip("transformers")

MESHES = ({"tp": 8}, {"dp": 2, "tp": 4}, {"a": 2, "b": 2, "c": 8})
SHALLOW, DEEP = 8, 128

#: The memory of an H100, in bytes.
LIMIT = 80e9

#: How much more work the deep model may take.
AT_MOST = 1.2

#: Lines of Python that each further layer may take, over all stages; a line takes some 0.1 us.
LINES_PER_LAYER = 1700


@cache
def llama(layers: int) -> ZooModel:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(8, 128, dtype=torch.int64, device="meta")
    return ZooModel(model, (), {"input_ids": ids, "labels": ids})


@cache
def work(layers: int, axes: tuple[tuple[str, int], ...], fold: bool = True) -> Work:
    return search_work(llama(layers), dict(axes), LIMIT, fold=fold)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_depth_adds_few_entries(axes: Mapping[str, int]) -> None:
    shallow, deep = (work(layers, tuple(axes.items())) for layers in (SHALLOW, DEEP))
    assert deep.total("entries") <= AT_MOST * shallow.total("entries"), f"{shallow.kinds} -> {deep.kinds}"
    for stage in ("price", "solve"):
        assert deep.lines[stage] <= AT_MOST * shallow.lines[stage], stage


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_layer_more_takes_few_steps(axes: Mapping[str, int]) -> None:
    """Every layer has to be looked at, to see that it is like the others: once, and whatever the mesh."""
    shallow, deep = (work(layers, tuple(axes.items())) for layers in (SHALLOW, DEEP))
    more = (deep.total("lines") - shallow.total("lines")) / (DEEP - SHALLOW)
    assert more <= LINES_PER_LAYER, f"{dict(shallow.lines)} -> {dict(deep.lines)}"


def test_what_is_not_folded_is_seen() -> None:
    axes = tuple(MESHES[0].items())
    shallow, deep = (work(layers, axes, fold=False) for layers in (2, 6))
    assert deep.total("entries") > AT_MOST * shallow.total("entries")
    assert deep.lines["price"] > AT_MOST * shallow.lines["price"]
