"""Priced space + a choice per slot -> Plan: strategies per node, conversion trees, collectives, what is not split.

In: :class:`~fxpar.cost.price.Priced` and one choice per slot, from the solver, from a seed, or from a hand-written
layout. Out: :class:`~fxpar.plans.Plan`. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fxpar.cost.arcs import plain_layout
from fxpar.cost.price import Priced
from fxpar.cost.rows import Passage
from fxpar.cost.trees import cheapest_tree
from fxpar.graph import Graph, Node, Ref, Value
from fxpar.layout import I, Layout
from fxpar.parts import parts_of
from fxpar.plans import Arc, Choice, GraphPlan, NodePlan, Plan, Unsplit
from fxpar.rules.joint import Joint
from fxpar.rules.strategy import Strategy
from fxpar.space import Slot, Space
from fxpar.traffic import collectives


def assemble(
    priced: Priced,
    choice: Sequence[int],
    *,
    status: str = "given",
    bound_seconds: float | None = None,
    gap: float = 0.0,
    marginals: Sequence[np.ndarray] | None = None,
    notes: tuple[str, ...] = (),
    stats: dict[str, int] | None = None,
    passages: Mapping[int, Passage] | None = None,
    objective_seconds: float | None = None,
) -> Plan:
    """The plan that takes ``choice[i]`` at slot ``i``.

    ``marginals`` (for each slot, the best step in seconds for each of its choices) adds runner-ups and reasons.
    ``passages`` are the conversions of the flows (by number) that must not be just the cheapest, because memory has a
    price, and ``objective_seconds`` is what the step takes with them.
    """
    space = priced.space
    picked = tuple(int(item) for item in choice[: len(space.slots)])
    joints = [slot.ways[item] for slot, item in zip(space.slots, picked, strict=True)]
    given = passages or {}
    plans = {name: _graph_plan(priced, name, graph, joints, given) for name, graph in space.program.graphs().items()}
    objective = priced.seconds(picked) if objective_seconds is None else objective_seconds
    return Plan(
        mesh=space.mesh,
        cluster=priced.cluster.name,
        program=space.program.digest(),
        graphs=plans,
        calls=space.program.calls,
        parameters=_parameters(space, joints),
        collectives=collectives(space.program, space.mesh, plans),
        objective_seconds=objective,
        bound_seconds=objective if bound_seconds is None else bound_seconds,
        gap=gap,
        status=status,
        whole_seconds=priced.seconds(whole_choice(space)),
        split_seconds=_split_seconds(space, picked, objective, marginals),
        parameter_bytes=sum(meta.bytes for _, meta, _ in _parameter_slots(space)) + sum(space.program.unused.values()),
        unsplit=tuple(_unsplit(space, picked, marginals)),
        unruled_ops=space.unruled,
        choices=tuple(_choices(priced, picked, marginals)),
        notes=notes,
        stats=stats or {},
        parts=parts_of(space.program, space.mesh, plans),
    )  # fmt: skip


def whole_choice(space: Space) -> tuple[int, ...]:
    """The choice that splits nothing: the first strategy of every slot is whole, in state ``I``."""
    return (0,) * len(space.slots)


def random_choice(space: Space, seed: int) -> tuple[int, ...]:
    """A valid plan drawn with ``seed``: any combination of strategies is valid, conversions join them."""
    random = np.random.default_rng(seed)
    return tuple(int(random.integers(len(slot.ways))) for slot in space.slots)


def _layout(joint: Joint, side: str, position: int = 0) -> Layout:
    """The layout of an input or output (``side``: ``"inputs"`` or ``"outputs"``)."""
    return tuple(getattr(strategy, side)[position] for strategy in joint)


def _graph_plan(
    priced: Priced, name: str, graph: Graph, joints: list[Joint], passages: Mapping[int, Passage]
) -> GraphPlan:
    space = priced.space
    inputs = tuple(_layout(joints[space.input_slots[name, index]], "outputs") for index in range(len(graph.inputs)))
    nodes = tuple(_node_plan(space, name, index, node, joints) for index, node in enumerate(graph.nodes))
    outputs = tuple(
        _layout(joints[space.output_slots[name, index]], "inputs") if isinstance(out, Ref) else None
        for index, out in enumerate(graph.outputs)
    )
    updates = tuple(_layout(joints[space.update_slots[name, index]], "inputs") for index in range(len(graph.updates)))
    produced = {item.value: layout for item, layout in zip(graph.inputs, inputs, strict=True)}
    wanted: dict[int, dict[Layout, None]] = {}
    for node, plan in zip(graph.nodes, nodes, strict=True):
        tensors = [out for out in node.outputs if out is not None]
        produced.update(zip(tensors, plan.outputs, strict=True))
        for value, layout in zip(node.operands, plan.inputs, strict=True):
            wanted.setdefault(value, {})[layout] = None
    finals: list[tuple[int, Layout | None]] = [
        (out.value, layout) for out, layout in zip(graph.outputs, outputs, strict=True) if isinstance(out, Ref)
    ]
    finals += [(value, layout) for (_, value), layout in zip(graph.updates, updates, strict=True)]
    for value, final in finals:
        if final is not None:
            wanted.setdefault(value, {})[final] = None
    trees, again = {}, {}
    for value, layouts in wanted.items():
        passage = passages.get(space.flow_of[name, value])
        arcs = passage.conversions if passage else _tree(priced, name, value, produced[value], tuple(layouts))
        if arcs:
            trees[value] = arcs
        if passage and passage.again:
            again[value] = passage.again
    return GraphPlan(graph.digest(), inputs, nodes, outputs, updates, trees, again)


def _node_plan(space: Space, name: str, index: int, node: Node, joints: list[Joint]) -> NodePlan:
    if not node.op.startswith("block:"):
        return NodePlan(joints[space.node_slots[name, index]])
    block = node.op.removeprefix("block:")
    entries = [i for i, item in enumerate(space.program.blocks[block].inputs) if item.kind == "input"]
    leaves = [i for i, out in enumerate(node.outputs) if out is not None]
    inputs = [_layout(joints[space.input_slots[block, i]], "inputs") for i in entries]
    outputs = [_layout(joints[space.output_slots[block, i]], "outputs") for i in leaves]
    return NodePlan(
        tuple(
            Strategy(node.op, tuple(layout[axis] for layout in inputs), tuple(layout[axis] for layout in outputs))
            for axis in range(len(space.mesh.axes))
        )
    )


def _tree(priced: Priced, graph: str, value: int, src: Layout, targets: tuple[Layout, ...]) -> tuple[Arc, ...]:
    """The very tree that was priced: over the same states, with the same seconds."""
    flow = priced.space.flow_of[graph, value]
    meta, tree = priced.space.flows[flow].meta, priced.trees[flow]
    root, wanted = plain_layout(src, meta), {plain_layout(target, meta) for target in targets}
    if wanted == {root}:
        return ()
    number = {layout: index for index, layout in enumerate(tree.layouts)}
    return cheapest_tree(tree.arcs, number[root], [number[target] for target in wanted], tree.layouts).arcs


def _parameter_slots(space: Space) -> Iterator[tuple[str, Value, int]]:
    """Every parameter that a graph reads: its name, its value, its slot."""
    graphs = space.program.graphs()
    for name, number in space.parameter_slots.items():
        slot = space.slots[number]
        graph = graphs[slot.graph]
        yield name, graph.values[graph.inputs[slot.index].value], number


def _parameters(space: Space, joints: list[Joint]) -> dict[str, Layout]:
    read = {name: _layout(joints[number], "outputs") for name, number in space.parameter_slots.items()}
    return {**read, **dict.fromkeys(space.program.unused, (I,) * len(space.mesh.axes))}


def _unsplit(space: Space, picked: Sequence[int], marginals: Sequence[np.ndarray] | None) -> Iterator[Unsplit]:
    for name, size in space.program.unused.items():
        yield Unsplit(name, size, "the forward does not use it")
    reasons: dict[int, str | None] = {}  # by slot: the instances of a block share theirs
    for name, meta, number in _parameter_slots(space):
        if number not in reasons:
            reasons[number] = _why_whole(space, number, meta, picked[number], marginals)
        reason = reasons[number]
        if reason is not None:
            yield Unsplit(name, meta.bytes, reason)


def _why_whole(
    space: Space, number: int, meta: Value, picked: int, marginals: Sequence[np.ndarray] | None
) -> str | None:
    """Why the parameters of a slot are not split; ``None`` if they are."""
    slot = space.slots[number]
    if _is_split(slot, picked):
        return None
    if space.mesh.size == 1:
        return "axis " + " and ".join(f"{axis} has degree {degree}" for axis, degree in space.mesh.axes)
    split = [item for item in range(len(slot.ways)) if _is_split(slot, item)]
    if not split:
        return f"no dim of {list(meta.shape)} divides by {' or '.join(map(str, space.mesh.degrees))}"
    if marginals is None:
        return "chosen so"
    extra = min(float(marginals[number][item]) for item in split) - float(marginals[number][picked])
    return f"any split would make the step {extra * 1e6:.3g} us longer"


def _is_split(slot: Slot, item: int) -> bool:
    return any(state.kind == "S" for state in slot.ways.layout(item, "outputs", 0))


def _split_seconds(
    space: Space, picked: Sequence[int], objective: float, marginals: Sequence[np.ndarray] | None
) -> float | None:
    numbers = set(space.parameter_slots.values())
    if any(_is_split(space.slots[number], picked[number]) for number in numbers):
        return objective
    if marginals is None:
        return None
    found = [
        float(marginals[number][item])
        for number in numbers
        for item in range(len(space.slots[number].ways))
        if _is_split(space.slots[number], item)
    ]
    return min(found, default=None)


def _choices(priced: Priced, picked: Sequence[int], marginals: Sequence[np.ndarray] | None) -> Iterator[Choice]:
    space = priced.space
    graphs = space.program.graphs()
    for number, slot in enumerate(space.slots):
        if slot.kind not in ("node", "parameter"):
            continue
        graph = graphs[slot.graph]
        node = graph.nodes[slot.index] if slot.kind == "node" else None
        name = slot.ways.name(picked[number])
        seconds = float(priced.problem.variables[number].costs[picked[number]]) / max(slot.weight, 1)
        runner, extra = None, None
        if marginals is not None and len(slot.ways) > 1:
            others = [item for item in range(len(slot.ways)) if item != picked[number]]
            best = min(others, key=lambda item: (float(marginals[number][item]), item))
            runner = slot.ways.name(best)
            extra = max(0.0, float(marginals[number][best]) - float(marginals[number][picked[number]]))
        module = node.module if node else graph.inputs[slot.index].name
        op, source = (node.op, node.source) if node else ("parameter", "")
        yield Choice(slot.graph, module, op, source, name, seconds, slot.weight, runner, extra)
