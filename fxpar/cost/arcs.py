"""Seconds of single conversions between the layouts of a value on a mesh: each changes the state on one axis.

In: a value, its layouts, the mesh and its links. Out: a matrix. What one conversion costs is :mod:`fxpar.cost.comm`,
and what several cost together :mod:`fxpar.cost.trees`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fxpar.cluster import Cluster, Link
from fxpar.cost.comm import conversion_seconds
from fxpar.graph import Value
from fxpar.layout import Layout, Mesh, State, local_layout, padding, without_gradient


def plain_layout(layout: Layout, meta: Value) -> Layout:
    """``layout`` with ``R`` written ``I`` if the value carries no gradient."""
    return layout if meta.grad else tuple(without_gradient(state) for state in layout)


def arc_matrix(
    layouts: Sequence[Layout],
    meta: Value,
    mesh: Mesh,
    links: Sequence[Link],
    cluster: Cluster,
    *,
    forward_only: bool = False,
) -> np.ndarray:
    """Seconds ``[L, L]`` of the conversions between ``layouts``; infinite where they differ on several axes.

    With ``forward_only`` what runs backward is left out.

    A conversion on one axis moves a rank's piece, which is the smaller and the more contiguous the more the other axes
    have cut; so it is priced for the local tensor, with the states as they are there.

    >>> from fxpar.layout import I, S
    >>> toy = Cluster.load("toy")
    >>> mesh = Mesh.of({"dp": 2, "tp": 2})
    >>> found = arc_matrix([(S(0), S(1)), (S(0), I), (I, I)], Value((8, 8), "float32"), mesh, toy.axis_links(mesh), toy)
    >>> np.isfinite(found).astype(int).tolist()
    [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """
    found = np.full((len(layouts), len(layouts)), np.inf)
    np.fill_diagonal(found, 0.0)
    local = [local_layout(layout, mesh.degrees) for layout in layouts]
    numbers: dict[State, int] = {}
    codes = np.array([[numbers.setdefault(state, len(numbers)) for state in layout] for layout in layouts])
    degrees = mesh.degrees
    parts = np.array([[degree / padding(meta.shape, state, degree) if state.kind == "S" else 1.0
                       for degree in degrees] for state in numbers])  # fmt: skip
    uneven = bool((parts % 1).any())
    shares = parts[codes, range(len(degrees))]
    places = codes * len(numbers) ** np.arange(len(degrees))
    known: dict[tuple[object, ...], np.ndarray] = {}
    for axis, (degree, link) in enumerate(zip(degrees, links, strict=True)):
        share = np.delete(shares, axis, axis=1).prod(axis=1)
        for alike in _equal(places.sum(axis=1) - places[:, axis]):  # layouts that differ on this axis only
            if len(alike) == 1:
                continue
            states = tuple(local[number][axis] for number in alike.tolist())
            here = meta.bytes / float(share[alike[0]])
            pads = (
                tuple(padding(meta.shape, layouts[number][axis], degree) for number in alike.tolist()) if uneven else ()
            )
            key = (axis, here, *pads, *map(id, states))
            if key not in known:
                known[key] = _axis_arcs(
                    states, pads or (1.0,) * len(states), here, meta.grad, degree, link, cluster, forward_only
                )
            found[alike[:, None], alike] = known[key]
    return found


def _equal(numbers: np.ndarray) -> list[np.ndarray]:
    """The places of equal numbers, group by group."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


@lru_cache(maxsize=65536)
def _axis_arcs(
    states: tuple[State, ...],
    pads: tuple[float, ...],
    whole_bytes: float,
    grad: bool,
    degree: int,
    link: Link,
    cluster: Cluster,
    forward_only: bool,
) -> np.ndarray:
    """Seconds between states of one axis, written as they are on the local tensor; ``pads`` makes up uneven pieces."""

    def seconds(a: int, b: int) -> float:
        moved = whole_bytes * pads[a] * pads[b]
        return conversion_seconds(
            states[a], states[b], moved, degree, link, cluster, grad=grad, forward_only=forward_only
        )

    return np.array([[seconds(a, b) for b in range(len(states))] for a in range(len(states))])
