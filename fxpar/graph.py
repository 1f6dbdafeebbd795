"""A captured model as frozen, torch-free records: values, nodes, inputs, outputs, and their canonical text.

In: plain values. Out: :class:`Graph` and :class:`Program` (one top-level graph that calls block graphs).
What an operation means, costs or may be split into is elsewhere (:mod:`fxpar.rules`, :mod:`fxpar.cost`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from fxpar.errors import CaptureError
from fxpar.layout import Layout, local_sizes

_BITS = re.compile(r"(\d+)")


@lru_cache
def item_bytes(dtype: str) -> int:
    """Bytes per element of a torch dtype by name.

    >>> item_bytes("bfloat16"), item_bytes("complex64"), item_bytes("bool"), item_bytes("float8_e4m3fn")
    (2, 8, 1, 1)
    """
    bits = _BITS.search(dtype)
    return max(1, int(bits[1]) // 8) if bits else 1


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of value number ``value`` inside a node's arguments or a graph's outputs."""

    value: int

    def __repr__(self) -> str:
        return f"%{self.value}"


@dataclass(frozen=True, slots=True)
class Torch:
    """A torch constant in an argument: ``Torch("dtype", "float32")``, ``Torch("device", "cpu")``, ..."""

    kind: str
    name: str

    def __repr__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its global ``shape``, ``dtype`` (``"float32"``), and whether it carries a gradient."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{'~' if self.grad else ''}"

    @property
    def bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    def local_bytes(self, layout: Layout, degrees: Sequence[int]) -> int:
        """The size in bytes of the largest piece that a rank has of it.

        >>> from fxpar.layout import S
        >>> Value((53, 2), "float32").local_bytes((S(0),), (4,))
        112
        """
        return math.prod(local_sizes(self.shape, layout, degrees)) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Input:
    """A value that comes from outside: ``kind`` is ``"parameter"``, ``"buffer"``, ``"constant"`` or ``"input"``.

    ``name`` is the qualified name relative to the module the graph was captured from.
    """

    kind: str
    name: str
    value: int


