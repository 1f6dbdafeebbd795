"""Graphs and their plans as tapes: the steps that one rank runs, with the memory that each takes and keeps.

In: a captured program with footprints, a plan. Out: :class:`~fxpar.cost.lifetimes.Tape` s. Conversions stand where
:mod:`fxpar.rewrite` puts them; a call of a block is one step, made from the walk of the block's own tape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxpar.cost.footprint import local_footprint, moved, whole_loss
from fxpar.cost.lifetimes import NEW, Remaking, Step, Tape, Walk, walk
from fxpar.cost.strides import KNOWN, Strides, contiguous, view_strides
from fxpar.graph import Footprint, Graph, Node, Program, Ref
from fxpar.layout import Layout, Mesh, conversion, local_sizes, without_gradient
from fxpar.plans import GraphPlan, NodePlan
from fxpar.remade import Path, remade

#: Operations that hand a gradient on as it is, to operands of the result's shape and dtype.
_HANDS_ON = ("aten.add.Tensor", "aten.sub.Tensor")
_PRODUCTS = ("aten.linear.default", "aten.mm.default")
_DETACH = "aten.detach.default"


def place(program: Program, graph: Graph, module: str) -> str:
    """Where in the model, with the instances of a block as one: ``"[Block].mlp"``."""
    first = ".".join(module.split(".")[: 2 if graph is program.top else 1])
    return first if graph is program.top else f"[{graph.name}]" + (f".{first}" if first else "")


@dataclass(frozen=True, slots=True)
class _Block:
    """The walk of a block, with its tensors by their position in a call."""

    walk: Walk
    kept_reads: tuple[int, ...]
    kept_writes: tuple[int, ...]
    gradients: tuple[int | None, ...]


class Tapes:
    """Writes the tapes of a program's graphs. A block is walked once for each way in which gradients reach it."""

    def __init__(self, program: Program, mesh: Mesh, plans: Mapping[str, GraphPlan]) -> None:
        self.program, self.degrees, self.plans = program, mesh.degrees, plans
        self.blocks: dict[tuple[str, frozenset[int], bool], _Block] = {}
        #: What the blocks' own parts keep over all calls, and what the calls keep in all, both by place.
        self.kept: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def tape(self, name: str, needed: frozenset[int], again: bool = False) -> Tape:
        """Graph ``name`` when its outputs number ``needed`` get a gradient; ``again``: it is run again in backward,
        and then nothing of it is made again on top of that."""
        graph, plan = self.program.graphs()[name], self.plans[name]
        plan = replace(plan, again={}) if again else plan
        return _Writer(self, graph, plan, self.program.footprints[name]).write(needed)

    def block(self, name: str, needed: frozenset[int], again: bool) -> _Block:
        """Block ``name``; ``again``: it is run again in backward, and its forward keeps only what it is given."""
        key = (name, needed, again)
        if key not in self.blocks:
            graph, tape = self.program.blocks[name], self.tape(name, needed, again)
            entries = [index for index, item in enumerate(graph.inputs) if item.kind == "input"]
            grads = tuple(NEW if graph.values[graph.inputs[index].value].grad else None for index in entries)
            found = walk(tape)
            if again:
                once = walk(tape, keep=False)
                backward = max(found.forward_bytes, found.kept_bytes + found.backward_bytes)
                found = replace(found, forward_bytes=once.forward_bytes, backward_bytes=backward, kept_bytes=0,
                                kept=Counter())  # fmt: skip
                self.blocks[key] = _Block(found, tuple(range(len(entries))), (), grads)
            else:
                reads = [place for place, index in enumerate(entries) if tape.inputs[index] in found.kept_inputs]
                results = tape.outputs[: sum(isinstance(out, Ref) for out in graph.outputs)]
                writes = [place for place, tensor in enumerate(results) if tensor in found.kept_outputs]
                self.blocks[key] = _Block(found, tuple(reads), tuple(writes), grads)
        return self.blocks[key]


