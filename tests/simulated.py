"""A program under a plan with all ranks simulated in this process: outputs, and gradients of everything it reads.

In: a :class:`~fxpar.graph.Program`, a plan, the whole tensors by name. Out: :class:`Numbers` per rank, to hold against
those of the program run whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.graph import Graph, Program, Ref
from fxpar.layout import Mesh
from fxpar.plans import Plan
from fxpar.rewrite import Place, rewrite_program
from fxpar.runtime.collectives import join, split
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
        self.degree = plan.mesh.degrees[0]
        places = [Place(plan.mesh, (rank,), ("none",), torch.device("cpu")) for rank in range(self.degree)]
        per_rank = [rewrite_program(program, plan, place, callables or {}) for place in places]
        self.modules = {name: [modules[name] for modules in per_rank] for name in program.graphs()}
        for name, modules in self.modules.items():
            if change is not None:
                change(name, modules)
                for module in modules:
                    module.graph.lint()

    def run(self, tensors: Tensors, seed: int = 0, watch: Watcher | None = None) -> list[Numbers]:
        """Every rank's numbers, from cotangents drawn with ``seed``; raises AssertionError if ranks differ in kind."""
        self.pieces: dict[tuple[str, str], list[Tensor]] = {}
        self.tensors, self.watch = tensors, watch
        top = self.program.top
        outs = run_simulated(self.modules["top"], self._inputs(top, "", None), call=self._call, watch=watch)
        count = len(top.outputs)
        grads = cotangents(top, outs[0][:count], seed)
        roots = [out[index] for out in outs for index in grads if out[index].requires_grad]
        torch.autograd.backward(roots, [grads[index] for out in outs for index in grads if out[index].requires_grad])
        return [self._numbers(rank, out, count) for rank, out in enumerate(outs)]

    def _state(self, key: tuple[str, str]) -> str:
        kind, name = key
        return str(self.plan.parameters[name][0]) if kind == "parameter" else "I"

    def _rank_pieces(self, key: tuple[str, str]) -> list[Tensor]:
        """A leaf per rank of its piece of a whole tensor."""
        if key not in self.pieces:
            whole, state = self.tensors[key].detach(), self._state(key)
            mine = [split(whole, state, self.degree)[rank] if state[0] == "S" else whole for rank in range(self.degree)]
            grad = self.tensors[key].requires_grad
            self.pieces[key] = [piece.clone().requires_grad_(grad) for piece in mine]
        return self.pieces[key]

    def _inputs(self, graph: Graph, module: str, given: Sequence[Sequence[Any]] | None) -> list[list[Any]]:
        columns: list[list[Any]] = []
        waiting = iter(zip(*given, strict=True)) if given is not None else None
        for item in graph.inputs:
            if item.kind == "input" and waiting is not None:
                columns.append(list(next(waiting)))
            else:
                name = item.name if item.kind in ("input", "constant") else self.program.name_of(module, item.name)
                columns.append(self._rank_pieces((item.kind, name)))
        return [[column[rank] for column in columns] for rank in range(self.degree)]

    def _call(self, name: str, module: str, given: list[tuple[Any, ...]]) -> list[Any]:
        inputs = self._inputs(self.program.blocks[name], module, given)
        return run_simulated(self.modules[name], inputs, call=self._call, watch=self.watch)

    def _numbers(self, rank: int, outs: tuple[Any, ...], count: int) -> Numbers:
        gradients = {}
        for key in [key for key, tensor in self.tensors.items() if tensor.requires_grad]:
            pieces, state = self._rank_pieces(key), self._state(key)
            found = [torch.zeros_like(piece) if piece.grad is None else piece.grad for piece in pieces]
            gradients[key] = join(torch.stack(found), state) if state[0] == "S" else found[rank]
        names = [name for name, _ in self.program.top.updates]
        return Numbers(outs[:count], dict(zip(names, outs[count:], strict=True)), gradients)


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
