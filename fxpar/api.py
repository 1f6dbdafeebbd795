"""The stages in order: :func:`plan` and :func:`parallelize`.

In: a model, a mesh, example inputs. Out: a :class:`~fxpar.plans.Plan`, or the same model object, sharded.
Everything that decides or rewrites is in the stage modules; this file is the picture of section 3 of the design.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpar.assemble import assemble
from fxpar.capture import Captured, capture
from fxpar.cluster import Cluster
from fxpar.cost.price import Priced, price
from fxpar.errors import LayoutError, RuleError
from fxpar.graph import Program
from fxpar.inputs import derive_inputs
from fxpar.layout import Layout, Mesh
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.progress import progress
from fxpar.solver import min_marginals, solve
from fxpar.space import Space, space


class Stages:
    """Names, times and (on request) dumps the stages of one planning run."""

    def __init__(self, dump: str | Path | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.dump = Path(dump) if dump else None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with progress(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def write(self, name: str, text: str) -> None:
        """With ``dump``, write a stage's text form to the next numbered file."""
        if self.dump is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        number = len(list(self.dump.glob("[0-9][0-9]-*.txt")))
        (self.dump / f"{number:02d}-{name}.txt").write_text(text + "\n")


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
    captured = captured_model(model, example_args, example_kwargs, whole=whole, stages=stages)
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


def captured_model(
    model: nn.Module,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    whole: Sequence[str] = (),
    stages: Stages,
) -> Captured:
    """Capture ``model`` on the example inputs, or on inputs derived from it when there are none."""
    if example_args is None and example_kwargs is None:
        args, kwargs, description = derive_inputs(model)
        print(f"fxpar: no example inputs given; assuming {description}")
    else:
        args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    with stages.stage("capture"):
        captured = capture(model, args, kwargs, whole=whole)
    stages.write("program", captured.program.text())
    return captured


def search(
    program: Program,
    mesh: Mesh,
    cluster: Cluster,
    *,
    parameters: Mapping[str, str | Layout] | None = None,
    strict: bool = False,
    time_limit_seconds: float = 60.0,
    stages: Stages | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """The cheapest plan for a captured program; ``parameters`` are states to hold, by glob."""
    stages = stages or Stages()
    with stages.stage("space"):
        open_space = space(program, mesh)
    stages.write("space", open_space.text())
    if strict and open_space.unruled:
        listed = ", ".join(f"{op} in {module or 'the model'}" for op, module, _ in open_space.unruled)
        raise RuleError(f"strict=True, and these operations have no rule: {listed}; register one, or leave strict out")
    with stages.stage("price"):
        priced = price(open_space, cluster)
    with stages.stage("solve"):
        pins = pin(open_space, parameters=parameters)
        solution = solve(priced.problem, pins=pins, time_limit_seconds=time_limit_seconds)
        marginals = min_marginals(priced.problem, pins=pins) if solution.status == "optimal" else None
    with stages.stage("assemble"):
        found = assemble(
            priced,
            solution.choice,
            status=solution.status,
            bound_seconds=solution.bound,
            gap=solution.gap,
            marginals=marginals,
            notes=tuple(notes),
            stats=statistics(open_space, priced),
        )
    found = found.with_timings(**stages.seconds)
    stages.write("plan", str(found))
    stages.write("explain", found.explain())
    return found


def statistics(open_space: Space, priced: Priced) -> dict[str, int]:
    """The sizes that decide how long a search takes; the same for the same model on every machine."""
    program = open_space.program
    variables, constraints = priced.problem.size()
    return {
        "nodes": len(program.top.nodes)
        + sum(len(graph.nodes) * len(program.instances(name)) for name, graph in program.blocks.items()),
        "nodes_folded": sum(len(graph.nodes) for graph in program.graphs().values()),
        "unique_blocks": len(program.blocks),
        "slots": len(open_space.slots),
        "variables": variables,
        "constraints": constraints,
    }


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


def cluster_for(cluster: str | Path | Cluster | None, mesh: DeviceMesh | Mesh | Mapping[str, int]) -> Cluster:
    """The cluster asked for, or the preset for the mesh's device type."""
    if cluster is None:
        cluster = "h100" if isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda" else "cpu-gloo"
    return Cluster.load(cluster)
