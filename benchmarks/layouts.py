"""Megatron-LM's layouts as states to hold; what they leave open the solver completes.

In: a model of transformers, its keyword arguments, a mesh. Out: a :class:`~fxpar.plans.Plan`. TP is Shoeybi et al. 2019
(arXiv 1909.08053); with sequence parallelism it is Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fxpar.assemble import assemble
from fxpar.capture import capture
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.layout import Mesh
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.solver import solve
from fxpar.space import space

#: What :func:`fxpar.pins.pin` takes: states of parameters, of blocks' outputs, and of operations' outputs.
Held = Mapping[str, Mapping[str, str]]


def llama(between: str) -> Held:
    """Llama with heads, inner features and vocabulary split, and the residual stream in the state ``between``."""
    block = "LlamaDecoderLayer"
    return {
        "parameters": {
            **{f"*.{name}_proj.weight": "S0" for name in ("q", "k", "v", "gate", "up")},
            **{f"*.{name}_proj.weight": "S1" for name in ("o", "down")},
            "*embed_tokens.weight": "S0",
            "*lm_head.weight": "S0",
            "*norm.weight": "I",
        },
        "leave": {f"{block}.0": between},
        "nodes": {
            **{f"{block}:self_attn.{name}_proj:aten.linear.default": "S2" for name in ("q", "k", "v")},
            **{f"{block}:mlp.{name}_proj:aten.linear.default": "S2" for name in ("gate", "up")},
            f"{block}:self_attn.o_proj:aten.linear.default": "P",
            f"{block}:mlp.down_proj:aten.linear.default": "P",
            f"{block}:*layernorm:*": between,
            f"{block}::aten.add.Tensor": between,
            "top:model.norm:*": between,
            "top:lm_head:*": "S2",
            "top::aten.cross_entropy_loss.default": "I",
            "top::aten.reshape.default": "I",
        },
    }


LLAMA_TP, LLAMA_TP_SP = llama("I"), llama("S1")


def pinned_plan(model: nn.Module, inputs: Mapping[str, Any], mesh: Mapping[str, int], cluster: str, held: Held) -> Plan:
    """The cheapest plan of ``model`` that is in the states ``held``; its times are as ``cluster`` prices them."""
    found = space(capture(model, (), dict(inputs)).program, Mesh.of(dict(mesh)))
    priced = price(found, Cluster.load(cluster))
    choice = solve(priced.problem, pins=pin(found, **{kind: dict(wishes) for kind, wishes in held.items()})).choice
    return assemble(priced, choice)
