"""Graphs and their plans as tapes: the steps that one rank runs, with the memory that each takes and keeps.

In: a captured program with footprints, a plan. Out: :class:`~fxpar.cost.lifetimes.Tape` s. Conversions stand where
:mod:`fxpar.rewrite` puts them; a call of a block is one step, made from the walk of the block's own tape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from fxpar.cost.footprint import local_footprint, moved, whole_loss
from fxpar.cost.lifetimes import NEW, Step, Tape, Walk, walk
from fxpar.graph import Footprint, Graph, Node, Program, Ref
from fxpar.layout import Layout, conversion, local_share, without_gradient
from fxpar.plans import GraphPlan, NodePlan, Plan

#: Operations that hand a gradient on as it is, to operands of the result's shape and dtype.
_HANDS_ON = ("aten.add.Tensor", "aten.sub.Tensor")


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

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.blocks: dict[tuple[str, frozenset[int], bool], _Block] = {}
        #: What the blocks' own parts keep over all calls, and what the calls keep in all, both by place.
        self.kept: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def tape(self, name: str, needed: frozenset[int]) -> Tape:
        """Graph ``name`` when its outputs number ``needed`` get a gradient."""
        graph = self.program.graphs()[name]
        return _Writer(self, graph, self.plan.graphs[name], self.program.footprints[name]).write(needed)

    def block(self, name: str, needed: frozenset[int], again: bool) -> _Block:
        """Block ``name``; ``again``: it is run again in backward, and its forward keeps only what it is given."""
        key = (name, needed, again)
        if key not in self.blocks:
            graph, tape = self.program.blocks[name], self.tape(name, needed)
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
        self.degrees = tapes.plan.mesh.degrees
        self.steps: list[Step] = []
        self.sizes: list[int] = []
        self.held: dict[tuple[int, Layout], int] = {}
        self.sources = {
            (value, self._plain(value, dst)): src for value, arcs in plan.trees.items() for src, dst in arcs
        }
        self.readers = Counter(value for node in graph.nodes for value in node.operands)
        self.readers.update(out.value for out in graph.outputs if isinstance(out, Ref))
        self.readers.update(value for _, value in graph.updates)
        self.products: set[int] = set()
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
        )

    def _plain(self, value: int, layout: Layout) -> Layout:
        return layout if self.graph.values[value].grad else tuple(without_gradient(state) for state in layout)

    def _hold(self, value: int, layout: Layout) -> int:
        number = self.held[value, self._plain(value, layout)] = self._new(value, layout)
        return number

    def _new(self, value: int, layout: Layout) -> int:
        self.sizes.append(self.graph.values[value].bytes // local_share(layout, self.degrees))
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
        return self.held[value, layout]

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
        if node.op == "local.class_terms" and self._is_whole_loss(node, chosen):
            print_ = whole_loss(print_, self.sizes[reads[0]])
        fused = self._fused(node, outs)
        self.steps.append(
            Step(
                where,
                reads,
                writes,
                print_.views if fused is None else (fused,),
                tuple(self._gradient(node, position, print_) for position in range(len(reads))),
                print_.operands,
                print_.outputs,
                print_.own_bytes,
                print_.forward_bytes,
                print_.backward_bytes,
            )
        )

    def _gradient(self, node: Node, position: int, print_: Footprint) -> int | None:
        """How the gradient of an operand comes about."""
        meta = self.graph.values[node.operands[position]]
        outs = [self.graph.values[out] for out in node.outputs if out is not None]
        if not meta.grad or not any(out.grad for out in outs) or node.op == "aten.detach.default":
            return None
        for number, out in enumerate(outs):
            alike = (out.shape, out.dtype) == (meta.shape, meta.dtype)
            whole = print_.views[number] == position and out.bytes == meta.bytes
            if whole or (alike and node.op in _HANDS_ON and (position == 0 or node.op != "aten.sub.Tensor")):
                return number
        return NEW

    def _fused(self, node: Node, outs: list[int]) -> int | None:
        """The operand whose memory a sum with a bias is in, because both are one call (:mod:`fxpar.fuse`)."""
        if node.op in ("aten.linear.default", "aten.mm.default") and len(node.operands) == 2:
            self.products.add(outs[0])
        if node.op != "aten.add.Tensor" or len(node.operands) != 2 or node.kwargs:
            return None
        total = self.graph.values[outs[0]]
        for position, product in enumerate(node.operands):
            bias = self.graph.values[node.operands[1 - position]]
            if product in self.products and self.readers[product] == 1 and bias.shape == total.shape[-1:]:
                return position if bias.dtype == total.dtype == self.graph.values[product].dtype else None
        return None

    def _is_whole_loss(self, terms: Node, chosen: NodePlan) -> bool:
        """Whether :mod:`fxpar.fuse` will put a cross-entropy together again: no class is cut, and one target serves."""
        if any(state.kind == "P" for state in chosen.outputs[0]):
            return False
        readers = [(node, plan) for node, plan in zip(self.graph.nodes, self.plan.nodes, strict=True)
                   if set(terms.outputs) & set(node.operands)]  # fmt: skip
        if len(readers) != 1 or readers[0][0].op != "local.class_loss":
            return False
        (loss, plan), target = readers[0], terms.operands[2]
        place = len([arg for arg in loss.args[:3] if isinstance(arg, Ref)])
        if loss.operands[place] != target:
            return False
        wanted, layout = (self._plain(target, at) for at in (plan.inputs[place], chosen.inputs[2]))
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
