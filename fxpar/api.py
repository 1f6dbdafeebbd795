"""The stages in order: :func:`plan` and :func:`parallelize`.

In: a model, a mesh, example inputs. Out: a :class:`~fxpar.plans.Plan`, or the same model object, sharded.
Everything that decides or rewrites is in the stage modules; this file is the picture in docs/map.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpar.binding import bind, kept_whole, place_of
from fxpar.boundary import Boundary, BoundaryRule, data_axes_of
from fxpar.calls import (
    Calls,
    call_text,
    capture_call,
    check_loss,
    check_loss_args,
    check_plan,
    check_same_mesh,
    example_call,
)
from fxpar.capture import Captured
from fxpar.cluster import Cluster, presets
from fxpar.layout import Mesh
from fxpar.meshes import as_mesh, check_mesh
from fxpar.plans import Plan
from fxpar.rewrite import Place
from fxpar.runtime.agree import all_agree, all_succeed, broadcast_from_first, meet
from fxpar.runtime.bodies import Variant
from fxpar.runtime.module import apply, call_key
from fxpar.runtime.shards import check_parameters
from fxpar.runtime.skeleton import follow, skeleton
from fxpar.search import Stages, search


def plan(
    model: nn.Module,
    mesh: DeviceMesh | Mesh | Mapping[str, int],
    *,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    example_loss_args: Sequence[Any] | None = None,
    data_axes: Sequence[str] | None = None,
    input_placements: Any = None,
    output_placements: Any = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Mapping[str, str] | None = None,
    optimizer: str = "adamw",
    memory_limit_bytes: float | None = None,
    strict: bool = False,
    check_folding: bool = False,
    whole: Sequence[str] = (),
    time_limit_seconds: float = 60.0,
    dump: str | Path | None = None,
) -> Plan:
    """Choose how to split ``model`` over ``mesh``; no process group is needed, and no parameter is touched.

    ``mesh`` is ``{"axis": degree}`` or a :class:`DeviceMesh`, of one to three axes; the model may be on ``meta``.
    ``data_axes`` carry the batch (left out: those with a name such as ``dp``, ``fsdp`` or ``data``,
    :data:`fxpar.boundary.DATA_AXES`): every rank along them calls the model with its own part of the batch, and
    ``example_args`` and ``example_kwargs`` are one rank's. The batch is dim 0 of the first tensor and of all inputs
    and outputs whose dim 0 is as long. ``input_placements`` and ``output_placements`` say otherwise: a pytree of
    DTensor placements (a sequence per tensor, one for each mesh axis), or a dict from names (of an argument, a path in
    it, a key or position in the output) to such.

    With ``loss_fn`` the program is the model and ``loss_fn(output, *loss_args)``; ``example_loss_args`` are those of
    one call. ``constraints`` holds parameters, or what modules return, in given states by glob
    (``{"*.down_proj.weight": "S1@tp", "*.mlp": "S1@tp"}``, :func:`fxpar.pins.pin`); axes not named are left open.
    On every device, a training step with ``optimizer`` takes at most ``memory_limit_bytes`` (left out: what a device of
    the cluster has; ``math.inf`` for any number). ``whole`` are
    globs of modules to compute whole, untraced. ``strict`` refuses operations without a rule. ``check_folding``
    also plans without folding repeated blocks, and the plan says what folding costs. ``dump`` is a folder for the text
    of every stage.

    Raises :class:`~fxpar.errors.CaptureError` when the model cannot be captured, :class:`~fxpar.errors.RuleError` under
    ``strict``, :class:`~fxpar.errors.LayoutError` for a mesh or placements that cannot be used,
    :class:`~fxpar.errors.CallError` for a loss without its arguments, and :class:`~fxpar.errors.InfeasibleError` for
    constraints that nothing satisfies, and for a memory limit that no plan found keeps.

    >>> import torch, fxpar
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> found = fxpar.plan(mlp, {"tp": 4}, example_args=(torch.zeros(8, 64),), cluster="toy")
    >>> found.parameters["0.weight"], found.parameters["2.weight"], found.status
    ((S0,), (S1,), 'optimal')
    """
    stages, axes = Stages(dump), as_mesh(mesh)
    check_loss(loss_fn, example_loss_args)
    rule = BoundaryRule(data_axes_of(axes, data_axes))
    calls = Calls(axes, rule, whole, loss_fn, input_placements, output_placements)
    args, kwargs = example_call(model, example_args, example_kwargs, example_loss_args, calls)
    captured, boundary = captured_model(model, args, kwargs, calls, stages)
    prices = cluster_for(cluster, mesh)
    return search(
        captured.program,
        axes,
        prices,
        boundary=boundary,
        parameters=constraints,
        optimizer=optimizer,
        memory_limit_bytes=prices.memory_bytes if memory_limit_bytes is None else memory_limit_bytes,
        strict=strict,
        check_folding=check_folding,
        time_limit_seconds=time_limit_seconds,
        stages=stages,
        notes=captured.notes,
    )


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    example_loss_args: Sequence[Any] | None = None,
    plan: Plan | None = None,
    data_axes: Sequence[str] | None = None,
    input_placements: Any = None,
    output_placements: Any = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Mapping[str, str] | None = None,
    optimizer: str = "adamw",
    memory_limit_bytes: float | None = None,
    strict: bool = False,
    whole: Sequence[str] = (),
    time_limit_seconds: float = 60.0,
) -> nn.Module:
    """Split ``model`` over ``mesh``, in place: the same object, its parameters DTensors, its forward rewritten.

    Every rank of the mesh calls it with an equal model and, along axes that carry no batch, equal inputs. The first
    rank plans (unless ``plan`` is given) and tells the others; the other options are those of :func:`plan`. A call that
    differs from the example's (in shapes, dtypes or modes) is planned when it comes, with the parameters as they are;
    constraints on what modules return hold for calls like the example's only. A ``plan`` for a cluster that is no
    preset needs its ``cluster`` again, to plan such calls.

    With ``loss_fn`` the model is then called with ``loss_args=(...)`` beside its own arguments, and returns the loss
    (which its hooks see, too); in eval mode it may be called without, and returns its output. A loss inside of the
    model (by ``loss_fn``, or because its forward computes one) is that of the whole batch, also if the ranks' parts
    have unequal numbers of tokens, and so are the gradients. With a loss outside, computed by every rank on its part of
    the outputs, gradients are those of the mean of the ranks' losses, as DistributedDataParallel and FSDP have it.

    Nothing is changed unless everything fits on every rank: besides what :func:`plan` raises,
    :class:`~fxpar.errors.PlanError` when ``plan`` is for another model, inputs or mesh,
    :class:`~fxpar.errors.CallError` for a model that is sharded already, and :class:`~fxpar.errors.RankError` when
    another rank fails or has another model.
    """
    check_mesh(mesh)
    axes, stages = as_mesh(mesh), Stages()
    check_loss(loss_fn, example_loss_args)
    if plan:
        check_same_mesh(plan, axes)
    given = plan.boundary if plan else BoundaryRule()
    rule = given if plan and data_axes is None else replace(given, data_axes=data_axes_of(axes, data_axes))
    calls = Calls(axes, rule, whole, loss_fn, input_placements, output_placements)
    prices = cluster_for(cluster, mesh, plan)
    usual = math.inf if plan else prices.memory_bytes  # a given plan was made for a limit of its own
    needs: dict[str, Any] = {
        "optimizer": plan.memory.optimizer if plan and plan.memory else optimizer,
        "memory_limit_bytes": usual if memory_limit_bytes is None else memory_limit_bytes,
        "strict": strict,
        "time_limit_seconds": time_limit_seconds,
    }

    def read() -> tuple[Captured, Boundary, Any, nn.Module, str]:
        check_parameters(model, {})
        args, kwargs = example_call(model, example_args, example_kwargs, example_loss_args, calls)
        captured, boundary = captured_model(model, args, kwargs, calls, stages)
        key = call_key(list(model.modules()), args, kwargs)
        return captured, boundary, key, skeleton(model), call_text(model, args, kwargs)

    captured, boundary, key, bare, shown = all_succeed(read, mesh, "capturing the model")
    all_agree(f"{captured.program.digest()} for {shown}", mesh, "the captured model")

    def decide() -> tuple[str, int, str]:
        found = plan or search(
            captured.program,
            axes,
            prices,
            boundary=boundary,
            parameters=constraints,
            stages=stages,
            notes=captured.notes,
            **needs,
        )
        for note in captured.notes:
            warnings.warn(note, stacklevel=4)
        return found.to_json(), torch.initial_seed(), uuid4().hex

    text, seed, name = broadcast_from_first(decide, mesh, "planning")
    chosen = Plan.from_json(text)
    place = place_of(mesh, axes)

    def ready() -> Variant:
        planned = captured.divided(chosen.calls)
        check_plan(chosen, axes, planned, boundary)
        found = bind(planned, chosen, place, bare)
        check_parameters(model, chosen.parameters)
        return found

    variant = all_succeed(ready, mesh, "rewriting the model")
    all_agree(chosen.digest, mesh, "the plan")

    meetings, further = count(), calls.settled(boundary.rule)

    def recapture(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        check_loss_args(bare, kwargs, loss_fn, training=root.training)
        meet(mesh, f"{name}/{next(meetings)}", "calling the model in a new way (other shapes, dtypes or modes)")
        return another_variant(follow(bare, root), args, kwargs, further, chosen, prices, place, mesh, needs)

    apply(
        model,
        variant,
        plan=chosen,
        layouts=chosen.parameters,
        mesh=mesh,
        recapture=recapture,
        key=key,
        seed=seed,
        kept=kept_whole(captured),
    )
    return model


def another_variant(
    bare: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    calls: Calls,
    first: Plan,
    prices: Cluster,
    place: Place,
    mesh: DeviceMesh,
    needs: dict[str, Any],
) -> Variant:
    """What to run for a call that the first plan does not fit: captured anew, parameters held as they are."""
    what = "the way the model is called"
    captured, boundary = all_succeed(lambda: capture_call(bare, args, kwargs, calls), mesh, f"capturing {what}")
    all_agree(f"{captured.program.digest()} for {call_text(bare, args, kwargs)}", mesh, what)

    def decide() -> str:
        held = {name: layout for name, layout in first.parameters.items() if name not in captured.program.unused}
        return search(captured.program, first.mesh, prices, boundary=boundary, parameters=held, **needs).to_json()

    found = Plan.from_json(broadcast_from_first(decide, mesh, f"planning for {what}"))
    return all_succeed(lambda: bind(captured.divided(found.calls), found, place, bare), mesh, f"rewriting for {what}")


def captured_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], calls: Calls, stages: Stages
) -> tuple[Captured, Boundary]:
    """Capture a call, as a stage of planning."""
    with stages.stage("capture"):
        captured, boundary = capture_call(model, args, kwargs, calls)
    stages.write("program", captured.program.text)
    return captured, boundary


def cluster_for(
    cluster: str | Path | Cluster | None, mesh: DeviceMesh | Mesh | Mapping[str, int], plan: Plan | None = None
) -> Cluster:
    """The cluster asked for, or the preset that a given plan names, or the preset for the mesh's device type."""
    if cluster is None and plan is not None and plan.cluster in presets():
        cluster = plan.cluster
    if cluster is None:
        cluster = "h100" if isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda" else "cpu-gloo"
    return Cluster.load(cluster)