@dataclass(frozen=True)
class Node:
    """One operation.

    ``op`` is an aten overload (``"aten.linear.default"``), or ``"block:<name>"`` (a call of a folded block),
    ``"call:<id>"`` (an opaque Python callable) or ``"whole:<id>"`` (a module kept whole). ``args`` nests tuples,
    :class:`Ref`, :class:`Torch` and plain constants. ``outputs`` are value numbers, ``None`` where not a tensor.
    ``module`` is the qualified path of the module that ran it, ``source`` is ``file:line`` in the user's code.
    ``autocast`` lists ``(device_type, dtype, enabled)`` in force beyond the graph's own surroundings.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    module: str = ""
    source: str = ""
    grad_enabled: bool = True
    autocast: tuple[tuple[str, str, bool], ...] = ()

    @cached_property
    def operands(self) -> tuple[int, ...]:
        """The values it reads, in the order in which they stand in ``args`` and then ``kwargs``."""
        found: list[Ref] = []
        _gather(self.args, found)
        for _, arg in self.kwargs:
            _gather(arg, found)
        return tuple([ref.value for ref in found])

    def kwarg(self, name: str, default: Any = None) -> Any:
        """The keyword argument ``name``."""
        return dict(self.kwargs).get(name, default)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position``, or the keyword ``name``, or ``default``."""
        return self.args[position] if position < len(self.args) else self.kwarg(name, default)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What running a node takes in memory, beyond its operands and outputs, and what its backward keeps of them.

    ``operands`` and ``outputs`` are the positions (among :attr:`Node.operands` and among the outputs that are tensors)
    that autograd keeps, ``own_bytes`` what it keeps besides (masks, statistics, ...). ``views`` says of each output
    tensor of which operand it is a view, if of any. ``forward_bytes`` and ``backward_bytes`` are the most that is alive
    while it runs forward (what it keeps of its own included) and backward (gradients that come and go left out).
    All bytes are those of the whole operation, not divided by any degree.
    """

    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    own_bytes: int = 0
    views: tuple[int | None, ...] = ()
    forward_bytes: int = 0
    backward_bytes: int = 0

    def __repr__(self) -> str:
        kept = [f"in{index}" for index in self.operands] + [f"out{index}" for index in self.outputs]
        kept += [f"{self.own_bytes}B"] if self.own_bytes else []
        views = [f"out{out} is in{operand}" for out, operand in enumerate(self.views) if operand is not None]
        return "; ".join(filter(None, ("keeps " + " ".join(kept) if kept else "", ", ".join(views))))


def refs(arg: Any) -> Iterator[Ref]:
    """All :class:`Ref` in a nested argument, in order."""
    found: list[Ref] = []
    _gather(arg, found)
    return iter(found)


def _gather(arg: Any, found: list[Ref]) -> None:
    if isinstance(arg, Ref):
        found.append(arg)
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            _gather(item, found)


def map_refs(arg: Any, change: Any) -> Any:
    """``arg`` with ``change(ref)`` in place of every :class:`Ref`; lists and tuples become tuples."""
    if isinstance(arg, Ref):
        return change(arg)
    if isinstance(arg, (tuple, list)):
        return tuple(map_refs(item, change) for item in arg)
    return arg


@dataclass(frozen=True)
class Graph:
    """A straight-line program over values ``0 .. len(values) - 1``, each produced once, before its uses.

    ``outputs`` are :class:`Ref` or constants. ``updates`` are buffers that get a new value: ``(buffer name, value)``.
    """

    name: str
    values: tuple[Value, ...]
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    updates: tuple[tuple[str, int], ...] = ()

    def verify(self) -> Graph:
        """Raise :class:`CaptureError` unless every value is produced once and before it is used; return self."""
        known: set[int] = set()
        for item in self.inputs:
            self._produce(known, item.value, f"input {item.name}")
        for node in self.nodes:
            for value in node.operands:
                if value not in known:
                    raise CaptureError(f"graph {self.name}: {node.op} ({node.source}) reads %{value} before it exists")
            for out in node.outputs:
                if out is not None:
                    self._produce(known, out, node.op)
        for value in [ref.value for ref in refs(self.outputs)] + [value for _, value in self.updates]:
            if value not in known:
                raise CaptureError(f"graph {self.name}: output %{value} is produced by nothing")
        return self

    def _produce(self, known: set[int], value: int, what: str) -> None:
        if value in known or not 0 <= value < len(self.values):
            raise CaptureError(f"graph {self.name}: {what} produces %{value}, which is taken or out of range")
        known.add(value)

    def text(self, *, canonical: bool = False, footprints: tuple[Footprint, ...] = ()) -> str:
        """A line per input, node and output; ``canonical`` leaves out names, modules and source lines."""
        lines = [] if canonical else [f"graph {self.name}"]
        for item in self.inputs:
            name = "" if canonical else f" {item.name}"
            lines.append(f"%{item.value} = {item.kind}{name} {self.values[item.value]}")
        for index, node in enumerate(self.nodes):
            outs = ", ".join("_" if out is None else f"%{out} {self.values[out]}" for out in node.outputs)
            kwargs = "".join(f", {name}={arg!r}" for name, arg in node.kwargs)
            mode = "" if node.grad_enabled else " no_grad"
            mode += "".join(f" autocast({device},{dtype},{on})" for device, dtype, on in node.autocast)
            where = "" if canonical else f"  # {node.module} {node.source}"
            where += f"  ({footprints[index]})" if footprints and str(footprints[index]) else ""
            lines.append(f"{outs} = {node.op}({', '.join(map(repr, node.args))}{kwargs}){mode}{where}")
        lines.append(f"return {self.outputs!r}")
        for index, (name, value) in enumerate(self.updates):
            lines.append(f"update {index if canonical else name} = %{value}")
        return "\n".join(lines)

    def digest(self) -> str:
        """A hash of what is computed: equal for graphs that differ only in names, modules and source lines."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.text(canonical=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Program:
    """A model: the graph ``top``, whose ``block:<name>`` nodes call graphs in ``blocks``.

    A block call's ``args`` are the block's ``"input"`` inputs in order, its parameters and buffers are those of the
    module at ``node.module``. ``aliases`` maps every further name of a tied parameter or buffer to its first name.
    ``unused`` has the bytes of each parameter that no graph reads. ``footprints`` says what each node takes in memory,
    by graph (empty if nobody has looked), and ``recompute`` lists the modules that are called as blocks and run again
    in backward.
    """

    top: Graph
    blocks: dict[str, Graph] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    footprints: dict[str, tuple[Footprint, ...]] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()

    def verify(self) -> Program:
        """Check every graph, and that block calls fit their blocks; return self."""
        self.top.verify()
        for graph in self.blocks.values():
            graph.verify()
        for node in self.top.nodes:
            if not node.op.startswith("block:"):
                continue
            block = self.blocks.get(node.op.removeprefix("block:"))
            if block is None:
                raise CaptureError(f"{node.module} calls {node.op}, which is not among {sorted(self.blocks)}")
            wanted = [item for item in block.inputs if item.kind == "input"]
            if len(node.args) != len(wanted) or len(node.outputs) != len(block.outputs):
                raise CaptureError(f"{node.module} does not fit {node.op}: its inputs or outputs differ in number")
        for name, graph in self.graphs().items():
            if self.footprints and len(self.footprints.get(name, ())) != len(graph.nodes):
                raise CaptureError(f"graph {name}: {len(graph.nodes)} nodes, but not as many footprints")
        return self

    def graphs(self) -> dict[str, Graph]:
        """Every graph by name, ``"top"`` first."""
        return {"top": self.top, **self.blocks}

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The module path and the block of every call of a block, in order."""
        return tuple(
            (node.module, node.op.removeprefix("block:")) for node in self.top.nodes if node.op.startswith("block:")
        )

    def instances(self, block: str) -> tuple[str, ...]:
        """The module paths that are called as ``block``, in call order, repeated if called again."""
        return tuple(node.module for node in self.top.nodes if node.op == f"block:{block}")

    def name_of(self, module: str, relative: str) -> str:
        """The first qualified name of parameter or buffer ``relative`` of ``module``."""
        name = f"{module}.{relative}" if module else relative
        return self.aliases.get(name, name)

    def names_of(self, modules: Iterable[str], relative: str) -> list[str]:
        """:meth:`name_of` for several modules; where nothing is tied, much faster than one by one."""
        if self.aliases:
            return [self.name_of(module, relative) for module in modules]
        return [f"{module}.{relative}" if module else relative for module in modules]

    def text(self) -> str:
        return "\n\n".join(
            graph.text(footprints=self.footprints.get(name, ())) for name, graph in self.graphs().items()
        )

    def digest(self) -> str:
        """A hash of the whole program, of its parameter names, and of nothing else."""
        parts = [f"{name}:{graph.digest()}" for name, graph in self.graphs().items()]
        parts += [f"{item.kind} {item.name}" for graph in self.graphs().values() for item in graph.inputs]
        parts += [f"{node.op}@{node.module}" for node in self.top.nodes if node.op.startswith("block:")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
