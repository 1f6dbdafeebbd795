"""Run a model sharded on CPU processes and compare every number with the unsharded model.

In: a function that builds a model and its inputs, a mesh, and perhaps a plan. Out: a :class:`Report`: outputs,
gradients of parameters and inputs, and parameters after one AdamW step. How processes are started is
:mod:`fxpar.processes`; what a plan should cost is not checked here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fxpar.api import as_mesh, parallelize
from fxpar.errors import FxparError
from fxpar.layout import Mesh
from fxpar.plans import Plan
from fxpar.precision import Float64Casts
from fxpar.processes import run_ranks
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives
from fxpar.training_step import Difference, double, named_tensors, train_step
from fxpar.whole_batch import Gathers, own_part

Build = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Report:
    """What was compared, in module order, and how far apart the sharded and the unsharded numbers are.

    ``plan`` is its digest; ``planned`` and ``executed`` count the collectives of one step.
    """

    mesh: str
    tolerance: float
    differences: tuple[Difference, ...]
    plan: str
    planned: int
    executed: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every error is at most the tolerance (a NaN is not), and the collectives are those of the plan."""
        close = bool(self.differences) and all(item.error <= self.tolerance for item in self.differences)
        return close and self.planned == self.executed

    @property
    def worst(self) -> tuple[Difference, ...]:
        """All differences, largest first; NaN before any number."""
        return tuple(sorted(self.differences, key=lambda item: (item.error == item.error, -item.error)))

    @property
    def first_layer(self) -> str | None:
        """The first layer, in module order, whose output differs; without one, the layer of the first gradient."""
        for kind in ("layer output", "gradient", "output"):
            wrong = [item for item in self.differences if item.kind == kind and not item.error <= self.tolerance]
            if wrong:
                name = wrong[0].name
                return name.rpartition(".")[0] if kind == "gradient" else name
        return None

    def text(self, worst: int = 10) -> str:
        """The report with its ``worst`` largest differences."""
        counts = f"{self.executed} collectives in a step, {self.planned} planned"
        lines = [*self.notes, f"plan {self.plan} on {self.mesh}: {counts}"]
        for kind in dict.fromkeys(item.kind for item in self.differences):
            errors = [item.error for item in self.differences if item.kind == kind]
            bad = sum(not error <= self.tolerance for error in errors)
            largest = float("nan") if any(error != error for error in errors) else max(errors)
            lines.append(f"  {kind:24} {len(errors):5} compared, largest error {largest:.1e}, {bad} wrong")
        lines.append("largest differences:")
        lines += [f"  {item.error:8.1e}  {item.kind}: {item.name}" for item in self.worst[:worst]]
        if self.ok:
            lines.append(f"equal: every difference is at most {self.tolerance:.0e}")
        else:
            layer = self.first_layer or "none (only the optimizer step, or the number of collectives)"
            lines.append(f"NOT EQUAL: first layer that differs: {layer}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A picklable builder of a model by name: a zoo name (shrunk unless ``full``) or ``package.module:function``."""

    name: str
    full: bool = False

    def __call__(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], tuple[str, ...]]:
        from fxpar import zoo

        built = zoo.load(self.name) if ":" in self.name else zoo.build(self.name, shrink=not self.full, device="cpu")
        return built.model, built.args, built.kwargs, tuple(built.whole)


@dataclass(frozen=True)
class _Job:
    build: Callable[[], tuple[Any, ...]]
    axes: tuple[tuple[str, int], ...]
    plan: str | None
    cluster: Any
    strict: bool
    seed: int


def verify(
    build: Build | ModelSpec,
    mesh: dict[str, int] | Mesh,
    *,
    plan: Plan | None = None,
    cluster: Any = "toy",
    strict: bool = False,
    seed: int = 0,
    tolerance: float = 1e-9,
) -> Report:
    """Compare a sharded with an unsharded training step in float64, on one CPU process per rank of ``mesh``.

    The unsharded model gets the whole batch, the ranks along data axes (``dp``, ``fsdp``, ...) their parts of it.

    ``build`` is a picklable function of no arguments that returns ``model, args, kwargs`` (and, if it likes, the names
    of modules to keep whole); every process calls it with the same random seed. Raises :class:`LayoutError` for a mesh
    that cannot be used, and :class:`RankError` with the message of the rank that failed.
    """
    axes = as_mesh(mesh)
    job = _Job(build, axes.axes, plan.to_json() if plan else None, cluster, strict, seed)
    found = json.loads(run_ranks(_rank, axes.size, job))
    return Report(
        mesh=" x ".join(f"{name}={degree}" for name, degree in axes.axes),
        tolerance=tolerance,
        differences=tuple(Difference(**item) for item in found["differences"]),
        plan=found["plan"],
        planned=found["planned"],
        executed=found["executed"],
        notes=tuple(found["notes"]),
    )


def _rank(rank: int, job: _Job) -> str:
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh(
        "cpu", tuple(degree for _, degree in job.axes), mesh_dim_names=tuple(name for name, _ in job.axes)
    )
    torch.manual_seed(job.seed)
    model, args, kwargs, *rest = job.build()
    require_real(model)
    model, args, kwargs = model.double(), double(args), double(kwargs)
    notes = []
    with Float64Casts():
        if _is_random(model, args, kwargs):
            model.eval()
            notes.append("the model draws random numbers in training mode: compared in eval mode")
        reference = copy.deepcopy(model)
        given = Plan.from_json(job.plan) if job.plan else None
        own_args, own_kwargs, layouts = own_part(model, args, kwargs, given, mesh)
        sharded = parallelize(
            model,
            mesh,
            example_args=own_args,
            example_kwargs=own_kwargs,
            plan=given,
            cluster=job.cluster,
            strict=job.strict,
            whole=rest[0] if rest else (),
        )
        plan = applied_plan(sharded)
        with record_collectives() as executed:
            gathers = Gathers(plan, mesh)
            mine = train_step(
                sharded, own_args, own_kwargs, job.seed, gathers.layers(), gathers.outputs, gathers.gradient_in(layouts)
            )
        whole = dict.fromkeys(plan.instances, _as_they_are)
        wanted = train_step(reference, args, kwargs, job.seed, whole) if rank == 0 else None
    return json.dumps(
        {
            "differences": [asdict(item) for item in mine.compare(wanted)] if wanted else [],
            "plan": plan.digest,
            "planned": sum(item.count for item in plan.collectives),
            "executed": len(executed),
            "notes": notes,
        }
    )


def _as_they_are(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors


def require_real(model: nn.Module) -> None:
    """Raise :class:`FxparError` naming the first tensor of ``model`` that has no memory."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise FxparError(f"{name} is on the meta device: verify runs the model, so build it on the CPU")


def _is_random(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two runs from different seeds differ (a copy runs: a forward may change buffers)."""
    outputs = []
    state = torch.get_rng_state()
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs.append([tensor for _, tensor in named_tensors(copy.deepcopy(model)(*args, **kwargs))])
    torch.set_rng_state(state)
    return not all(torch.equal(first, second) for first, second in zip(*outputs, strict=True))
