"""Which collectives one step of a planned program runs: kind, bytes, phase and module, forward and backward.

In: a program and the plans of its graphs. Out: :class:`~fxpar.plans.Collective` records, equal ones counted, with the
bytes of the ranks that have the largest pieces. They are what :func:`fxpar.runtime.records.record_collectives` finds
there when the plan runs and every output that carries a gradient gets one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from fxpar.cost.comm import wire_bytes
from fxpar.cost.lifetimes import needed_again
from fxpar.cost.tapes import Tapes
from fxpar.errors import PlanError
from fxpar.graph import Graph, Node, Program, Ref, Value
from fxpar.layout import COLLECTIVES, I, Layout, Mesh, conversion, padding
from fxpar.plans import Arc, Collective, GraphPlan

Live = frozenset[int]


def collectives(program: Program, mesh: Mesh, plans: Mapping[str, GraphPlan]) -> tuple[Collective, ...]:
    """Every collective of one step, in order of module.

    Raises :class:`PlanError` if something is made again in a program that does not say what autograd keeps.
    """
    found: Counter[tuple[str, str, str, str, int]] = Counter()
    flows, tapes = _Gradients(program), Tapes(program, mesh, plans)
    for name, needed, modules in flows.passages():
        graph = program.graphs()[name]
        for phase, kind, axis, size in _steps(flows, mesh, graph, plans[name], needed):
            for module, count in modules.items():
                found[module, phase, kind, axis, size] += count
        keeping = {module: count for module, count in modules.items() if module not in program.recompute}
        if plans[name].again and keeping:
            for kind, axis, size in _made_again(tapes, mesh, graph, name, needed):
                for module, count in keeping.items():
                    found[module, "backward", kind, axis, size] += count
    return tuple(Collective(*item, count) for item, count in sorted(found.items()))


def _made_again(tapes: Tapes, mesh: Mesh, graph: Graph, name: str, needed: Live) -> Iterator[tuple[str, str, int]]:
    """Kind, axis and wire bytes of each collective that backward runs to make again what was not kept."""
    if not tapes.program.footprints:
        raise PlanError("the plan makes tensors again in backward: its program must be captured, not written by hand")
    tape = tapes.tape(name, needed)
    for tensor in sorted(needed_again(tape)):
        value, path = tape.again[tensor].of
        for src, dst in pairwise(path):
            for at, (a, b) in enumerate(zip(src, dst, strict=True)):
                if a != b and mesh.degrees[at] > 1 and (kind := conversion(a, b).forward) in COLLECTIVES:
                    yield kind, mesh.axes[at][0], _wire_bytes(mesh, graph.values[value], src, dst, at, kind)


def _steps(
    flows: _Gradients, mesh: Mesh, graph: Graph, plan: GraphPlan, needed: Live
) -> Iterator[tuple[str, str, str, int]]:
    """Phase, kind, axis and wire bytes of each collective in one passage of ``graph``.

    The outputs ``needed`` get gradients.
    """
    returning = _read_with_gradient(flows, graph, plan, needed)
    for value, arcs in plan.trees.items():
        for src, dst in arcs:
            (at,) = [number for number, (a, b) in enumerate(zip(src, dst, strict=True)) if a != b]
            axis, degree = mesh.axes[at]
            if degree == 1:
                continue
            step, meta = conversion(src[at], dst[at]), graph.values[value]
            if step.forward in COLLECTIVES:
                yield "forward", step.forward, axis, _wire_bytes(mesh, meta, src, dst, at, step.forward)
            if step.backward in COLLECTIVES and _leads_to(dst, arcs, returning.get(value, set())):
                yield "backward", step.backward, axis, _wire_bytes(mesh, meta, src, dst, at, step.backward)


def _wire_bytes(mesh: Mesh, meta: Value, src: Layout, dst: Layout, at: int, kind: str) -> int:
    """What each rank sends in a step of a conversion, either way, on axis number ``at``."""
    degree = mesh.degrees[at]
    here = meta.local_bytes((*src[:at], I, *src[at + 1 :]), mesh.degrees)  # what the ranks of this axis have together
    padded = here * padding(meta.shape, src[at], degree) * padding(meta.shape, dst[at], degree)
    return round(wire_bytes(kind, padded, degree))


def _read_with_gradient(flows: _Gradients, graph: Graph, plan: GraphPlan, needed: Live) -> dict[int, set[Layout]]:
    """By value, the layouts in which something reads it that sends a gradient back."""
    found: dict[int, set[Layout]] = {}
    live = flows.live("top" if graph is flows.program.top else graph.name, needed)
    for node, chosen in zip(graph.nodes, plan.nodes, strict=True):
        for value, layout, sends in zip(node.operands, chosen.inputs, flows.sends(graph, node, live), strict=True):
            if sends:
                found.setdefault(value, set()).add(layout)
    for index, (out, final) in enumerate(zip(graph.outputs, plan.outputs, strict=True)):
        if isinstance(out, Ref) and final is not None and index in needed:
            found.setdefault(out.value, set()).add(final)
    return found


def _leads_to(state: Layout, arcs: tuple[Arc, ...], wanted: set[Layout]) -> bool:
    return state in wanted or any(_leads_to(dst, arcs, wanted) for src, dst in arcs if src == state)


class _Gradients:
    """Where gradients flow, given which outputs of a graph get one: calls of one block may differ in that."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[tuple[str, Live], Live] = {}

    def passages(self) -> Iterator[tuple[str, Live, Counter[str]]]:
        """Each graph and which of its outputs get gradients, with the modules that it runs in like that."""
        top = self.program.top
        wanted = frozenset(self._outputs(top))
        yield "top", wanted, Counter([""])
        live = self.live("top", wanted)
        inside: dict[tuple[str, Live], Counter[str]] = {}
        for node in top.nodes:
            if node.op.startswith("block:"):
                block = node.op.removeprefix("block:")
                inside.setdefault((block, self._needed(node, live)), Counter())[node.module] += 1
        for (block, needed), modules in inside.items():
            yield block, needed, modules

    def live(self, name: str, needed: Live) -> Live:
        """The values of graph ``name`` that get a gradient when the outputs number ``needed`` get one."""
        if (name, needed) not in self.known:
            graph = self.program.graphs()[name]
            live = {out.value for index, out in enumerate(graph.outputs) if index in needed}
            for node in reversed(graph.nodes):
                reads = zip(node.operands, self.sends(graph, node, frozenset(live)), strict=True)
                live.update(value for value, sends in reads if sends)
            self.known[name, needed] = frozenset(live)
        return self.known[name, needed]

    def sends(self, graph: Graph, node: Node, live: Live) -> tuple[bool, ...]:
        """For each operand, whether ``node`` sends a gradient back to it."""
        if node.op == "aten.detach.default" or not any(out in live for out in node.outputs):
            return (False,) * len(node.operands)
        if node.op.startswith("block:"):
            block = self.program.blocks[node.op.removeprefix("block:")]
            inside = self.live(block.name, self._needed(node, live))
            return tuple(item.value in inside for item in block.inputs if item.kind == "input")
        return tuple(graph.values[value].grad for value in node.operands)

    def _needed(self, node: Node, live: Live) -> Live:
        block = self.program.blocks[node.op.removeprefix("block:")]
        return frozenset(index for index in self._outputs(block) if node.outputs[index] in live)

    def _outputs(self, graph: Graph) -> Iterator[int]:
        for index, out in enumerate(graph.outputs):
            if isinstance(out, Ref) and graph.values[out.value].grad:
                yield index
