"""Take any one conversion out of a rewritten model, or only its backward, and the numbers come out wrong.

So no conversion is superfluous, and the parity check sees each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from benchmarks.megatron import megatron_plan
from fxpar.assemble import assemble, random_choice
from fxpar.layout import COLLECTIVES, CONVERSIONS
from fxpar.precision import Float64Casts
from fxpar.runtime.collectives import convert, join, split
from tests.cases import TOLERANCE, Case, best
from tests.models import MODELS
from tests.simulated import Simulation, largest_error


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def case(request: pytest.FixtureRequest) -> Case:
    model, args, kwargs = MODELS[request.param]()
    with Float64Casts():
        return Case(model, args, kwargs, name=request.param)


@pytest.mark.parametrize("layout", ["optimal", "megatron tp", "megatron tp+sp"])
@pytest.mark.parametrize("degree", [2, 4])
def test_no_conversion_can_be_taken_out(case: Case, layout: str, degree: int) -> None:
    priced = case.priced(degree)
    if layout == "optimal":
        plan = best(priced)
    else:
        plan = megatron_plan(priced, case.name, sequence_parallel=layout.endswith("sp"))
    simulation = Simulation(case.program, plan, case.callables)
    assert wrong_numbers(case, simulation) is None
    survivors, mutants = [], 0
    for what, undo in mutations(simulation):
        mutants += 1
        if wrong_numbers(case, simulation) is None:
            survivors.append(what)
        undo()
    assert wrong_numbers(case, simulation) is None, "a mutation was not undone"
    assert mutants >= 8
    assert not survivors, f"{len(survivors)} of {mutants} mutants pass: {survivors}"


@pytest.mark.parametrize("seed", range(3))
def test_no_collective_of_a_random_plan_can_be_taken_out(case: Case, seed: int) -> None:
    """A random plan may sum what is zero elsewhere, or gather what it then takes apart: there, what ran tells."""
    priced = case.priced(2)
    plan = assemble(priced, random_choice(priced.space, seed))
    simulation = Simulation(case.program, plan, case.callables)
    planned = sum(item.count for item in plan.collectives)
    assert wrong_numbers(case, simulation) is None and collectives(case, simulation) == planned
    survivors, mutants = [], 0
    for what, undo in mutations(simulation, COLLECTIVES):
        mutants += 1
        if wrong_numbers(case, simulation) is None and collectives(case, simulation) == planned:
            survivors.append(what)
        undo()
    assert mutants > 30
    assert not survivors, f"{len(survivors)} of {mutants} mutants pass: {survivors}"


def wrong_numbers(case: Case, simulation: Simulation) -> str | None:
    """What the parity check says; None if all is well."""
    error, where = largest_error(simulation.run(case.tensors), case.wanted)
    return None if error <= TOLERANCE else f"{where} is off by {error:.1e}"


def collectives(case: Case, simulation: Simulation) -> int:
    """How many collectives a run executes."""
    ran: list[str] = []
    simulation.run(case.tensors, watch=lambda kind, *_: ran.append(kind))
    return sum(kind in COLLECTIVES for kind in ran)


def mutations(simulation: Simulation, kinds: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Spoil one conversion at a time on all ranks: yield what was done and how to undo it.

    With ``kinds``, only steps of these kinds are spoilt.
    """
    for name, modules in simulation.modules.items():
        for nodes in list(zip(*(module.graph.nodes for module in modules), strict=True)):
            if nodes[0].target is not convert:
                continue
            _, src, dst, grad = nodes[0].args[:4]
            what = f"{src} -> {dst} of {nodes[0].args[0]} in {name}"
            steps = CONVERSIONS[src[0], dst[0]]
            if not kinds or steps.forward in kinds:
                for node in nodes:
                    node.target = taken_out
                yield what, functools.partial(restore, nodes)
            if grad and steps.backward != "none" and (not kinds or steps.backward in kinds):
                pairs = [(node, without_backward(node)) for node in nodes]
                yield f"{steps.backward} of {what}", functools.partial(reattach, pairs)


def restore(nodes: tuple[fx.Node, ...]) -> None:
    for node in nodes:
        node.target = convert


def without_backward(node: fx.Node) -> fx.Node:
    """Let ``node`` convert forward only, and put a node after it that leads the gradient back without its backward."""
    graph, (x, src, dst, _, _, degree, rank, _) = node.graph, node.args
    node.args = (*node.args[:3], False, *node.args[4:])
    with graph.inserting_after(node):
        after = graph.call_function(local_backward, (x, node, src, dst, degree, rank))
    node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    return after


def reattach(pairs: list[tuple[fx.Node, fx.Node]]) -> None:
    for node, after in pairs:
        after.replace_all_uses_with(node)
        node.graph.erase_node(after)
        node.args = (*node.args[:3], True, *node.args[4:])


def taken_out(x: Tensor, src: str, dst: str, _grad: bool, _axis: str, degree: int, rank: int, _group: str) -> Tensor:
    """``x`` in the shape it should have after the conversion, but as if there were no other ranks."""
    return alone(CONVERSIONS[src[0], dst[0]].forward, x, src, dst, degree, rank)


def alone(kind: str, x: Tensor, src: str, dst: str, degree: int, rank: int) -> Tensor:
    """One step of a conversion on one rank: no exchange; of the others' pieces it knows none, or takes a wrong one."""
    if kind == "slice":
        return split(x, dst, degree)[(rank + 1) % degree]
    if kind in ("reduce_scatter", "all_to_all"):
        x = split(x, dst, degree)[rank]
    if kind in ("pad", "all_gather", "all_to_all"):
        return join(torch.stack([x] * degree), src)
    return x.view_as(x)


def local_backward(x: Tensor, y: Tensor, src: str, dst: str, degree: int, rank: int) -> Tensor:
    """``y``, with a gradient that comes to ``x`` in the right shape but as if there were no other ranks."""
    return _LocalBackward.apply(x, y, src, dst, degree, rank)


class _LocalBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, *where: Any) -> Tensor:
        ctx.where = where
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        src, dst, degree, rank = ctx.where
        kind = CONVERSIONS[src[0], dst[0]].backward
        return alone(kind, grad, dst, src, degree, rank), None, None, None, None, None


def test_shapes_of_the_spoiled_backward() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    shapes = {("S0", "R"): (8, 4), ("I", "S0"): (2, 4), ("P", "R"): (4, 4), ("S0", "S1"): (8, 2), ("S1", "P"): (4, 8)}
    for (src, dst), shape in shapes.items():
        assert taken_out(x, src, dst, True, "tp", 2, 0, "").shape == shape
        (grad,) = torch.autograd.grad(local_backward(x, torch.ones(shape), src, dst, 2, 0).sum(), x)
        assert grad.shape == x.shape, (src, dst)
