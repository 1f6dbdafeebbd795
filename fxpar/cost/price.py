"""Space + cluster -> the priced program: seconds per choice of every slot, seconds per conversion tree of every flow.

In: a :class:`~fxpar.space.Space`, a :class:`~fxpar.cluster.Cluster`. Out: :class:`Priced`, whose ``problem`` the solver
takes. Its variables are the space's slots, in order. Times are seconds of one training step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxpar.cluster import Cluster
from fxpar.cost.arcs import arcs_between
from fxpar.cost.compute import node_seconds, optimizer_seconds
from fxpar.cost.trees import Arcs, Tree, cheapest_tree, tree_table
from fxpar.graph import Value
from fxpar.layout import I, Layout, R, State, padding, without_gradient
from fxpar.rules.joint import MAX_KEPT, Ways, layouts_at_rest, layouts_of
from fxpar.rules.strategy import Strategy
from fxpar.rules.work import flops
from fxpar.solver.problem import CostTable, Factor, Variable
from fxpar.space import Flow, Slot, Space

#: Tables with more entries than this are left to the solver, which knows other ways.
MAX_TABLE_ENTRIES = 10_000


#: These read only the entries of their first operand that they return.
LOOK_UPS = frozenset(
    ("aten.embedding.default", "aten.index_select.default", "aten.index.Tensor", "aten.gather.default")
)


@dataclass(frozen=True)
class Priced:
    """A space with its prices: a variable per slot, a factor per flow, in the space's order."""

    space: Space
    cluster: Cluster
    problem: CostTable
    trees: tuple[FlowPrice, ...]

    def seconds(self, choice: tuple[int, ...]) -> float:
        """Seconds of a step under ``choice``, one entry per slot."""
        total = sum(float(self.problem.variables[slot].costs[choice[slot]]) for slot in range(len(self.space.slots)))
        return total + sum(tree.weight * tree.seconds(choice) for tree in self.trees)


@dataclass(frozen=True)
class FlowPrice:
    """What a flow costs: ``arcs`` are the single conversions between ``layouts``.

    ``roots`` maps the producer's choices to layouts, ``reads`` each reading slot's choices to one layout per reading;
    ``table`` has the seconds of one passage for all choices, unless it would be large.
    """

    weight: int
    layouts: tuple[Layout, ...]
    arcs: Arcs
    producer: int
    roots: np.ndarray
    reads: dict[int, np.ndarray]
    table: np.ndarray | None = None

    def tree(self, choice: Sequence[int]) -> Tree[Layout]:
        """The conversions of one passage under ``choice``."""
        targets = {int(number) for slot, reads in self.reads.items() for number in reads[choice[slot]]}
        return cheapest_tree(self.arcs, int(self.roots[choice[self.producer]]), targets, self.layouts)

    def seconds(self, choice: Sequence[int]) -> float:
        """Seconds of one passage under ``choice``."""
        return self.tree(choice).seconds


def price(space: Space, cluster: Cluster) -> Priced:
    """Price every choice and every conversion of ``space`` on ``cluster``."""
    variables = tuple(Variable(slot.name, _slot_costs(space, slot, cluster)) for slot in space.slots)
    trees = tuple(map(_FlowPrices(space, cluster).of, space.flows))
    return Priced(space, cluster, CostTable(variables, tuple(_factor(tree) for tree in trees)), trees)


def _slot_costs(space: Space, slot: Slot, cluster: Cluster) -> np.ndarray:
    graph, ways = space.program.graphs()[slot.graph], slot.ways
    if slot.kind == "parameter":
        meta = graph.values[graph.inputs[slot.index].value]
        if not meta.grad:
            return np.zeros(len(ways))
        return slot.weight * optimizer_seconds(meta.bytes / pieces(space, ways, "outputs", 0, meta), cluster)
    if slot.kind != "node":
        return np.zeros(len(ways))
    node = graph.nodes[slot.index]
    operands = [graph.values[value] for value in node.operands]
    outputs = [graph.values[out] for out in node.outputs if out is not None]
    dtype = (outputs or operands or [Value((), "float32")])[0].dtype
    moved = written = sum(
        (meta.bytes / pieces(space, ways, "outputs", at, meta) for at, meta in enumerate(outputs)), np.zeros(len(ways))
    )
    for at, meta in enumerate(operands):
        read = meta.bytes / pieces(space, ways, "inputs", at, meta)
        moved = moved + (np.minimum(read, written) if at == 0 and node.op in LOOK_UPS else read)
    divided = shares(space, ways, operands, outputs)
    grad = any(meta.grad for meta in outputs)
    return slot.weight * node_seconds(flops(graph, node) / divided, moved, dtype, cluster, op=node.op, grad=grad)


def pieces(space: Space, ways: Ways, side: str, position: int, meta: Value) -> np.ndarray:
    """For each way, how many pieces of an input or output make up the whole, each as large as the largest."""
    return _product(ways, [
        [_parts(meta, getattr(strategy, side)[position], degree) for strategy in options]
        for degree, options in zip(space.mesh.degrees, ways.axes, strict=True)
    ])  # fmt: skip


def _parts(meta: Value, state: State, degree: int) -> float:
    return degree / padding(meta.shape, state, degree) if state.kind == "S" else 1.0


def shares(space: Space, ways: Ways, operands: Sequence[Value], outputs: Sequence[Value]) -> np.ndarray:
    """For each way, how many parts make up the whole work, each as large as the largest."""

    def share(strategy: Strategy, degree: int) -> float:
        if not strategy.divided:
            return 1.0
        cuts = [*zip(operands, strategy.inputs, strict=True), *zip(outputs, strategy.outputs, strict=True)]
        return min((_parts(meta, state, degree) for meta, state in cuts if state.kind == "S"), default=float(degree))

    return _product(ways, [
        [share(strategy, degree) for strategy in options]
        for degree, options in zip(space.mesh.degrees, ways.axes, strict=True)
    ])  # fmt: skip


