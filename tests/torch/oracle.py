"""The oracle: run an operation whole, and split as a strategy says on simulated ranks, and compare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from fxpar.graph import Graph, Input, Node, Ref, Torch, Value, map_refs, refs
from fxpar.layout import State
from fxpar.rules import Strategy, hint_links, rule_for, strategies
from fxpar.rules.localise import localise
from fxpar.runtime.local_ops import piece
from fxpar.runtime.targets import resolve, to_torch


@dataclass(frozen=True)
class T:
    """A tensor operand of a sample: random numbers, or integers below ``high``, or given ``data``."""

    shape: tuple[int, ...]
    grad: bool = True
    high: int = 0
    dtype: torch.dtype = torch.float64
    positive: bool = False
    data: Any = None

    def make(self, generator: torch.Generator) -> torch.Tensor:
        if self.data is not None:
            x = torch.as_tensor(self.data)
            return x.double() if x.is_floating_point() else x
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.high:
            return torch.randint(self.high, self.shape, generator=generator, dtype=torch.int64)
        x = torch.randn(self.shape, generator=generator, dtype=self.dtype)
        x = x.mul(8).round() if self.dtype == torch.float32 else x  # so that partial sums are exact
        return x.abs() * 0.8 + 0.1 if self.positive else x


def ints(*shape: int, high: int) -> T:
    return T(shape, grad=False, high=high)


def mask(*shape: int) -> T:
    return T(shape, grad=False, dtype=torch.bool)


@dataclass(frozen=True)
class Sample:
    """One use of an operation; ``T`` in the arguments are its tensor operands."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        shown = [map_operands(arg, lambda t: "x".join(map(str, t.shape)) or "()") for arg in self.args]
        return f"{self.op.removeprefix('aten.')}{shown}{dict(self.kwargs) or ''}".replace("'", "")


