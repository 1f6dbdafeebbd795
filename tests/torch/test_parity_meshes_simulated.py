"""Models on simulated meshes of two and three axes, the first of which carries the batch, under many plans."""

from __future__ import annotations

import functools

import pytest

from fxpar.assemble import assemble, random_choice
from fxpar.boundary import Boundary, BoundaryRule, boundary_of, data_axes_of, input_layouts
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.layout import Mesh
from fxpar.precision import Float64Casts
from fxpar.space import space
from fxpar.trees import flatten_call, tensor_names
from tests.cases import Case, best
from tests.models import MODELS

NAMES = ("llama", "gpt2", "bert", "t5", "vit")
MESHES = ({"dp": 2, "tp": 4}, {"dp": 2, "sp": 2, "tp": 2})
SEEDS = 10
TOLERANCE = 1e-9


@functools.cache
def case_of(name: str) -> tuple[Case, tuple[tuple[str, tuple[int, ...]], ...]]:
    """The model captured on the whole batch; its inputs' names and shapes."""
    model, args, kwargs = MODELS[name]()
    tensors, _, _ = flatten_call(args, kwargs)
    names = tensor_names(model.forward, args, kwargs)
    with Float64Casts():
        return Case(model, args, kwargs), tuple((n, tuple(t.shape)) for n, t in zip(names, tensors, strict=True))


def boundary(case: Case, tensors: tuple[tuple[str, tuple[int, ...]], ...], mesh: Mesh) -> Boundary:
    rule = BoundaryRule(data_axes_of(mesh, None))
    inputs = input_layouts(tensors, rule, mesh)
    return boundary_of(case.program, inputs, case.captured.output_names, rule, mesh)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_models_on_simulated_meshes(name: str, axes: dict[str, int]) -> None:
    case, tensors = case_of(name)
    mesh = Mesh.of(axes)
    priced = price(space(case.program, mesh, boundary(case, tensors, mesh)), Cluster.load("toy"))
    plans = {"the best plan": best(priced)}
    plans |= {f"random plan {seed}": assemble(priced, random_choice(priced.space, seed)) for seed in range(SEEDS)}
    assert any(state.kind == "S" for layout in plans["the best plan"].parameters.values() for state in layout)
    for label, plan in plans.items():
        error, where = case.error(plan)
        assert error <= TOLERANCE, f"{label} of {name} on {axes}: {where} is off by {error:.1e}"
