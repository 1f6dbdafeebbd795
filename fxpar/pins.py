"""Wishes about states -> the choices they leave: of parameters and modules by name, of blocks' inputs and outputs.

In: a :class:`~fxpar.space.Space` and ``{glob: "S0@tp"}`` dictionaries. Out: ``{slot: allowed choices}``, which the
solver takes. A hand-written layout is a set of pins, the solver completes it. Which places a glob names is
:mod:`fxpar.places`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.errors import InfeasibleError, LayoutError
from fxpar.layout import I, Layout, Mesh, S, State, can_be, divides, local_layout, nested_layout, parse_state
from fxpar.places import Place, matching, modules_of, nodes_of, parameters_of, passages_of
from fxpar.report import layout_text
from fxpar.space import Space

Pins = dict[int, set[int]]


@dataclass(frozen=True)
class Wish:
    """States on some axes, in the order in which they were named; ``None`` is any cut. Other axes are left open."""

    text: str
    states: tuple[tuple[int, State | None], ...]

    def met_by(self, layout: Layout, degrees: tuple[int, ...]) -> bool:
        """Whether a layout has these states, as a rank sees them; axes that cut one dim do so in the order named."""
        here = local_layout(layout, degrees)
        for axis, state in self.states:
            if degrees[axis] > 1 and (here[axis].kind != "S" if state is None else here[axis] != state):
                return False
        cuts = [layout[axis] for axis, _ in self.states if layout[axis].kind == "S" and degrees[axis] > 1]
        return all(a.parts < b.parts for at, a in enumerate(cuts) for b in cuts[at + 1 :] if a.dim == b.dim)


def parse_wish(text: str, mesh: Mesh) -> Wish:
    """Read ``"S1@tp"``, ``"I@dp S0@tp"``, ``"S@dp"`` (any cut) or ``"replicated"`` (on all axes).

    An axis that is not named is left open. With one axis, its name may be left out. Raises :class:`LayoutError`.

    >>> parse_wish("S1@tp", Mesh.of({"dp": 2, "tp": 4})).states
    ((1, S1),)
    """
    states: dict[int, State | None] = {}
    for axis, state in _named(text, mesh):
        states.pop(axis, None)
        states[axis] = None if state == "S" else parse_state(state)
    if not states:
        raise LayoutError(f"layout {text!r} says nothing; write for example S0@{mesh.names[0]}, or replicated")
    return Wish(text, tuple(states.items()))


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
    states = dict.fromkeys(range(len(mesh.names)), I)
    named: list[int] = []
    for axis, state in _named(text, mesh):
        states[axis] = parse_state(state)
        named = [other for other in named if other != axis] + [axis]
    order = [*named, *(axis for axis in states if axis not in named)]
    found = nested_layout([states[axis] for axis in order], [mesh.degrees[axis] for axis in order])
    nested = dict(zip(order, found, strict=True))
    return tuple(nested[axis] for axis in states)


def _named(text: str, mesh: Mesh) -> list[tuple[int, str]]:
    """Axis and state of every part of a text."""
    found: list[tuple[int, str]] = []
    for part in text.replace(",", " ").split():
        if part == "replicated":
            found += [(axis, "I") for axis in range(len(mesh.names))]
            continue
        state, at, name = part.partition("@")
        if not at and len(mesh.names) == 1:
            name = mesh.names[0]
        if name not in mesh.names:
            what = f"names axis {name!r}" if at else f"does not say on which axis: write {state}@{mesh.names[-1]}"
            raise LayoutError(f"layout {text!r} {what}; the mesh has {', '.join(mesh.names)}")
        found.append((mesh.names.index(name), state))
    return found


def pin(
    space: Space,
    *,
    constraints: Mapping[str, str | Layout] | None = None,
    parameters: Mapping[str, str | Layout] | None = None,
    enter: Mapping[str, str] | None = None,
    leave: Mapping[str, str] | None = None,
    nodes: Mapping[str, str] | None = None,
) -> Pins:
    """The choices that remain when parameters, modules' outputs, blocks' inputs and outputs, operations are held.

    Keys are globs. ``parameters`` are named as the model has them. ``constraints`` as well; a glob that no parameter
    has is one of modules, whose outputs are then read in that state by whatever comes after. ``enter`` takes
    ``"<block>.<input>"``, ``leave`` ``"<block>.<number>"``, ``nodes`` ``"<graph>:<module>:<op>"`` for what operations
    leave (their first output). Values are what :func:`parse_wish` reads, or a whole layout.
    Raises :class:`PlanError` for a glob that matches nothing, with the nearest names, and :class:`InfeasibleError`
    for a state that a tensor cannot be in, with the reason.
    """
    pins: Pins = {}
    known, passages = parameters_of(space), {kind: passages_of(space, kind) for kind in ("enter", "leave")}
    asked: list[tuple[str, str | Layout, list[Place]]] = []
    for pattern, text in (constraints or {}).items():
        asked.append((pattern, text, matching(pattern, known, "parameter", modules_of(space), "module")))
    for pattern, text in (parameters or {}).items():
        asked.append((pattern, text, matching(pattern, known, "parameter")))
    for kind, wishes, what in (("enter", enter, "block input"), ("leave", leave, "block output")):
        asked += [(pattern, text, matching(pattern, passages[kind], what)) for pattern, text in (wishes or {}).items()]
    if nodes:
        operations = nodes_of(space)
        asked += [(pattern, text, matching(pattern, operations, "operation")) for pattern, text in nodes.items()]
    held: dict[int, str] = {}
    for pattern, text, places in asked:
        for place in places:
            _narrow(pins, held, space, place, text, pattern)
    return pins


def _narrow(pins: Pins, held: dict[int, str], space: Space, place: Place, wanted: str | Layout, pattern: str) -> None:
    ways, degrees = space.slots[place.slot].ways, space.mesh.degrees
    layouts = {choice: ways.layout(choice, place.side, place.position) for choice in range(len(ways))}
    if isinstance(wanted, str):
        wish = parse_wish(wanted, space.mesh)
        able = {choice for choice, layout in layouts.items() if wish.met_by(layout, degrees)}
    else:
        able = {choice for choice, layout in layouts.items() if layout == wanted}
        wish = Wish(layout_text(wanted, space.mesh), tuple(enumerate(local_layout(wanted, degrees))))
    if not able:
        states = dict.fromkeys((axis, local_layout(layout, degrees)[axis])
                               for axis, _ in wish.states for layout in layouts.values())  # fmt: skip
        raise InfeasibleError(
            f"{place.name} of shape {list(place.shape)} cannot be {wish.text} on a mesh of "
            + ", ".join(f"{name}={degree}" for name, degree in space.mesh.axes)
            + f": {_reason(space, place, wish)}. It can be "
            + ", ".join(f"{state}@{space.mesh.names[axis]}" for axis, state in states)
        )
    left = able & pins.get(place.slot, able)
    if not left:
        raise InfeasibleError(
            f"{place.name} cannot be {wish.text} ({pattern!r}) and what {held[place.slot]!r} asks for at once"
        )
    pins[place.slot], held[place.slot] = left, pattern


def _reason(space: Space, place: Place, wish: Wish) -> str:
    """Why no choice has the states that are wished for: the first cause that holds."""
    at_rest = space.slots[place.slot].kind == "parameter"
    possible = can_be if at_rest else divides
    for axis, state in wish.states:
        name, degree = space.mesh.axes[axis]
        if state is None:
            if not any(possible(place.shape, S(dim), degree) for dim in range(len(place.shape))):
                return f"no dim divides by {degree}, the degree of {name}"
        elif state.kind == "S" and state.dim >= len(place.shape):
            return f"it has {len(place.shape)} dims, and no dim {state.dim}"
        elif not possible(place.shape, state, degree):
            parts = f"{state.parts} parts times " if state.parts > 1 else ""
            return f"dim {state.dim} of size {place.shape[state.dim]} does not divide by {parts}{degree} ({name})"
        elif state.kind != "S" and state != I and at_rest:
            return f"a parameter at rest is cut (S) or whole (I), never {state}"
    if place.what:
        return f"{place.what} cannot work so"
    if len(wish.states) > 1:
        return "the cuts do not go together"
    return "nothing in the model cuts it so"
