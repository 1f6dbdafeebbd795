"""Seconds of single conversions between the layouts of a value on a mesh: each changes the state on one axis.

In: a value, its layouts, the mesh and its links. Out: :class:`~fxpar.cost.trees.Arcs`. What one conversion costs is
:mod:`fxpar.cost.comm`, and what several cost together :mod:`fxpar.cost.trees`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeVar

import numpy as np

from fxpar.cluster import Cluster, Link
from fxpar.cost.comm import conversion_seconds
from fxpar.cost.trees import Arcs
from fxpar.graph import Value
from fxpar.layout import Layout, Mesh, State, local_layout, padding, without_gradient


def plain_layout(layout: Layout, meta: Value) -> Layout:
    """``layout`` with ``R`` written ``I`` if the value carries no gradient."""
    return layout if meta.grad else tuple(without_gradient(state) for state in layout)


Item = TypeVar("Item", bound=Hashable)


def arcs_between(
    layouts: Sequence[Layout],
    meta: Value,
    mesh: Mesh,
    links: Sequence[Link],
    cluster: Cluster,
    *,
    forward_only: bool = False,
) -> Arcs:
    """Seconds of the single conversions between ``layouts``, by number. With ``forward_only`` backward is left out.

    A conversion on one axis moves a rank's piece, which is the smaller and the more contiguous the more the other axes
    have cut; so it is priced for the local tensor, with the states as they are there.

    >>> from fxpar.layout import I, S
    >>> toy = Cluster.load("toy")
    >>> mesh = Mesh.of({"dp": 2, "tp": 2})
    >>> links = toy.axis_links(mesh)
    >>> found = arcs_between([(S(0), S(1)), (S(0), I), (I, I)], Value((8, 8), "float32"), mesh, links, toy)
    >>> list(zip(found.sources.tolist(), found.ends.tolist()))
    [(0, 1), (1, 0), (1, 2), (2, 1)]
    """
    degrees = mesh.degrees
    states, codes = numbered(layouts)
    parts = np.array([[degree / padding(meta.shape, state, degree) if state.kind == "S" else 1.0
                       for degree in degrees] for state in states])  # fmt: skip
    shares = parts[codes, range(len(degrees))]
    places = codes * len(states) ** np.arange(len(degrees))
    kinds, pieces = codes, [(state, state) for state in states]
    if any(state.parts > 1 for state in states):  # only these look otherwise on a piece
        local = [local_layout(layout, degrees) for layout in layouts]
        pieces, kinds = numbered([tuple(zip(*pair, strict=True)) for pair in zip(layouts, local, strict=True)])
    parcels = []
    for axis, (degree, link) in enumerate(zip(degrees, links, strict=True)):
        share, size = np.unique(np.delete(shares, axis, axis=1).prod(axis=1), return_inverse=True)
        own, kind = np.unique(kinds[:, axis], return_inverse=True)
        pads = tuple(padding(meta.shape, pieces[number][0], degree) for number in own.tolist())
        here = tuple(pieces[number][1] for number in own.tolist())
        tables = np.array([
            _axis_arcs(here, pads, meta.bytes / part, meta.grad, degree, link, cluster, forward_only)
            for part in share.tolist()
        ])  # fmt: skip
        src, dst = _pairs(places.sum(axis=1) - places[:, axis])  # layouts that differ on this axis only
        seconds = tables[size[src], kind[src], kind[dst]]
        there = np.isfinite(seconds) & (src != dst)
        parcels.append((src[there], dst[there], seconds[there]))
    sources, ends, found = (np.concatenate(column) for column in zip(*parcels, strict=True))
    order = np.argsort(sources * len(layouts) + ends)
    start = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=len(layouts)))])
    return Arcs(start.astype(np.int32), ends[order].astype(np.int32), found[order])


def arc_seconds(layouts: Sequence[Layout], meta: Value, mesh: Mesh, cluster: Cluster) -> np.ndarray:
    """The seconds of :func:`arcs_between` as a matrix, infinite where there is no single conversion."""
    arcs = arcs_between(layouts, meta, mesh, cluster.axis_links(mesh), cluster)
    matrix = np.full((len(layouts), len(layouts)), np.inf)
    np.fill_diagonal(matrix, 0.0)
    matrix[arcs.sources, arcs.ends] = arcs.seconds
    return matrix


def numbered(rows: Sequence[tuple[Item, ...]]) -> tuple[list[Item], np.ndarray]:
    """The items in rows of equal length, each once, and ``[rows, length]``: which they are."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys(chain.from_iterable(rows)))}
    every = map(numbers.__getitem__, chain.from_iterable(rows))
    return list(numbers), np.fromiter(every, np.int64, len(rows) * len(rows[0])).reshape(len(rows), -1)


def _pairs(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of places with equal numbers."""
    order = np.argsort(numbers, kind="stable")
    first = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    size = np.diff(first, append=len(order))
    each = np.repeat(size, size)  # of every place in order, how many are equal to it
    before = np.cumsum(each) - each
    within = np.arange(each.sum()) - np.repeat(before, each)
    return np.repeat(order, each), order[np.repeat(np.repeat(first, size), each) + within]


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
