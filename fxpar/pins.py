"""Wishes about states -> the choices they leave: parameters by name, block inputs and outputs by block.

In: a :class:`~fxpar.space.Space` and ``{glob: "S0@tp"}`` dictionaries. Out: ``{slot: allowed choices}``, which the
solver takes. A hand-written layout is a set of pins, the solver completes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from fxpar.errors import InfeasibleError, LayoutError, PlanError
from fxpar.layout import I, Layout, Mesh, nested_layout, parse_state
from fxpar.report import layout_text
from fxpar.space import Slot, Space

Pins = dict[int, set[int]]


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Read ``"S0@tp"``, ``"R@tp"`` or ``"replicated"``; axes that are not named are ``I``; raises `LayoutError`.

    Cuts of one dim on several axes are made one after the other, in the order of the text, as they are written on what
    is left.

    >>> parse_layout("S1@tp", Mesh.of({"tp": 4}))
    (S1,)
    >>> mesh = Mesh.of({"dp": 2, "tp": 4})
    >>> parse_layout("S0@dp,S0@tp", mesh), parse_layout("S0@tp,S0@dp", mesh)
    ((S0, S0/2), (S0/4, S0))
    """
    states = dict.fromkeys(mesh.names, I)
    named: list[str] = []
    for part in text.replace(",", " ").split():
        if part == "replicated":
            continue
        state, at, axis = part.partition("@")
        if not at and len(mesh.names) == 1:
            axis = mesh.names[0]
        if axis not in states:
            raise LayoutError(f"layout {text!r} names axis {axis!r}; the mesh has {', '.join(mesh.names)}")
        states[axis] = parse_state(state)
        named = [name for name in named if name != axis] + [axis]
    order = [*named, *(name for name in mesh.names if name not in named)]
    degrees = dict(mesh.axes)
    found = nested_layout([states[name] for name in order], [degrees[name] for name in order])
    nested = dict(zip(order, found, strict=True))
    return tuple(nested[name] for name in mesh.names)


def pin(
    space: Space,
    *,
    parameters: Mapping[str, str | Layout] | None = None,
    enter: Mapping[str, str] | None = None,
    leave: Mapping[str, str] | None = None,
    nodes: Mapping[str, str] | None = None,
) -> Pins:
    """The choices that remain when parameters, block inputs and outputs, and operations' outputs are held in states.

    Keys are globs: over parameter names; over ``"<block>.<number>"`` for the inputs (``enter``) and outputs
    (``leave``) of folded blocks; over ``"<graph>:<module>:<op>"`` for operations (``nodes``: their first output).
    Raises :class:`PlanError` for a glob that matches nothing, with the nearest names, and :class:`InfeasibleError`
    for a state that a tensor cannot be in.
    """
    pins: Pins = {}
    names = space.parameter_slots
    for pattern, text in (parameters or {}).items():
        wanted = parse_layout(text, space.mesh) if isinstance(text, str) else text
        for name in _matching(pattern, names, "parameter"):
            _narrow(pins, space, names[name], wanted, name)
    for kind, wishes in (("enter", enter or {}), ("leave", leave or {})):
        slots = {f"{slot.graph}.{slot.index}": n for n, slot in enumerate(space.slots) if slot.kind == kind}
        for pattern, text in wishes.items():
            wanted = parse_layout(text, space.mesh)
            for name in _matching(pattern, slots, f"block {'input' if kind == 'enter' else 'output'}"):
                _narrow(pins, space, slots[name], wanted, name)
    graphs = space.program.graphs()
    ops = {}
    for number, slot in enumerate(space.slots):
        if slot.kind == "node":
            ops[f"{slot.graph}:{graphs[slot.graph].nodes[slot.index].module}:{slot.name}", number] = number
    for pattern, text in (nodes or {}).items():
        wanted = parse_layout(text, space.mesh)
        hits = set(_matching(pattern, dict.fromkeys(name for name, _ in ops), "operation"))
        for name, number in ops:
            if name in hits:
                _narrow(pins, space, number, wanted, name)
    return pins


def _matching(pattern: str, names: Iterable[str], what: str) -> list[str]:
    known = list(names)
    found = [name for name in known if fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
        raise PlanError(f"{pattern!r} matches no {what}; nearest: {', '.join(near) or 'none'}")
    return found


def _narrow(pins: Pins, space: Space, number: int, wanted: Layout, name: str) -> None:
    slot: Slot = space.slots[number]
    left = {choice for choice in range(len(slot.ways)) if slot.ways.layout(choice, "outputs", 0) == wanted}
    left &= pins.get(number, left)
    if not left:
        possible = dict.fromkeys(slot.ways.layout(choice, "outputs", 0) for choice in range(len(slot.ways)))
        offered = ", ".join(layout_text(layout, space.mesh) for layout in possible)
        raise InfeasibleError(
            f"{name} cannot be {layout_text(wanted, space.mesh)} on {space.mesh.axes}: it can be {offered}"
        )
    pins[number] = left
