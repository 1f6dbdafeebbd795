"""The hand-made layouts of Megatron-LM, as plans: what a person would write for each family of models.

In: a priced space of a family's model. Out: a :class:`~fxpar.plans.Plan` with status ``"given"``. Tensor parallelism
(Shoeybi et al., 2019): q, k, v and the first feed-forward layer are split by columns, the layers after them by rows, so
a block needs one all-reduce after each half. With sequence parallelism (Korthikanti et al., 2022) the residual stream
and its norms are split along the sequence. The embedding and the head are split by vocabulary if it divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fxpar.assemble import assemble
from fxpar.cost.price import Priced
from fxpar.layout import S, divides
from fxpar.pins import Pins, pin
from fxpar.plans import Plan
from fxpar.solver import solve
from fxpar.space import Space

#: In place of a state: that of the residual stream. The second form stands where sequence parallelism leaves it open,
#: because batch and sequence are one dim there.
STREAM, STREAM_IF_WHOLE = "stream", "stream unless split"

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class Family:
    """What one family of models is held to, by glob as in :func:`fxpar.pins.pin`; all other parameters are whole.

    ``vocabulary`` names the embedding's weight, and ``vocabulary_nodes`` what holds only if its rows divide.
    """

    parameters: Mapping[str, str]
    nodes: Mapping[str, str]
    vocabulary: str = ""
    vocabulary_parameters: Mapping[str, str] = field(default_factory=dict)
    vocabulary_nodes: Mapping[str, str] = field(default_factory=dict)


_LINEAR, _ADD = "aten.linear.default", "aten.add.Tensor"
_ATTENTION = "aten.scaled_dot_product_attention.default"

FAMILIES: dict[str, Family] = {
    "mlp": Family(
        parameters={"*.ups.*": "S0", "*.downs.*.weight": "S1"},
        nodes={
            f"FeedForward:ups.*:{_LINEAR}": "S2",
            f"FeedForward:downs.*:{_LINEAR}": "P",
            f"FeedForward:downs.*:{_ADD}": STREAM,
            "FeedForward:norms.*:*": STREAM,
            f"FeedForward::{_ADD}": STREAM,
            "top:embed:*": STREAM,
            "top:head:*": STREAM,
        },
    ),
    "llama": Family(
        parameters={
            "*.self_attn.[qkv]_proj.weight": "S0",
            "*.self_attn.o_proj.weight": "S1",
            "*.mlp.gate_proj.weight": "S0",
            "*.mlp.up_proj.weight": "S0",
            "*.mlp.down_proj.weight": "S1",
        },
        nodes={
            f"*:self_attn.[qkv]_proj:{_LINEAR}": "S2",
            f"*:self_attn:{_ATTENTION}": "S1",
            f"*:self_attn.o_proj:{_LINEAR}": "P",
            f"*:mlp.gate_proj:{_LINEAR}": "S2",
            f"*:mlp.up_proj:{_LINEAR}": "S2",
            f"*:mlp.down_proj:{_LINEAR}": "P",
            "*:*layernorm:*": STREAM,
            f"LlamaDecoderLayer::{_ADD}": STREAM,
            "top:model.norm:*": STREAM,
        },
        vocabulary="model.embed_tokens.weight",
        vocabulary_parameters={"model.embed_tokens.weight": "S0", "lm_head.weight": "S0"},
        vocabulary_nodes={"top:model.embed_tokens:*": "P", f"top:lm_head:{_LINEAR}": "S2"},
    ),
    "gpt2": Family(
        parameters={
            "*.attn.c_attn.weight": "S1/3",
            "*.attn.c_attn.bias": "S0/3",
            "*.c_proj.weight": "S0",
            "*.mlp.c_fc.weight": "S1",
            "*.mlp.c_fc.bias": "S0",
        },
        nodes={
            "*:attn.c_attn:aten.mm.default": "S1/3",
            f"*:attn:{_ATTENTION}": "S1",
            "*:*c_proj:aten.mm.default": "P",
            f"*:*c_proj:{_ADD}": STREAM_IF_WHOLE,
            "*:mlp.c_fc:aten.mm.default": "S1",
            "*:ln_[12]:*": STREAM,
            f"GPT2Block::{_ADD}": STREAM,
            "top:transformer.ln_f:*": STREAM,
        },
        vocabulary="transformer.wte.weight",
        vocabulary_parameters={"transformer.wte.weight": "S0"},
        vocabulary_nodes={"top:transformer.wte:*": "P", f"top:lm_head:{_LINEAR}": "S2"},
    ),
    "bert": Family(
        parameters={
            "*.attention.self.*": "S0",
            "*.layer.*.output.dense.weight": "S1",
            "*.intermediate.dense.*": "S0",
        },
        nodes={
            f"BertLayer:attention.self.*:{_LINEAR}": "S2",
            f"BertLayer:attention.self:{_ATTENTION}": "S1",
            f"BertLayer:*output.dense:{_LINEAR}": "P",
            f"BertLayer:*output.dense:{_ADD}": STREAM,
            f"BertLayer:intermediate.dense:{_LINEAR}": "S2",
            f"BertLayer:*output:{_ADD}": STREAM,
            "BertLayer:*LayerNorm:*": STREAM,
            "top:bert.embeddings.LayerNorm:*": STREAM,
            "top:cls.predictions.transform*:*": STREAM,
        },
        vocabulary="bert.embeddings.word_embeddings.weight",
        vocabulary_parameters={"bert.embeddings.word_embeddings.weight": "S0", "cls.predictions.bias": "S0"},
        vocabulary_nodes={"top:bert.embeddings.word_embeddings:*": "P", "top:cls.predictions.decoder:*": "S2"},
    ),
    "vit": Family(
        parameters={
            "*.attention.[qkv]_proj.*": "S0",
            "*.attention.o_proj.weight": "S1",
            "*.mlp.fc1.*": "S0",
            "*.mlp.fc2.weight": "S1",
        },
        nodes={
            f"ViTLayer:attention.[qkv]_proj:{_LINEAR}": "S2",
            f"ViTLayer:attention:{_ATTENTION}": "S1",
            f"ViTLayer:attention.o_proj:{_LINEAR}": "P",
            f"ViTLayer:attention.o_proj:{_ADD}": STREAM,
            f"ViTLayer:mlp.fc1:{_LINEAR}": "S2",
            f"ViTLayer:mlp.fc2:{_LINEAR}": "P",
            f"ViTLayer:mlp.fc2:{_ADD}": STREAM,
            "ViTLayer:layernorm_*:*": STREAM,
            f"ViTLayer::{_ADD}": STREAM,
            "top:vit.embeddings.patch_embeddings*:*": "I",
            "top:vit.layernorm:*": STREAM,
            "top:classifier:*": "I",
        },
    ),
    "t5": Family(
        parameters={
            "*Attention.[qkv].weight": "S0",
            "*Attention.o.weight": "S1",
            "*.relative_attention_bias.weight": "S1",
            "*.wi.weight": "S0",
            "*.wo.weight": "S1",
        },
        nodes={
            f"*Attention.[qkv]:{_LINEAR}": "S2",
            f"*Attention:{_ATTENTION}": "S1",
            f"*Attention.o:{_LINEAR}": "P",
            f"*.wi:{_LINEAR}": "S2",
            f"*.wo:{_LINEAR}": "P",
            "*layer_norm:*": STREAM,
            f"T5Layer*::{_ADD}": STREAM,
        },
        vocabulary="shared.weight",
        vocabulary_parameters={"shared.weight": "S0"},
        vocabulary_nodes={"top:*.embed_tokens:*": "P", f"top:lm_head:{_LINEAR}": "S2"},
    ),
    "transformer_encoder": Family(
        parameters={
            "*.self_attn.in_proj_*": "S0/3",
            "*.self_attn.out_proj.weight": "S1",
            "*.linear1.*": "S0",
            "*.linear2.weight": "S1",
        },
        nodes={
            f"*:self_attn:{_ATTENTION}": "S1",
            f"*:linear1:{_LINEAR}": "S2",
            f"*:linear2:{_LINEAR}": "P",
            f"*:linear2:{_ADD}": STREAM,
            "*:norm[12]:*": STREAM,
            f"TransformerEncoderLayer::{_ADD}": STREAM,
        },
    ),
}


def megatron_plan(priced: Priced, family: str, *, sequence_parallel: bool) -> Plan:
    """Megatron-LM's layout of a model of ``family`` on the last axis; raises :class:`PlanError` for another make.

    What the layout leaves open (reshapes, masks, activations, other axes) is filled in at least cost.
    """
    solution = solve(priced.problem, pins=megatron_pins(priced.space, family, sequence_parallel=sequence_parallel))
    return assemble(priced, solution.choice)


def megatron_pins(space: Space, family: str, *, sequence_parallel: bool, axis: str = "") -> Pins:
    """The choices that Megatron-LM's layout leaves on ``axis`` (the last one if left out); other axes are open."""
    recipe, axis = FAMILIES[family], axis or space.mesh.names[-1]
    parameters, nodes = dict(recipe.parameters), dict(recipe.nodes)
    if recipe.vocabulary and _rows_divide(space, recipe.vocabulary, axis):
        parameters |= recipe.vocabulary_parameters
        nodes |= recipe.vocabulary_nodes
    stream = f"S{SEQUENCE_DIM}" if sequence_parallel else "I"
    states = {STREAM: stream, STREAM_IF_WHOLE: "" if sequence_parallel else "I"}
    held = {glob: states.get(state, state) for glob, state in nodes.items()}
    return pin(
        space,
        parameters={name: f"{_state_of(name, parameters)}@{axis}" for name in space.parameter_slots},
        leave={f"{block}.0": f"{stream}@{axis}" for block in space.program.blocks},
        nodes={glob: f"{state}@{axis}" for glob, state in held.items() if state},
    )


def family_of(space: Space) -> str | None:
    """The family whose recipe fits a model: all that it names is there; ``None`` if there is none."""
    for family, recipe in FAMILIES.items():
        globs = [*recipe.parameters, *recipe.vocabulary_parameters]
        if all(any(fnmatchcase(name, glob) for name in space.parameter_slots) for glob in globs):
            return family
    return None


def _state_of(parameter: str, states: Mapping[str, str]) -> str:
    """The state of the first glob that fits; whole if none does."""
    return next((state for glob, state in states.items() if fnmatchcase(parameter, glob)), "I")


def _rows_divide(space: Space, parameter: str, axis: str) -> bool:
    slot = space.slots[space.parameter_slots[parameter]]
    graph = space.program.graphs()[slot.graph]
    return divides(graph.values[graph.inputs[slot.index].value].shape, S(0), dict(space.mesh.axes)[axis])
