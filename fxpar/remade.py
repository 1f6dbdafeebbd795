"""What a plan does not keep for backward but makes again: which tensors share one memory, and how each is made.

In: a graph and its plan. Out: for each layout that is made again, the layouts on the way to it. The rewritten graph,
the predicted collectives and the predicted memory all read it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.graph import Graph
from fxpar.layout import Layout, conversion
from fxpar.legality import plain
from fxpar.plans import GraphPlan

#: Layouts from the one a value is produced in to one that is made again.
Path = tuple[Layout, ...]


def remade(graph: Graph, plan: GraphPlan, degrees: Sequence[int]) -> dict[tuple[int, Layout], Path]:
    """By value and layout, the way to what is made again; ``R`` is written ``I`` where no gradient is carried.

    A conversion that does nothing leaves a tensor in its memory, so layouts that differ by such conversions only are
    kept or made again together: they have one path, that of the first of them.
    """
    found: dict[tuple[int, Layout], Path] = {}
    for value, wanted in plan.again.items():
        paths: dict[Layout, Path] = {}
        for src, dst in ((plain(a, graph, value), plain(b, graph, value)) for a, b in plan.trees[value]):
            before = paths.setdefault(src, (src,))
            paths.setdefault(dst, before if _does_nothing(src, dst, degrees) else (*before, dst))
        chosen = {paths[plain(layout, graph, value)] for layout in wanted}
        found |= {(value, at): path for at, path in paths.items() if path in chosen and len(path) > 1}
    return found


def _does_nothing(src: Layout, dst: Layout, degrees: Sequence[int]) -> bool:
    changed = [(a, b) for a, b, degree in zip(src, dst, degrees, strict=True) if a != b and degree > 1]
    return all(conversion(a, b).forward == "none" for a, b in changed)
