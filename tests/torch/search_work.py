"""The work of a search, counted without a clock: nodes expanded, table entries touched, and lines of Python run.

In: a model and a mesh. Out: :class:`Work` by stage. Entries are counted where they are computed, by watching the
functions that compute them; lines are those of fxpar itself, so that a loop which touches no table is seen, too.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np

import fxpar
from fxpar import kernels, tree_kernels
from fxpar.capture import capture, program
from fxpar.capture.session import Session
from fxpar.capture.structure import Structure
from fxpar.capture.units import Units
from fxpar.cluster import Cluster
from fxpar.cost import price
from fxpar.layout import Mesh
from fxpar.search import Stages, search
from fxpar.solver import elimination
from fxpar.zoo import ZooModel

HOME = str(Path(fxpar.__file__).parent)

#: Stages of a search. Blocks are folded while the model is captured, so ``fold`` is counted there.
STAGES = ("fold", "space", "price", "solve", "fit")


@dataclass
class Work:
    """Entries and lines by stage; ``kinds`` has the entries by what they are."""

    entries: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    stage: str = "capture"

    def add(self, kind: str, count: float) -> None:
        """``count`` entries more in the present stage."""
        self.entries[self.stage] += int(count)
        self.kinds[kind] += int(count)

    def total(self, what: str, stages: Sequence[str] = STAGES) -> int:
        """Entries or lines of some stages together."""
        return sum(getattr(self, what)[stage] for stage in stages)


def search_work(
    model: ZooModel, axes: dict[str, int], limit_bytes: float, *, cluster: str = "h100", fold: bool = True
) -> Work:
    """What folding ``model`` and searching its optimum on a mesh within a memory limit comes to.

    Of a second search, whose caches are full: what the first one fills them with would hide what depth adds.
    """

    def run(stages: Stages | None) -> None:
        captured = capture(model.model, model.args, model.kwargs, whole=model.whole, fold=fold).program
        found = search(captured, Mesh.of(axes), Cluster.load(cluster), memory_limit_bytes=limit_bytes, stages=stages)
        assert found.status == "optimal"

    run(None)
    work = Work()
    with _watched(work), _lines_counted(work):
        run(_Named(work))
    return work


class _Named(Stages):
    """Tells the counter which stage runs."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.work.stage = name
        with super().stage(name):
            yield


@contextmanager
def _lines_counted(work: Work) -> Iterator[None]:
    lines = work.lines

    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        lines[work.stage] += event == "line"
        return inside

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        return inside if frame.f_code.co_filename.startswith(HOME) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _watched(work: Work) -> Iterator[None]:
    """Every function that expands nodes or computes entries, watched."""

    def within(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, work.stage = work.stage, stage
            try:
                return function(*args, **kwargs)
            finally:
                work.stage = before

        return run

    def after(kind: str, function: Callable[..., Any], count: Callable[..., float]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            work.add(kind, count(result, *args))
            return result

        return run

    def bounds(costs: Sequence[np.ndarray], implementation: str | None = None) -> Any:
        return _WatchedBounds(work, original_bounds(costs, implementation), costs)

    original_bounds = tree_kernels.bounds
    space_module, search_module = sys.modules["fxpar.space"], sys.modules["fxpar.search"]
    replaced = [
        (Structure, "of", staticmethod(within("fold", Structure.of))),
        (Structure, "_walk", after("modules", Structure._walk, lambda *_: 1)),
        (program, "worth_folding", within("fold", program.worth_folding)),
        (Units, "call", within("fold", after("calls of blocks", Units.call, lambda *_: 1))),
        (Units, "_record", within("capture", Units._record)),
        (Units, "_append", within("capture", Units._append)),
        (sys.modules["fxpar.capture.modules"], "inline", within("capture", program.modules.inline)),
        (Session, "node", after("nodes recorded", Session.node, lambda *_: 1)),
        (Units, "merged", within("fold", Units.merged)),
        (Units, "check_repeats", within("fold", Units.check_repeats)),
        (Units, "check_updates", within("fold", Units.check_updates)),
        (search_module, "space", after("ways and uses", search_module.space, _space_entries)),
        (space_module, "parameter_groups", after("parameters", space_module.parameter_groups, _names)),
        (price, "_slot_costs", after("costs of choices", price._slot_costs, lambda costs, *_: costs.size)),
        (price, "arcs_between", after("conversions", price.arcs_between, lambda arcs, *_: arcs.ends.size)),
        (price, "tree_table", after("table entries", price.tree_table, lambda table, *_: table.size)),
        (tree_kernels, "tree_costs", after("trees", tree_kernels.tree_costs, _tree_entries)),
        (kernels, "eliminate", after("eliminated", kernels.eliminate, _eliminated_entries)),
        (elimination, "_join", after("marginals", elimination._join, lambda table, *_: table.size)),
        (tree_kernels, "bounds", bounds),
    ]
    with ExitStack() as stack:
        for owner, name, watched in replaced:
            stack.enter_context(patch.object(owner, name, watched))
        yield


def _space_entries(space: Any, *_: Any) -> int:
    return sum(len(slot.ways) for slot in space.slots) + sum(1 + len(flow.consumers) for flow in space.flows)


def _names(groups: Mapping[Any, Sequence[str]], *_: Any) -> int:
    return sum(map(len, groups.values()))


def _tree_entries(
    costs: np.ndarray, graph: tree_kernels.Graph, roots: Any, sets: Sequence[Sequence[int]], *_: Any
) -> int:
    """Every state gets a cost for every subset of every set."""
    return costs.size + (len(graph[0]) - 1) * sum(1 << len(targets) for targets in sets)


def _eliminated_entries(
    _: Any, sizes: Sequence[int], scopes: Sequence[Sequence[int]], tables: Sequence[np.ndarray], order: Sequence[int]
) -> int:
    """The entries of the given tables, and of the one that each variable's elimination computes."""
    near: list[set[int]] = [{variable} for variable in range(len(sizes))]
    for scope in scopes:
        for variable in scope:
            near[variable] |= set(scope)
    total = sum(np.asarray(table).size for table in tables)
    for variable in order:
        total += math.prod(sizes[other] for other in near[variable])
        for other in near[variable] - {variable}:
            near[other] = (near[other] | near[variable]) - {variable}
    return total


class _WatchedBounds:
    """Bounds whose sweeps are counted: each visits every choice, table and tree."""

    def __init__(self, work: Work, bounds: tree_kernels.Bounds, costs: Sequence[np.ndarray]) -> None:
        self.work, self.bounds = work, bounds
        self.each = sum(len(row) for row in costs)
        self.states: dict[int, int] = {}

    def add_graph(self, start: np.ndarray, ends: np.ndarray, costs: np.ndarray) -> int:
        number = self.bounds.add_graph(start, ends, costs)
        self.states[number] = len(start) - 1
        return number

    def add_tree(self, graph: int, variables: Sequence[int], states: Sequence[np.ndarray]) -> None:
        self.each += sum(map(len, states)) + (self.states[graph] << (len(states) - 1))
        self.bounds.add_tree(graph, variables, states)

    def add_table(self, variables: Sequence[int], values: np.ndarray) -> None:
        self.each += values.size
        self.bounds.add_table(variables, values)

    def sweep(self, limit: float, backwards: bool) -> float:
        self.work.add("sweeps", self.each)
        return self.bounds.sweep(limit, backwards)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bounds, name)
