"""A recorded graph of aten operations -> its normal form: few canonical operations, explicit gradients, no dead code.

In: a functional :class:`Graph` as recorded (any aten operation, ``Value.grad`` meaning "requires grad"). Out: a
:class:`Graph` that computes the same numbers and gradients. Three steps: rewrite every node by the table
(:mod:`~fxpar.normalise.canonical`), share equal work (:mod:`~fxpar.normalise.call`), settle gradients and drop dead
code (:mod:`~fxpar.normalise.grads`). What an operation may be split into is :mod:`fxpar.rules`.
"""

from __future__ import annotations

from dataclasses import replace

from fxpar.errors import CaptureError
from fxpar.graph import Graph, Node, Ref, Value, map_refs
from fxpar.normalise.call import Builder, Call
from fxpar.normalise.canonical import canonical
from fxpar.normalise.grads import finalise
from fxpar.normalise.losses import join_log_softmax

__all__ = ["normalise"]


def normalise(graph: Graph) -> Graph:
    """The normal form of a recorded ``graph``; raises :class:`CaptureError` if a rewrite does not fit a node.

    >>> from fxpar.graph import Input
    >>> x, y, z = (Value(shape, "float32") for shape in ((2, 3), (3, 2), (3, 2, 1)))
    >>> nodes = (Node("aten.t.default", (Ref(0),), (), (1,)), Node("aten.unsqueeze.default", (Ref(1), -1), (), (2,)))
    >>> print(normalise(Graph("f", (x, y, z), (Input("input", "x", 0),), nodes, (Ref(2),))).text(canonical=True))
    %0 = input float32[2,3]
    %1 float32[3,2] = aten.permute.default(%0, (1, 0))
    %2 float32[3,2,1] = aten.reshape.default(%1, (3, 2, 1))
    return (%2,)
    """
    graph, builder = join_log_softmax(graph), Builder()
    new: dict[int, Ref] = {item.value: builder.add_value(graph.values[item.value]) for item in graph.inputs}

    for node in graph.nodes:
        outs = tuple(None if out is None else _recorded(graph.values[out], node) for out in node.outputs)
        stops = node.op.startswith("aten.") and not any(out is not None and out.grad for out in outs)

        def change(ref: Ref, node: Node = node, stops: bool = stops) -> Ref:
            return builder.detach(new[ref.value], node) if stops else new[ref.value]

        kwargs = tuple((name, map_refs(arg, change)) for name, arg in node.kwargs)
        call = Call(builder, node, map_refs(node.args, change), kwargs, outs)
        result = canonical(call)
        results = result if isinstance(result, tuple) else (result,)
        for old, out, made in zip(node.outputs, outs, results, strict=True):
            if old is not None and out is not None and made is not None:
                _check_fit(graph.name, node, out, builder.values[made.value])
                new[old] = made if out.grad else call.detach(made)

    rewritten = Graph(
        graph.name,
        tuple(builder.values),
        tuple(replace(item, value=new[item.value].value) for item in graph.inputs),
        tuple(builder.nodes),
        map_refs(graph.outputs, lambda ref: new[ref.value]),
        tuple((name, new[value].value) for name, value in graph.updates),
    )
    return finalise(rewritten)


#: Operations that may give back their very operand, and with it the gradient, even where gradients are off.
_MAY_RETURN_OPERAND = frozenset({"contiguous", "to", "type_as", "dropout", "positive", "resolve_conj", "resolve_neg"})


def _recorded(value: Value, node: Node) -> Value:
    """An output as it really is: torch calls a view made under no_grad differentiable, yet no gradient comes back."""
    if value.grad and not node.grad_enabled and node.op.startswith("aten."):
        return replace(value, grad=node.op.split(".")[1] in _MAY_RETURN_OPERAND)
    return value


def _check_fit(name: str, node: Node, recorded: Value, value: Value) -> None:
    if (recorded.shape, recorded.dtype) != (value.shape, value.dtype):
        raise CaptureError(
            f"graph {name}: {node.op} at {node.source or node.module or 'an unknown place'} gave {recorded}, "
            f"its normal form gives {value}; keep the module {node.module or '(root)'} whole to go round it"
        )
