"""What people write by hand comes out by itself, nothing held: where it is cheaper, and not where it is not."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.capture import capture
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.graph import Program
from fxpar.layout import I, Mesh, S, State, conversion
from fxpar.plans import Plan
from fxpar.space import space
from tests.cases import TOLERANCE, Case, best


class Block(nn.Module):
    """Causal attention and a feed-forward, each after a norm, with dropout before it is added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), self.dropout)


class Transformer(nn.Module):
    """Tokens to logits, through equal blocks."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@functools.cache
def program(length: int, width: int, heads: int, dropout: float = 0.0, blocks: int = 2) -> Program:
    """One sample, so there is no batch to split, in bfloat16 on meta."""
    with torch.device("meta"):
        model = Transformer(width, heads, dropout, blocks).to(torch.bfloat16)
        return capture(model, (torch.zeros(1, length, dtype=torch.int64),), {}).program


def optimum(program: Program, degree: int, cluster: str) -> Plan:
    return best(price(space(program, Mesh.of({"tp": degree})), Cluster.load(cluster)))


def small(length: int, width: int, heads: int) -> Case:
    """One that can be run, in float64 without dropout; no parameter is at zero or one, where mistakes are not seen."""
    torch.manual_seed(0)
    model = Transformer(width, heads).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return Case(model, (torch.randint(256, (1, length)),))


def in_block(plan: Plan, kind: str) -> dict[tuple[str, int], int]:
    """How often the first block runs collectives of a kind, by phase and wire bytes."""
    first = next(iter(plan.instances))
    found = [item for item in plan.collectives if (item.module, item.kind) == (first, kind)]
    return {(item.phase, item.wire_bytes): item.count for item in found}


LONG, SHORT, WIDTH, HEADS, DEGREE = 131072, 64, 256, 8, 8


@pytest.mark.parametrize("cluster", ["h100", "a100", "toy"])
def test_long_sequences_go_to_heads_for_attention_by_themselves(cluster: str) -> None:
    """Jacobs et al., 2023: queries, keys, values and the result each take an all-to-all of 1/n of a gather's bytes."""
    plan = optimum(program(LONG, WIDTH, HEADS), DEGREE, cluster)
    assert "Ulysses" in str(plan)
    stream = 2 * LONG * WIDTH
    one = stream * (DEGREE - 1) // DEGREE**2
    assert in_block(plan, "all_to_all") == {("forward", one): 4, ("backward", one): 4}
    gathered = [size for kind in ("all_gather", "reduce_scatter") for _, size in in_block(plan, kind)]
    assert max(gathered, default=0) < one, "no activation is gathered"


@pytest.mark.parametrize("cluster", ["h100", "a100", "toy"])
def test_short_sequences_do_not(cluster: str) -> None:
    plan = optimum(program(SHORT, WIDTH, HEADS), DEGREE, cluster)
    assert "Ulysses" not in str(plan)
    assert not in_block(plan, "all_to_all")


@pytest.mark.parametrize(("length", "found"), [(131072, True), (65536, True), (512, False)])
def test_so_it_is_with_llama(length: int, found: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, vocab_size=256, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        llama = LlamaForCausalLM(config).to(torch.bfloat16)
        captured = capture(llama, (torch.zeros(1, length, dtype=torch.int64),), {})
    plan = optimum(captured.program, DEGREE, "h100")
    assert ("Ulysses" in str(plan)) == found
    assert sum(in_block(plan, "all_to_all").values()) == (8 if found else 0)


def test_what_goes_to_heads_by_itself_has_the_models_numbers() -> None:
    case = small(256, 8, 4)
    plan = best(case.priced(4))
    assert "Ulysses" in str(plan)
    error, where = case.error(plan)
    assert error <= TOLERANCE, f"{where} is off by {error:.1e}"


def between_matrices(program: Program, plan: Plan) -> dict[str, set[State]]:
    """By operation, the states of what a block's norms, dropouts and additions (not of biases) make on the one axis."""
    (block,) = program.blocks.values()
    found: dict[str, set[State]] = {}
    for node, chosen in zip(block.nodes, plan.graphs[block.name].nodes, strict=True):
        if node.op.endswith(("layer_norm.default", "dropout.default")) or (node.op, node.module) == (ADD, ""):
            found.setdefault(node.op, set()).add(chosen.outputs[0][0])
    return found


def summed(program: Program, plan: Plan) -> dict[str, bool]:
    """For every parameter of a block's norms, whether its gradient is summed over the ranks on its way to rest."""
    (block,) = program.blocks.values()
    trees = plan.graphs[block.name].trees
    steps = {
        item.name: {conversion(src[0], dst[0]).backward for src, dst in trees.get(item.value, ())}
        for item in block.inputs
        if item.name.startswith(("before", "between"))
    }
    return {name: bool(kinds & {"all_reduce", "reduce_scatter"}) for name, kinds in steps.items()}


NORM, DROPOUT, ADD = "aten.layer_norm.default", "aten.dropout.default", "aten.add.Tensor"


@pytest.mark.parametrize("cluster", ["h100", "a100"])
def test_norms_dropout_and_additions_work_on_pieces_of_the_sequence_by_themselves(cluster: str) -> None:
    """Between column- and row-parallel matrices, as Korthikanti et al., 2022, have it: collective by collective."""
    length, width = 4096, 8192
    wide = program(length, width, 64, dropout=0.1, blocks=4)
    plan = optimum(wide, DEGREE, cluster)
    assert "column- and row-parallel, sequence-parallel" in str(plan)
    assert between_matrices(wide, plan) == {NORM: {S(1)}, DROPOUT: {S(1)}, ADD: {S(1)}}
    assert summed(wide, plan) == dict.fromkeys(("before.weight", "before.bias", "between.weight", "between.bias"), True)
    piece, vector = 2 * length * width * (DEGREE - 1) // DEGREE, 2 * 2 * width * (DEGREE - 1) // DEGREE
    each_way = {("forward", piece): 2, ("backward", piece): 2}
    assert in_block(plan, "all_gather") == in_block(plan, "reduce_scatter") == each_way
    assert in_block(plan, "all_reduce") == {("backward", vector): 6}, "of norms, and of biases of row-parallel layers"


def test_they_do_not_where_sums_of_their_gradients_would_take_longer() -> None:
    narrow = program(1024, 1024, 8, dropout=0.1)
    plan = optimum(narrow, 4, "h100")
    assert "column- and row-parallel" in str(plan) and "sequence-parallel" not in str(plan)
    assert between_matrices(narrow, plan) == {NORM: {I}, DROPOUT: {I}, ADD: {I}}
    assert not any(summed(narrow, plan).values())


def test_norms_on_pieces_of_the_sequence_by_themselves_have_the_models_numbers() -> None:
    case = small(8, 32, 4)
    plan = best(case.priced(4))
    assert between_matrices(case.program, plan) == {NORM: {S(1)}, ADD: {S(1)}}
    assert all(summed(case.program, plan).values())
    error, where = case.error(plan)
    assert error <= TOLERANCE, f"{where} is off by {error:.1e}"
