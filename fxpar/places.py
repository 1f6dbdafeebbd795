"""Names -> places of a space: parameters, modules' outputs, blocks' inputs and outputs, operations, by glob.

In: a :class:`~fxpar.space.Space`. Out: :class:`Place` by name: which side of which slot a name stands for. What is
wished for there is :mod:`fxpar.pins`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fxpar.errors import PlanError
from fxpar.graph import Graph, Ref
from fxpar.space import Space

Places = Mapping[str, list["Place"]]


@dataclass(frozen=True, slots=True)
class Place:
    """Input or output (``side``) number ``position`` of a slot: a tensor of global ``shape``.

    ``name`` is for messages; ``what`` is the operation that the slot belongs to, if there is one.
    """

    slot: int
    side: str
    position: int
    name: str
    shape: tuple[int, ...]
    what: str = ""


def matching(pattern: str, places: Places, what: str, more: Places | None = None, more_what: str = "") -> list[Place]:
    """The places whose names fit a glob; of ``more`` if none do; raises :class:`PlanError` with the nearest names."""
    for group in (places, more or {}):
        found = [place for name, own in group.items() if fnmatchcase(name, pattern) for place in own]
        if found:
            return list(dict.fromkeys(found))
    known = [*places, *(more or {})]
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
    either = f"{what} and no {more_what}" if more is not None else what
    raise PlanError(f"{pattern!r} matches no {either}; nearest: {', '.join(near) or 'none'}")


def parameters_of(space: Space) -> dict[str, list[Place]]:
    """Every parameter that the model reads, by its own name; instances of a folded block share a slot."""
    graphs, found = space.program.graphs(), {}
    for name, number in space.parameter_slots.items():
        slot = space.slots[number]
        graph = graphs[slot.graph]
        found[name] = [Place(number, "outputs", 0, name, graph.values[graph.inputs[slot.index].value].shape)]
    return found


def passages_of(space: Space, kind: str) -> dict[str, list[Place]]:
    """Inputs (``kind`` ``"enter"``) of blocks by ``"<block>.<input>"``, outputs (``"leave"``) by number."""
    graphs, found = space.program.graphs(), {}
    for number, slot in enumerate(space.slots):
        if slot.kind != kind:
            continue
        graph = graphs[slot.graph]
        own = graph.inputs[slot.index].name if kind == "enter" else str(slot.index)
        value = graph.inputs[slot.index].value if kind == "enter" else graph.outputs[slot.index].value
        name = f"{slot.graph}.{own}"
        found[name] = [Place(number, "outputs", 0, name, graph.values[value].shape)]
    return found


def nodes_of(space: Space) -> dict[str, list[Place]]:
    """What operations leave, by ``"<graph>:<module>:<op>"``."""
    graphs, found = space.program.graphs(), dict[str, list[Place]]()
    for number, slot in enumerate(space.slots):
        node = graphs[slot.graph].nodes[slot.index] if slot.kind == "node" else None
        out = next((value for value in node.outputs if value is not None), None) if node else None
        if node and out is not None:
            name = f"{slot.graph}:{node.module}:{slot.name}"
            shape = graphs[slot.graph].values[out].shape
            found.setdefault(name, []).append(Place(number, "outputs", 0, name, shape, slot.name))
    return found


def modules_of(space: Space) -> dict[str, list[Place]]:
    """Every module's outputs, by its path: each reading, outside of it, of a value that was made inside of it."""
    found: dict[str, list[Place]] = {}
    for name, graph in space.program.graphs().items():
        instances = ("",) if name == "top" else space.program.instances(name)
        paths = {parent for node in graph.nodes if not node.op.startswith("block:") for parent in _parents(node.module)}
        for path in paths:
            places = _readings(space, name, graph, path)
            for instance in dict.fromkeys(instances):
                found.setdefault(f"{instance}.{path}" if instance else path, []).extend(places)
        for instance in dict.fromkeys(instances if name != "top" else ()):
            own = [number for (block, _), number in space.output_slots.items() if block == name]
            found.setdefault(instance, []).extend(
                Place(number, "outputs", 0, f"output {space.slots[number].index} of {instance}",
                      graph.values[graph.outputs[space.slots[number].index].value].shape)
                for number in own
            )  # fmt: skip
    return {path: places for path, places in found.items() if places}


def _parents(path: str) -> list[str]:
    """A module's path and those of the modules around it."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _readings(space: Space, name: str, graph: Graph, path: str) -> list[Place]:
    """Where values that were made in module ``path`` of a graph are read outside of it."""

    def inside(module: str) -> bool:
        return module == path or module.startswith(path + ".")

    made = {value for node in graph.nodes if inside(node.module) for value in node.outputs if value is not None}
    found = []

    def add(slot: int, side: str, position: int, value: int, what: str = "") -> None:
        found.append(Place(slot, side, position, f"the output of {path}", graph.values[value].shape, what))

    for index, node in enumerate(graph.nodes):
        if node.op.startswith("block:") and not inside(node.module):
            block = node.op.removeprefix("block:")
            entries = [at for at, item in enumerate(space.program.blocks[block].inputs) if item.kind == "input"]
            for arg, at in zip(node.args, entries, strict=True):
                if arg.value in made:
                    add(space.input_slots[block, at], "inputs", 0, arg.value)
        elif not inside(node.module):
            for position, value in enumerate(node.operands):
                if value in made:
                    add(space.node_slots[name, index], "inputs", position, value, node.op)
    for index, out in enumerate(graph.outputs):
        if isinstance(out, Ref) and out.value in made:
            add(space.output_slots[name, index], "inputs", 0, out.value)
    return found
