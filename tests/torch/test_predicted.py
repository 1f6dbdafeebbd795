"""What plans predict: the best plan splits what should be split, and communicates no more than Megatron-LM does."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.megatron import megatron_plan
from fxpar.assemble import assemble, random_choice
from fxpar.capture import capture
from fxpar.cluster import Cluster
from fxpar.cost.arcs import arc_seconds
from fxpar.cost.price import Priced, price
from fxpar.graph import Program
from fxpar.layout import Mesh
from fxpar.plans import Plan
from fxpar.precision import Float64Casts
from fxpar.space import space
from tests.cases import best
from tests.models import MODELS

BLOCK = re.compile(r"(^|\.)(blocks|layers|layer|block|h)\.\d+\.")


@functools.cache
def program(name: str) -> Program:
    model, args, kwargs = MODELS[name]()
    with Float64Casts():
        return capture(model, args, kwargs).program


@functools.cache
def priced(name: str, degree: int = 4) -> Priced:
    return price(space(program(name), Mesh.of({"tp": degree})), Cluster.load("toy"))


def of_block(plan: Plan) -> Counter[tuple[str, str, int]]:
    """The collectives of the plan's first block: phase, kind and wire bytes, with their counts."""
    first = next(iter(plan.instances))
    found: Counter[tuple[str, str, int]] = Counter()
    for item in plan.collectives:
        if item.module == first:
            found[item.phase, item.kind, item.wire_bytes] += item.count
    return found


def wire_bytes(plan: Plan) -> int:
    """Bytes that each rank sends for one block in a step."""
    return sum(size * count for (_, _, size), count in of_block(plan).items())


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_best_plan_splits_the_blocks(name: str, degree: int) -> None:
    plan = best(priced(name, degree))
    sizes: dict[str, int] = {}
    model, _, _ = MODELS[name]()
    for parameter, tensor in model.named_parameters():
        if BLOCK.search(parameter):
            sizes[parameter] = tensor.numel()
    whole = sum(size for parameter, size in sizes.items() if plan.parameters[parameter][0].kind != "S")
    assert sizes and whole <= 0.1 * sum(sizes.values())
    per_block = Counter(item.module for item in plan.collectives for _ in range(item.count))
    assert all(per_block[module] >= 4 for module in plan.instances)


QKV = {
    "gpt2": ("attn.c_attn.weight", "S1/3"),
    "transformer_encoder": ("self_attn.in_proj_weight", "S0/3"),
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", QKV)
def test_fused_heads_are_split_without_gathering_q_k_or_v(name: str, degree: int) -> None:
    plan = best(priced(name, degree))
    weight, state = QKV[name]
    (block,) = program(name).blocks.values()
    inside = {item.name: item.value for item in block.inputs}
    # Everything between the projection's weight and the attention.
    between = {inside[weight]}
    for node in block.nodes:
        if between.intersection(node.operands):
            between.update(out for out in node.outputs if out is not None)
        if "attention" in node.op:
            break
    else:
        pytest.fail("the block has no attention")
    assert {str(at[0]) for parameter, at in plan.parameters.items() if parameter.endswith(weight)} == {state}
    assert not between & plan.graphs[block.name].trees.keys()
    fused = {block.values[value].bytes for value in between}
    gathers = [size for _, kind, size in of_block(plan) if kind == "all_gather"]
    largest = max(fused) * (degree - 1) // degree
    assert gathers and max(gathers) < largest


class Wide:
    """Blocks of published sizes, on meta, in bfloat16, 2048 tokens."""

    @staticmethod
    def llama() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    @staticmethod
    def gpt2() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=4096, n_layer=2, n_head=32, vocab_size=50304, n_positions=2048, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


@functools.cache
def wide(name: str, cluster: str) -> Priced:
    with torch.device("meta"):
        model = getattr(Wide, name)().to(torch.bfloat16)
        ids: Any = torch.zeros(1, 2048, dtype=torch.int64)
    captured = capture(model, (ids,), {})
    return price(space(captured.program, Mesh.of({"tp": 4})), Cluster.load(cluster))


SIZES = ["tiny", "wide"]


def sized(name: str, size: str) -> Priced:
    return priced(name) if size == "tiny" else wide(name, "h100")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_more_bytes_and_seconds_than_megatron(name: str, size: str) -> None:
    found = sized(name, size)
    plan = best(found)
    tensor, sequence = (megatron_plan(found, name, sequence_parallel=split) for split in (False, True))
    assert 0 < wire_bytes(plan) <= wire_bytes(sequence)
    assert plan.objective_seconds <= min(tensor.objective_seconds, sequence.objective_seconds)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "norms"), [("llama", 2), ("gpt2", 6)])
def test_the_hand_made_layouts_are_megatrons(name: str, norms: int, size: str) -> None:
    """Two all-reduces each way; with sequence parallelism each is a gather and a scatter, and norms are summed.

    ``norms`` counts the whole parameters whose gradients are summed: norms, and biases of row-parallel layers.
    """
    found = sized(name, size)
    block = next(iter(found.space.program.blocks.values()))
    stream = next(block.values[item.value] for item in block.inputs if item.name == "hidden_states")
    whole, part = stream.bytes * 2 * 3 // 4, stream.bytes * 3 // 4
    one = stream.bytes // (stream.shape[0] * stream.shape[1]) * 2 * 3 // 4
    tensor, sequence = (of_block(megatron_plan(found, name, sequence_parallel=split)) for split in (False, True))
    assert tensor == {("forward", "all_reduce", whole): 2, ("backward", "all_reduce", whole): 2}
    assert sequence == {
        **{(phase, kind, part): 2 for phase in ("forward", "backward") for kind in ("all_gather", "reduce_scatter")},
        ("backward", "all_reduce", one): norms,
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_price_of_a_plan_is_that_of_its_operations_and_conversions(name: str) -> None:
    found = priced(name)
    mesh = found.space.mesh
    for seed in range(10):
        choice = random_choice(found.space, seed)
        plan = assemble(found, choice)
        total = sum(float(found.problem.variables[slot].costs[at]) for slot, at in enumerate(choice))
        for graph_name, graph in found.space.program.graphs().items():
            times = 1 if graph_name == "top" else len(found.space.program.instances(graph_name))
            for value, arcs in plan.graphs[graph_name].trees.items():
                meta = graph.values[value]
                total += times * sum(float(arc_seconds(arc, meta, mesh, found.cluster)[0, 1]) for arc in arcs)
        assert total == pytest.approx(plan.objective_seconds, rel=1e-9)