class _Writer:
    """Writes one tape; ``held`` numbers the tensors of every value in every layout, as :mod:`fxpar.rewrite` does."""

    def __init__(self, tapes: Tapes, graph: Graph, plan: GraphPlan, footprints: tuple[Footprint, ...]) -> None:
        self.tapes, self.graph, self.plan, self.footprints = tapes, graph, plan, footprints
        self.degrees = tapes.degrees
        self.steps: list[Step] = []
        self.sizes: list[int] = []
        self.held: dict[tuple[int, Layout], int] = {}
        self.sources = {
            (value, self._plain(value, dst)): src for value, arcs in plan.trees.items() for src, dst in arcs
        }
        self.readers = Counter(value for node in graph.nodes for value in node.operands)
        self.readers.update(out.value for out in graph.outputs if isinstance(out, Ref))
        self.readers.update(value for _, value in graph.updates)
        self.remade = remade(graph, plan, self.degrees)
        self.again: dict[int, Remaking] = {}
        self.strides: dict[int, tuple[Sequence[int], Strides]] = {}
        #: By the tensor that an operation makes: the operation, and the tensors that it reads.
        self.made: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.called: set[str] = set()

    def write(self, needed: frozenset[int]) -> Tape:
        graph, plan = self.graph, self.plan
        inputs = [self._hold(item.value, layout) for item, layout in zip(graph.inputs, plan.inputs, strict=True)]
        for number, node in enumerate(graph.nodes):
            self._node(number, node, plan.nodes[number])
        results = {
            index: self._tensor(out.value, layout, "")
            for index, (out, layout) in enumerate(zip(graph.outputs, plan.outputs, strict=True))
            if isinstance(out, Ref) and layout is not None
        }
        updates = [
            self._tensor(value, layout, "") for (_, value), layout in zip(graph.updates, plan.updates, strict=True)
        ]
        parameters = [tensor for item, tensor in zip(graph.inputs, inputs, strict=True) if item.kind == "parameter"]
        return Tape(
            tuple(self.steps),
            self.sizes,
            tuple(inputs),
            (*results.values(), *updates),
            frozenset(parameters),
            frozenset(tensor for index, tensor in results.items() if index in needed),
            self.again,
        )

    def _plain(self, value: int, layout: Layout) -> Layout:
        return layout if self.graph.values[value].grad else tuple(without_gradient(state) for state in layout)

    def _hold(self, value: int, layout: Layout) -> int:
        number = self.held[value, self._plain(value, layout)] = self._new(value, layout)
        return number

    def _new(self, value: int, layout: Layout) -> int:
        self.sizes.append(self.graph.values[value].local_bytes(layout, self.degrees))
        return len(self.sizes) - 1

    def _tensor(self, value: int, layout: Layout, name: str) -> int:
        """``value`` in ``layout``, converted along its tree where it is not held yet."""
        layout = self._plain(value, layout)
        if (value, layout) not in self.held:
            src = self._plain(value, self.sources[value, layout])
            tensor = self._tensor(value, src, name)
            for axis in [axis for axis, (a, b) in enumerate(zip(src, layout, strict=True)) if a != b]:
                dst = (*src[:axis], layout[axis], *src[axis + 1 :])
                tensor = self._convert(value, tensor, src, dst, axis, name)
                src = dst
            self.held[value, layout] = tensor
            path = self.remade.get((value, layout), ())
            if path[-1:] == (layout,):
                self.steps[-1] = replace(self.steps[-1], views=(None,))  # a view would be copied
                self.again[tensor] = self._remaking(value, path)
                shape = local_sizes(self.graph.values[value].shape, layout, self.degrees)
                self.strides[tensor] = (shape, contiguous(shape))  # whatever is moved arrives in order
        return self.held[value, layout]

    def _remaking(self, value: int, path: Path) -> Remaking:
        meta, before, most = self.graph.values[value], 0, 0
        for src, dst in pairwise(path):
            for axis in [axis for axis, (a, b) in enumerate(zip(src, dst, strict=True)) if a != b]:
                kind = conversion(src[axis], dst[axis]).forward
                step = (*src[:axis], dst[axis], *src[axis + 1 :])
                shared, scratch, size = moved(kind, meta, src, step, axis, self.degrees)
                most = max(most, before + scratch + (0 if shared else size))
                before, src = (before if shared else size), step
        return Remaking(self.held[value, path[0]], max(0, most - self.sizes[self.held[value, path[-1]]]), (value, path))

    def _convert(self, value: int, tensor: int, src: Layout, dst: Layout, axis: int, name: str) -> int:
        meta, made = self.graph.values[value], self._new(value, dst)
        if self.degrees[axis] == 1:
            self.steps.append(Step(name, (tensor,), (made,), (0,), (0 if meta.grad else None,)))
            return made
        kinds = conversion(src[axis], dst[axis])
        shared, scratch, size = moved(kinds.forward, meta, src, dst, axis, self.degrees)
        self.sizes[made] = size
        back_shared, back_scratch, back_size = moved(kinds.backward, meta, dst, src, axis, self.degrees)
        gradient = 0 if back_shared else NEW
        self.steps.append(
            Step(
                name,
                (tensor,),
                (made,),
                (0 if shared else None,),
                (gradient if meta.grad else None,),
                forward_bytes=scratch,
                backward_bytes=back_scratch + back_size - self.sizes[tensor] if not back_shared else 0,
            )
        )
        return made

    def _node(self, number: int, node: Node, chosen: NodePlan) -> None:
        where = place(self.tapes.program, self.graph, node.module)
        reads = tuple(
            self._tensor(value, layout, where) for value, layout in zip(node.operands, chosen.inputs, strict=True)
        )
        outs = [out for out in node.outputs if out is not None]
        writes = tuple(self._hold(out, layout) for out, layout in zip(outs, chosen.outputs, strict=True))
        if node.op.startswith("block:"):
            self.steps.append(self._call(node, reads, writes))
            return
        print_ = local_footprint(self.graph, node, self.footprints[number], chosen.strategies, self.degrees)
        if node.op == "local.class_terms" and self._is_whole_loss(node, chosen, reads):
            print_ = whole_loss(print_, self.sizes[reads[0]])
        self.made.update(dict.fromkeys(writes, (node.op, reads)))
        fused = self._fused(node, reads)
        views = print_.views if fused is None else (fused,)
        if node.op in KNOWN and reads[0] in self.strides:
            views = self._views(node, chosen, reads[0], writes[0])
        self.steps.append(
            Step(
                where,
                reads,
                writes,
                views,
                tuple(self._gradient(node, position, print_) for position in range(len(reads))),
                print_.operands,
                print_.outputs,
                print_.own_bytes,
                print_.forward_bytes,
                print_.backward_bytes,
            )
        )

    def _views(self, node: Node, chosen: NodePlan, read: int, write: int) -> tuple[int | None, ...]:
        """Whether the result is in the memory of something that was moved, and so lies in other strides than before."""
        assert node.outputs[0] is not None
        sizes = local_sizes(self.graph.values[node.outputs[0]].shape, chosen.outputs[0], self.degrees)
        found = view_strides(node.op, node.args, *self.strides[read], sizes)
        if found is None:
            return (None,)
        self.strides[write] = (sizes, found)
        return (0,)

    def _gradient(self, node: Node, position: int, print_: Footprint) -> int | None:
        """How the gradient of an operand comes about."""
        meta = self.graph.values[node.operands[position]]
        outs = [self.graph.values[out] for out in node.outputs if out is not None]
        if not meta.grad or not any(out.grad for out in outs) or node.op == _DETACH:
            return None
        for number, out in enumerate(outs):
            alike = (out.shape, out.dtype) == (meta.shape, meta.dtype)
            whole = print_.views[number] == position and out.bytes == meta.bytes
            if whole or (alike and node.op in _HANDS_ON and (position == 0 or node.op != "aten.sub.Tensor")):
                return number
        return NEW

    def _fused(self, node: Node, reads: tuple[int, ...]) -> int | None:
        """The operand whose memory a sum with a bias is in, because both are one call (:mod:`fxpar.fuse`)."""
        if node.op != "aten.add.Tensor" or len(reads) != 2 or node.kwargs:
            return None
        total = self.graph.values[next(out for out in node.outputs if out is not None)]
        metas = [self.graph.values[value] for value in node.operands]
        for position, (product, bias) in enumerate((metas, metas[::-1])):
            op, factors = self.made.get(reads[position], ("", ()))
            alike = bias.shape == total.shape[-1:] and product.shape == total.shape
            if alike and bias.dtype == total.dtype == product.dtype and op in _PRODUCTS and len(factors) == 2:
                return position if self.readers[node.operands[position]] == 1 else None
        return None

    def _is_whole_loss(self, terms: Node, chosen: NodePlan, reads: tuple[int, ...]) -> bool:
        """Whether :mod:`fxpar.fuse` will put a cross-entropy together again: no class is cut, nothing is converted."""
        if any(state.kind == "P" for state in chosen.outputs[0]):
            return False
        op, (source, *_) = self.made.get(reads[1], ("", (-1,)))
        if op != "aten.amax.default" or (source != reads[0] and self.made.get(source) != (_DETACH, reads[:1])):
            return False
        found = [(node, plan) for node, plan in zip(self.graph.nodes, self.plan.nodes, strict=True)
                 if set(terms.outputs) & set(node.operands)]  # fmt: skip
        if len(found) != 1 or found[0][0].op != "local.class_loss":
            return False
        (loss, plan), target = found[0], terms.operands[2]
        sums = len(chosen.outputs)
        if plan.inputs[:sums] != chosen.outputs or loss.operands[sums] != target:
            return False
        wanted, layout = (self._plain(target, at) for at in (plan.inputs[sums], chosen.inputs[2]))
        while layout != wanted and (target, layout) in self.sources:
            layout = self._plain(target, self.sources[target, layout])
        return layout == wanted

    def _call(self, node: Node, reads: tuple[int, ...], writes: tuple[int, ...]) -> Step:
        """A call of a block as one step."""
        tapes, name = self.tapes, node.op.removeprefix("block:")
        needed = frozenset(
            index
            for index, out in enumerate(node.outputs)
            if out is not None and self.graph.values[out].grad and self.readers[out]
        )
        block = tapes.block(name, needed, node.module in tapes.program.recompute)
        found = block.walk
        tapes.kept.update(found.kept)
        tapes.calls[f"[{name}]"] += found.kept_bytes
        sent = sum(self.sizes[tensor] for tensor, how in zip(reads, block.gradients, strict=True) if how == NEW)
        left = (
            0 if node.module in self.called else found.left_bytes
        )  # gradients of a second call are added to the first
        self.called.add(node.module)
        return Step(
            f"[{name}]",
            reads,
            writes,
            (None,) * len(writes),
            block.gradients,
            block.kept_reads,
            block.kept_writes,
            found.kept_bytes,
            max(0, found.forward_bytes - sum(self.sizes[tensor] for tensor in writes)),
            max(0, found.backward_bytes - sent),
            left,
        )
