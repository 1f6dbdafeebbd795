"""Space + cluster -> the priced program: seconds per choice of every slot, seconds per conversion tree of every flow.

In: a :class:`~fxpar.space.Space`, a :class:`~fxpar.cluster.Cluster`. Out: :class:`Priced`, whose ``problem`` the solver
takes. Its variables are the space's slots, in order. Times are seconds of one training step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import numpy as np

from fxpar.cluster import Cluster, Link
from fxpar.cost.comm import arc_seconds
from fxpar.cost.compute import node_seconds, optimizer_seconds
from fxpar.cost.trees import subset_costs
from fxpar.graph import Value
from fxpar.layout import I, R, State, without_gradient
from fxpar.rules.strategy import Strategy
from fxpar.rules.work import flops
from fxpar.solver.problem import CostTable, Factor, Variable
from fxpar.space import Flow, Slot, Space

#: Tables with more entries than this are left to the solver, which knows other ways.
MAX_TABLE_ENTRIES = 200_000


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
    """What a flow costs: ``costs[root, mask]`` for the producer's state and the set of states that are needed.

    ``roots`` maps the producer's choices to states, ``reads`` each reading slot's choices to states (one per reading),
    ``masks`` to the set of them. ``arcs`` are the seconds between ``states``.
    """

    weight: int
    states: tuple[State, ...]
    arcs: np.ndarray
    costs: np.ndarray
    producer: int
    roots: np.ndarray
    reads: dict[int, np.ndarray]
    masks: dict[int, np.ndarray]

    def seconds(self, choice: tuple[int, ...]) -> float:
        """Seconds of one passage under ``choice``."""
        mask = reduce(int.__or__, (int(masks[choice[slot]]) for slot, masks in self.masks.items()), 0)
        return float(self.costs[self.roots[choice[self.producer]], mask])


def price(space: Space, cluster: Cluster) -> Priced:
    """Price every choice and every conversion of ``space`` on ``cluster``."""
    (link,) = cluster.axis_links(space.mesh)
    variables = tuple(Variable(slot.name, _slot_costs(space, slot, cluster)) for slot in space.slots)
    cache: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
    trees = tuple(_flow_price(space, flow, cluster, link, cache) for flow in space.flows)
    return Priced(space, cluster, CostTable(variables, tuple(_factor(tree) for tree in trees)), trees)


def _slot_costs(space: Space, slot: Slot, cluster: Cluster) -> np.ndarray:
    if slot.kind == "parameter":
        graph = space.program.graphs()[slot.graph]
        meta = graph.values[graph.inputs[slot.index].value]
        return np.array([slot.weight * _update_seconds(meta, item, space, cluster) for item in slot.strategies])
    if slot.kind != "node":
        return np.zeros(len(slot.strategies))
    graph = space.program.graphs()[slot.graph]
    node = graph.nodes[slot.index]
    operands = [graph.values[value] for value in node.operands]
    outputs = [graph.values[out] for out in node.outputs if out is not None]
    work, dtype = flops(graph, node), (outputs or operands or [Value((), "float32")])[0].dtype
    grad = any(meta.grad for meta in outputs)
    seconds = []
    for item in slot.strategies:
        written = sum(_local_bytes(m, s, space) for m, s in zip(outputs, item.outputs, strict=True))
        read = [_local_bytes(m, s, space) for m, s in zip(operands, item.inputs, strict=True)]
        if node.op in LOOK_UPS:
            read[0] = min(read[0], written)
        moved = written + sum(read)
        share = work / space.mesh.degrees[0] if item.divided else work
        seconds.append(slot.weight * node_seconds(share, moved, dtype, cluster, op=node.op, grad=grad))
    return np.array(seconds)


def _update_seconds(meta: Value, strategy: Strategy, space: Space, cluster: Cluster) -> float:
    return optimizer_seconds(_local_bytes(meta, strategy.outputs[0], space), cluster) if meta.grad else 0.0


def _local_bytes(meta: Value, state: State, space: Space) -> float:
    return meta.bytes / space.mesh.degrees[0] if state.kind == "S" else float(meta.bytes)


def _flow_price(
    space: Space,
    flow: Flow,
    cluster: Cluster,
    link: Link,
    cache: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]],
) -> FlowPrice:
    produced = [
        _state(item.outputs[flow.producer.position], flow.meta) for item in space.slots[flow.producer.slot].strategies
    ]
    needed: dict[int, list[list[State]]] = {}
    for use in flow.consumers:
        read = [_state(item.inputs[use.position], flow.meta) for item in space.slots[use.slot].strategies]
        needed.setdefault(use.slot, []).append(read)
    wanted = tuple(sorted({state for reads in needed.values() for read in reads for state in read}))
    between = {I, R} if flow.meta.grad else {I}
    states = tuple(sorted({*wanted, *produced, *between}))
    most = sum(len(reads) for reads in needed.values())
    key = (flow.meta, states, wanted, most)
    number = {state: index for index, state in enumerate(states)}
    if key not in cache:
        arcs = _arcs(states, flow.meta, space.mesh.degrees[0], link, cluster)
        cache[key] = arcs, subset_costs(arcs, most, [number[state] for state in wanted])
    arcs, costs = cache[key]
    bit = {state: 1 << index for index, state in enumerate(wanted)}
    return FlowPrice(
        weight=flow.weight,
        states=states,
        arcs=arcs,
        costs=costs,
        producer=flow.producer.slot,
        roots=np.array([number[state] for state in produced]),
        reads={
            slot: np.array([[number[state] for state in read] for read in reads]).T for slot, reads in needed.items()
        },
        masks={
            slot: np.array(
                [reduce(int.__or__, (bit[state] for state in states)) for states in zip(*reads, strict=True)]
            )
            for slot, reads in needed.items()
        },
    )


def _arcs(states: tuple[State, ...], meta: Value, degree: int, link: Link, cluster: Cluster) -> np.ndarray:
    seconds = [[0.0 if a == b else arc_seconds(a, b, meta, degree, link, cluster) for b in states] for a in states]
    return np.array(seconds)


def _state(state: State, meta: Value) -> State:
    return state if meta.grad else without_gradient(state)


def _factor(tree: FlowPrice) -> Factor:
    """One flow as a factor: its tree, and its table unless that is so large that the solver should not build it."""
    slots = tuple(tree.masks)
    scope, states = (tree.producer, *slots), (tree.roots, *(tree.reads[slot] for slot in slots))
    if math.prod(len(item) for item in states) > MAX_TABLE_ENTRIES:
        return Factor(scope, None, tree.arcs, states, tree.weight)
    mask = np.zeros((), dtype=np.int64)
    for slot in slots:
        mask = mask[..., None] | tree.masks[slot]
    table = tree.weight * tree.costs[tree.roots.reshape((-1,) + (1,) * mask.ndim), mask[None]]
    return Factor(scope, table, tree.arcs, states, tree.weight)
