"""Rules of operations that make tensors from numbers, and of random ones.

Constant fills may be made locally, in local sizes. A split random operation draws on every rank from the rank's own
stream, a whole one from the common stream, so all ranks draw the same.
"""

from __future__ import annotations

from fxpar.graph import Graph, Node
from fxpar.rules.localise import Local, Split, out_sizes
from fxpar.rules.pointwise import line, register_pointwise
from fxpar.rules.registry import Line, Localiser, register, rule, shapes


def own_draws(sizes: Localiser | None = None) -> Localiser:
    """A localiser for random operations: local ``sizes`` first, then numbers of the rank's own."""

    def change(split: Split, local: Local) -> Local:
        local = sizes(split, local) if sizes else local
        return Local("local.random_split", (local.target, split.rank, *local.args), local.kwargs)

    return change


def _out_dims(graph: Graph, node: Node, mark: str = "") -> str:
    """Nothing the operands hold matters, only which dims come out."""
    operands, outputs = shapes(graph, node)
    ins = [" ".join(f"i{index}x{dim}!" for dim in range(len(shape))) for index, shape in enumerate(operands)]
    outs = [" ".join(f"d{index}x{dim}{mark}" for dim in range(len(shape))) for index, shape in enumerate(outputs)]
    return f"{', '.join(ins)} -> {', '.join(outs)}"


def filled(graph: Graph, node: Node) -> Line:
    """Every dim of the result may be split."""
    return _out_dims(graph, node)


@rule(
    *("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.eye.default", "aten.eye.m"),
    *("aten.linspace.default", "aten.scalar_tensor.default", "aten.randperm.default"),
    *("aten.tril_indices.default", "aten.triu_indices.default"),
)
def counted(graph: Graph, node: Node) -> Line:
    """Elements that depend on where they stand: made whole on every rank."""
    return _out_dims(graph, node, "!")


for _op in ("zeros", "ones", "full"):
    register(f"aten.{_op}.default", filled, out_sizes(0, "size"))
    register(f"aten.new_{_op}.default", filled, out_sizes(1, "size"))
for _op in ("rand", "randn"):
    register(f"aten.{_op}.default", filled, own_draws(out_sizes(0, "size")))
register("aten.randint.default", filled, own_draws(out_sizes(1, "size")))
register("aten.randint.low", filled, own_draws(out_sizes(2, "size")))

for _op in ("rand_like.default", "randn_like.default", "randint_like.default", "randint_like.low_dtype"):
    register_pointwise(f"aten.{_op}", local=own_draws())
for _op in ("bernoulli.default", "bernoulli.p", "alpha_dropout.default"):
    register_pointwise(f"aten.{_op}", local=own_draws())
for _op in ("uniform.default", "normal_functional.default", "exponential.default"):
    register_pointwise(f"aten.{_op}", local=own_draws())

#: Dropout scales what it keeps: linear, as long as all ranks drop the same elements of their summands.
register_pointwise("aten.dropout.default", "first", own_draws())


@rule("aten.native_dropout.default", local=own_draws())
def native_dropout(graph: Graph, node: Node) -> Line:
    """Dropout that gives its mask as well."""
    operands, outputs = shapes(graph, node)
    text = line(operands, outputs[:1])
    return f"{text}, {text.partition('->')[2]}"


@rule("aten.rrelu.default", local=lambda split, local: own_draws()(split, local) if _is_random(split.node) else local)
def rrelu(graph: Graph, node: Node) -> Line:
    """Random slopes in training, the mean slope otherwise."""
    return line(*shapes(graph, node))


def _is_random(node: Node) -> bool:
    return bool(node.arg(3, "training", False))
