"""Seconds of collectives and of conversions between states, by the alpha-beta model of a ring.

In: a step's kind, the bytes of the *whole* tensor (not of a rank's piece), the axis' degree and its
:class:`~fxpar.cluster.Link`. Out: seconds. Which steps a conversion takes is :data:`fxpar.layout.CONVERSIONS`.
"""

from __future__ import annotations

import math

from fxpar.cluster import Cluster, Link
from fxpar.errors import LayoutError
from fxpar.graph import Value
from fxpar.layout import COLLECTIVES, CONVERSIONS, R, State, can_be, conversion, padding


def ring_steps(kind: str, degree: int) -> int:
    """How many messages a rank sends one after the other in a collective; raises :class:`LayoutError`."""
    if kind not in COLLECTIVES:
        raise LayoutError(f"{kind!r} is not a collective; there are {', '.join(COLLECTIVES)}")
    return (2 if kind == "all_reduce" else 1) * (degree - 1)


def wire_bytes(kind: str, whole_bytes: float, degree: int) -> float:
    """Bytes that each rank sends in a collective on a tensor of ``whole_bytes``.

    All-reduce ``2 (n-1)/n B``, all-gather and reduce-scatter ``(n-1)/n B``, all-to-all ``(n-1)/n^2 B``
    (Thakur, Rabenseifner and Gropp, 2005). Raises :class:`LayoutError` on another kind.

    >>> [wire_bytes(kind, 1600, 4) for kind in ("all_reduce", "all_gather", "all_to_all")]
    [2400.0, 1200.0, 300.0]
    """
    message = whole_bytes / degree / (degree if kind == "all_to_all" else 1)
    return ring_steps(kind, degree) * message


def collective_seconds(kind: str, whole_bytes: float, degree: int, link: Link) -> float:
    """Seconds of a collective: ``alpha`` for each message that a rank sends, and its bytes over the link's rate."""
    return ring_steps(kind, degree) * link.alpha_seconds + wire_bytes(kind, whole_bytes, degree) / link.bytes_per_second


def step_seconds(
    step: str, whole_bytes: float, degree: int, link: Link, cluster: Cluster, *, copies: float = 0.0
) -> float:
    """Seconds of one step of a conversion: a launch, the bytes on the link, the bytes moved in memory.

    ``copies`` counts how often a collective also rewrites the tensor in memory, because its pieces are not contiguous.
    """
    if step == "none" or degree == 1:
        return 0.0
    piece = whole_bytes / degree
    if step == "slice":  # reads and writes a piece
        moved = 2 * piece
    elif step == "pad":  # reads a piece, writes the whole
        moved = piece + whole_bytes
    elif step == "keep":  # reads and writes the whole
        moved = 2 * whole_bytes
    else:
        moved = 2 * whole_bytes * copies
    wire = collective_seconds(step, whole_bytes, degree, link) if step in COLLECTIVES else 0.0
    return cluster.launch_seconds + wire + moved / cluster.memory_bytes_per_second


def arc_seconds(src: State, dst: State, value: Value, degree: int, link: Link, cluster: Cluster) -> float:
    """Seconds to convert ``value`` from ``src`` to ``dst`` in one go: forward and, if it carries one, its gradient.

    Infinite where there is no such step: a state that the value cannot be in, ``R`` of a value without
    gradient, anything but ``I`` from ``M``, two cuts of one dim, or a strided cut exchanged for another cut. Those are
    reached through other states.

    >>> from fxpar.layout import I, S
    >>> toy = Cluster.load("toy")
    >>> arc_seconds(S(0), S(0), Value((8,), "float32"), 4, toy.link(4), toy)
    0.0
    """
    if not (can_be(value.shape, src, degree) and can_be(value.shape, dst, degree)):
        return math.inf
    whole_bytes = value.bytes * padding(value.shape, src, degree) * padding(value.shape, dst, degree)
    return conversion_seconds(src, dst, whole_bytes, degree, link, cluster, grad=value.grad)


def conversion_seconds(
    src: State,
    dst: State,
    whole_bytes: float,
    degree: int,
    link: Link,
    cluster: Cluster,
    *,
    grad: bool,
    forward_only: bool = False,
) -> float:
    """Like :func:`arc_seconds`, for any tensor of ``whole_bytes`` that both states divide."""
    if not grad and R in (src, dst):
        return math.inf
    if src == dst:
        return 0.0
    if (src.kind, dst.kind) not in CONVERSIONS:
        return math.inf
    cuts = [state for state in (src, dst) if state.kind == "S"]
    if len(cuts) == 2 and (src.dim == dst.dim or src.parts > 1 or dst.parts > 1):
        return math.inf
    # Collectives join and split pieces along dim 0. Any other cut takes one more pass over the tensor; an exchange
    # of cuts takes one over a piece before and one after.
    copies = 2.0 / degree if len(cuts) == 2 else float(any(cut.dim > 0 or cut.parts > 1 for cut in cuts))
    steps = conversion(src, dst)
    total = step_seconds(steps.forward, whole_bytes, degree, link, cluster, copies=copies)
    if grad and not forward_only:
        total += step_seconds(steps.backward, whole_bytes, degree, link, cluster, copies=copies)
    return total
