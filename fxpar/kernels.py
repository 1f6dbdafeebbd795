"""The native border: kernels, each as readable numpy and, when built, as ``fxpar._native``; equal to the last bit.

In: arrays. Out: arrays. Here is elimination; :mod:`fxpar.tree_kernels` has those on graphs of states. The meaning of
the numbers is for :mod:`fxpar.cost.trees` and :mod:`fxpar.solver` to know.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from fxpar.errors import SolverError

try:
    _native: Any = import_module("fxpar._native")
except ModuleNotFoundError:
    _native = None
except ImportError as error:  # built, and broken: planning would be fifty times slower without a word
    warnings.warn(
        f"fxpar._native does not load ({error}); the slow numpy kernels run: install fxpar again", stacklevel=2
    )
    _native = None

#: Which implementation runs unless one is asked for: ``"native"`` if the extension was built, else ``"numpy"``.
DEFAULT = "numpy" if _native is None else "native"


def native() -> Any:
    """The native module; :class:`SolverError` if it was not built."""
    if _native is None:
        raise SolverError("the native core was not built; install fxpar where pybind11 and a C++17 compiler are")
    return _native


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
    if which(implementation) == "native":
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


def which(implementation: str | None) -> str:
    """``"native"`` or ``"numpy"``: the one that is asked for, or the default; raises :class:`SolverError`."""
    name = implementation or DEFAULT
    if name not in ("native", "numpy") or (name == "native" and _native is None):
        raise SolverError(f"kernel implementation {name!r} is not available; take 'numpy', or build the extension")
    return name
