"""How much arithmetic an operation does.

In: a node. Out: floating-point operations of its forward pass, whole. What they take in time is
:mod:`fxpar.cost.compute`.
"""

from __future__ import annotations

import math

from fxpar.graph import Graph, Node
from fxpar.rules.registry import rule_for, shapes

#: Operations that do one multiplication and one addition per combination of their factors.
CONTRACTIONS = frozenset(
    f"aten.{name}.default" for name in ("linear", "mm", "bmm", "matmul", "mv", "dot", "outer", "einsum")
)

#: Operations that move or reinterpret elements without arithmetic.
FREE = frozenset(
    f"aten.{name}.default"
    for name in ("reshape", "permute", "expand", "detach", "view_as_complex", "view_as_real", "unfold", "diagonal")
) | {"aten.slice.Tensor", "aten.select.int"}


def flops(graph: Graph, node: Node) -> float:
    """Forward floating-point operations of ``node``, not divided by any degree.

    A contraction does ``2 * product of its factor sizes``; attention ``2 b h q k (d + e)`` (causal or not, and its
    softmax left out); other operations one per element of their largest tensor; views and unknown calls none.
    """
    if node.op in FREE or not node.op.startswith(("aten.", "local.")):
        return 0.0
    operands, outputs = shapes(graph, node)
    if "scaled_dot_product" in node.op and len(operands) >= 3:
        query, key, value = operands[:3]
        return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if node.op.removeprefix("aten.").startswith(("conv", "_conv")) and len(operands) >= 2:
        return _convolution(node, operands, outputs)
    if node.op == "aten._grouped_mm.default":  # each row meets one of the matrices
        return 2.0 * math.prod(operands[0]) * outputs[0][-1]
    if node.op in CONTRACTIONS:
        rule = rule_for(graph, node)
        if rule is not None:
            return 2.0 * math.prod(size for _, size in rule.sizes)
    return float(max((math.prod(shape) for shape in operands + outputs), default=0))


def _convolution(node: Node, operands: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]) -> float:
    """Each element of the weight meets every output position of every sample (input position if transposed)."""
    transposed = "transpose" in node.op or (node.op == "aten.convolution.default" and bool(node.arg(6, "transposed")))
    source, weight = operands[:2]
    places = source if transposed else outputs[0]
    spatial = math.prod(places[2 - (len(places) < len(weight)) :])
    batch = source[0] if len(source) == len(weight) else 1
    return 2.0 * batch * spatial * math.prod(weight)
