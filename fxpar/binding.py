"""Captured model + Plan -> :class:`~fxpar.runtime.bodies.Variant`: what one rank runs for one way of calling.

In: what :mod:`fxpar.capture` found, the plan for it, this rank's place, and the model's skeleton (for modules that are
kept whole). Out: rewritten graphs with the names of what they read. Nothing of the model is touched.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpar.boundary import averaging_share
from fxpar.capture import Captured
from fxpar.graph import Graph, Node, Program, Ref
from fxpar.layout import Mesh
from fxpar.plans import Plan
from fxpar.rewrite import Place, calls_blocks, rewrite_program
from fxpar.runtime.again import mark
from fxpar.runtime.bodies import Body, CallForm, Variant
from fxpar.runtime.shards import mesh_device
from fxpar.runtime.targets import resolve


def place_of(device_mesh: DeviceMesh, mesh: Mesh) -> Place:
    """Where this rank stands on ``device_mesh``, whose axes are those of ``mesh``."""
    coordinates = device_mesh.get_coordinate()
    assert coordinates is not None, "the caller has checked that this rank is part of the mesh"
    groups = tuple(device_mesh.get_group(axis).group_name for axis in range(device_mesh.ndim))
    return Place(mesh, tuple(coordinates), groups, mesh_device(device_mesh))


def bind(captured: Captured, plan: Plan, place: Place, skeleton: nn.Module) -> Variant:
    """Rewrite every graph for this rank; raises :class:`~fxpar.errors.PlanError` if the plan does not fit."""
    program = captured.program
    callables: dict[str, Any] = {}
    for node in _nodes(program):
        kind, _, key = node.op.partition(":")
        if kind == "call":
            callables[node.op] = captured.callables[key]
        elif kind == "whole":
            call = captured.callables[key]
            # A copy: the skeleton follows the model into other train/eval modes, this variant stays as captured.
            callables[node.op] = partial(call, copy.deepcopy(skeleton.get_submodule(call.path)))
    graphs = rewrite_program(program, plan, place, callables)
    leave = [layout for layout in plan.graphs["top"].outputs if layout is not None]
    bodies = {name: _body(graph, graphs[name]) for name, graph in program.graphs().items()}
    return Variant(
        top=bodies.pop("top"),
        result=captured.out_spec,
        blocks=bodies,
        forms={block: CallForm(*captured.block_specs[block]) for block in program.blocks},
        sites=tuple(plan.instances),
        constants={name: tensor.to(place.device) for name, tensor in captured.constants.items()},
        random=any(_is_random(node) for node in _nodes(program)),
        recompute=captured.recompute,
        shares=tuple(averaging_share(layout, plan.boundary.data_axes, plan.mesh) for layout in leave),
    )


def kept_whole(captured: Captured) -> tuple[str, ...]:
    """The paths of the modules that are called as they are."""
    return tuple(captured.callables[node.op.removeprefix("whole:")].path for node in _nodes(captured.program)
                 if node.op.startswith("whole:"))  # fmt: skip


def _nodes(program: Program) -> list[Node]:
    return [node for graph in program.graphs().values() for node in graph.nodes]


def _body(graph: Graph, rewritten: torch.fx.GraphModule) -> Body:
    return Body(
        graph=rewritten,
        reads=tuple((item.kind, item.name) for item in graph.inputs),
        tensors=tuple(isinstance(out, Ref) for out in graph.outputs),
        updates=tuple(name for name, _ in graph.updates),
        calls_blocks=calls_blocks(graph),
        again=any(node.target is mark for node in rewritten.graph.nodes),
    )


def _is_random(node: Node) -> bool:
    """Whether a node may draw random numbers; what happens inside opaque calls is not known."""
    if node.op.startswith(("call:", "whole:")):
        return True
    if node.op.startswith("block:"):
        return False
    tags = getattr(resolve(node.op), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or bool(node.kwarg("dropout_p", 0.0))
