"""Building a graph node by node: equal work is shared, chains of reshapes and permutes collapse.

In: a recorded node with its operands already rewritten (:class:`Call`). Out: nodes and values in a :class:`Builder`.
Which operation becomes which is :mod:`fxpar.normalise.canonical`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fxpar.graph import Node, Ref, Torch, Value, refs


def words(text: str) -> list[str]:
    """Names written in one string, to keep long tables readable."""
    return text.split()


#: Operations that draw random numbers, by name without overload. Two of them are never the same work.
RANDOM = frozenset(
    words(
        "alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout feature_dropout geometric "
        "gru log_normal lstm multinomial native_dropout normal normal_functional poisson rand rand_like randint "
        "randint_like randn randn_like random randperm rnn_relu rnn_tanh rrelu rrelu_with_noise "
        "rrelu_with_noise_functional uniform _fused_dropout _sample_dirichlet _standard_gamma"
    )
)

#: Namespaces of operations that do what their names say: all others are opaque callables.
PURE = ("aten.", "local.")

_DIFFERENTIABLE = ("float", "bfloat", "complex")


def is_random(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> bool:
    """Whether running ``op`` twice may give two results: it draws random numbers, or is an opaque callable."""
    if not op.startswith(PURE):
        return True
    name = op.split(".")[1]
    if "scaled_dot_product" in name:
        return bool(args[4] if len(args) > 4 else dict(kwargs).get("dropout_p", 0.0))
    return name in RANDOM


class Builder:
    """The values and nodes made so far."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self._made_by: dict[int, Node] = {}
        self._seen: dict[str, tuple[Ref | None, ...]] = {}

    def add_value(self, value: Value) -> Ref:
        self.values.append(value)
        return Ref(len(self.values) - 1)

    def add_node(
        self, like: Node, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], outs: Sequence[Any]
    ) -> tuple[Ref | None, ...]:
        """Append a node that stands where ``like`` stood, or find the equal one that is already there."""
        key = "" if is_random(op, args, kwargs) else repr((op, args, kwargs, like.autocast, outs))
        if key and key in self._seen:
            return self._seen[key]
        made = tuple(None if out is None else self.add_value(out) for out in outs)
        numbers = tuple(None if ref is None else ref.value for ref in made)
        node = Node(op, args, kwargs, numbers, like.module, like.source, like.grad_enabled, like.autocast)
        self.nodes.append(node)
        self._made_by.update((number, node) for number in numbers if number is not None)
        if key:
            self._seen[key] = made
        return made

    def detach(self, x: Ref, reader: Node) -> Ref:
        """``x`` without its gradient, whatever the mode."""
        value = self.values[x.value]
        if not value.grad:
            return x
        neutral = replace(reader, grad_enabled=True, autocast=())
        (ref,) = self.add_node(neutral, "aten.detach.default", (x,), (), (replace(value, grad=False),))
        assert ref is not None
        return ref

    def maker(self, ref: Ref) -> Node | None:
        """The node that made ``ref``, or None for an input."""
        return self._made_by.get(ref.value)


