"""Rules of operations along dims: sums and means (which may be split), and those that need their dims whole.

A mean over a split dim is the sum of the ranks' means, each divided by the degree. A maximum over a split dim is the
largest of the ranks' maxima, if no gradient asks whose it is. Norms, variances, softmax, scans and sorts over a split
dim would need more: their dims stay whole.
"""

from __future__ import annotations

from fxpar.graph import Graph, Node
from fxpar.rules.localise import Local, Split
from fxpar.rules.registry import Line, rule, shapes


def mean_split(split: Split, local: Local) -> Local:
    """A mean over the split factor becomes a partial mean; other factors change nothing."""
    if split.factor not in split.rule.summed:
        return local
    return Local("local.mean_split", (local.target, split.degree, *local.args), local.kwargs)


def reduction(graph: Graph, node: Node, dims: object, keepdim: bool, mark: str) -> str:
    """The line of a reduction over ``dims`` (``None`` or empty: all); ``mark`` marks them."""
    ((source,), outputs) = shapes(graph, node)
    chosen = (dims,) if isinstance(dims, int) else tuple(dims) if isinstance(dims, (tuple, list)) else ()
    gone = {dim % len(source) for dim in chosen} if chosen and source else set(range(len(source)))
    operand = [f"d{dim}" + mark * (dim in gone) for dim in range(len(source))]
    out = [("1" if dim in gone else f"d{dim}") for dim in range(len(source)) if keepdim or dim not in gone]
    return f"{' '.join(operand)} -> {', '.join([' '.join(out)] * len(outputs))}"


@rule("aten.sum.dim_IntList", "aten.nansum.default")
def sum_(graph: Graph, node: Node) -> Line:
    """A sum over dims; split, each rank has a summand."""
    linear = "; P 0" * node.op.startswith("aten.sum")
    return reduction(graph, node, node.arg(1, "dim"), node.arg(2, "keepdim", False), "+") + linear


@rule("aten.mean.dim", local=mean_split)
def mean(graph: Graph, node: Node) -> Line:
    """A mean over dims."""
    return reduction(graph, node, node.arg(1, "dim"), node.arg(2, "keepdim", False), "+") + "; P 0"


@rule("aten.sum.default")
def sum_all(graph: Graph, node: Node) -> Line:
    """A sum over everything."""
    return reduction(graph, node, None, False, "+") + "; P 0"


@rule("aten.mean.default", local=mean_split)
def mean_all(graph: Graph, node: Node) -> Line:
    """A mean over everything."""
    return reduction(graph, node, None, False, "+") + "; P 0"


def _whole_dims(*ops: str, dim: int, keepdim: int) -> None:
    """Register reductions whose dims are argument ``dim``, and whose keepdim is argument ``keepdim``."""

    @rule(*ops)
    def whole(graph: Graph, node: Node) -> Line:
        return reduction(graph, node, node.arg(dim, "dim"), bool(node.arg(keepdim, "keepdim", False)), "!")


@rule("aten.amax.default")
def amax(graph: Graph, node: Node) -> Line:
    """The largest over dims: split, each rank has its largest; ties share a gradient, so with one they stay whole."""
    (out,) = node.outputs
    differentiated = out is not None and graph.values[out].grad
    return reduction(graph, node, node.arg(1, "dim"), node.arg(2, "keepdim", False), "!" if differentiated else "^~")


_whole_dims(
    *("aten.amin.default", "aten.argmax.default", "aten.argmin.default"),
    *("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.mode.default", "aten.logsumexp.default"),
    *("aten.any.dim", "aten.all.dim", "aten.any.dims", "aten.all.dims", "aten.prod.dim_int"),
    dim=1,
    keepdim=2,
)
_whole_dims("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.kthvalue.default", dim=2, keepdim=3)
_whole_dims("aten.var.dim", "aten.std.dim", dim=1, keepdim=3)
_whole_dims(
    *("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction"),
    dim=1,
    keepdim=3,
)


@rule(
    *("aten.max.default", "aten.min.default", "aten.median.default", "aten.prod.default", "aten.norm.Scalar"),
    *("aten.any.default", "aten.all.default", "aten.var.default", "aten.std.default"),
)
def whole_all(graph: Graph, node: Node) -> Line:
    """A reduction of everything that is not a sum: never split."""
    return reduction(graph, node, None, False, "!")


def _along(*ops: str, linear: bool = False, default: int | None = None) -> None:
    """Register operations that keep every dim's place and need the dim in argument 1 whole."""

    @rule(*ops)
    def along(graph: Graph, node: Node) -> Line:
        ((source,), outputs) = shapes(graph, node)
        dim = node.arg(1, "dim", default)
        names = [f"d{place}" + "!" * (place == dim % len(source)) for place in range(len(source))]
        term = " ".join(names)
        return f"{term} -> {', '.join([term] * len(outputs))}" + "; P 0" * linear


_along("aten.softmax.int", "aten.log_softmax.int", "aten._softmax.default", "aten._log_softmax.default")
_along("aten.cumsum.default", linear=True)
_along("aten.cumprod.default", "aten.logcumsumexp.default", "aten.cummax.default", "aten.cummin.default")
_along("aten.sort.default", "aten.argsort.default", default=-1)


@rule("aten.sort.stable")
def sort_stable(graph: Graph, node: Node) -> Line:
    """A sort whose dim is a keyword."""
    ((source,), _) = shapes(graph, node)
    term = " ".join(f"d{place}" + "!" * (place == node.kwarg("dim", -1) % len(source)) for place in range(len(source)))
    return f"{term} -> {term}, {term}"


@rule("aten.histc.default")
def histc(graph: Graph, node: Node) -> Line:
    """Counts between given bounds: split, each rank counts its own."""
    ((source,), _) = shapes(graph, node)
    if node.arg(2, "min", 0) == node.arg(3, "max", 0):
        return None  # the bounds are those of the data
    return f"{' '.join(f'd{place}+' for place in range(len(source)))} -> b!"


@rule("aten.topk.default", "aten.glu.default", "aten.diff.default")
def resized(graph: Graph, node: Node) -> Line:
    """Operations that change the size of one dim."""
    operands, outputs = shapes(graph, node)
    if len(operands) > 1:
        return None
    (source,) = operands
    dim = node.arg(1 if node.op == "aten.glu.default" else 2, "dim", -1) % len(source)
    before, after = ([f"d{place}" for place in places] for places in (range(dim), range(dim + 1, len(source))))
    here, there = ("(h! o)", "o") if node.op == "aten.glu.default" else ("i!", "k!")
    operand, out = (" ".join([*before, own, *after]) for own in (here, there))
    linear = "; P 0" * (node.op == "aten.diff.default")
    return f"{operand} -> {', '.join([out] * len(outputs))}{linear}"
