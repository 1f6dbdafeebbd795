"""Batch and sequence are followed through real models: through flattening, permutes and attention, into blocks."""

from __future__ import annotations

import pytest

from fxpar.capture import capture
from fxpar.dims import batch, dependent, follow, sequence
from fxpar.graph import Program
from tests.models import BATCH, LENGTH, MODELS


def program_of(name: str) -> Program:
    model, args, kwargs = MODELS[name]()
    return capture(model, args, kwargs).program


@pytest.mark.parametrize("name", MODELS)
def test_the_size_of_a_followed_dim_stays(name: str) -> None:
    """A batch of 4 and a sequence of 8 (16 patches) may be a part of a dim, never another one."""
    program, length = program_of(name), 16 if name == "vit" else LENGTH
    graphs = program.graphs()
    for followed, size in ((batch(program), BATCH), (sequence(program), length)):
        assert followed.values
        for (graph, value), (dim, parts) in followed.values.items():
            assert graphs[graph].values[value].shape[dim] % (parts * size) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "transformer_encoder"])
def test_the_batch_reaches_every_product_and_the_sequence_all_in_blocks(name: str) -> None:
    program = program_of(name)
    found, along = batch(program), sequence(program)
    for graph_name, graph in program.graphs().items():
        for index, node in enumerate(graph.nodes):
            if "linear" in node.op or ".mm." in node.op or "attention" in node.op:
                assert (graph_name, index) in found.nodes
                assert (graph_name, index) in along.nodes or graph_name == "top"


def test_a_sequence_in_a_flattened_dim_is_cut_in_as_many_parts_as_the_batch() -> None:
    program = program_of("gpt2")
    (index,) = [at for at, node in enumerate(program.blocks["GPT2Block"].nodes) if node.module == "mlp.c_fc"
                and node.op == "aten.mm.default"]  # fmt: skip
    assert batch(program).nodes["GPT2Block", index] == ("m", 1)
    assert sequence(program).nodes["GPT2Block", index] == ("m", BATCH)


def test_a_dim_ends_where_it_must_stay_whole() -> None:
    """Features of the stream end in the norm that runs over them."""
    program = program_of("llama")
    block = program.blocks["LlamaDecoderLayer"]
    stream = next(item.value for item in block.inputs if item.kind == "input")
    followed = follow(program, {("LlamaDecoderLayer", stream): (2, 1)})
    ops = [block.nodes[index].op for _, index in followed.nodes]
    assert "aten.pow.Tensor_Scalar" in ops and "aten.linear.default" in ops, "the mean is summed, the linear too"
    assert not any("attention" in op for op in ops)


@pytest.mark.parametrize("name", MODELS)
def test_what_has_the_batch_depends_on_it(name: str) -> None:
    program = program_of(name)
    found = dependent(program)
    assert set(batch(program).values) <= found
    parameters = {(graph_name, item.value) for graph_name, graph in program.graphs().items()
                  for item in graph.inputs if item.kind == "parameter"}  # fmt: skip
    assert not parameters & found
    factories = {(graph_name, out) for graph_name, graph in program.graphs().items() for node in graph.nodes
                 for out in node.outputs if "arange" in node.op and out is not None}  # fmt: skip
    assert not factories & found and (factories or name in ("mlp", "vit", "bert", "transformer_encoder"))
