"""Program + rules + mesh -> Space: every decision, the states it may take, and the values that connect decisions.

In: a :class:`~fxpar.graph.Program`, a :class:`~fxpar.layout.Mesh`. Out: :class:`Space`. Nothing here has a price
(:mod:`fxpar.cost.price`) and nothing is chosen (:mod:`fxpar.solver`).

A folded block has one set of decisions, however often it is called. The state in which each of its inputs arrives
and each of its outputs leaves is a decision of its own (an *enter* or *leave* slot), shared by all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxpar.boundary import Boundary, whole_boundary
from fxpar.graph import Graph, Input, Node, Program, Ref, Value
from fxpar.hints import Hints, propagate
from fxpar.layout import I, Layout, Mesh, P, R, S, State, can_be, divides
from fxpar.rules import rule_for
from fxpar.rules.joint import Ways, collected, layouts_at_rest, layouts_of, node_ways
from fxpar.rules.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Slot:
    """One decision. ``kind`` is ``"node"``, ``"parameter"``, ``"fixed"`` (an input, buffer, constant, output or
    update of the whole model), ``"enter"`` or ``"leave"`` (a block's input or output).

    ``index`` is its number among the graph's nodes, inputs or outputs; ``weight`` is how often it runs in a step
    (for a parameter: how many parameters share the decision).
    """

    kind: str
    graph: str
    index: int
    name: str
    ways: Ways
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Use:
    """A value at a slot: the layout of input or output number ``position`` in whatever way the slot takes."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Flow:
    """A value, the slot that produces it, the slots that read it, and how often that happens in a step."""

    graph: str
    value: int
    meta: Value
    producer: Use
    consumers: tuple[Use, ...]
    weight: int = 1


@dataclass(frozen=True)
class Space:
    """All decisions (``slots``) and connections (``flows``) of a program on a mesh.

    ``node_slots`` maps ``(graph, node number)`` to a slot; ``input_slots`` and ``output_slots`` likewise (top-level
    outputs, block outputs); ``update_slots`` for buffer updates. ``parameter_slots`` maps a parameter's name to one,
    ``flow_of`` maps ``(graph, value)`` to a flow.
    """

    program: Program
    mesh: Mesh
    boundary: Boundary
    slots: tuple[Slot, ...]
    flows: tuple[Flow, ...]
    node_slots: dict[tuple[str, int], int]
    input_slots: dict[tuple[str, int], int]
    output_slots: dict[tuple[str, int], int]
    update_slots: dict[tuple[str, int], int]
    parameter_slots: dict[str, int]
    flow_of: dict[tuple[str, int], int]
    unruled: tuple[tuple[str, str, int], ...]

    def text(self) -> str:
        """A line per slot: its name, how often it runs, and what it may do."""
        return "\n".join(
            f"{number:4d} {slot.kind:9} x{slot.weight:<4d} {slot.graph}/{slot.name}: {len(slot.ways)} ways of "
            + " x ".join(
                ", ".join(f"{s.name}({' '.join(map(str, s.inputs))} -> {' '.join(map(str, s.outputs))})" for s in axis)
                for axis in slot.ways.axes
            )
            for number, slot in enumerate(self.slots)
        )


def space(program: Program, mesh: Mesh, boundary: Boundary | None = None) -> Space:
    """Every decision that ``program`` leaves open on ``mesh``.

    Inputs arrive and outputs leave as ``boundary`` says: whole, if it is left out.
    """
    return _Builder(program, mesh, boundary or whole_boundary(program, mesh)).build()


def states_of(meta: Value, degree: int, parts: Iterable[tuple[int, int]], *, at_rest: bool) -> tuple[State, ...]:
    """The states a value may be in: at rest ``I`` and ``S``, also unevenly; inside a program also ``R`` and ``P``.

    ``parts`` are further ``(dim, parts)`` that something nearby wants to cut.
    """
    if degree == 1:
        return (I,)
    found: list[State] = [I]
    if not at_rest and meta.grad:
        found.append(R)
    found += [S(dim) for dim in range(len(meta.shape))]
    found += [S(dim, count) for dim, count in sorted(parts)]
    if not at_rest and not meta.dtype.startswith("bool"):
        found.append(P)
    return tuple(state for state in found if (can_be if at_rest else divides)(meta.shape, state, degree))


class _Builder:
    """Collects slots and flows graph by graph; used once."""

    def __init__(self, program: Program, mesh: Mesh, boundary: Boundary) -> None:
        self.program, self.mesh, self.boundary = program, mesh, boundary
        self.degrees = mesh.degrees
        self.hints: Hints = propagate(program, self.degrees)
        self.slots: list[Slot] = []
        self.flows: dict[tuple[object, ...], Flow] = {}
        self.places: dict[tuple[object, ...], list[tuple[str, int]]] = {}
        self.node_slots: dict[tuple[str, int], int] = {}
        self.input_slots: dict[tuple[str, int], int] = {}
        self.output_slots: dict[tuple[str, int], int] = {}
        self.update_slots: dict[tuple[str, int], int] = {}
        self.parameter_slots: dict[str, int] = {}
        self.unruled: dict[tuple[str, str], int] = {}
        self.groups = parameter_groups(program)
        self.whole: Layout = (I,) * len(mesh.axes)

    def build(self) -> Space:
        # Blocks first: a call in the top-level graph connects to their enter and leave slots.
        for name, graph in [*self.program.blocks.items(), ("top", self.program.top)]:
            self._graph(name, graph, len(self.program.instances(name)) if name != "top" else 1)
        return Space(
            self.program,
            self.mesh,
            self.boundary,
            tuple(self.slots),
            tuple(self.flows.values()),
            self.node_slots,
            self.input_slots,
            self.output_slots,
            self.update_slots,
            self.parameter_slots,
            {place: number for number, places in enumerate(self.places.values()) for place in places},
            tuple((op, module, count) for (op, module), count in self.unruled.items()),
        )

    def _slot(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def _graph(self, name: str, graph: Graph, weight: int) -> None:
        producers: dict[int, Use] = {}
        consumers: dict[int, list[Use]] = {}
        for index, item in enumerate(graph.inputs):
            slot = self.input_slots[name, index] = self._input(name, graph, index, item, weight)
            producers[item.value] = Use(slot, 0)
        for index, node in enumerate(graph.nodes):
            if node.op.startswith("block:"):
                self._call(node, producers, consumers)
            else:
                self._node(name, graph, index, node, weight, producers, consumers)
        for index, out in enumerate(graph.outputs):
            if isinstance(out, Ref):
                slot = self.output_slots[name, index] = self._output(name, graph, index, out.value, weight)
                consumers.setdefault(out.value, []).append(Use(slot, 0))
        for index, (buffer, value) in enumerate(graph.updates):
            fixed = Slot("fixed", name, index, f"update {buffer}", _wanted(self.whole))
            slot = self.update_slots[name, index] = self._slot(fixed)
            consumers.setdefault(value, []).append(Use(slot, 0))
        for value, readers in consumers.items():
            self._flow(name, graph, value, producers[value], tuple(dict.fromkeys(readers)), weight)

    def _flow(self, name: str, graph: Graph, value: int, producer: Use, readers: tuple[Use, ...], weight: int) -> None:
        meta = graph.values[value]
        key = (producer, frozenset(readers), meta)
        self.places.setdefault(key, []).append((name, value))
        if key in self.flows:  # the same decisions again, as between the instances of a folded block: priced together
            old = self.flows[key]
            self.flows[key] = Flow(old.graph, old.value, meta, producer, old.consumers, old.weight + weight)
        else:
            self.flows[key] = Flow(name, value, meta, producer, readers, weight)

    def _input(self, name: str, graph: Graph, index: int, item: Input, weight: int) -> int:
        meta = graph.values[item.value]
        if item.kind == "parameter":
            return self._parameter(name, index, item, meta)
        if item.kind == "input" and name != "top":
            return self._slot(Slot("enter", name, index, f"enter {item.name}", self._passing(name, item.value), weight))
        layout = self.whole
        if item.kind == "input":
            number = sum(other.kind == "input" for other in graph.inputs[:index])
            layout = self.boundary.inputs[number]
        return self._slot(Slot("fixed", name, index, f"{item.kind} {item.name}", _given(layout), weight))

    def _passing(self, graph: str, value: int) -> Ways:
        """Any layout that a value may have where it enters or leaves a block."""
        meta = self.program.graphs()[graph].values[value]
        parts = self.hints.parts(graph, value)
        states = tuple(states_of(meta, degree, parts, at_rest=False) for degree in self.degrees)
        layouts = layouts_of(states, meta.shape, self.degrees)
        return _ways(layouts, lambda state: Strategy(str(state), (state,), (state,)), states)

    def _parameter(self, graph: str, index: int, item: Input, meta: Value) -> int:
        group = self.groups[graph, item.name]
        if group[0] not in self.parameter_slots:
            parts = self.hints.parts(graph, item.value)
            states = tuple(states_of(meta, degree, parts, at_rest=True) for degree in self.degrees)
            layouts = layouts_at_rest(states, meta.shape, self.degrees)
            rest = _ways(layouts, lambda state: Strategy(str(state), (), (state,)), states)
            slot = self._slot(Slot("parameter", graph, index, f"parameter {item.name}", rest, len(group)))
            self.parameter_slots.update(dict.fromkeys(group, slot))
        return self.parameter_slots[group[0]]

    def _node(
        self,
        name: str,
        graph: Graph,
        index: int,
        node: Node,
        weight: int,
        producers: dict[int, Use],
        consumers: dict[int, list[Use]],
    ) -> None:
        choices = node_ways(graph, node, self.degrees, self.hints.factors(name, index))
        slot = self.node_slots[name, index] = self._slot(Slot("node", name, index, node.op, choices, weight))
        if rule_for(graph, node) is None and node.operands:
            key = (node.op, f"{name}:{node.module}" if name != "top" else node.module)
            self.unruled[key] = self.unruled.get(key, 0) + weight
        for position, value in enumerate(node.operands):
            consumers.setdefault(value, []).append(Use(slot, position))
        tensors = [out for out in node.outputs if out is not None]
        producers.update({out: Use(slot, position) for position, out in enumerate(tensors)})

    def _call(self, node: Node, producers: dict[int, Use], consumers: dict[int, list[Use]]) -> None:
        block = node.op.removeprefix("block:")
        graph = self.program.blocks[block]
        entries = [index for index, item in enumerate(graph.inputs) if item.kind == "input"]
        for arg, index in zip(node.args, entries, strict=True):
            consumers.setdefault(arg.value, []).append(Use(self.input_slots[block, index], 0))
        for index, out in enumerate(node.outputs):
            if out is not None:
                producers[out] = Use(self.output_slots[block, index], 0)

    def _output(self, name: str, graph: Graph, index: int, value: int, weight: int) -> int:
        if name == "top":
            layout = self.boundary.outputs[index]
            assert layout is not None, "an output that is a tensor has a layout"
            return self._slot(Slot("fixed", name, index, f"output {index}", _wanted(layout), weight))
        return self._slot(Slot("leave", name, index, f"leave {index}", self._passing(name, value), weight))


def _given(layout: Layout) -> Ways:
    return collected([tuple(Strategy(str(state), (), (state,)) for state in layout)])


def _wanted(layout: Layout) -> Ways:
    return collected([tuple(Strategy(str(state), (state,), ()) for state in layout)])


def _ways(layouts: Sequence[Layout], strategy: Callable[[State], Strategy], states: Sequence[Sequence[State]]) -> Ways:
    alone = tuple(tuple(strategy(state) for state in axis) for axis in states)
    return collected([tuple(map(strategy, layout)) for layout in layouts], alone)


def parameter_groups(program: Program) -> dict[tuple[str, str], tuple[str, ...]]:
    """For each parameter of each graph, the names of all parameters that must be in the same state.

    Those are the same parameter of every instance of a folded block, and whatever is tied to any of them.
    """
    links: dict[tuple[str, str], tuple[str, str]] = {}
    owners: dict[str, tuple[str, str]] = {}  # the first that has a name

    def find(key: tuple[str, str]) -> tuple[str, str]:
        while links[key] != key:
            key = links[key]
        return key

    members: dict[tuple[str, str], dict[str, None]] = {}  # names in order, each once
    for graph_name, graph in program.graphs().items():
        modules = ("",) if graph_name == "top" else program.instances(graph_name)
        for item in graph.inputs:
            if item.kind == "parameter":
                key = links[graph_name, item.name] = graph_name, item.name
                names = members[key] = dict.fromkeys(program.names_of(modules, item.name))
                for name in names.keys() & owners.keys():
                    links[find(owners[name])] = find(key)
                owners |= dict.fromkeys(names.keys() - owners.keys(), key)
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for key, names in members.items():
        groups.setdefault(find(key), {}).update(names)
    return {key: tuple(groups[find(key)]) for key in members}
