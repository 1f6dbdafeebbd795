"""Every operation, and programs put together at random, on meshes of two and three axes: any ways that go together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpar.assemble import assemble, random_choice
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.graph import Program
from fxpar.layout import Mesh
from fxpar.legality import check_program
from fxpar.space import space
from tests.cases import Case as ModelCase
from tests.simulated import Numbers, Simulation, Tensors, largest_error, whole_plan
from tests.torch.oracle import Case
from tests.torch.oracle_samples import samples
from tests.torch.test_parity_simulated import BATCH, LENGTH, WIDTH, Random

TOLERANCE = 1e-9
MESHES = ((2, 2), (2, 3), (4, 2), (2, 2, 2))
SAMPLES = list(samples())


def mesh_of(degrees: tuple[int, ...]) -> Mesh:
    return Mesh.of(dict(zip("abc", degrees, strict=False)))


def wanted_of(case: Case, program: Program) -> tuple[Tensors, Numbers]:
    """The operation's tensors by name, and its numbers on one rank: those of torch, test_rules_oracle.py says."""
    pairs = zip(case.tensors, case.graph.inputs, strict=True)
    tensors = {("input", item.name): case._leaf(x, case.graph.values[item.value].grad) for x, item in pairs}
    return tensors, Simulation(program, whole_plan(program)).run(tensors)[0]


@pytest.mark.parametrize("index", range(len(SAMPLES)), ids=[f"{index}-{what}" for index, what in enumerate(SAMPLES)])
def test_ways_of_several_axes_equal_the_whole_operation(index: int) -> None:
    case = Case(SAMPLES[index])
    program = Program(case.graph).verify()
    tensors, wanted = wanted_of(case, program)
    degrees = MESHES[index % len(MESHES)]
    priced = price(space(program, mesh_of(degrees)), Cluster.load("toy"))
    for seed in range(4):
        plan = assemble(priced, random_choice(priced.space, seed))
        check_program(program, plan)
        error, where = largest_error(Simulation(program, plan).run(tensors), wanted)
        assert error <= TOLERANCE, f"{plan.graphs['top'].nodes[0].name} on {degrees}: {where} is off by {error:.1e}"


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from(MESHES), st.integers(0, 10**6))
def test_random_programs_on_random_meshes_under_random_plans(
    program: int, length: int, degrees: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(program)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    case = ModelCase(Random(program, length), (x,))
    priced = case.priced(degrees)
    for number in range(3):
        plan = assemble(priced, random_choice(priced.space, seed + number))
        error, where = case.error(plan)
        assert error <= TOLERANCE, f"{degrees}, plan {number}: {where} is off by {error:.1e}"
