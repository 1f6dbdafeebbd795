"""Mesh axes, the states of a tensor on an axis, and the conversion table.

In: nothing but plain values. Out: :class:`State`, :class:`Mesh`, ``Layout`` (one state per mesh axis) and
:func:`conversion`. What a conversion costs is :mod:`fxpar.cost.comm`; how it runs is :mod:`fxpar.runtime.collectives`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fxpar.errors import LayoutError


class State(NamedTuple):
    """What a tensor is on one mesh axis.

    ``kind`` is ``"S"`` (a slice along ``dim``), ``"R"`` (whole, gradients partial), ``"I"`` (whole, gradients whole)
    or ``"P"`` (a summand); of a tensor without gradient also ``"M"`` (the true value is the largest of the ranks').
    ``parts`` is the ``k`` of ``S(d/k)``: dim ``d`` seen as ``k`` equal parts, each of them cut.
    Both refer to the whole tensor, whatever other axes do: so every axis converts by itself. Two axes may cut one dim
    if their cuts nest: ``(S0, S0/2)`` on degrees ``(2, 4)`` cuts in 2 and each piece in 4, ``(S0/4, S0)`` in 4 and each
    piece in 2.

    >>> State("S", 0, 3)
    S0/3
    """

    kind: str
    dim: int = -1
    parts: int = 1

    def __repr__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" if self.parts == 1 else f"S{self.dim}/{self.parts}"


R = State("R")
I = State("I")  # noqa: E741  (the name the field would read as "invariant")
P = State("P")
M = State("M")


def S(dim: int, parts: int = 1) -> State:  # noqa: N802
    """Shard along ``dim``, seen as ``parts`` equal parts."""
    return State("S", dim, parts)


Layout = tuple[State, ...]

_STATE = re.compile(r"(?:S(\d+)(?:/(\d+))?|([RIPM]))")


def parse_state(text: str) -> State:
    """Read ``"S1"``, ``"S0/3"``, ``"R"``, ``"I"``, ``"P"`` or ``"M"``; raises :class:`LayoutError`.

    >>> parse_state("S0/3") == S(0, 3)
    True
    """
    match = _STATE.fullmatch(text.strip())
    if match is None:
        raise LayoutError(f"{text!r} is not a state; write S<dim>, S<dim>/<parts>, R, I, P or M")
    if match[3]:
        return State(match[3])
    return State("S", int(match[1]), int(match[2] or 1))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with their degrees, outermost first.

    >>> Mesh.of({"tp": 4})
    Mesh(axes=(('tp', 4),))
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(axes: dict[str, int] | Mesh) -> Mesh:
        """A mesh from ``{"axis": degree}``; raises :class:`LayoutError` on a degree below 1."""
        if isinstance(axes, Mesh):
            return axes
        for name, degree in axes.items():
            if not isinstance(degree, int) or degree < 1:
                raise LayoutError(f"mesh axis {name!r} has degree {degree!r}; a degree is a whole number from 1")
        if not axes:
            raise LayoutError("a mesh needs at least one axis, for example {'tp': 4}")
        return Mesh(tuple(axes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(degree for _, degree in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.degrees)


def divides(shape: tuple[int, ...], state: State, degree: int) -> bool:
    """Whether a tensor of global ``shape`` can be in ``state`` on an axis of ``degree``, in equal pieces."""
    if state.kind != "S":
        return True
    if state.dim >= len(shape):
        return False
    return shape[state.dim] % (state.parts * degree) == 0 and shape[state.dim] > 0


def is_uneven(shape: Sequence[int], state: State, degree: int) -> bool:
    """Whether ``state`` cuts a tensor of global ``shape`` as ``torch.chunk`` does, with a smaller last piece.

    Every rank must get something, and the dim may be cut by one axis only, in one part.

    >>> is_uneven((53,), S(0), 4), is_uneven((12,), S(0), 4), is_uneven((12,), S(0), 8)
    (True, False, False)
    """
    if state.kind != "S" or state.parts > 1 or state.dim >= len(shape):
        return False
    size = shape[state.dim]
    return size % degree != 0 and (degree - 1) * -(-size // degree) < size


def can_be(shape: tuple[int, ...], state: State, degree: int) -> bool:
    """Whether a tensor of global ``shape`` can be in ``state`` on an axis of ``degree``, evenly or not."""
    return divides(shape, state, degree) or is_uneven(shape, state, degree)


def padding(shape: Sequence[int], state: State, degree: int) -> float:
    """How much larger a tensor is with all pieces as large as the largest: collectives move it so.

    >>> padding((10,), S(0), 4), padding((12,), S(0), 4)
    (1.2, 1.0)
    """
    if not is_uneven(shape, state, degree):
        return 1.0
    size = shape[state.dim]
    return -(-size // degree) * degree / size


def written(state: State, shape: Sequence[int], degree: int) -> str:
    """A state as :mod:`fxpar.runtime.collectives` reads it: with the size of the dim where pieces are uneven.

    >>> written(S(0), (53, 8), 4), written(S(1), (53, 8), 4)
    ('S0~53', 'S1')
    """
    return f"{state}~{shape[state.dim]}" if is_uneven(shape, state, degree) else str(state)


def nests(a: State, a_degree: int, b: State, b_degree: int) -> bool:
    """Whether two axes may hold a tensor in ``a`` and ``b`` at once: cuts of one dim must not cross (docs/states.md).

    >>> nests(S(0), 2, S(0), 4), nests(S(0), 2, S(0, 2), 4), nests(S(0, 4), 2, S(0), 4)
    (False, True, True)
    """
    if a.kind != "S" or b.kind != "S" or a.dim != b.dim or 1 in (a_degree, b_degree):
        return True
    return b.parts % (a.parts * a_degree) == 0 or a.parts % (b.parts * b_degree) == 0


def fits(shape: tuple[int, ...], layout: Layout, degrees: Sequence[int]) -> bool:
    """Whether a tensor of global ``shape`` can be in ``layout``: cuts of one dim are even, if not lone, and nest."""
    cuts = [(state, degree) for state, degree in zip(layout, degrees, strict=True) if state.kind == "S"]
    for number, (state, degree) in enumerate(cuts):
        if not can_be(shape, state, degree):
            return False
        if any(not nests(state, degree, *other) for other in cuts[:number]):
            return False
    uneven = [state.dim for state, degree in cuts if not divides(shape, state, degree)]
    return all(sum(state.dim == dim and degree > 1 for state, degree in cuts) == 1 for dim in uneven)


@lru_cache(maxsize=65536)
def local_layout(layout: Layout, degrees: tuple[int, ...]) -> Layout:
    """The states as a rank finds them on its piece, where the other axes' cuts have been made already.

    >>> local_layout((S(0), S(0, 2)), (2, 4)), local_layout((S(0, 4), S(0)), (2, 4))
    ((S0, S0), (S0, S0))
    """
    return tuple(
        _within(state, [other for number, other in enumerate(zip(layout, degrees, strict=True)) if number != axis])
        for axis, state in enumerate(layout)
    )


def successive_layout(layout: Layout, degrees: Sequence[int]) -> Layout:
    """The states as cuts made one axis after the other, each on the piece the ones before leave (DTensor's reading).

    >>> successive_layout((S(0), S(0, 2)), (2, 4)), successive_layout((S(0, 4), S(0)), (2, 4))
    ((S0, S0), (S0/4, S0))
    """
    places = list(zip(layout, degrees, strict=True))
    return tuple(_within(state, places[:axis]) for axis, state in enumerate(layout))


def _within(state: State, others: Sequence[tuple[State, int]]) -> State:
    """``state`` on what the cuts ``others`` leave."""
    if state.kind != "S":
        return state
    outer = [degree for cut, degree in others
             if cut.kind == "S" and cut.dim == state.dim and cut.parts * degree <= state.parts]  # fmt: skip
    return S(state.dim, state.parts // math.prod(outer))


def nested_layout(successive: Sequence[State], degrees: Sequence[int]) -> Layout:
    """The layout of cuts made one axis after the other; raises :class:`LayoutError` if two of them cross.

    The inverse of :func:`successive_layout`: plain shards of one dim on two axes are cut by the first axis first.

    >>> nested_layout((S(0), S(0)), (2, 4))
    (S0, S0/2)
    """
    found: list[State] = []
    for state, degree in zip(successive, degrees, strict=True):
        if state.kind == "S":
            cuts = sorted((cut.parts, n) for cut, n in zip(found, degrees, strict=False)
                          if cut.kind == "S" and cut.dim == state.dim and n > 1)  # fmt: skip
            parts = state.parts
            for outer, n in cuts:
                parts *= n if outer <= parts else 1
            state = S(state.dim, parts)
            if not all(nests(state, degree, cut, n) for cut, n in zip(found, degrees, strict=False)):
                raise LayoutError(f"{successive} on degrees {tuple(degrees)}: {state} crosses another cut of that dim")
        found.append(state)
    return tuple(found)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest piece of a tensor of global ``shape``; raises :class:`LayoutError` if there is none.

    >>> local_shape((8, 24), (S(1, 3),), Mesh.of({"tp": 4}))
    (8, 6)
    """
    for state, (axis, degree) in zip(layout, mesh.axes, strict=True):
        if not can_be(shape, state, degree):
            raise LayoutError(f"shape {shape} cannot be {state}@{axis}: degree {degree} does not divide it")
    if not fits(shape, layout, mesh.degrees):
        raise LayoutError(f"shape {shape} cannot be {layout} on {mesh.axes}: two cuts of one dim cross")
    return local_sizes(shape, layout, mesh.degrees)


def local_sizes(
    shape: Sequence[int], layout: Layout, degrees: Sequence[int], coordinates: Sequence[int] | None = None
) -> tuple[int, ...]:
    """A global shape as the rank at ``coordinates`` sees it; without them, as the ranks do that have the most.

    >>> local_sizes((8, 24), (S(1), S(1, 2)), (2, 4)), local_sizes((53,), (S(0),), (4,), (3,))
    ((8, 3), (11,))
    """
    sizes = list(shape)
    for state, degree, rank in zip(layout, degrees, coordinates or (0,) * len(layout), strict=True):
        if state.kind == "S":
            most = -(-sizes[state.dim] // degree)
            sizes[state.dim] = min(most, sizes[state.dim] - rank * most) if sizes[state.dim] % degree else most
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one state becomes another: what runs forward, and what runs backward on the gradient.

    Each is ``"all_gather"``, ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_to_all"`` (they communicate), or
    ``"slice"``, ``"pad"`` (zeros elsewhere), ``"keep"`` (on the first rank, zeros elsewhere), or ``"none"``.
    """

    forward: str
    backward: str


COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")

#: See docs/states.md. Every pair of S, R, I and P is here; ``R -> P`` keeps forward, its (whole) cotangent is kept on
#: one rank. ``M`` is left by an all-reduce that takes the largest, and entered by nothing.
CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("S", "I"): Conversion("all_gather", "slice"),
    ("S", "R"): Conversion("all_gather", "reduce_scatter"),
    ("S", "S"): Conversion("all_to_all", "all_to_all"),
    ("S", "P"): Conversion("pad", "slice"),
    ("P", "I"): Conversion("all_reduce", "none"),
    ("P", "R"): Conversion("all_reduce", "all_reduce"),
    ("P", "S"): Conversion("reduce_scatter", "all_gather"),
    ("I", "R"): Conversion("none", "all_reduce"),
    ("I", "S"): Conversion("slice", "all_gather"),
    ("I", "P"): Conversion("keep", "none"),
    ("R", "S"): Conversion("slice", "pad"),
    ("R", "I"): Conversion("none", "keep"),
    ("R", "P"): Conversion("keep", "keep"),
    ("M", "I"): Conversion("all_reduce", "none"),
}


def conversion(src: State, dst: State) -> Conversion:
    """The conversion from ``src`` to a different state ``dst`` (docs/states.md); raises :class:`LayoutError` if equal.

    >>> conversion(P, S(1))
    Conversion(forward='reduce_scatter', backward='all_gather')
    """
    if src == dst:
        raise LayoutError(f"{src} -> {dst} is not a conversion")
    return CONVERSIONS[src.kind, dst.kind]


def without_gradient(state: State) -> State:
    """``R`` and ``I`` are the same for a tensor that carries no gradient: both are written ``I``."""
    return I if state == R else state
