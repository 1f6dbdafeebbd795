"""Cross-entropy as sums over classes and a loss made of them, so that its logits may be split over the classes.

In: a :class:`Call` of ``cross_entropy_loss``, or a recorded graph in which it stands as two operations. Out: the
largest logit of every position, sums over classes near it, the loss (:mod:`fxpar.runtime.class_loss` has the numbers).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fxpar.graph import Graph, Node, Ref, Torch, refs
from fxpar.normalise.call import Call, Result, Rewrite, table, words

MEAN = 1
_WIDE = {"float16": "float32", "bfloat16": "float32"}
_LOG_SOFTMAX = words("aten.log_softmax.int aten._log_softmax.default aten.special_log_softmax.default")
_NEGATIVE_LOG = words("aten.nll_loss_nd.default aten.nll_loss.default aten.nll_loss2d.default")


def cross_entropy(call: Call) -> Result:
    """Over class indices; over probabilities, and with weights that are trained, it stays one operation."""
    logits, target, weight = call.args[0], call.args[1], call.arg(2, "weight")
    trained = weight is not None and call.builder.values[weight.value].grad
    if call.dtype(target) != "int64" or trained:
        return call.keep()
    reduction, ignore = call.arg(3, "reduction", MEAN), call.arg(4, "ignore_index", -100)
    smoothing = float(call.arg(5, "label_smoothing", 0.0))
    logits = call.cast(logits, call.out.dtype)  # what autocast does before the loss
    dim = min(1, call.rank(logits) - 1)
    classes, positions = call.shape(logits)[dim], call.shape(target)
    near = call.new(
        "aten.amax.default", call.detach(logits), (dim,), False, shape=positions, of_dtype=call.dtype(logits)
    )
    wide = _WIDE.get(call.dtype(logits), call.dtype(logits))
    among = (weight,) if smoothing and weight is not None else (None,)
    total, picked, *smoothed = call.several(
        "local.class_terms",
        (logits, near, target, *among, ignore, bool(smoothing)),
        [(positions, wide)] * (3 if smoothing else 2),
    )
    terms = (total, picked, *(smoothed or (None,)))
    dtype = Torch("dtype", call.out.dtype)
    return call.new("local.class_loss", *terms, target, weight, reduction, ignore, smoothing, classes, dtype)


LOSSES: dict[str, Rewrite] = table(cross_entropy, "cross_entropy_loss")


def join_log_softmax(graph: Graph) -> Graph:
    """``nll_loss(log_softmax(x))`` as one cross-entropy, where nothing else reads the log-probabilities."""
    made = {out: node for node in graph.nodes for out in node.outputs if out is not None}
    reads = Counter(value for node in graph.nodes for value in node.operands)
    reads.update(ref.value for ref in refs(graph.outputs))
    reads.update(value for _, value in graph.updates)
    nodes = [_joined(graph, node, made, reads) for node in graph.nodes]
    return graph if nodes == list(graph.nodes) else replace(graph, nodes=tuple(nodes))


def _joined(graph: Graph, node: Node, made: dict[int, Node], reads: Counter[int]) -> Node:
    if node.op not in _NEGATIVE_LOG or not node.args or not isinstance(node.args[0], Ref):
        return node
    inner = made.get(node.args[0].value)
    if inner is None or inner.op not in _LOG_SOFTMAX or reads[node.args[0].value] != 1:
        return node
    logits, probabilities = graph.values[inner.operands[0]], graph.values[node.args[0].value]
    rank = len(logits.shape)
    alike = logits.dtype == probabilities.dtype and logits.grad == probabilities.grad
    same_modes = (inner.grad_enabled, inner.autocast) == (node.grad_enabled, node.autocast)
    if inner.arg(1, "dim") % max(rank, 1) != min(1, rank - 1) or not alike or not same_modes:
        return node
    return replace(node, op="aten.cross_entropy_loss.default", args=(inner.args[0], *node.args[1:]))
