"""Rules of look-ups and of losses on class indices: embedding, one-hot, cross-entropy, negative log-likelihood."""

from __future__ import annotations

from fxpar.graph import Graph, Node, Ref
from fxpar.rules.localise import Local, Split
from fxpar.rules.reduce import mean_split
from fxpar.rules.registry import Line, register, rule, shapes

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reduction="none", "mean" and "sum"

register("aten.one_hot.default", "... -> ... c!")
register("aten.bucketize.Tensor", "..., b! -> ...")


def _embedding_split(split: Split, local: Local) -> Local:
    """Over a split vocabulary, a rank looks up the rows it has and gives zeros for the others."""
    if split.factor != "v":
        return local
    weight, indices = local.args[:2]
    padding = split.node.arg(2, "padding_idx", -1)
    return Local(
        "local.embedding_split",
        (weight, indices, split.rule.size("v"), split.cuts, padding),
        (),
    )


@rule("aten.embedding.default", local=_embedding_split)
def embedding(graph: Graph, node: Node) -> Line:
    """Rows of a table; gradients scaled by how often a row is used need all indices in one place."""
    if node.arg(3, "scale_grad_by_freq", False) or node.arg(4, "sparse", False):
        return None
    return "v+~ d~, ... -> ... d; P 0"


def _loss_split(split: Split, local: Local) -> Local:
    """A mean over split positions needs the number of all counted ones: the targets come whole, and are cut here."""
    if split.factor not in split.rule.summed:
        return local
    if split.node.arg(3, "reduction", MEAN) != MEAN:
        return local
    if _by_probability(split.graph, split.node):
        return mean_split(split, local)
    place = split.rule.places(split.factor)[0]
    dim = place.dim - (place.dim > 1)  # the logits have the class dim at 1, the targets do not
    op, pieces, *args = local.args if local.target == "local.loss_mean_split" else (local.target, (), *local.args)
    return Local("local.loss_mean_split", (op, (*pieces, (dim, split.cuts)), *args), local.kwargs)


def _by_probability(graph: Graph, node: Node) -> bool:
    dtype = graph.values[node.operands[1]].dtype
    return node.op == "aten.cross_entropy_loss.default" and dtype.startswith(("float", "bfloat"))


@rule("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default", local=_loss_split)
def class_loss(graph: Graph, node: Node) -> Line:
    """Classes stay whole; positions may be split, also for a mean, which counts the targets that are not ignored.

    Cross-entropy over class indices is written as :func:`class_terms` and :func:`class_loss_of_terms` at capture.
    """
    (logits, _, *weight), _ = shapes(graph, node)
    mean_weighted = isinstance(node.arg(2, "weight"), Ref) and graph.values[node.operands[2]].grad
    if mean_weighted:
        return None
    how = node.arg(3, "reduction", MEAN)
    dims = [f"p{dim}" for dim in range(len(logits) - 1)]
    marked = [dim + "+" * (how != NONE) for dim in dims]
    first = " ".join([*marked[:1], "c!", *marked[1:]]) if len(logits) > 1 else "c!"
    if _by_probability(graph, node):
        second = first
    elif how == MEAN:
        second = " ".join(f"t{dim}!" for dim in range(len(dims)))
    else:
        second = " ".join(marked)
    out = " ".join(dims) if how == NONE else ""
    return f"{', '.join([first, second] + ['c!'] * len(weight))} -> {out}"


def _terms_split(split: Split, local: Local) -> Local:
    """Over split classes, a rank sums over those it has, and knows the logits of the targets among them."""
    if split.factor != "c":
        return local
    return local.with_arg(6, "classes", split.rule.size("c")).with_arg(7, "cuts", split.cuts)


@rule("local.class_terms", local=_terms_split)
def class_terms(graph: Graph, node: Node) -> Line:
    """Sums over classes for every position; a split of the classes leaves summands."""
    (logits, _, _, *weight), outputs = shapes(graph, node)
    dims = [f"p{dim}" for dim in range(len(logits) - 1)]
    position = " ".join(dims)
    first = " ".join([*dims[:1], "c+~", *dims[1:]])
    operands = [first, position, position, *["c+"] * len(weight)]
    return f"{', '.join(operands)} -> {', '.join([position] * len(outputs))}"


def _terms_loss_split(split: Split, local: Local) -> Local:
    """A mean over split positions needs all targets to count them: they come whole, and are cut here."""
    if split.node.arg(5, "reduction") != MEAN:
        return local
    cut = (split.rule.places(split.factor)[0].dim, split.cuts)
    pieces = dict(local.kwargs).get("pieces", ())
    return local.with_arg(10, "pieces", (*pieces, cut))


@rule("local.class_loss", local=_terms_loss_split)
def class_loss_of_terms(graph: Graph, node: Node) -> Line:
    """The loss at every position, their sum, or their mean."""
    (total, *_), _ = shapes(graph, node)
    how, terms = node.arg(5, "reduction"), 2 + isinstance(node.arg(2, "smoothed"), Ref)
    dims = [f"p{dim}" for dim in range(len(total))]
    position = " ".join(dim + "+" * (how != NONE) for dim in dims)
    target = " ".join(f"t{dim}!" for dim in range(len(dims))) if how == MEAN else position
    weight = ["c!"] * isinstance(node.arg(4, "weight"), Ref)
    out = " ".join(dims) if how == NONE else ""
    return f"{', '.join([*[position] * terms, target, *weight])} -> {out}"


def _pointwise_loss(*ops: str, reduction: int = 2) -> None:
    """Register losses that compare element by element, with ``reduction`` as that argument."""

    def local(split: Split, call: Local) -> Local:
        return mean_split(split, call) if split.node.arg(reduction, "reduction", MEAN) == MEAN else call

    @rule(*ops, local=local)
    def compare(graph: Graph, node: Node) -> Line:
        operands, _ = shapes(graph, node)
        how = node.arg(reduction, "reduction", MEAN)
        if any(shape != operands[0] for shape in operands):
            return None
        term = " ".join(f"p{dim}" + "+" * (how != NONE) for dim in range(len(operands[0])))
        out = " ".join(f"p{dim}" for dim in range(len(operands[0]))) if how == NONE else ""
        return f"{', '.join([term] * len(operands))} -> {out}"


_pointwise_loss(
    "aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default"
)
_pointwise_loss("aten.soft_margin_loss.default", "aten.kl_div.default")
_pointwise_loss("aten.binary_cross_entropy.default", reduction=3)
_pointwise_loss("aten.binary_cross_entropy_with_logits.default", reduction=4)
