"""Models on simulated meshes of two and three axes, the first of which carries the batch, against one process.

The loss is inside the program (rows have unequal counts of labels, some ignored) or outside. Under the optimal plan and
random plans every gradient agrees to 1e-9 in float64, and what was communicated is what the plan said; ten AdamW steps
with clipping under the optimal plan have equal losses and norms, to 1e-7. ``tests/dist/test_parity_meshes.py`` holds
real processes to the same bars.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from fxpar.assemble import assemble, random_choice
from fxpar.boundary import BoundaryRule, boundary_of, data_axes_of, input_layouts
from fxpar.cluster import Cluster
from fxpar.cost.price import Priced, price
from fxpar.graph import Ref
from fxpar.layout import Mesh
from fxpar.plans import Collective, Plan
from fxpar.precision import Float64Casts
from fxpar.runtime.records import record_collectives
from fxpar.space import space
from fxpar.trees import flatten_call, tensor_names
from tests.cases import TOLERANCE, Case, best
from tests.losses import LARGEST_NORM, LEARNING_RATE, built, loss_of, outside_loss, ten_steps
from tests.simulated import Numbers, Simulation, largest_error

NAMES = ("llama", "gpt2", "bert", "t5", "vit")
MESHES = ({"dp": 2, "tp": 4}, {"dp": 2, "sp": 2, "tp": 2})
SEEDS = range(10)


@dataclass(frozen=True)
class Reference:
    """A model captured on the whole batch, and its own gradients of the loss that is meant, and ten steps."""

    case: Case
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    wanted: dict[bool, Numbers]
    steps: list[float]

    def priced(self, axes: dict[str, int]) -> Priced:
        """On a mesh whose data axes cut the batch at the border of the model."""
        mesh, program = Mesh.of(axes), self.case.program
        rule = BoundaryRule(data_axes_of(mesh, None))
        layouts = input_layouts(self.tensors, rule, mesh)
        boundary = boundary_of(program, layouts, self.case.captured.output_names, rule, mesh)
        return price(space(program, mesh, boundary), Cluster.load("toy"))

    def output(self, name: str) -> int:
        """The number of a flat output."""
        refs = [index for index, ref in enumerate(self.case.program.top.outputs) if isinstance(ref, Ref)]
        return refs[self.case.captured.output_names.index(name)]

    def loss(self, whole: tuple[Tensor, ...], inside: bool) -> tuple[Tensor, dict[int, Tensor]]:
        """The loss, and its gradient as an output's, from whole outputs."""
        if inside:
            loss = whole[self.output("loss")].detach()
            return loss, {self.output("loss"): torch.ones_like(loss)}
        logits = whole[self.output("logits")].detach().requires_grad_()
        loss = outside_loss(logits)
        return loss.detach(), {self.output("logits"): torch.autograd.grad(loss, logits)[0]}


@functools.cache
def reference(name: str, labelled: bool) -> Reference:
    """With labels, there are gradients of the loss inside as well as of one outside; steps are of the former."""
    model, args, kwargs = built(name, labelled)
    with Float64Casts():
        case = Case(model, args, kwargs)
        wanted = {}
        for inside in {labelled, False}:
            leaves = {key: x for key, x in case.tensors.items() if x.requires_grad}
            loss = loss_of(model(*args, **kwargs), inside)
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            wanted[inside] = replace(case.wanted, gradients=dict(zip(leaves, grads, strict=True)))
        steps = ten_steps(copy.deepcopy(model), args, kwargs, labelled)
    tensors, _, _ = flatten_call(args, kwargs)
    names = tensor_names(model.forward, args, kwargs)
    shapes = tuple((name, tuple(x.shape)) for name, x in zip(names, tensors, strict=True))
    return Reference(case, shapes, wanted, steps)


def check(found: Reference, plan: Plan, what: str) -> Simulation:
    """Gradients of each loss, and what was communicated in the first of these steps."""
    simulation = Simulation(found.case.program, plan, found.case.callables)
    simulation.hold(found.case.tensors)
    with record_collectives() as ran:
        outs = simulation.forward()
        whole = simulation.whole_outputs(outs)
        for number, (inside, wanted) in enumerate(found.wanted.items()):
            simulation.backward(outs, found.loss(whole, inside)[1])
            if number == 0:
                assert not (unplanned := difference(ran, plan)), f"{what}: ran beyond the plan: {unplanned}"
            error, where = largest_error(simulation.numbers(outs), wanted)
            assert error <= TOLERANCE, f"{what}, loss {inside=}: {where} is off by {error:.1e}"
    return simulation


def difference(ran: list[Collective], plan: Plan) -> dict[Collective, int]:
    """How often each collective ran beyond what was planned (negative: less often)."""
    counts = Counter(ran)
    counts.subtract({replace(item, count=1): item.count for item in plan.collectives})
    return {item: count for item, count in counts.items() if count}


def simulated_steps(simulation: Simulation, found: Reference, inside: bool) -> list[float]:
    """As :func:`tests.losses.ten_steps`; each rank keeps its pieces, and an optimizer for them, from step to step."""
    simulation.hold(found.case.tensors)
    keys = [key for key in found.case.tensors if key[0] == "parameter"]
    pieces = [[simulation.pieces_of(key)[rank] for key in keys] for rank in simulation.ranks]
    optimizers = [torch.optim.AdamW(own, lr=LEARNING_RATE) for own in pieces]
    losses, norms = [], []
    for _ in range(10):
        outs = simulation.forward()
        loss, cotangents = found.loss(simulation.whole_outputs(outs), inside)
        simulation.backward(outs, cotangents)
        norm = nn.utils.get_total_norm([simulation.gradient(key) for key in keys])
        for own, optimizer in zip(pieces, optimizers, strict=True):
            nn.utils.clip_grads_with_norm_(own, LARGEST_NORM, norm)
            optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses + norms


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("name", NAMES)
def test_the_best_plan_trains_as_one_process_does(name: str, inside: bool, axes: dict[str, int]) -> None:
    found = reference(name, inside)
    plan = best(found.priced(axes))
    assert any(state.kind == "S" for layout in plan.parameters.values() for state in layout)
    simulation = check(found, plan, f"the best plan of {name} on {axes}")
    assert simulated_steps(simulation, found, inside) == pytest.approx(found.steps, rel=1e-7)
    assert found.steps[9] < found.steps[0] and min(found.steps[10:]) > LARGEST_NORM


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_random_plans_have_the_gradients_of_losses_inside_and_outside(name: str, axes: dict[str, int]) -> None:
    found = reference(name, True)
    priced = found.priced(axes)
    for seed in SEEDS:
        check(found, assemble(priced, random_choice(priced.space, seed)), f"random plan {seed} of {name} on {axes}")
