"""A program under a plan with all ranks simulated in this process: outputs, and gradients of everything it reads.

In: a :class:`~fxpar.graph.Program`, a plan, the whole tensors by name. Out: :class:`Numbers` per rank, to hold against
those of the program run whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from fxpar.graph import Graph, Program, Ref
from fxpar.layout import I, Layout, Mesh, successive_layout
from fxpar.plans import Plan
from fxpar.rewrite import Place, rewrite_program
from fxpar.runtime.pieces import piece
from fxpar.runtime.simulate_ranks import Watcher, run_simulated

torch.set_num_threads(1)  # the tensors are so small that threads would only wait for one another

#: Whole tensors by ``(kind, name)``, as the program's inputs name them.
Tensors = Mapping[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Numbers:
    """One rank's flat outputs, new buffer values, and whole gradients by ``(kind, name)``."""

    outputs: tuple[Any, ...]
    updates: dict[str, Tensor]
    gradients: dict[tuple[str, str], Tensor]


class Simulation:
    """A program rewritten for every rank of ``plan``; ``change(graph name, modules per rank)`` may spoil it."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        callables: Mapping[str, Callable[..., Any]] | None = None,
        change: Callable[[str, Sequence[fx.GraphModule]], None] | None = None,
    ) -> None:
        self.program, self.plan = program, plan
        self.coordinates = list(product(*map(range, plan.mesh.degrees)))
        self.ranks = range(len(self.coordinates))
        places = [Place(plan.mesh, at, group_names(at), torch.device("cpu")) for at in self.coordinates]
        with patch.object(fx.GraphModule, "recompile", _unwritten):
            per_rank = [rewrite_program(program, plan, place, callables or {}) for place in places]
        self.modules = {name: [modules[name] for modules in per_rank] for name in program.graphs()}
        for name, modules in self.modules.items():
            if change is not None:
                change(name, modules)
                for module in modules:
                    module.graph.lint()

    def run(self, tensors: Tensors, seed: int = 0, watch: Watcher | None = None) -> list[Numbers]:
        """Every rank's numbers, from cotangents drawn with ``seed``; raises AssertionError if ranks differ in kind."""
        self.hold(tensors)
        outs = self.forward(watch)
        self.backward(outs, cotangents(self.program.top, self.whole_outputs(outs), seed))
        return self.numbers(outs)

    def hold(self, tensors: Tensors) -> None:
        """Every rank takes its pieces of ``tensors``, and keeps them from run to run."""
        self.tensors = tensors
        self.pieces: dict[tuple[str, str], list[Tensor]] = {}

    def forward(self, watch: Watcher | None = None) -> list[tuple[Any, ...]]:
        """Every rank's flat outputs, and new buffer values, from the pieces that it holds."""
        self.watch = watch
        return run_simulated(
            self.modules["top"], self._inputs(self.program.top, "", None), call=self._call, watch=watch
        )

    def backward(self, outs: Sequence[tuple[Any, ...]], grads: Mapping[int, Tensor]) -> None:
        """New gradients of all pieces, from whole cotangents by the number of an output.

        Outputs without one get zeros, which change no gradient: so everything runs that plans predict.
        """
        for own in chain.from_iterable(self.pieces.values()):
            own.grad = None
        roots, given = [], []
        for index, layout in enumerate(self.plan.graphs["top"].outputs):
            for at, out in zip(self.coordinates, outs, strict=True):
                if layout is not None and out[index].requires_grad:
                    roots.append(out[index])
                    zero = torch.zeros_like(out[index])
                    given.append(piece_of(grads[index], layout, self.plan.mesh, at) if index in grads else zero)
        torch.autograd.backward(roots, given, retain_graph=True)

    def numbers(self, outs: Sequence[tuple[Any, ...]]) -> list[Numbers]:
        """Every rank's numbers after a run."""
        names, count = [name for name, _ in self.program.top.updates], len(self.program.top.outputs)
        keys = [key for key, tensor in self.tensors.items() if tensor.requires_grad]
        return [
            Numbers(
                self.whole_outputs(outs, rank),
                dict(zip(names, outs[rank][count:], strict=True)),
                {key: self.gradient(key, rank) for key in keys},
            )
            for rank in self.ranks
        ]

    def gradient(self, key: tuple[str, str], rank: int = 0) -> Tensor:
        """The whole gradient of a tensor, as ``rank`` and those that have what it lacks know it."""
        found = [torch.zeros_like(own) if own.grad is None else own.grad for own in self.pieces_of(key)]
        return self._join(found, self._layout(key), rank, tuple(self.tensors[key].shape))

    def whole_outputs(self, outs: Sequence[tuple[Any, ...]], rank: int = 0) -> tuple[Any, ...]:
        """The flat outputs, those that are split put together from the ranks that have what ``rank`` lacks."""
        layouts = self.plan.graphs["top"].outputs
        return tuple(
            self._join([out[index] for out in outs], layouts[index], rank, self._shape(index))
            if isinstance(outs[rank][index], Tensor) else outs[rank][index]
            for index in range(len(layouts))
        )  # fmt: skip

    def _shape(self, index: int) -> tuple[int, ...]:
        """The shape of a flat output that is a tensor."""
        top = self.program.top
        return top.values[top.outputs[index].value].shape

    def _join(self, pieces: Sequence[Tensor], layout: Layout | None, rank: int, sizes: tuple[int, ...]) -> Tensor:
        assert layout is not None
        mesh, mine = self.plan.mesh, self.coordinates[rank]
        if all(state.kind != "S" for state in layout):
            return pieces[rank]
        numbers = torch.arange(math.prod(sizes)).view(sizes)
        flats, places = [], []
        for other, at in enumerate(self.coordinates):
            if all(a == b or state.kind == "S" for a, b, state in zip(at, mine, layout, strict=True)):
                flats.append(pieces[other].reshape(-1))
                places.append(piece_of(numbers, layout, mesh, at).reshape(-1))
        return torch.cat(flats)[torch.cat(places).argsort()].view(sizes)

    def _layout(self, key: tuple[str, str]) -> Layout:
        kind, name = key
        if kind == "parameter":
            return self.plan.parameters[name]
        if kind == "input":
            names = [(item.kind, item.name) for item in self.program.top.inputs]
            return self.plan.graphs["top"].inputs[names.index(key)]
        return (I,) * len(self.plan.mesh.axes)

    def pieces_of(self, key: tuple[str, str]) -> list[Tensor]:
        """A leaf per rank of its piece of a whole tensor."""
        if key not in self.pieces:
            whole, grad = self.tensors[key].detach(), self.tensors[key].requires_grad
            mine = [piece_of(whole, self._layout(key), self.plan.mesh, at) for at in self.coordinates]
            self.pieces[key] = [own.clone().requires_grad_(grad) for own in mine]
        return self.pieces[key]

    def _inputs(self, graph: Graph, module: str, given: Sequence[Sequence[Any]] | None) -> list[list[Any]]:
        columns: list[list[Any]] = []
        waiting = iter(zip(*given, strict=True)) if given is not None else None
        for item in graph.inputs:
            if item.kind == "input" and waiting is not None:
                columns.append(list(next(waiting)))
            else:
                name = item.name if item.kind in ("input", "constant") else self.program.name_of(module, item.name)
                columns.append(self.pieces_of((item.kind, name)))
        return [[column[rank] for column in columns] for rank in self.ranks]

    def _call(self, name: str, module: str, given: list[tuple[Any, ...]]) -> list[Any]:
        inputs = self._inputs(self.program.blocks[name], module, given)
        return run_simulated(self.modules[name], inputs, call=self._call, watch=self.watch)


