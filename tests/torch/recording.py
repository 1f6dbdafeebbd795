"""A small recorder and evaluator of graphs on real tensors, for tests of graph rewrites."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fxpar.graph import Graph, Input, Node, Ref, Torch, Value

_CONSTANTS = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


class _Recorder(ProxyTorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.values: list[Value] = []
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        self.twins: list[torch.Tensor] = []

    def __enter__(self) -> _Recorder:
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def number(self, x: torch.Tensor) -> int:
        self.numbers[id(x)] = len(self.values)
        self.alive.append(x)
        self.values.append(Value(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad))
        return self.numbers[id(x)]

    def known(self, x: torch.Tensor) -> bool:
        """Whether ``x`` was made here. Python's factories (``ones_like``) hand out a twin of what was recorded."""
        if id(x) not in self.numbers:
            for number, made in enumerate(self.alive):
                if made.untyped_storage()._cdata == x.untyped_storage()._cdata and made.stride() == x.stride():
                    self.numbers[id(x)] = number
                    self.twins.append(x)
        return id(x) in self.numbers

    def constant(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if not self.known(x):
                self.inputs.append(Input("constant", f"constant{len(self.inputs)}", self.number(x)))
            return Ref(self.numbers[id(x)])
        if isinstance(x, (list, tuple)):
            return tuple(map(self.constant, x))
        kind = _CONSTANTS.get(type(x))
        return Torch(kind, str(x).removeprefix("torch.")) if kind else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = self.constant(args), tuple((name, self.constant(arg)) for name, arg in (kwargs or {}).items())
        out = func(*args, **(kwargs or {}))
        outs = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor)]
        numbers = tuple(self.number(o) for o in outs)
        on = torch.is_autocast_enabled("cpu")
        autocast = (("cpu", str(torch.get_autocast_dtype("cpu")).removeprefix("torch."), True),) if on else ()
        self.nodes.append(Node(str(func), *read, numbers, "", "", torch.is_grad_enabled(), autocast))
        return out


def record(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Graph, dict[str, torch.Tensor]]:
    """What ``function`` does to tensors, and the inputs of that graph by name: ``x0``, ``x1``, ..., then constants."""
    recorder, fake = _Recorder(), FakeTensorMode(allow_non_fake_inputs=True)
    shadows = [fake.from_tensor(arg) for arg in args]
    for index, shadow in enumerate(shadows):
        recorder.inputs.append(Input("input", f"x{index}", recorder.number(shadow)))
    with fake, enable_python_dispatcher(), recorder:
        out = function(*shadows)
    outputs = tuple(recorder.constant(o) for o in tree_flatten(out)[0])
    graph = Graph("recorded", tuple(recorder.values), tuple(recorder.inputs), tuple(recorder.nodes), outputs)
    constants = {item.name: recorder.alive[item.value] for item in graph.inputs[len(args) :]}
    return graph.verify(), {f"x{index}": arg for index, arg in enumerate(args)} | constants


@contextlib.contextmanager
def _surroundings(node: Node) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(node.grad_enabled))
        for device, dtype, on in node.autocast:
            stack.enter_context(torch.autocast(device, getattr(torch, dtype), on))
        yield


def evaluate(graph: Graph, inputs: dict[str, torch.Tensor]) -> list[Any]:
    """The flat outputs of ``graph``; every value is checked against what the graph says of it."""
    env = {item.value: inputs[item.name] for item in graph.inputs}

    def real(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return env[arg.value]
        if isinstance(arg, Torch):
            return torch.device(arg.name) if arg.kind == "device" else getattr(torch, arg.name)
        return [real(item) for item in arg] if isinstance(arg, tuple) else arg

    for node in graph.nodes:
        namespace, name, overload = node.op.split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        with _surroundings(node):
            out = op(*map(real, node.args), **{name: real(arg) for name, arg in node.kwargs})
        outs = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor)]
        for number, o in zip(node.outputs, outs, strict=True):
            if number is not None:
                value = graph.values[number]
                found = Value(tuple(o.shape), str(o.dtype).removeprefix("torch."), value.grad)
                assert found == value, f"{node} gave {found}, the graph says {value}"
                assert o.requires_grad or not value.grad, f"{node}: the graph says it carries a gradient"
                env[number] = o
    return [env[o.value] if isinstance(o, Ref) else o for o in graph.outputs]


def gradients(outs: list[Any], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of a fixed weighted sum of ``outs``; None for inputs that get none."""
    total = torch.zeros((), dtype=torch.float64)
    for index, out in enumerate(outs):
        if isinstance(out, torch.Tensor) and out.requires_grad:
            real = torch.view_as_real(out) if out.is_complex() else out
            weight = torch.sin(torch.arange(real.numel(), dtype=torch.float64) + index).reshape(real.shape)
            total = total + real.double().mul(weight).sum()
    wanted = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
    remaining = iter(found)
    return [next(remaining) if x.requires_grad else None for x in inputs]
