"""Memory as rows of the priced program: what each choice, and each conversion tree, makes a device hold.

In: :class:`~fxpar.cost.price.Priced`, the optimizer's name. Out: :class:`Rows`, a problem with bytes. The rows are what
a device holds when the forward has ended (parameters, optimizer states, what autograd keeps) and when the optimizer
runs (parameters, gradients, states). They leave out what comes and goes in between: the exact walk over a finished
plan is :mod:`fxpar.cost.memory`.

A converted value that backward needs is kept, or made again from what it was made from. In a flow's graph of states
that is a second layer: its conversions cost their forward once more and lead to the same needs without bytes.

Memory is counted once, also where several values are in it: views of one another (:func:`_views`), what a conversion
leaves in place, and what several blocks, or several calls of one, are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.cost.arcs import arcs_between, numbered
from fxpar.cost.footprint import CHANGED, local_footprint
from fxpar.cost.memory import OPTIMIZERS
from fxpar.cost.price import FlowPrice, Priced, pieces, shares
from fxpar.cost.trees import Arcs
from fxpar.graph import Footprint, Value
from fxpar.layout import Layout, conversion
from fxpar.solver.problem import CostTable, Factor
from fxpar.space import Flow, Slot, Space, Use

#: What the rows bound.
KEPT, UPDATED = 0, 1


@dataclass(frozen=True, slots=True)
class Passage:
    """The conversions of a value, parents first, and the layouts that are not kept for backward but made again."""

    conversions: tuple[tuple[Layout, Layout], ...]
    again: tuple[Layout, ...] = ()


@dataclass(frozen=True)
class FlowRows:
    """A flow whose value is kept for backward: a graph of ``4 L`` states over its ``L`` layouts.

    State ``s`` is the value in a layout, for now; ``L + s`` the same, produced there and kept anyway; ``2 L + s`` kept
    for backward (and from there in another layout, where a conversion leaves it in place); ``3 L + s`` made again.
    """

    price: FlowPrice
    arcs: Arcs
    factor: Factor

    def passage(self, choice: Sequence[int], arcs: Sequence[tuple[int, int]]) -> Passage:
        """What a tree of states, as the solver gives it, means."""
        root, _ = self.factor.ends([choice[variable] for variable in self.factor.variables])
        count, layouts = len(self.price.layouts), self.price.layouts
        parents: dict[int, int] = {}
        for src, dst in sorted(arcs, key=lambda arc: arc[1] >= 3 * count):
            if src % count != dst % count and dst % count != root % count:
                parents.setdefault(dst % count, src % count)
        reached, conversions = [root % count], []
        for node in reached:
            children = sorted(dst for dst, src in parents.items() if src == node)
            conversions += [(layouts[node], layouts[child]) for child in children]
            reached += children
        again = {layouts[dst % count] for src, dst in arcs if src >= 3 * count and 2 * count <= dst < 3 * count}
        return Passage(tuple(conversions), tuple(sorted(again)))


@dataclass(frozen=True)
class Rows:
    """The priced program with bytes in variables and factors; ``flows`` has those that keep something, by number."""

    problem: CostTable
    flows: dict[int, FlowRows]


def memory_rows(priced: Priced, optimizer: str | None, *, again: bool = True) -> Rows:
    """``priced`` with rows :data:`KEPT` and :data:`UPDATED`; with ``again``, gathered parameters may be made again."""
    space = priced.space
    states = len(OPTIMIZERS[optimizer].states)
    variables = tuple(
        replace(variable, bytes=_slot_bytes(space, slot, states))
        for slot, variable in zip(space.slots, priced.problem.variables, strict=True)
    )
    flows: dict[int, FlowRows] = {}
    factors = list(priced.problem.factors)
    cache: dict[tuple[object, ...], Arcs] = {}
    viewed, free = _views(space)
    for number, (flow, tree) in enumerate(zip(space.flows, priced.trees, strict=True)):
        keeping = _keeping(space, flow, viewed)
        if any(any(columns) for columns in keeping.values()):
            flows[number] = _flow_rows(priced, flow, tree, keeping, again, flow.producer in free, cache)
            factors[number] = flows[number].factor
    return Rows(CostTable(variables, tuple(factors)), flows)


def _slot_bytes(space: Space, slot: Slot, states: int) -> np.ndarray:
    """``[rows, choices]`` of a slot alone: parameters with gradients and states; what a node keeps of its own."""
    graph, ways = space.program.graphs()[slot.graph], slot.ways
    rows = np.zeros((2, len(ways)))
    if slot.kind == "parameter":
        meta = graph.values[graph.inputs[slot.index].value]
        local = slot.weight * meta.bytes / pieces(space, ways, "outputs", 0, meta)
        rows[KEPT] = local * (1 + states * meta.grad)
        rows[UPDATED] = local * (1 + (1 + states) * meta.grad)
    elif slot.kind == "node":
        print_ = _footprint(space, slot)
        node = graph.nodes[slot.index]
        operands = [graph.values[value] for value in node.operands]
        outputs = [graph.values[out] for out in node.outputs if out is not None]
        rows[KEPT] += slot.weight * _own_bytes(space, slot, operands, outputs)
        for position in print_.outputs:
            if print_.views[position] is not None:
                continue
            meta = outputs[position]
            rows[KEPT] += slot.weight * meta.bytes / pieces(space, ways, "outputs", position, meta)
    return rows


def _own_bytes(space: Space, slot: Slot, operands: Sequence[Value], outputs: Sequence[Value]) -> np.ndarray:
    """What each way of a node keeps besides operands and results."""
    graph, ways, whole = space.program.graphs()[slot.graph], slot.ways, _footprint(space, slot)
    node = graph.nodes[slot.index]
    if node.op not in CHANGED:
        return whole.own_bytes / shares(space, ways, operands, outputs)
    picked = [tuple(axis[pick] for axis, pick in zip(ways.axes, row, strict=True)) for row in ways.picks.tolist()]
    local = [local_footprint(graph, node, whole, strategies, space.mesh.degrees) for strategies in picked]
    return np.array([float(print_.own_bytes) for print_ in local])


def working_sets(space: Space) -> list[np.ndarray]:
    """For each slot and choice, the local bytes of what a node reads and writes while it runs; zero for other slots."""
    return [_working_set(space, slot) for slot in space.slots]


def _working_set(space: Space, slot: Slot) -> np.ndarray:
    total = np.zeros(len(slot.ways))
    if slot.kind != "node":
        return total
    graph = space.program.graphs()[slot.graph]
    node, views = graph.nodes[slot.index], _footprint(space, slot).views
    outputs = [out for out in node.outputs if out is not None]
    for side, values in (("inputs", node.operands), ("outputs", outputs)):
        for position, value in enumerate(values):
            if side == "inputs" or position >= len(views) or views[position] is None:
                meta = graph.values[value]
                total += meta.bytes / pieces(space, slot.ways, side, position, meta)
    return total


def _footprint(space: Space, slot: Slot) -> Footprint:
    return space.program.footprints[slot.graph][slot.index]


def _keeping(space: Space, flow: Flow, viewed: set[Use]) -> dict[int, list[bool]]:
    """For each reading slot, whether each of its readings is kept for backward."""
    found: dict[int, list[bool]] = {}
    for use in flow.consumers:
        found.setdefault(use.slot, []).append(_keeps(space, use) or use in viewed)
    return found


def _keeps(space: Space, use: Use) -> bool:
    """Whether an operation keeps one of its operands itself."""
    slot = space.slots[use.slot]
    return slot.kind == "node" and use.position in _footprint(space, slot).operands


def _views(space: Space) -> tuple[set[Use], set[Use]]:
    """Of results that are views: the operands that are kept by keeping them, and those that are kept for nothing.

    A view of a parameter, or of what the call brings, is free where it is made; what the parameter was converted to
    before is kept. Of other memory so many views count as have room in it, and none if it is kept itself.
    """
    flows = {flow.producer: flow for flow in space.flows}
    origin = {use: flow.producer for flow in space.flows for use in flow.consumers}
    operand: dict[Use, Use] = {}
    base: dict[Use, Use] = {}
    room: dict[Use, int] = {}
    kept, free = set[Use](), set[Use]()
    for number, slot in enumerate(space.slots):
        views = _footprint(space, slot).views if slot.kind == "node" else ()
        for position, read in enumerate(views):
            made = Use(number, position)
            if read is None or made not in flows:
                continue
            operand[made] = Use(number, read)
            source = origin[operand[made]]
            root = base[made] = base.get(source, source)
            if not _is_kept(space, flows[made]):
                continue
            if space.slots[root.slot].kind in ("parameter", "fixed"):
                free.add(made)
                step = made
                while step in operand:
                    kept.add(operand[step])
                    step = origin[operand[step]]
                continue
            if root not in room:
                room[root] = 0 if _is_kept(space, flows[root]) else flows[root].meta.bytes
            room[root] -= flows[made].meta.bytes
            if room[root] < 0:
                free.add(made)
    return kept, free


def _is_kept(space: Space, flow: Flow) -> bool:
    """Whether an operation keeps a value: the one that makes it, or one that reads it."""
    slot = space.slots[flow.producer.slot]
    own = slot.kind == "node" and flow.producer.position in _footprint(space, slot).outputs
    return own or any(_keeps(space, use) for use in flow.consumers)


def _flow_rows(
    priced: Priced,
    flow: Flow,
    tree: FlowPrice,
    keeping: dict[int, list[bool]],
    again: bool,
    free: bool,
    cache: dict[tuple[object, ...], Arcs],
) -> FlowRows:
    space, count = priced.space, len(tree.layouts)
    producer, position = space.slots[flow.producer.slot], flow.producer.position
    # Parameters and what the call brings are there anyway; so is what its producer keeps.
    there, shares = free or producer.kind in ("parameter", "fixed"), 1
    if producer.kind == "node":
        there |= position in _footprint(space, producer).outputs
    elif producer.kind == "enter":
        there, shares = _shared(space, flow)
    again = again and producer.kind == "parameter"
    key = (id(tree.arcs), flow.meta, there, again, shares)
    if key not in cache:
        repeat = _forward_arcs(priced, tree.layouts, flow.meta) if again else None
        sizes = np.array([float(flow.meta.local_bytes(layout, space.mesh.degrees)) for layout in tree.layouts])
        cache[key] = _layered(tree.arcs, sizes / shares, repeat, _in_place(tree.arcs, tree.layouts))
    arcs = cache[key]
    roots = tree.roots + (count if there else 0)
    reads = tuple(tree.reads[slot] + 2 * count * np.array(columns) for slot, columns in keeping.items())
    factor = Factor((tree.producer, *keeping), None, arcs, (roots, *reads), tree.weight)
    return FlowRows(tree, arcs, factor)


def _shared(space: Space, flow: Flow) -> tuple[bool, int]:
    """Of a block's input: whether it is there anyway, and in how many parts it is counted so that it counts once.

    All calls may be given one and the same tensor, and so may calls of other blocks.
    """
    slot, program = space.slots[flow.producer.slot], space.program
    entries = [index for index, item in enumerate(program.blocks[slot.graph].inputs) if item.kind == "input"]
    position, top = entries.index(slot.index), program.top
    calls = [node for node in top.nodes if node.op.startswith("block:")]
    given = {node.args[position].value for node in calls if node.op == f"block:{slot.graph}"}
    if len(given) > 1:
        return False, 1
    (value,) = given
    blocks = {node.op for node in calls if any(arg.value == value for arg in node.args)}
    return any(item.value == value for item in top.inputs), flow.weight * len(blocks)


def _in_place(arcs: Arcs, layouts: Sequence[Layout]) -> np.ndarray:
    """Which conversions leave a value in the memory where it is."""
    states, codes = numbered(layouts)
    same = np.array([[a != b and conversion(a, b).forward == "none" for b in states] for a in states])
    before, after = codes[arcs.sources], codes[arcs.ends]
    return (same[before, after] | (before == after)).all(axis=1)


def _forward_arcs(priced: Priced, layouts: tuple[Layout, ...], meta: Value) -> Arcs:
    mesh, cluster = priced.space.mesh, priced.cluster
    return arcs_between(layouts, meta, mesh, cluster.axis_links(mesh), cluster, forward_only=True)


def _layered(arcs: Arcs, sizes: np.ndarray, repeat: Arcs | None, in_place: np.ndarray) -> Arcs:
    """The graph of :class:`FlowRows`; ``repeat`` has the same arcs with the seconds of making them again."""
    count = len(arcs)
    here, ones = np.arange(count), np.zeros(count)
    parts = [  # from, to, seconds, bytes kept
        (arcs.sources, arcs.ends, arcs.seconds, np.zeros(len(arcs.ends))),
        (here, 2 * count + here, ones, sizes),
        (count + here, here, ones, ones),
        (count + here, 2 * count + here, ones, ones),
    ]
    if in_place.any():
        sources, ends = arcs.sources[in_place], arcs.ends[in_place]
        nothing = np.zeros(len(ends))
        parts.append((2 * count + sources, 2 * count + ends, arcs.seconds[in_place], nothing))
        parts.append((2 * count + np.unique(ends), np.unique(ends), *np.zeros((2, len(np.unique(ends))))))
    if repeat is not None:
        second = arcs.seconds + repeat.seconds
        parts += [
            (3 * count + arcs.sources, 3 * count + arcs.ends, second, np.zeros(len(arcs.ends))),
            (count + here, 3 * count + here, ones, ones),
            (3 * count + here, here, ones, ones),
            (3 * count + here, 2 * count + here, ones, ones),
        ]
    sources, ends, seconds, kept = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((ends, sources))
    start = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=4 * count))])
    return Arcs(
        start.astype(np.int32),
        ends[order].astype(np.int32),
        seconds[order],
        np.stack([kept[order], np.zeros(len(order))]),
    )
