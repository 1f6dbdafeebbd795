"""The graph of one unit (the root or a block) while it is being recorded.

In: fake tensors and the operations that made them. Out: a raw, functional :class:`~fxpar.graph.Graph`.
What in-place operations mean for it is :mod:`fxpar.capture.functional`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpar.capture.recorder import storage_key
from fxpar.capture.where import Where
from fxpar.errors import CaptureError
from fxpar.graph import Graph, Input, Node, Ref, Torch, Value

_TORCH_KINDS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
    torch.device: "device",
}


class Memory:
    """One storage: which value it holds now, and where it came from.

    ``kind`` is that of :class:`~fxpar.graph.Input`, or ``"value"`` for results of operations. ``shared`` says why
    writing to it cannot be followed (empty if it can); ``keep_apart`` is the class of the block that is to blame.
    """

    __slots__ = ("keep_apart", "kind", "name", "shared", "value", "version")

    def __init__(self, kind: str, name: str, value: int) -> None:
        self.kind, self.name, self.value = kind, name, value
        self.version = 0
        self.shared = ""
        self.keep_apart: int | None = None


class Alias:
    """How one tensor lies in its :class:`Memory`: through which views, and the value number it had at ``version``."""

    __slots__ = ("memory", "path", "value", "version")

    def __init__(self, memory: Memory, path: tuple[Any, ...], value: int) -> None:
        self.memory, self.path, self.value = memory, path, value
        self.version = memory.version


@dataclass
class Frame:
    """Values, nodes and inputs recorded so far.

    ``prefix`` is the path of the unit's module with a trailing dot. ``reals`` are the tensors behind the inputs.
    ``fakes[v]`` shows what value ``v`` was when it was made, and ``numbers`` leads back from it to ``v``.
    """

    name: str
    prefix: str
    grad_enabled: bool
    autocast: tuple[tuple[str, str, bool], ...]
    values: list[Value] = field(default_factory=list)
    fakes: list[torch.Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    reals: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[int, Alias] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    refresh: Callable[[Frame, torch.Tensor, Alias], int] | None = None

    def new_value(self, fake: torch.Tensor, grad: bool | None = None) -> int:
        """A value number for ``fake``, which is kept alive."""
        requires_grad = fake.requires_grad if grad is None else grad
        self.values.append(Value(tuple(fake.shape), dtype_name(fake.dtype), requires_grad))
        self.fakes.append(fake)
        self.numbers[id(fake)] = len(self.values) - 1
        return len(self.values) - 1

    def add_input(self, kind: str, name: str, fake: torch.Tensor) -> int:
        """Make ``fake`` an input of the graph."""
        value = self.new_value(fake)
        self.inputs.append(Input(kind, name, value))
        memory = self.memories.get(storage_key(fake))
        if memory is not None:
            memory.shared = memory.shared or f"{memory.name} and {name} share memory"
        else:
            memory = self.memories[storage_key(fake)] = Memory(kind, name, value)
        self.aliases[id(fake)] = Alias(memory, (), value)
        return value

    def add_fresh(self, fake: torch.Tensor, value: int | None = None) -> int:
        """Make ``fake``, which owns new memory, known as ``value`` (or as a new one)."""
        value = self.new_value(fake) if value is None else value
        key = storage_key(fake)
        memory = self.memories.get(key)
        if memory is None:
            memory = self.memories[key] = Memory("value", "", value)
        else:
            memory.shared = memory.shared or "two results of operations share memory"
        self.aliases[id(fake)] = Alias(memory, (), value)
        return value

    def alias(self, fake: torch.Tensor) -> Alias | None:
        return self.aliases.get(id(fake))

    def read(self, fake: torch.Tensor, where: Callable[[], Where]) -> int:
        """The value number that ``fake`` holds now; raises :class:`CaptureError` if it came from nowhere."""
        alias = self.aliases.get(id(fake))
        if alias is None:
            raise CaptureError(
                f"{where()}: a {dtype_name(fake.dtype)}{list(fake.shape)} tensor is used that no recorded operation "
                "made (it may come from a C++ extension, or from a call that torch hides); keep the module whole"
            )
        if alias.version == alias.memory.version:
            return alias.value
        assert self.refresh is not None
        return self.refresh(self, fake, alias)

    def graph(self, outputs: Iterable[Any], order: dict[str, int]) -> Graph:
        """The recorded graph: inputs sorted by ``order``, gradients consistent."""
        inputs = sorted_inputs(self.inputs, order)
        values = _consistent_gradients(self.values, inputs, self.nodes)
        return Graph(self.name, values, tuple(inputs), tuple(self.nodes), tuple(outputs), tuple(self.updates.items()))


_KINDS = ("parameter", "buffer", "constant", "input")


def sorted_inputs(inputs: list[Input], order: dict[str, int]) -> list[Input]:
    """Parameters and buffers in ``order`` (by name), then constants, then inputs."""
    return sorted(inputs, key=lambda item: (_KINDS.index(item.kind), order.get(item.name, 0)))


def _consistent_gradients(values: list[Value], inputs: list[Input], nodes: list[Node]) -> tuple[Value, ...]:
    """Autograd's flags, less those of results that, after functionalisation, read nothing that requires grad."""
    result = list(values)
    for node in nodes:
        if not node.op.startswith("block:") and not any(result[value].grad for value in node.operands):
            for out in node.outputs:
                if out is not None and result[out].grad:
                    result[out] = Value(result[out].shape, result[out].dtype)
    return tuple(result)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    name = _DTYPES.get(dtype)
    if name is None:
        name = _DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return name


_DTYPES: dict[torch.dtype, str] = {}


def constant(arg: Any) -> Any:
    """``arg`` as a graph holds it: torch objects become :class:`Torch`; raises :class:`TypeError` if it cannot be."""
    kind = type(arg)
    if arg is None or kind in (int, float, bool, str, complex, Ref):
        return arg
    name = _TORCH_KINDS.get(kind)
    if name == "device":
        return Torch("device", "cpu")
    if name is not None:
        return Torch(name, str(arg).removeprefix("torch."))
    if isinstance(arg, (tuple, list)):
        return tuple(constant(item) for item in arg)
    if isinstance(arg, (bool, int, float, str)):
        return arg.__index__() if isinstance(arg, int) else arg
    raise TypeError(type(arg).__qualname__)
