"""Wishes about states -> the choices they leave: parameters by name, block inputs and outputs by block.

In: a :class:`~fxpar.space.Space` and ``{glob: "S0@tp"}`` dictionaries. Out: ``{slot: allowed choices}``, which the
solver takes. A hand-written layout is a set of pins, the solver completes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from fxpar.errors import InfeasibleError, LayoutError, PlanError
from fxpar.layout import I, Layout, Mesh, State, parse_state
from fxpar.report import layout_text
from fxpar.space import Slot, Space

Pins = dict[int, set[int]]


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Read ``"S0@tp"``, ``"R@tp"`` or ``"replicated"``; axes that are not named are ``I``; raises `LayoutError`.

    >>> parse_layout("S1@tp", Mesh.of({"tp": 4}))
    (S1,)
    """
    states = dict.fromkeys(mesh.names, I)
    for part in text.replace(",", " ").split():
        if part == "replicated":
            continue
        state, at, axis = part.partition("@")
        if not at and len(mesh.names) == 1:
            axis = mesh.names[0]
        if axis not in states:
            raise LayoutError(f"layout {text!r} names axis {axis!r}; the mesh has {', '.join(mesh.names)}")
        states[axis] = parse_state(state)
    return tuple(states.values())


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
            _narrow(pins, space, names[name], wanted, lambda item: item.outputs, name)
    for kind, wishes in (("enter", enter or {}), ("leave", leave or {})):
        slots = {f"{slot.graph}.{slot.index}": n for n, slot in enumerate(space.slots) if slot.kind == kind}
        for pattern, text in wishes.items():
            wanted = parse_layout(text, space.mesh)
            for name in _matching(pattern, slots, f"block {'input' if kind == 'enter' else 'output'}"):
                _narrow(pins, space, slots[name], wanted, lambda item: item.outputs, name)
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
                _narrow(pins, space, number, wanted, lambda item: item.outputs, name)
    return pins


def _matching(pattern: str, names: Iterable[str], what: str) -> list[str]:
    known = list(names)
    found = [name for name in known if fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
        raise PlanError(f"{pattern!r} matches no {what}; nearest: {', '.join(near) or 'none'}")
    return found


def _narrow(
    pins: Pins, space: Space, number: int, wanted: Layout, states: Callable[..., tuple[State, ...]], name: str
) -> None:
    slot: Slot = space.slots[number]
    left = {i for i, item in enumerate(slot.strategies) if states(item)[0] == wanted[0]}
    left &= pins.get(number, left)
    if not left:
        offered = ", ".join(layout_text(states(item)[:1], space.mesh) for item in slot.strategies)
        raise InfeasibleError(
            f"{name} cannot be {layout_text(wanted, space.mesh)} on {space.mesh.axes}: it can be {offered}"
        )
    pins[number] = left