def _unwritten(module: fx.GraphModule) -> None:
    """No code is written for a graph that is run node by node: that takes longer than running it."""


def group_names(at: Sequence[int]) -> tuple[str, ...]:
    """A name for the group of a rank on each axis: the ranks that differ from it on that axis only."""
    return tuple(f"axis {axis} of {(*at[:axis], *at[axis + 1 :])}" for axis in range(len(at)))


def piece_of(whole: Tensor, layout: Layout, mesh: Mesh, at: Sequence[int]) -> Tensor:
    """What the rank at coordinates ``at`` has of a tensor in ``layout``: one axis cuts after the other."""
    for state, degree, rank in zip(successive_layout(layout, mesh.degrees), mesh.degrees, at, strict=True):
        if state.kind == "S":
            whole = piece(whole, state.dim, ((state.parts, degree, rank),))
    return whole


def cotangents(top: Graph, outs: Sequence[Any], seed: int) -> dict[int, Tensor]:
    """A fixed random cotangent for each output that carries a gradient."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for index, (out, ref) in enumerate(zip(outs, top.outputs, strict=True)):
        if isinstance(ref, Ref) and top.values[ref.value].grad:
            noise = torch.randn(out.shape, generator=generator, dtype=torch.float64)
            found[index] = noise.to(out.dtype) / max(1, out.numel()) ** 0.5
    return found


def largest_error(found: Sequence[Numbers], wanted: Numbers) -> tuple[float, str]:
    """The largest error over all ranks, and where: max|a-b| / max(max|b|, 1e-3 x the largest of its kind)."""
    worst, where = 0.0, "nothing"
    gradient, output = _largest(wanted.gradients.values()), _largest(wanted.outputs)
    for rank, mine in enumerate(found):
        pairs = [
            (f"output {i}", a, b, output) for i, (a, b) in enumerate(zip(mine.outputs, wanted.outputs, strict=True))
        ]
        pairs += [(f"update {name}", mine.updates[name], b, 0.0) for name, b in wanted.updates.items()]
        assert mine.gradients.keys() == wanted.gradients.keys()
        pairs += [(f"gradient of {k[1]}", mine.gradients[k], b, gradient) for k, b in wanted.gradients.items()]
        for name, a, b, scale in pairs:
            error = _error(a, b, scale)
            if error > worst:
                worst, where = error, f"{name} on rank {rank}"
    return worst, where


def _largest(tensors: Iterable[Any]) -> float:
    numbers = [x.detach() for x in tensors if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    return max((float(torch.where(x.isfinite(), x.abs(), 0.0).max()) for x in numbers), default=0.0)


def _error(a: Any, b: Any, scale: float) -> float:
    if not isinstance(b, Tensor):
        return 0.0 if a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.detach(), b.detach()
    if not (b.is_floating_point() or b.is_complex()) or not b.numel():
        return 0.0 if torch.equal(a, b) else float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    difference = float(torch.where(same, 0.0, (a - b).abs()).max())
    if not math.isfinite(difference):
        return float("inf")
    size = float(torch.where(b.isfinite(), b.abs(), 0.0).max())
    return difference / max(size, 1e-3 * scale) if difference else 0.0


def whole_plan(program: Program) -> Plan:
    """The plan on one rank, where nothing is split: the program as it was captured."""
    from fxpar.assemble import assemble, whole_choice
    from fxpar.cluster import Cluster
    from fxpar.cost.price import price
    from fxpar.space import space

    priced = price(space(program, Mesh.of({"tp": 1})), Cluster.load("toy"))
    return assemble(priced, whole_choice(priced.space))
