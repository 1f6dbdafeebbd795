"""One small module under many plans, all ranks simulated, against the module run as it is.

:func:`check` is what the tests of single cases call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpar import trees
from fxpar.assemble import assemble, random_choice
from fxpar.boundary import Boundary
from fxpar.capture import Captured, capture
from fxpar.cluster import Cluster
from fxpar.cost.price import Priced, price
from fxpar.graph import Ref
from fxpar.layout import Mesh
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.solver import solve
from fxpar.space import space
from fxpar.trees import flatten_call
from tests.simulated import Numbers, Simulation, Tensors, cotangents, largest_error

TOLERANCE = 1e-9


class Of(nn.Module):
    """A function of inputs and of named linears (``name=(in, out)``) as a module."""

    def __init__(self, function: Callable[..., Any], **linears: tuple[int, int]) -> None:
        super().__init__()
        self.function = function
        for name, (inputs, outputs) in linears.items():
            setattr(self, name, nn.Linear(inputs, outputs))
        self.double()

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


class Case:
    """A model captured on its inputs, its tensors by name, and its own numbers."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, name: str = ""
    ) -> None:
        self.name = name
        self.captured = capture(model, args, kwargs)
        self.program = self.captured.program
        called = {f"call:{key}": call for key, call in self.captured.callables.items()}
        whole = {
            f"whole:{key}": functools.partial(call, model.get_submodule(call.path))
            for key, call in self.captured.callables.items()
            if hasattr(call, "path")
        }
        self.callables = called | whole
        self.tensors = tensors_of(self.captured, model, args, kwargs or {})
        self.wanted = own_numbers(self.captured, model, args, kwargs or {}, self.tensors)

    def priced(self, degrees: int | tuple[int, ...], cluster: str = "toy", boundary: Boundary | None = None) -> Priced:
        axes = (degrees,) if isinstance(degrees, int) else degrees
        mesh = Mesh.of({name: degree for name, degree in zip(("tp", "up", "vp"), axes, strict=False)})
        return price(space(self.program, mesh, boundary), Cluster.load(cluster))

    def error(self, plan: Plan) -> tuple[float, str]:
        """The largest error under ``plan`` on simulated ranks, and where it is."""
        found = Simulation(self.program, plan, self.callables).run(self.tensors)
        return largest_error(found, self.wanted)


def tensors_of(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """Everything that the program reads, by kind and (first) name."""
    found: dict[tuple[str, str], Tensor] = {}
    found.update({("parameter", name): tensor for name, tensor in model.named_parameters()})
    found.update({("buffer", name): tensor.clone() for name, tensor in model.named_buffers()})  # a run may change them
    names = [item.name for item in captured.program.top.inputs if item.kind == "input"]
    found.update({("input", name): x for name, x in zip(names, flatten_call(args, kwargs)[0], strict=True)})
    for graph_name, graph in captured.program.graphs().items():
        for module in ("",) if graph_name == "top" else captured.program.instances(graph_name):
            for item in graph.inputs:
                if item.kind == "constant":
                    found["constant", item.name] = captured.constant_of(model, module, item.name)
    return found


def own_numbers(
    captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Tensors
) -> Numbers:
    """The numbers of ``model`` run as it is; gradients that it does not have are zeros."""
    leaves = {key: tensor for key, tensor in tensors.items() if tensor.requires_grad}
    out = model(*args, **kwargs)
    outputs = trees.flatten(out)[0]
    refs = [index for index, ref in enumerate(captured.program.top.outputs) if isinstance(ref, Ref)]
    whole = list(captured.program.top.outputs)
    for index, tensor in zip(refs, outputs, strict=True):
        whole[index] = tensor
    grads = cotangents(captured.program.top, whole, seed=0)
    found = torch.autograd.grad(
        [whole[i] for i in grads], list(leaves.values()), list(grads.values()), allow_unused=True
    )
    gradients = {
        key: torch.zeros_like(tensor) if grad is None else grad
        for (key, tensor), grad in zip(leaves.items(), found, strict=True)
    }
    buffers = dict(model.named_buffers())
    updates = {name: buffers[name].clone() for name, _ in captured.program.top.updates}
    return Numbers(tuple(whole), updates, gradients)


def check(
    model: nn.Module,
    *args: Any,
    parameters: Mapping[str, str] | None = None,
    nodes: Mapping[str, str] | None = None,
    degrees: Sequence[int | tuple[int, ...]] = (2, 4),
    seeds: int = 12,
) -> Plan:
    """Assert that ``model`` computes its own numbers at each of ``degrees``; return the best plan at the last of them.

    A tuple of degrees is a mesh of several axes.

    It runs under the best plan with ``parameters`` and ``nodes`` held, and under ``seeds`` plans of random strategies.
    """
    case = Case(model, args)
    for degree in degrees:
        priced = case.priced(degree)
        plan = best(priced, parameters, nodes)
        plans = [plan, *(assemble(priced, random_choice(priced.space, seed)) for seed in range(seeds))]
        for number, candidate in enumerate(plans):
            error, where = case.error(candidate)
            name = f"random plan {number - 1}" if number else "the best plan"
            assert error <= TOLERANCE, f"{name} at degree {degree}: {where} is off by {error:.1e}"
    return plan


def best(priced: Priced, parameters: Mapping[str, str] | None = None, nodes: Mapping[str, str] | None = None) -> Plan:
    """The plan of least seconds with ``parameters`` and ``nodes`` held."""
    solution = solve(priced.problem, pins=pin(priced.space, parameters=parameters, nodes=nodes))
    return assemble(priced, solution.choice, status=solution.status)