def sample(op: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(f"aten.{op}" if "." in op else f"aten.{op}.default", args, tuple(kwargs.items()))


def map_operands(arg: Any, change: Any) -> Any:
    if isinstance(arg, T):
        return change(arg)
    if isinstance(arg, (tuple, list)):
        return tuple(map_operands(item, change) for item in arg)
    return arg


class Case:
    """A sample as a graph of one node, with the values and gradients of the whole operation."""

    def __init__(self, what: Sample) -> None:
        generator = torch.Generator().manual_seed(0)
        self.generator = generator
        self.tensors: list[torch.Tensor] = []
        specs: list[T] = []

        def add(spec: T) -> Ref:
            self.tensors.append(spec.make(generator))
            specs.append(spec)
            return Ref(len(specs) - 1)

        args, kwargs = map_operands((what.args, what.kwargs), add)
        inputs = [self._leaf(x, spec.grad) for x, spec in zip(self.tensors, specs, strict=True)]
        torch.manual_seed(7)
        outs = call(what.op, args, kwargs, inputs)
        values = [value_of(x) for x in inputs] + [value_of(x) for x in outs if isinstance(x, torch.Tensor)]
        numbers = iter(range(len(inputs), len(values)))
        node = Node(what.op, args, kwargs, tuple(next(numbers) if isinstance(x, torch.Tensor) else None for x in outs))
        if not any(value.grad for value in values[len(inputs) :]) and what.op != "aten.detach.default":
            values = [Value(value.shape, value.dtype) for value in values]
            inputs = [x.detach() for x in inputs]
        self.node = node
        self.graph = Graph(
            "sample",
            tuple(values),
            tuple(Input("input", f"x{index}", index) for index in range(len(inputs))),
            (node,),
            tuple(Ref(out) for out in node.outputs if out is not None),
        ).verify()
        self.outs = [x for x in outs if isinstance(x, torch.Tensor)]
        self.cotangents = [self._like(x) if x.requires_grad else None for x in self.outs]
        self.gradients = gradients(self.outs, inputs, self.cotangents)
        self.outs = [x.detach() for x in self.outs]

    def _leaf(self, x: torch.Tensor, grad: bool) -> torch.Tensor:
        return x.detach().clone().requires_grad_(grad and (x.is_floating_point() or x.is_complex()))

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point() or x.is_complex():
            noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
            return noise.mul(8).round() if x.dtype == torch.float32 else noise
        return torch.randint(-3, 3, x.shape, generator=self.generator).to(x.dtype)

    def strategies(self, degree: int) -> tuple[Strategy, ...]:
        """All strategies, with every factor also cut in 2, 3 and 4 parts where that is even."""
        hints = {link.factor: {2, 3, 4} for link in hint_links(self.graph, self.node)}
        return strategies(self.graph, self.node, degree, hints)

    def split_factors(self) -> set[str]:
        rule = rule_for(self.graph, self.node)
        return set(rule.factors) if rule else set()

    def scatter(self, x: torch.Tensor, state: State, degree: int) -> list[torch.Tensor]:
        """The ranks' local values of a whole value (or of a whole cotangent, if given the cotangent's state)."""
        if state.kind == "S":
            return [piece(x, state.dim, ((state.parts, degree, rank),)).clone() for rank in range(degree)]
        if state.kind == "P":
            summands = [self._like(x) for _ in range(degree - 1)]
            return [*summands, x - sum(summands)] if summands else [x]
        return [x.clone() for _ in range(degree)]

    def run(self, strategy: Strategy, degree: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Run the strategy on simulated ranks: outputs, and gradients of operands, by rank."""
        operands = [
            self.scatter(self.tensors[value], state, degree)
            for value, state in zip(self.node.operands, strategy.inputs, strict=True)
        ]
        cotangents = [  # a replicated value has a partial cotangent, a partial value a whole one
            [None] * degree
            if whole is None
            else self.scatter(whole, {"R": State("P"), "P": State("I")}.get(state.kind, state), degree)
            for whole, state in zip(self.cotangents, strategy.outputs, strict=True)
        ]
        outs, grads = [], []
        for rank in range(degree):
            inputs = [
                self._leaf(pieces[rank], self.graph.values[value].grad)
                for pieces, value in zip(operands, self.node.operands, strict=True)
            ]
            torch.manual_seed(7)
            local = localise(self.graph, self.node, (strategy,), (degree,), (rank,))
            assert len(list(refs((local.args, local.kwargs)))) == len(inputs)
            results = [x for x in call(local.target, local.args, local.kwargs, inputs) if isinstance(x, torch.Tensor)]
            grads.append(gradients(results, inputs, [column[rank] for column in cotangents]))
            outs.append([x.detach() for x in results])
        return outs, grads

    def check(self, strategy: Strategy, degree: int) -> None:
        """Run the strategy on simulated ranks; raise AssertionError if any value or gradient differs."""
        outs, grads = self.run(strategy, degree)
        for index, (whole, state) in enumerate(zip(self.outs, strategy.outputs, strict=True)):
            compare(f"output {index}", [column[index] for column in outs], whole, state)
        for index, (value, state) in enumerate(zip(self.node.operands, strategy.inputs, strict=True)):
            if self.graph.values[value].grad and self.graph.values[self.node.outputs[0]].grad:
                back = {"R": State("P"), "P": State("I")}.get(state.kind, state)
                compare(f"gradient of operand {index}", [g[index] for g in grads], self.gradients[index], back)


def compare(what: str, pieces: list[torch.Tensor], whole: torch.Tensor, state: State) -> None:
    """Whether local pieces in ``state`` make up ``whole``, to 1e-9."""
    if state.kind in "PM":
        join = torch.add if state.kind == "P" else torch.maximum
        _close(what, reduce(join, pieces), whole)
        return
    for rank, found in enumerate(pieces):
        right = whole if state.kind in "RI" else piece(whole, state.dim, ((state.parts, len(pieces), rank),))
        _close(f"{what} on rank {rank}", found, right)


def _close(what: str, found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape, f"{what}: shape {tuple(found.shape)}, should be {tuple(right.shape)}"
    assert found.dtype == right.dtype, f"{what}: {found.dtype}, should be {right.dtype}"
    assert torch.allclose(found, right, rtol=1e-9, atol=1e-9, equal_nan=True), (
        f"{what} is off by {(found - right).abs().max() if found.numel() else 0}"
    )


def value_of(x: torch.Tensor) -> Value:
    return Value(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad)


def call(op: str, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> list[Any]:
    """Call ``op`` with the operands in the places of the refs, in order."""
    queue = iter(operands)
    filled = map_refs(args, lambda _: next(queue))
    named = {name: to_torch(map_refs(arg, lambda _: next(queue)), "cpu") for name, arg in kwargs}
    out = resolve(op)(*to_torch(filled, "cpu"), **named)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def gradients(outs: list[Any], inputs: list[torch.Tensor], cotangents: list[Any]) -> list[torch.Tensor]:
    """The gradients of the inputs that have one; zeros where nothing flows."""
    pairs = [(out, g) for out, g in zip(outs, cotangents, strict=True) if g is not None]
    wanted = [x for x in inputs if x.requires_grad]
    found = (
        torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        if pairs and wanted
        else [None] * len(wanted)
    )
    queue = iter(found)
    full = [next(queue) if x.requires_grad else None for x in inputs]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, full, strict=True)]


DTYPE = {name: Torch("dtype", name) for name in ("float32", "float64", "int64", "bool", "complex128")}
