"""Put together again what capture took apart so that it could be split, where the plan does not split it.

In: one rank's fx graph. Out: the same graph with fewer calls: a bias goes back into the matrix product before it, the
sums of a cross-entropy back into the loss. No state changes: what is local stays so, rounded as in the user's model.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from fxpar.runtime.again import mark
from fxpar.runtime.class_loss import class_loss, class_terms
from fxpar.runtime.collectives import convert
from fxpar.runtime.local_ops import loss_mean_split

aten = torch.ops.aten

#: From a product's call to the one with a bias: linear(x, w) -> linear(x, w, b); mm(x, w) -> addmm(b, x, w).
_FUSED: dict[Any, Any] = {aten.linear.default: aten.linear.default, aten.mm.default: aten.addmm.default}


def fuse_bias(graph: fx.Graph) -> None:
    """Replace ``add(product, bias)`` by one call where the product is used for nothing else."""
    for add in list(graph.nodes):
        if add.target is not aten.add.Tensor or add.kwargs or len(add.args) != 2:
            continue
        for product, bias in (add.args, add.args[::-1]):
            if _fits(product, bias, add):
                _fuse(product, bias, add)
                break


def _fits(product: object, bias: object, add: fx.Node) -> bool:
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or "fxpar" not in bias.meta:
        return False
    if product.target not in _FUSED or len(product.args) != 2 or len(product.users) != 1:
        return False
    out, vector, total = (node.meta["fxpar"][0] for node in (product, bias, add))
    whole = vector.shape == out.shape[-1:] and out.shape == total.shape and out.dtype == vector.dtype == total.dtype
    return whole and _same_region(product, add)


def _same_region(first: fx.Node, last: fx.Node) -> bool:
    """Whether no grad mode or autocast region begins or ends between two nodes."""
    node = first.next
    while node is not last:
        if getattr(node.target, "__module__", "") == "fxpar.runtime.modes":
            return False
        node = node.next
    return True


def _fuse(product: fx.Node, bias: fx.Node, add: fx.Node) -> None:
    x, weight = product.args
    args = (bias, x, weight) if product.target is aten.mm.default else (x, weight, bias)
    with add.graph.inserting_before(add):
        fused = add.graph.create_node("call_function", _FUSED[product.target], args, name=product.name)
    fused.meta = {**add.meta, "stack_trace": product.meta.get("stack_trace", "")}
    add.replace_all_uses_with(fused)
    add.graph.erase_node(add)
    add.graph.erase_node(product)


def fuse_loss(graph: fx.Graph) -> None:
    """Replace :func:`class_loss` of :func:`class_terms` by torch's own loss where a rank has all classes."""
    for loss in list(graph.nodes):
        if loss.target is not class_loss:
            continue
        args: tuple[Any, ...] = loss.args
        sums, (target, weight, reduction, ignore, smoothing) = (
            [node for node in args[:3] if node is not None],
            args[3:8],
        )
        terms = _whole_terms(sums, target, loss)
        if terms is None:
            continue
        call: Any = aten.cross_entropy_loss.default
        given: tuple[Any, ...] = (terms.args[0], target, weight, reduction, ignore, smoothing)
        pieces = loss.kwargs.get("pieces", ())
        if pieces:
            call, given = loss_mean_split, ("aten.cross_entropy_loss.default", pieces, *given)
        with graph.inserting_before(loss):
            fused = graph.create_node("call_function", call, given, name=loss.name)
        fused.meta = loss.meta
        loss.replace_all_uses_with(fused)
        near = terms.args[1]
        for node in (loss, *sums, terms, near, *near.all_input_nodes):
            if not node.users and node.op == "call_function":
                graph.erase_node(node)


def _whole_terms(sums: list[Any], target: fx.Node, loss: fx.Node) -> Any:
    """The terms that ``sums`` are, if nothing else reads them and they cover all classes of the same logits."""
    if any(node.target is not getitem or len(node.users) != 1 for node in sums):
        return None
    terms = sums[0].args[0]
    if any(node.args[0] is not terms for node in sums) or terms.target is not class_terms:
        return None
    if terms.kwargs.get("cuts"):  # a piece of the classes
        return None
    logits, near, seen, *_ = terms.args
    if near.target is not aten.amax.default or len(near.users) != 1:
        return None
    (source,) = near.all_input_nodes
    if source is not logits and not (source.target is aten.detach.default and source.args[0] is logits):
        return None
    while seen is not target and seen.target in (convert, mark):  # the targets of some of the positions, or of all
        seen = seen.args[0]
    return terms if seen is target and _same_region(near, loss) else None
