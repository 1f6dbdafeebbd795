"""A small model with two folded blocks, a tied head, a buffer and an unused parameter, and its program by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpar.assemble import assemble, random_choice, whole_choice
from fxpar.binding import bind, place_of
from fxpar.capture.program import Captured
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.graph import Graph, Input, Node, Program, Ref, Value
from fxpar.layout import Mesh
from fxpar.plans import Plan
from fxpar.runtime.bodies import Variant
from fxpar.runtime.module import apply, call_key
from fxpar.space import space
from fxpar.trees import flatten

ROWS, WIDTH, INNER, OUT = 4, 8, 24, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER // 3, WIDTH, bias=False)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        a, b, c = self.up(x).chunk(3, -1)
        return {"out": x + self.down(torch.relu(a) * b + c), "cache": None}


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, OUT, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, OUT, bias=False)
        self.head.weight = self.inp.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        h = torch.relu(torch.mm(self.inp(x), self.inp.weight))
        for block in self.blocks:
            h = block(h, scale=2.0)["out"]
        self.seen.copy_(h.detach())
        return self.head(h), {"h": h}


class _Writer:
    def __init__(self, name: str) -> None:
        self.name, self.values, self.inputs, self.nodes = name, [], [], []

    def input(self, kind: str, name: str, *shape: int) -> Ref:
        self.inputs.append(Input(kind, name, len(self.values)))
        return self._value(shape)

    def _value(self, shape: tuple[int, ...], grad: bool = True) -> Ref:
        self.values.append(Value(shape, "float64", grad))
        return Ref(len(self.values) - 1)

    def node(self, op: str, *args: Any, shape: tuple[int, ...], grad: bool = True, module: str = "") -> Ref:
        out = self._value(shape, grad)
        self.nodes.append(Node(op, args, (), (out.value,), module, "toy.py:1"))
        return out

    def graph(self, *outputs: Any, updates: tuple[tuple[str, int], ...] = ()) -> Graph:
        return Graph(self.name, tuple(self.values), tuple(self.inputs), tuple(self.nodes), outputs, updates).verify()


def program(rows: int = ROWS) -> Program:
    b, third = _Writer("block"), (rows, INNER // 3)
    x = b.input("input", "x", rows, WIDTH)
    up, bias = b.input("parameter", "up.weight", INNER, WIDTH), b.input("parameter", "up.bias", INNER)
    down = b.input("parameter", "down.weight", WIDTH, INNER // 3)
    y = b.node("aten.linear.default", x, up, shape=(rows, INNER), module="up")
    y = b.node("aten.add.Tensor", y, bias, shape=(rows, INNER), module="up")
    parts = [b.node("aten.slice.Tensor", y, 1, i * INNER // 3, (i + 1) * INNER // 3, 1, shape=third) for i in range(3)]
    y = b.node("aten.relu.default", parts[0], shape=third)
    y = b.node("aten.mul.Tensor", y, parts[1], shape=third)
    y = b.node("aten.add.Tensor", y, parts[2], shape=third)
    y = b.node("aten.linear.default", y, down, shape=(rows, WIDTH), module="down")
    block = b.graph(None, b.node("aten.add.Tensor", x, y, shape=(rows, WIDTH)))

    t = _Writer("top")
    x = t.input("input", "x", rows, WIDTH)
    w = t.input("parameter", "inp.weight", OUT, WIDTH)
    h = t.node("aten.linear.default", x, w, shape=(rows, OUT), module="inp")
    h = t.node("aten.mm.default", h, w, shape=(rows, WIDTH))
    h = t.node("aten.relu.default", h, shape=(rows, WIDTH))
    for i in range(2):
        out = t._value((rows, WIDTH))
        t.nodes.append(Node("block:block", (h,), (), (None, out.value), f"blocks.{i}", "toy.py:2"))
        h = out
    seen = t.node("aten.detach.default", h, shape=(rows, WIDTH), grad=False)
    head = t.node("aten.linear.default", h, w, shape=(rows, OUT), module="head")
    top = t.graph(head, h, updates=(("seen", seen.value),) if rows == ROWS else ())
    return Program(top, {"block": block}, {"head.weight": "inp.weight"}, {"unused": 12}).verify()


def plan_for(found: Program, mesh: Mesh, seed: int | None) -> Plan:
    """A random plan, or (``None``) the one that splits nothing."""
    priced = price(space(found, mesh), Cluster.load("toy"))
    return assemble(priced, whole_choice(priced.space) if seed is None else random_choice(priced.space, seed))


def variant_for(found: Program, plan: Plan, mesh: DeviceMesh) -> Variant:
    one = torch.zeros(())
    specs = {"block": (flatten(((one,), {"scale": 2.0}))[1], flatten({"out": one, "cache": None})[1])}
    captured = Captured(found, flatten(((one,), {}))[1], flatten((one, {"h": one}))[1], specs)
    return bind(captured, plan, place_of(mesh, plan.mesh), nn.Module())


def toy(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy().double()


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def parallel(model: Toy, mesh: DeviceMesh, seed: int | None, recaptured: list[int] | None = None) -> Toy:
    """``model``, parallel by a random plan; parameters' states do not depend on the number of rows."""
    axes = Mesh((((mesh.mesh_dim_names or ("tp",))[0], mesh.size()),))
    found = program()
    plan = plan_for(found, axes, seed)

    def recapture(_model: nn.Module, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Variant:
        if recaptured is not None:
            recaptured.append(len(args[0]))
        again = program(len(args[0]))
        return variant_for(again, plan_for(again, axes, seed), mesh)

    apply(
        model,
        variant_for(found, plan, mesh),
        plan=plan,
        layouts=plan.parameters,
        mesh=mesh,
        recapture=recapture,
        key=call_key(list(model.modules()), (batch(),), {}),
        seed=0,
    )
    return model


def reference(seed: int = 0) -> Toy:
    return copy.deepcopy(toy(seed))
