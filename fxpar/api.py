"""The stages in order: :func:`plan` and :func:`parallelize`.

In: a model, a mesh, example inputs. Out: a :class:`~fxpar.plans.Plan`, or the same model object, sharded.
Everything that decides or rewrites is in the stage modules; this file is the picture in docs/map.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpar.binding import bind, kept_whole, place_of
from fxpar.capture import Captured, capture
from fxpar.cluster import Cluster, presets
from fxpar.errors import LayoutError, PlanError
from fxpar.inputs import derive_inputs
from fxpar.layout import Mesh
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
    cluster: str | Path | Cluster | None = None,
    constraints: Mapping[str, str] | None = None,
    strict: bool = False,
    whole: Sequence[str] = (),
    time_limit_seconds: float = 60.0,
    dump: str | Path | None = None,
) -> Plan:
    """Choose how to split ``model`` over ``mesh``; no process group is needed, and no parameter is touched.

    ``mesh`` is ``{"axis": degree}`` or a :class:`DeviceMesh`; the model may be on ``meta``. ``constraints`` holds
    parameters in given states by glob (``{"*.down_proj.weight": "S1@tp"}``). ``whole`` are globs of modules to compute
    whole, untraced. ``strict`` refuses operations without a rule. ``dump`` is a folder for the text of every stage.

    Raises :class:`~fxpar.errors.CaptureError` when the model cannot be captured, :class:`~fxpar.errors.RuleError` under
    ``strict``, :class:`~fxpar.errors.LayoutError` for a mesh that cannot be used, and
    :class:`~fxpar.errors.InfeasibleError` for constraints that nothing satisfies.

    >>> import torch, fxpar
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> found = fxpar.plan(mlp, {"tp": 4}, example_args=(torch.zeros(8, 64),), cluster="toy")
    >>> found.parameters["0.weight"], found.parameters["2.weight"], found.status
    ((S0,), (S1,), 'optimal')
    """
    stages = Stages(dump)
    captured, _, _ = captured_model(model, example_args, example_kwargs, whole=whole, stages=stages)
    return search(
        captured.program,
        as_mesh(mesh),
        cluster_for(cluster, mesh),
        parameters=constraints,
        strict=strict,
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
    plan: Plan | None = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Mapping[str, str] | None = None,
    strict: bool = False,
    whole: Sequence[str] = (),
    time_limit_seconds: float = 60.0,
) -> nn.Module:
    """Split ``model`` over ``mesh``, in place: the same object, its parameters DTensors, its forward rewritten.

    Every rank of the mesh calls it with an equal model and equal inputs. The first rank plans (unless ``plan`` is
    given) and tells the others; the other options are those of :func:`plan`. Nothing is changed unless everything
    fits on every rank: besides what :func:`plan` raises, :class:`~fxpar.errors.PlanError` when ``plan`` is for
    another model, inputs or mesh, :class:`~fxpar.errors.CallError` for a model that is sharded already, and
    :class:`~fxpar.errors.RankError` when another rank fails or has another model.
    """
    check_mesh(mesh)
    axes = as_mesh(mesh)
    stages = Stages()

    def read() -> tuple[Captured, Any, nn.Module]:
        check_parameters(model, {})
        captured, args, kwargs = captured_model(model, example_args, example_kwargs, whole=whole, stages=stages)
        return captured, call_key(list(model.modules()), args, kwargs), skeleton(model)

    captured, key, bare = all_succeed(read, mesh, "capturing the model")
    all_agree(captured.program.digest(), mesh, "the captured model")

    prices = cluster_for(cluster, mesh, plan)

    def decide() -> tuple[str, int, str]:
        found = plan or search(
            captured.program,
            axes,
            prices,
            parameters=constraints,
            strict=strict,
            time_limit_seconds=time_limit_seconds,
            stages=stages,
            notes=captured.notes,
        )
        for note in captured.notes:
            warnings.warn(note, stacklevel=4)
        return found.to_json(), torch.initial_seed(), uuid4().hex

    text, seed, name = broadcast_from_first(decide, mesh, "planning")
    chosen = Plan.from_json(text)
    place = place_of(mesh, axes)

    def ready() -> Variant:
        check_same_mesh(chosen, axes)
        found = bind(captured, chosen, place, bare)
        check_parameters(model, chosen.parameters)
        return found

    variant = all_succeed(ready, mesh, "rewriting the model")
    all_agree(chosen.digest, mesh, "the plan")

    meetings = count()

    def recapture(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        meet(mesh, f"{name}/{next(meetings)}", "calling the model in a new way (other shapes, dtypes or modes)")
        return another_variant(follow(bare, root), args, kwargs, whole, chosen, prices, place, mesh)

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
    whole: Sequence[str],
    first: Plan,
    prices: Cluster,
    place: Place,
    mesh: DeviceMesh,
) -> Variant:
    """What to run for a call that the first plan does not fit: captured anew, parameters held as they are."""
    what = "the way the model is called"
    captured = all_succeed(lambda: capture(bare, args, kwargs, whole=whole), mesh, f"capturing {what}")
    all_agree(captured.program.digest(), mesh, what)

    def decide() -> str:
        held = {name: layout for name, layout in first.parameters.items() if name not in captured.program.unused}
        return search(captured.program, first.mesh, prices, parameters=held).to_json()

    text = broadcast_from_first(decide, mesh, f"planning for {what}")
    return all_succeed(lambda: bind(captured, Plan.from_json(text), place, bare), mesh, f"rewriting for {what}")


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise :class:`LayoutError` unless ``mesh`` is a DeviceMesh that this rank is part of."""
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"parallelize needs a DeviceMesh, not {type(mesh).__name__}; make one with "
            "torch.distributed.device_mesh.init_device_mesh, or use fxpar.plan to plan without processes"
        )
    if mesh.get_coordinate() is None:
        raise LayoutError(
            f"rank {dist.get_rank()} is not part of the mesh {mesh}; call parallelize only on the ranks of the mesh "
            "(those whose mesh.get_coordinate() is not None)"
        )


