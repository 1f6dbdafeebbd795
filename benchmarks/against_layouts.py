"""The optimum against the layouts that people write by hand, in modelled seconds of a step.

In: names of zoo models, meshes, a cluster. Out: a Markdown table on standard output. A ratio is the step under a hand
layout over the step under the optimum, and must never be below 1; the solver fills in what a layout leaves open, so
each layout is at its best. Nothing is run.

    python -m benchmarks.against_layouts [--models llama3-8b ...] [--meshes tp=8 dp=2,tp=4] [--cluster h100]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.layouts import LAYOUTS, transformers_pins
from benchmarks.search_time import show
from fxpar import zoo
from fxpar.boundary import BoundaryRule, boundary_of, data_axes_of, input_layouts
from fxpar.capture import Captured, capture
from fxpar.cluster import Cluster
from fxpar.cost.price import Priced, price
from fxpar.errors import InfeasibleError, PlanError
from fxpar.layout import Mesh
from fxpar.pins import Pins
from fxpar.solver import Solution, solve
from fxpar.space import Space, space
from fxpar.zoo.sizes import ENTRIES

MESHES = ("tp=2", "tp=4", "tp=8", "dp=2,tp=4", "dp=8,tp=8")
TRANSFORMERS = "tp_plan"


@dataclass(frozen=True)
class Model:
    """A captured model, and the tensor parallelism that transformers has for it, by module."""

    name: str
    captured: Captured
    tp_plan: Mapping[str, str]


def load(name: str, *, shrink: bool = False, batch: int | None = None) -> Model:
    """A model of the zoo with ``batch`` samples on the whole mesh."""
    built = zoo.build(name, shrink=shrink, batch=batch)
    captured = capture(built.model, built.args, built.kwargs, whole=built.whole)
    return Model(name, captured, getattr(built.model, "_tp_plan", None) or {})


def priced(model: Model, mesh: Mesh, cluster: Cluster) -> Priced:
    """Priced on a mesh whose data axes cut the batch at the border of the model."""
    rule, program = BoundaryRule(data_axes_of(mesh, None)), model.captured.program
    shapes = [(item.name, program.top.values[item.value].shape) for item in program.top.inputs if item.kind == "input"]
    boundary = boundary_of(program, input_layouts(shapes, rule, mesh), model.captured.output_names, rule, mesh)
    return price(space(program, mesh, boundary), cluster)


def hand_pins(model: Model, found: Space) -> tuple[dict[str, Pins], dict[str, str]]:
    """The pins of every layout, and why the others are not possible."""
    pins, refused = dict[str, Pins](), dict[str, str]()
    for name in (*LAYOUTS, TRANSFORMERS):
        try:
            if name != TRANSFORMERS:
                pins[name] = LAYOUTS[name](found)
            elif model.tp_plan:
                pins[name] = transformers_pins(found, model.tp_plan, len(found.mesh.axes) - 1)
            else:
                refused[name] = "transformers has none for this model"
        except (InfeasibleError, PlanError) as error:
            refused[name] = str(error)
    return pins, refused


def compare(model: Model, mesh: Mesh, cluster: Cluster) -> tuple[Solution, dict[str, Solution], dict[str, str]]:
    """The optimum, every hand layout completed by the solver, and why the others are not possible."""
    problem = priced(model, mesh, cluster)
    pins, refused = hand_pins(model, problem.space)
    return solve(problem.problem), {name: solve(problem.problem, pins=some) for name, some in pins.items()}, refused


def batch(name: str, mesh: Mesh) -> int:
    """The model's usual batch, or a sample for every rank if that is more."""
    return max(ENTRIES[name].batch, mesh.size)


def mesh_of(text: str) -> Mesh:
    """Read ``"dp=2,tp=4"``.

    >>> mesh_of("dp=2,tp=4").degrees
    (2, 4)
    """
    return Mesh.of({name: int(degree) for name, _, degree in (part.partition("=") for part in text.split(","))})


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the optimum with hand layouts, in modelled seconds.")
    parser.add_argument("--models", nargs="*", default=list(zoo.NAMES))
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--shrink", action="store_true", help="small sizes of the same models")
    args = parser.parse_args()
    rows, cluster = [], Cluster.load(args.cluster)
    reasons, ratios = dict[tuple[str, str], str](), dict[tuple[str, str, str], float]()
    for name in args.models:
        for text in args.meshes:
            mesh, start = mesh_of(text), time.perf_counter()
            model = load(name, shrink=args.shrink, batch=batch(name, mesh))
            best, found, refused = compare(model, mesh, cluster)
            own = {which: solution.cost / best.cost for which, solution in found.items()}
            ratios |= {(name, text, which): ratio for which, ratio in own.items()}
            shown = [f"{own[which]:.3f}" if which in own else "-" for which in (*LAYOUTS, TRANSFORMERS)]
            took = f"{time.perf_counter() - start:.1f}"
            rows.append((name, text, f"{1e3 * best.cost:.3f}", best.status, *shown, took))
            for which, why in refused.items():
                if not why.endswith("two axes"):
                    reasons.setdefault((name, which), f"{which} of {name} on {text}: {why}")
    header = ("model", "mesh", "optimum, ms", "status", *LAYOUTS, TRANSFORMERS, "all, s")
    show(f"Hand layouts over the optimum ({args.cluster}), modelled seconds of a step", header, rows)
    least = min(ratios, key=ratios.__getitem__)
    print(f"\nThe smallest of {len(ratios)} ratios is {ratios[least]:.9f}: {', '.join(least)}.\n")
    print("\n".join(f"- {reason}" for reason in reasons.values()))


if __name__ == "__main__":
    main()