def _product(ways: Ways, parts: list[list[float]]) -> np.ndarray:
    """For each way, the product of the ``parts`` that its strategies make."""
    found = np.ones(len(ways))
    for axis, numbers in enumerate(parts):
        found *= np.array(numbers)[ways.picks[:, axis]]
    return found


class _FlowPrices:
    """Prices flows, of which many are alike: equal tensors between operations with equal ways (:func:`_sided`)."""

    def __init__(self, space: Space, cluster: Cluster) -> None:
        self.space, self.cluster, self.links = space, cluster, cluster.axis_links(space.mesh)
        self.arcs: dict[tuple[object, ...], tuple[tuple[Layout, ...], Arcs]] = {}
        self.known: dict[tuple[object, ...], tuple[tuple[Layout, ...], Arcs, list[np.ndarray]]] = {}
        self.tables: dict[tuple[object, ...], np.ndarray | None] = {}

    def of(self, flow: Flow) -> FlowPrice:
        slots, grad = self.space.slots, flow.meta.grad
        at_rest = slots[flow.producer.slot].kind == "parameter"
        sides = [_sided(slots[flow.producer.slot].ways, "outputs", flow.producer.position, grad)]
        sides += [_sided(slots[use.slot].ways, "inputs", use.position, grad) for use in flow.consumers]
        key = (flow.meta, at_rest, *sides)  # sides are told apart by identity
        if key not in self.known:
            layouts, arcs = self._between(sides, flow.meta, at_rest)
            number = {layout: index for index, layout in enumerate(layouts)}
            self.known[key] = layouts, arcs, [side.numbers(number) for side in sides]
        layouts, arcs, (roots, *columns) = self.known[key]
        by_slot: dict[int, list[np.ndarray]] = {}
        for use, column in zip(flow.consumers, columns, strict=True):
            by_slot.setdefault(use.slot, []).append(column)
        reads = {slot: np.array(own).T for slot, own in by_slot.items()}
        order = list(by_slot)
        same = (*key, *(order.index(use.slot) for use in flow.consumers))
        if same not in self.tables:
            size = math.prod(map(len, (roots, *reads.values())))
            small = size <= MAX_TABLE_ENTRIES
            self.tables[same] = tree_table(arcs, roots, list(reads.values())) if small else None
        return FlowPrice(
            weight=flow.weight,
            layouts=layouts,
            arcs=arcs,
            producer=flow.producer.slot,
            roots=roots,
            reads=reads,
            table=self.tables[same],
        )

    def _between(self, sides: Sequence[_Sided], meta: Value, at_rest: bool) -> tuple[tuple[Layout, ...], Arcs]:
        """The layouts that sides name or that lie between them, and the conversions between these."""
        named = frozenset(layout for side in sides for layout in side.layouts)
        between = tuple(
            frozenset([I, *([R] if meta.grad else []), *(state for side in sides for state in side.alone[axis])])
            for axis in range(len(self.space.mesh.axes))
        )
        key = (meta, named, between, at_rest)
        if key not in self.arcs:
            degrees = self.space.mesh.degrees
            ordered = tuple(tuple(sorted(states)) for states in between)
            through = (layouts_at_rest if at_rest else layouts_of)(ordered, meta.shape, degrees)
            layouts = tuple(sorted({*named, *through}))
            self.arcs[key] = layouts, arcs_between(layouts, meta, self.space.mesh, self.links, self.cluster)
        return self.arcs[key]


@dataclass(frozen=True, eq=False)
class _Sided:
    """The layouts of one input or output of a slot: ``layouts[index[choice]]``; ``alone`` has the states per axis."""

    layouts: list[Layout]
    index: np.ndarray
    alone: list[list[State]]

    def numbers(self, number: dict[Layout, int]) -> np.ndarray:
        """For each choice, the number of its layout."""
        return np.array([number[layout] for layout in self.layouts])[self.index]


@lru_cache(maxsize=MAX_KEPT)
def _sided(ways: Ways, side: str, position: int, grad: bool) -> _Sided:
    """One side of ways, which are told apart by identity."""

    def states(axes: tuple[tuple[Strategy, ...], ...]) -> list[list[State]]:
        return [[_state(getattr(item, side)[position], grad) for item in options] for options in axes]

    table, codes = [], np.zeros(len(ways), dtype=np.int64)
    for axis, options in enumerate(states(ways.axes)):
        known = {state: at for at, state in enumerate(dict.fromkeys(options))}
        own = np.array([known[state] for state in options])
        codes = codes * len(known) + own[ways.picks[:, axis]]
        table.append(list(known))
    different, index = np.unique(codes, return_inverse=True)
    columns = []
    for known_states in reversed(table):
        different, digits = np.divmod(different, len(known_states))
        columns.append([known_states[digit] for digit in digits.tolist()])
    return _Sided(list(zip(*reversed(columns), strict=True)), index, states(ways.alone))


def _state(state: State, grad: bool) -> State:
    return state if grad else without_gradient(state)


def _factor(tree: FlowPrice) -> Factor:
    """One flow as a factor: its tree, and its table unless that is so large that the solver should not build it."""
    states = (tree.roots, *tree.reads.values())
    table = None if tree.table is None else tree.weight * tree.table
    return Factor((tree.producer, *tree.reads), table, tree.arcs, states, tree.weight)