def check_same_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise :class:`PlanError` unless ``plan`` was made for ``mesh``."""
    if plan.mesh != mesh:
        raise PlanError(f"the plan is for a mesh {dict(plan.mesh.axes)}, and this one is {dict(mesh.axes)}; plan again")


def captured_model(
    model: nn.Module,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    whole: Sequence[str] = (),
    stages: Stages,
) -> tuple[Captured, tuple[Any, ...], dict[str, Any]]:
    """Capture ``model`` on the example inputs, or on inputs derived from it when there are none; and those inputs."""
    if example_args is None and example_kwargs is None:
        args, kwargs, description = derive_inputs(model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"fxpar: no example inputs given; assuming {description}")
    else:
        args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    with stages.stage("capture"):
        captured = capture(model, args, kwargs, whole=whole)
    stages.write("program", captured.program.text)
    return captured, args, kwargs


def as_mesh(mesh: DeviceMesh | Mesh | Mapping[str, int]) -> Mesh:
    """The mesh as names and degrees; raises :class:`LayoutError` if it has more than one axis."""
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
        found = Mesh(tuple(zip(names, mesh.shape, strict=True)))
    else:
        found = mesh if isinstance(mesh, Mesh) else Mesh.of(dict(mesh))
    if len(found.axes) != 1:
        raise LayoutError(
            f"the mesh has axes {', '.join(found.names)}; this version splits over one axis: "
            f"pass a sub-mesh such as mesh[{found.names[-1]!r}]"
        )
    return found


def cluster_for(
    cluster: str | Path | Cluster | None, mesh: DeviceMesh | Mesh | Mapping[str, int], plan: Plan | None = None
) -> Cluster:
    """The cluster asked for, or the preset that a given plan names, or the preset for the mesh's device type."""
    if cluster is None and plan is not None and plan.cluster in presets():
        cluster = plan.cluster
    if cluster is None:
        cluster = "h100" if isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda" else "cpu-gloo"
    return Cluster.load(cluster)
