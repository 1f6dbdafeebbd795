"""What one rank keeps of a node and needs while it runs, for a strategy per mesh axis.

In: a node's :class:`~fxpar.graph.Footprint`, which is that of the whole operation. Out: the footprint of the call that
a rank makes. Where that call is not the operation itself (:mod:`fxpar.runtime.local_ops`), what it keeps is said here;
``tests/dist/test_memory_ranks.py`` compares with what torch keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpar.graph import Footprint, Graph, Node, Value, item_bytes
from fxpar.layout import I, Layout, local_layout, local_sizes
from fxpar.rules.localise import localise
from fxpar.rules.strategy import Strategy


def local_footprint(
    graph: Graph, node: Node, whole: Footprint, strategies: Sequence[Strategy], degrees: Sequence[int]
) -> Footprint:
    """The footprint of a rank's own call: positions as in ``whole``, bytes of what this rank does.

    A memory row of the solver adds, for a node and its strategies, the local bytes of the operands at ``operands``
    (in the layouts they are read in) and of the outputs at ``outputs``, and ``own_bytes``. Memory is shared: a value in
    one layout counts once, however many nodes keep it; an output with an entry in ``views`` is the operand's memory;
    parameters, buffers and inputs in their own layouts are there anyway.
    """
    share = math.prod(degree for strategy, degree in zip(strategies, degrees, strict=True) if strategy.divided)
    local = replace(
        whole,
        own_bytes=whole.own_bytes // share,
        forward_bytes=whole.forward_bytes // share,
        backward_bytes=whole.backward_bytes // share,
    )
    if not node.op.startswith(("aten.", "local.")):
        return local
    target = localise(graph, node, strategies, degrees, (0,) * len(degrees)).target
    change = _CHANGES.get(target)
    return local if change is None else change(_Call(graph, node, local, tuple(strategies), tuple(degrees)))


@dataclass(frozen=True, slots=True)
class _Call:
    graph: Graph
    node: Node
    local: Footprint
    strategies: tuple[Strategy, ...]
    degrees: tuple[int, ...]

    def operand(self, position: int) -> tuple[Value, tuple[int, ...]]:
        """A tensor and the shape of this rank's piece of it."""
        meta = self.graph.values[self.node.operands[position]]
        layout = tuple(strategy.inputs[position] for strategy in self.strategies)
        return meta, local_sizes(meta.shape, layout, self.degrees)

    @property
    def out_bytes(self) -> int:
        meta = self.graph.values[next(out for out in self.node.outputs if out is not None)]
        layout = tuple(strategy.outputs[0] for strategy in self.strategies)
        return meta.local_bytes(layout, self.degrees)

    @property
    def grad(self) -> bool:
        return any(self.graph.values[out].grad for out in self.node.outputs if out is not None)


def _looks_up(call: _Call) -> Footprint:
    """With a piece of a table, a rank keeps where its indices are and which of them it has, not the indices."""
    count = math.prod(call.operand(1)[1])
    own = count * (item_bytes("int64") + item_bytes("bool")) if call.grad else 0
    return Footprint((), (), own, (None,), own + max(call.out_bytes, 4 * count * item_bytes("int64")), call.out_bytes)


def _rows(call: _Call) -> Footprint:
    """Causal attention of a piece of the queries is given a mask, which is kept as numbers that are added."""
    (query, rows), (_, keys) = call.operand(0), call.operand(1)
    mask = rows[-2] * keys[-2] * item_bytes(query.dtype)
    own = call.local.own_bytes + (mask if call.grad else 0)
    return replace(call.local, own_bytes=own, forward_bytes=call.local.forward_bytes + 2 * mask)


def whole_loss(terms: Footprint, logits_bytes: int) -> Footprint:
    """The footprint of sums over classes where torch's own loss runs instead (:func:`fxpar.fuse.fuse_loss`).

    It keeps log-probabilities, and makes their gradient before that of the logits.
    """
    own = logits_bytes if terms.own_bytes else 0
    return replace(terms, own_bytes=own, forward_bytes=logits_bytes, backward_bytes=own)


_CHANGES: dict[str, Callable[[_Call], Footprint]] = {
    "local.embedding_split": _looks_up,
    "local.gather_split": _looks_up,
    "local.attention_rows": _rows,
}


#: Operations of which some ways run another call (:mod:`fxpar.rules.localise`), with a footprint of its own.
CHANGED = frozenset(("aten.embedding.default", "aten.gather.default", "aten.scaled_dot_product_attention.default"))


def moved(kind: str, meta: Value, src: Layout, dst: Layout, axis: int, degrees: Sequence[int]) -> tuple[bool, int, int]:
    """Memory of one step of a conversion: whether the result is a view, scratch bytes, and bytes of the result.

    ``kind`` is an entry of :class:`fxpar.layout.Conversion`, from ``src`` to ``dst``, which differ on ``axis`` only. It
    follows :mod:`fxpar.runtime.collectives`: pieces are sent and arrive one after the other, so cuts along the first
    dim need no copy, and cuts along others are copied once.
    """
    before, after = (meta.local_bytes(layout, degrees) for layout in (src, dst))

    def flat(layout: Layout) -> bool:
        """Whether the pieces of a cut lie in memory one after the other."""
        state = local_layout(layout, degrees)[axis]
        shape = local_sizes(meta.shape, (*layout[:axis], I, *layout[axis + 1 :]), degrees)
        return state.parts == 1 and math.prod(shape[: state.dim]) == 1

    if kind == "none":
        return True, 0, before
    if kind == "slice":
        return False, 0, after
    if kind == "pad":
        return False, 0 if flat(src) else after, after
    if kind == "all_gather":
        return False, 0 if flat(src) else after, after
    if kind == "reduce_scatter":
        return False, 0 if flat(dst) else before, after
    if kind == "all_to_all":
        return False, (0 if flat(dst) else before) + (0 if flat(src) else after), after
    return False, 0, after  # all_reduce, keep
