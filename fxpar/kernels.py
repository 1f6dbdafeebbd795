"""The native border: two kernels, each as readable numpy and, when built, as ``fxpar._native``; equal to the last bit.

In: arrays. Out: arrays. The meaning of the numbers is :mod:`fxpar.cost.trees`' and :mod:`fxpar.solver`'s to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from fxpar.errors import SolverError

try:
    _native: Any = import_module("fxpar._native")
except ImportError:
    _native = None

#: Which implementation runs unless one is asked for: ``"native"`` if the extension was built, else ``"numpy"``.
DEFAULT = "numpy" if _native is None else "native"

MAX_TARGETS = 20


def native() -> Any:
    """The native module; :class:`SolverError` if it was not built."""
    if _native is None:
        raise SolverError("the native core was not built; install fxpar where pybind11 and a C++17 compiler are")
    return _native


def closure(arcs: np.ndarray) -> np.ndarray:
    """Cheapest path costs ``[S, S]`` between all pairs of ``S`` nodes (Floyd and Warshall)."""
    dist = np.array(arcs, dtype=np.float64)
    np.fill_diagonal(dist, 0.0)
    for k in range(len(dist)):
        np.minimum(dist, dist[:, k, None] + dist[None, k, :], out=dist)
    return dist


def conversion_costs(
    arcs: np.ndarray, most: int, targets: Sequence[int] | np.ndarray, implementation: str | None = None
) -> np.ndarray:
    """Cost ``[S, 2^T]`` of the cheapest tree from each of ``S`` nodes to each set of the ``T`` ``targets``.

    ``arcs[a, b]`` is the cost of the arc from ``a`` to ``b`` (not negative, may be infinite). Bit ``i`` of a set is
    ``targets[i]``. Sets of more than ``most`` targets are left infinite. (Dreyfus and Wagner, 1971.)
    Raises :class:`SolverError` on arcs that are not square, negative or nan, and on more than 20 targets.
    """
    arcs = np.ascontiguousarray(arcs, dtype=np.float64)
    wanted = np.ascontiguousarray(targets, dtype=np.int32)
    if arcs.ndim != 2 or arcs.shape[0] != arcs.shape[1] or not (arcs >= 0).all():
        raise SolverError(f"arc costs of shape {arcs.shape} must be square and nowhere negative or nan")
    if len(wanted) > MAX_TARGETS or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(arcs)):
        raise SolverError(f"{len(wanted)} targets among {len(arcs)} nodes; at most {MAX_TARGETS}, each a node's number")
    if _which(implementation) == "native":
        return _native.conversion_costs(arcs, int(most), wanted)
    return _conversion_costs_numpy(arcs, int(most), wanted)


def _conversion_costs_numpy(arcs: np.ndarray, most: int, targets: np.ndarray) -> np.ndarray:
    dist = closure(arcs)
    costs = np.full((len(dist), 1 << len(targets)), np.inf)
    costs[:, 0] = 0.0
    if most < 1 or len(targets) == 0:
        return costs
    costs[:, 1 << np.arange(len(targets))] = dist[:, targets]
    for level in range(2, min(most, len(targets)) + 1):
        whole, some = _splits(len(targets), level)
        merged = (costs[:, some] + costs[:, whole[:, None] ^ some]).min(axis=2)  # [S, sets]: two trees from one node
        costs[:, whole] = (dist[:, :, None] + merged[None]).min(axis=1)  # [S, sets]: a path to where they part
    return costs


@lru_cache(maxsize=256)
def _splits(count: int, level: int) -> tuple[np.ndarray, np.ndarray]:
    """All sets of ``level`` out of ``count`` bits ``[M]``, and for each one half of every way to part it ``[M, J]``."""
    bits = 1 << np.array(list(combinations(range(count), level)), dtype=np.int64)
    pattern = np.arange(1, 1 << (level - 1))[:, None] >> np.arange(level) & 1
    return bits.sum(axis=1), bits @ pattern.T


def eliminate(
    sizes: Sequence[int],
    scopes: Sequence[Sequence[int]],
    tables: Sequence[np.ndarray],
    order: Sequence[int],
    implementation: str | None = None,
) -> tuple[list[int], float]:
    """A choice for every variable that minimises the sum of ``tables``, and that sum, by variable elimination.

    Variable ``v`` has ``sizes[v]`` choices; axis ``i`` of ``tables[f]`` is variable ``scopes[f][i]``; ``order`` lists
    every variable once. Tables are added in their order, a variable's tables give one new table at the end, and among
    equal choices the first is taken, so the answer is the same everywhere. (Bertele and Brioschi, 1972.)
    """
    if _which(implementation) == "native":
        flat = [np.asarray(table, dtype=np.float64, order="C") for table in tables]
        try:
            return _native.eliminate(list(sizes), [list(scope) for scope in scopes], flat, list(order))
        except (ValueError, IndexError) as error:
            raise SolverError(f"cannot eliminate: {error}") from error
    return _eliminate_numpy(sizes, scopes, tables, order)


def _eliminate_numpy(
    sizes: Sequence[int], scopes: Sequence[Sequence[int]], tables: Sequence[np.ndarray], order: Sequence[int]
) -> tuple[list[int], float]:
    live: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
    having: list[list[int]] = [[] for _ in sizes]
    steps: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    total, count = 0.0, 0

    def add(scope: tuple[int, ...], table: np.ndarray) -> None:
        nonlocal total, count
        if not scope:
            total += float(table)
            return
        live[count] = scope, table
        for variable in scope:
            having[variable].append(count)
        count += 1

    for scope, table in zip(scopes, tables, strict=True):
        add(tuple(scope), np.asarray(table, dtype=np.float64))
    for variable in order:
        parts = [live.pop(number) for number in having[variable] if number in live]
        if not parts:
            parts = [((variable,), np.zeros(sizes[variable]))]
        scope = tuple(sorted({other for part, _ in parts for other in part} - {variable}))
        table = join((*scope, variable), parts)
        best = table.argmin(axis=-1)
        steps.append((variable, scope, best))
        add(scope, table.min(axis=-1))
    choice = [0] * len(sizes)
    for variable, scope, best in reversed(steps):
        choice[variable] = int(best[tuple(choice[other] for other in scope)])
    return choice, total


def join(scope: Sequence[int], parts: Sequence[tuple[Sequence[int], np.ndarray]]) -> np.ndarray:
    """The sum of tables over ``scope``, which holds all their variables; added from the first to the last."""
    position = {variable: axis for axis, variable in enumerate(scope)}
    total: np.ndarray | None = None
    for variables, table in parts:
        axes = [position[variable] for variable in variables]
        if any(left > right for left, right in pairwise(axes)):
            table = table.transpose(sorted(range(len(axes)), key=axes.__getitem__))
            axes.sort()
        if len(axes) < len(scope):
            shape = [1] * len(scope)
            for axis, size in zip(axes, table.shape, strict=True):
                shape[axis] = size
            table = table.reshape(shape)
        total = table if total is None else total + table
    if total is None:
        raise SolverError("there is no table to add")
    return total


def _which(implementation: str | None) -> str:
    which = implementation or DEFAULT
    if which not in ("native", "numpy") or (which == "native" and _native is None):
        raise SolverError(f"kernel implementation {which!r} is not available; take 'numpy', or build the extension")
    return which