class Call:
    """A recorded node, its arguments in terms of the new graph, and what may be put in its place."""

    def __init__(
        self,
        builder: Builder,
        node: Node,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        outs: tuple[Value | None, ...],
    ) -> None:
        self.builder = builder
        self.node = node
        self.args = args
        self.kwargs = dict(kwargs)
        self.outs = outs
        self._carries = any(out is not None and out.grad for out in outs)

    @property
    def out(self) -> Value:
        """The first output."""
        value = self.outs[0]
        assert value is not None
        return value

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def with_arg(self, position: int, name: str, value: Any) -> None:
        """Replace an argument where it stands, or add it if it is not there."""
        if position < len(self.args):
            self.args = (*self.args[:position], value, *self.args[position + 1 :])
        elif position == len(self.args) and name not in self.kwargs:
            self.args = (*self.args, value)
        else:
            self.kwargs[name] = value

    def shape(self, x: Ref) -> tuple[int, ...]:
        return self.builder.values[x.value].shape

    def dtype(self, x: Ref) -> str:
        return self.builder.values[x.value].dtype

    def rank(self, x: Ref) -> int:
        return len(self.shape(x))

    def dim(self, x: Ref, dim: int) -> int:
        """``dim`` of ``x`` counted from the front."""
        return dim % (self.rank(x) or 1)

    def dims(self, x: Ref, dims: Any) -> tuple[int, ...]:
        """Dims of ``x`` counted from the front; none at all stands for every dim."""
        if isinstance(dims, int):
            return (self.dim(x, dims),)
        return tuple(self.dim(x, dim) for dim in dims or range(self.rank(x)))

    # ---- what may be emitted -------------------------------------------------------------------------------------

    def new(self, op: str, *args: Any, shape: Sequence[int] | None = None, of_dtype: str = "", **kwargs: Any) -> Ref:
        """One output of ``op``, of the recorded output's shape and dtype unless told otherwise."""
        shape = self.out.shape if shape is None else tuple(shape)
        return self._one(op, args, tuple(kwargs.items()), shape, of_dtype or self.out.dtype)

    def _one(
        self, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], shape: tuple[int, ...], dtype: str
    ) -> Ref:
        (ref,) = self.builder.add_node(self.node, op, args, kwargs, (self._value(shape, dtype, (args, kwargs)),))
        assert ref is not None
        return ref

    def several(self, op: str, args: tuple[Any, ...], outs: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Ref, ...]:
        """Outputs of ``op`` with the given shapes and dtypes."""
        made = self.builder.add_node(self.node, op, args, (), [self._value(*out, args) for out in outs])
        return tuple(ref for ref in made if ref is not None)

    def keep(self, op: str = "") -> tuple[Ref | None, ...]:
        """The node itself, perhaps under another name."""
        op, kwargs = op or self.node.op, tuple(self.kwargs.items())
        outs = self.outs
        if op.startswith("aten."):  # an opaque callable knows better than its operands whether it carries a gradient
            read = (self.args, kwargs)
            outs = tuple(o and self._value(o.shape, o.dtype, read, o.grad) for o in outs)
        return self.builder.add_node(self.node, op, self.args, kwargs, outs)

    def _value(self, shape: tuple[int, ...], dtype: str, read: tuple[Any, ...], carries: bool = True) -> Value:
        """An output that requires grad if the recorded one does and an operand does."""
        grad = self._carries and carries and dtype.startswith(_DIFFERENTIABLE)
        return Value(shape, dtype, grad and any(self.builder.values[ref.value].grad for ref in refs(read)))

    def _source(self, x: Ref, op: str) -> tuple[Ref, Node | None]:
        """What ``op`` made ``x`` from, and that node, if no gradient is lost in between; else ``x`` itself."""
        maker, values = self.builder.maker(x), self.builder.values
        if maker is not None and maker.op == op and values[maker.args[0].value].grad == values[x.value].grad:
            return maker.args[0], maker
        return x, None

    def reshape(self, x: Ref, shape: Sequence[int]) -> Ref:
        x, _ = self._source(x, "aten.reshape.default")
        if tuple(shape) == self.shape(x):
            return x
        return self.new("aten.reshape.default", x, tuple(shape), shape=shape, of_dtype=self.dtype(x))

    def permute(self, x: Ref, dims: Sequence[int]) -> Ref:
        x, maker = self._source(x, "aten.permute.default")
        dims = tuple(maker.args[1][dim] for dim in dims) if maker else tuple(dims)
        if dims == tuple(range(len(dims))):
            return x
        shape = self.shape(x)
        return self.new("aten.permute.default", x, dims, shape=[shape[d] for d in dims], of_dtype=self.dtype(x))

    def slice(self, x: Ref, dim: int, start: int, end: int, step: int = 1) -> Ref:
        """Bounds as Python reads them: counted from the end if negative, cut to the size."""
        shape = list(self.shape(x))
        start, end, step = slice(start, end, step).indices(shape[dim])
        if (start, end, step) == (0, shape[dim], 1):
            return x
        shape[dim] = len(range(start, end, step))
        return self.new("aten.slice.Tensor", x, dim, start, max(end, start), step, shape=shape, of_dtype=self.dtype(x))

    def select(self, x: Ref, dim: int, index: int) -> Ref:
        shape = self.shape(x)
        index %= shape[dim]
        return self.new("aten.select.int", x, dim, index, shape=shape[:dim] + shape[dim + 1 :], of_dtype=self.dtype(x))

    def expand(self, x: Ref, shape: Sequence[int]) -> Ref:
        if tuple(shape) == self.shape(x):
            return x
        return self.new("aten.expand.default", x, tuple(shape), shape=shape, of_dtype=self.dtype(x))

    def cast(self, x: Ref, dtype: str) -> Ref:
        if dtype == self.dtype(x):
            return x
        to = Torch("dtype", dtype)
        return self._one("aten._to_copy.default", (x,), (("dtype", to),), self.shape(x), dtype)

    def full(self, value: Any) -> Ref:
        """A constant of the output's shape; the device is the run's unless the user named one."""
        device = self.kwargs.get("device") or Torch("device", "cpu")
        out = self.out
        kwargs = (("dtype", Torch("dtype", out.dtype)), ("device", device))
        return self._one("aten.full.default", (out.shape, value), kwargs, out.shape, out.dtype)

    def detach(self, x: Ref) -> Ref:
        return self.builder.detach(x, self.node)


#: What takes the place of a node's outputs: one value, or one per output.
Result = Ref | tuple[Ref | None, ...]
Rewrite = Callable[[Call], Result]


def table(rewrite: Rewrite, names: str) -> dict[str, Rewrite]:
    """The same rewrite for several operations, by ``name.overload``, or by ``name`` for all overloads."""
    return dict.fromkeys(words(names), rewrite)
