"""Put a bias, split off at capture so that it can be placed by itself, back into the matrix product before it.

In: one rank's fx graph. Out: the same graph with fewer calls. It changes no state: wherever the local sum of a product
and a vector is what the plan wants, the fused product is that sum, rounded once as in the user's own model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

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
