"""Seconds of operations and of the optimizer on one device, by the roofline model.

In: one rank's flops and bytes. Out: seconds. How many flops an operation takes is its rule's to say; what crosses the
network is :mod:`fxpar.cost.comm`.
"""

from __future__ import annotations

import numpy as np

from fxpar.cluster import Cluster

Numbers = float | np.ndarray

#: The gradient of a product takes two products (one per operand), and reads and writes about twice as much.
BACKWARD = 2.0

#: AdamW reads the parameter, its gradient and two moments, and writes the parameter and the moments.
ADAMW_PASSES = 7

#: Operations that only describe the same memory anew. (Those that must copy after all cost little beside the rest.)
VIEWS = frozenset(
    f"aten.{name}"
    for name in ("reshape.default", "permute.default", "expand.default", "slice.Tensor", "select.int", "detach.default")
)


def node_seconds(
    flops: Numbers, moved_bytes: Numbers, dtype: str, cluster: Cluster, *, op: str = "", grad: bool = False
) -> np.ndarray:
    """Seconds of one operation in a step: the larger of computing and moving, and at least a launch.

    ``flops`` and ``moved_bytes`` are what one rank computes, and reads and writes, forward: numbers, or arrays of one
    for each way of running it. With ``grad`` the backward pass is added. Views are free. (Williams, Waterman and
    Patterson, 2009.)

    >>> toy = Cluster.load("toy")
    >>> float(node_seconds(1e8, 8, "float32", toy)), float(node_seconds(1e8, 8, "float32", toy, grad=True))
    (1.0, 3.0)
    """
    if op in VIEWS:
        return np.zeros(np.broadcast(flops, moved_bytes).shape)
    total = _roofline(flops, moved_bytes, dtype, cluster)
    return total + _roofline(BACKWARD * flops, BACKWARD * moved_bytes, dtype, cluster) if grad else total


def optimizer_seconds(local_bytes: Numbers, cluster: Cluster) -> np.ndarray:
    """Seconds of AdamW on the ``local_bytes`` of a parameter that one rank keeps."""
    return np.maximum(cluster.launch_seconds, ADAMW_PASSES * local_bytes / cluster.memory_bytes_per_second)


def _roofline(flops: Numbers, moved_bytes: Numbers, dtype: str, cluster: Cluster) -> np.ndarray:
    busy = np.maximum(flops / cluster.peak(dtype), moved_bytes / cluster.memory_bytes_per_second)
    return np.maximum(cluster.launch_seconds, busy)
