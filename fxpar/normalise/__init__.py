"""A recorded graph of aten operations -> its normal form: few canonical operations, explicit gradients, no dead code.

In: a functional :class:`Graph` as recorded (any aten operation, ``Value.grad`` meaning "requires grad"). Out: a
:class:`Graph` that computes the same numbers and gradients. Three steps: rewrite every node by the table
(:mod:`~fxpar.normalise.canonical`), share equal work (:mod:`~fxpar.normalise.call`), settle gradients and drop dead
code (:mod:`~fxpar.normalise.grads`). What an operation may be split into is :mod:`fxpar.rules`.
"""

from __future__ import annotations

from dataclasses import replace

from fxpar.errors import CaptureError
from fxpar.graph import Graph, Node, Ref, map_refs
from fxpar.normalise.call import Builder, Call
from fxpar.normalise.canonical import canonical
from fxpar.normalise.grads import finalise

__all__ = ["normalise"]


def normalise(graph: Graph) -> Graph:
    """The normal form of a recorded ``graph``; raises :class:`CaptureError` if a rewrite does not fit a node.

    >>> from fxpar.graph import Input, Value
    >>> x, y, z = (Value(shape, "float32") for shape in ((2, 3), (3, 2), (3, 2, 1)))
    >>> nodes = (Node("aten.t.default", (Ref(0),), (), (1,)), Node("aten.unsqueeze.default", (Ref(1), -1), (), (2,)))
    >>> print(normalise(Graph("f", (x, y, z), (Input("input", "x", 0),), nodes, (Ref(2),))).text(canonical=True))
    %0 = input float32[2,3]
    %1 float32[3,2] = aten.permute.default(%0, (1, 0))
    %2 float32[3,2,1] = aten.reshape.default(%1, (3, 2, 1))
    return (%2,)
    """
    builder = Builder()
    new: dict[int, Ref] = {item.value: builder.add_value(graph.values[item.value]) for item in graph.inputs}

    def change(ref: Ref) -> Ref:
        return new[ref.value]

    for node in graph.nodes:
        kwargs = tuple((name, map_refs(arg, change)) for name, arg in node.kwargs)
        outs = tuple(None if out is None else graph.values[out] for out in node.outputs)
        call = Call(builder, node, map_refs(node.args, change), kwargs, outs)
        result = canonical(call)
        results = result if isinstance(result, tuple) else (result,)
        for old, made in zip(node.outputs, results, strict=True):
            if old is not None and made is not None:
                _check_fit(call, graph, node, old, made)
                new[old] = made if graph.values[old].grad else call.detach(made)

    rewritten = Graph(
        graph.name,
        tuple(builder.values),
        tuple(replace(item, value=new[item.value].value) for item in graph.inputs),
        tuple(builder.nodes),
        map_refs(graph.outputs, change),
        tuple((name, new[value].value) for name, value in graph.updates),
    )
    return finalise(rewritten)


def _check_fit(call: Call, graph: Graph, node: Node, old: int, made: Ref) -> None:
    recorded, value = graph.values[old], call.builder.values[made.value]
    if (recorded.shape, recorded.dtype) != (value.shape, value.dtype):
        raise CaptureError(
            f"graph {graph.name}: {node.op} at {node.source or node.module or 'an unknown place'} gave {recorded}, "
            f"its normal form gives {value}; keep the module {node.module or '(root)'} whole to go round it"
        )
