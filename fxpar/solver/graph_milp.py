"""The integer program of a reduced strategy graph: one-hot choices, tight edges, memory rows only where they bind.

In: the reduced graph as the native core exports it. Out: choices, and a proven bound. ``docs/milp.md`` has the formulas
of the one-hot edges. Memory rows are added when a solution breaks them. HiGHS begins with the cost of the best choice
known as if it had found it, and stops as soon as its bound shows that nothing is cheaper.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pulp

from fxpar.solver.milp import CUTOFF, LARGEST, _solver

#: Memory rows added at once, those broken most.
ROWS_AT_ONCE = 20

#: HiGHS' bounds are right to this part of them; of costs beyond 5e8 an optimum is proven to this part only.
TOLERANCE = 1e-9

#: The graph is reduced already, and there is a good choice: what HiGHS would do first takes longer than its root does.
OPTIONS = {"presolve": "off", "mip_heuristic_run_feasibility_jump": False}

#: After an interruption HiGHS gets this long to notice it.
GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class Remainder:
    """The reduced graph: per variable ``costs`` and held parts ``(from, to, usages)``, edges ``(a, b, matrix)``.

    ``room[t]`` is what may be held at moment ``t``; ``prices[t]`` is what the relaxation pays for it.
    """

    costs: tuple[np.ndarray, ...]
    held: tuple[tuple[tuple[int, int, np.ndarray], ...], ...]
    edges: tuple[tuple[int, int, np.ndarray], ...]
    room: np.ndarray
    prices: np.ndarray
    constant: int

    @classmethod
    def of(cls, exported: tuple[Any, ...]) -> Remainder:
        """From what the native core exports."""
        variables, edges, room, prices, constant = exported
        costs = tuple(np.array(costs, dtype=np.int64) for costs, _ in variables)
        held = tuple(tuple((a, b, np.array(usage, dtype=np.int64)) for a, b, usage in parts) for _, parts in variables)
        tables = tuple(
            (a, b, np.array(matrix, dtype=np.int64).reshape(len(costs[a]), len(costs[b]))) for a, b, matrix in edges
        )
        return cls(costs, held, tables, np.array(room, dtype=np.int64), np.array(prices), constant)

    def excess(self, choice: list[int]) -> np.ndarray:
        """What a choice holds at every moment beyond the room."""
        change = np.zeros(len(self.room) + 1, dtype=np.int64)
        for parts, pick in zip(self.held, choice, strict=True):
            for start, end, usage in parts:
                change[start] += usage[pick]
                change[end] -= usage[pick]
        return np.cumsum(change)[:-1] - self.room


@dataclass(frozen=True)
class Proof:
    """The best choice found, if any, and a lower bound of the cost of every choice; infinite if none is cheaper.

    ``interrupted``: Ctrl-C ended the search.
    """

    choice: list[int] | None
    bound: float
    interrupted: bool = False


@dataclass
class _Model:
    lp: pulp.LpProblem
    unit: float
    objective: list[tuple[pulp.LpVariable, float]] = field(default_factory=list)
    choices: list[list[pulp.LpVariable | None]] = field(default_factory=list)
    names: int = 0

    def column(self, cost: int, *, integer: bool) -> pulp.LpVariable:
        kind = pulp.LpInteger if integer else pulp.LpContinuous
        column = self.lp.add_variable(f"v{self.names}", 0, 1 if integer else None, kind)
        self.names += 1
        if cost:
            self.objective.append((column, cost / self.unit))
        return column

    def choice(self) -> list[int] | None:
        """What the solution chooses, if there is one."""
        values = [[column.value() or 0.0 if column is not None else 0.0 for column in row] for row in self.choices]
        return None if any(max(row) < 0.5 for row in values) else [int(np.argmax(row)) for row in values]

    def row(self, terms: list[tuple[pulp.LpVariable, float]], sense: int, right: float) -> None:
        self.names += 1
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, f"c{self.names}", right))


def prove(graph: Remainder, below: float, time_limit_seconds: float, stopped: Callable[[], bool]) -> Proof:
    """The cheapest choice, if it costs less than ``below``, or as much of a bound as there is time for.

    It ends soon when ``stopped``. Raises :class:`fxpar.errors.SolverError` if there is no solver.
    """
    start = time.perf_counter()
    model = _build(graph, below)
    priced = np.flatnonzero(graph.prices > 0)
    _memory_rows(model, graph, priced[np.argsort(-graph.prices[priced], kind="stable")][:ROWS_AT_ONCE])
    bound = 0.0
    while True:
        left = time_limit_seconds - (time.perf_counter() - start)
        if left <= 0:
            return Proof(None, bound)
        name, solver = _solver(left)
        watch = _Watch((least_of_interest(below) - graph.constant) / model.unit, stopped)
        if name == "HiGHS":
            solver.optionsDict |= OPTIONS | {CUTOFF: watch.enough}
            solver.callSolver = partial(_run, watch=watch)  # PuLP's own would wait, deaf to Ctrl-C
        try:
            model.lp.solve(solver)
        except _Deaf:
            return Proof(None, bound, watch.interrupted)
        if watch.reached or model.lp.status == pulp.LpStatusInfeasible:
            return Proof(None, float("inf"))
        if name == "HiGHS":
            bound = max(bound, model.lp.solverModel.getInfo().mip_dual_bound * model.unit + graph.constant)
        choice = model.choice()
        if choice is None:
            return Proof(None, bound, watch.interrupted)
        excess = graph.excess(choice)
        broken = np.flatnonzero(excess > 0)
        proven = model.lp.sol_status == pulp.LpSolutionOptimal
        if not len(broken):
            cost = pulp.value(model.lp.objective) * model.unit + graph.constant
            if proven and cost >= least_of_interest(below):  # HiGHS calls optimal whatever it met there
                return Proof(None, float("inf"))
            return Proof(choice, max(bound, cost) if proven else bound, watch.interrupted)
        if not proven:
            return Proof(None, bound, watch.interrupted)
        _memory_rows(model, graph, broken[np.argsort(-excess[broken], kind="stable")][:ROWS_AT_ONCE])


def least_of_interest(below: float) -> float:
    """From here on costs are as good as ``below``: they are whole numbers, and known to :data:`TOLERANCE`.

    >>> least_of_interest(1500.0), least_of_interest(1e12) < 1e12 - 500
    (1499.5, True)
    """
    return below - max(0.5, TOLERANCE * below)


@dataclass
class _Watch:
    """What ends a run of HiGHS early: a bound of ``enough``, being ``stopped``, or an interruption."""

    enough: float
    stopped: Callable[[], bool]
    reached: bool = False
    interrupted: bool = False

    def __call__(self, kind: Any, message: str, seen: Any, answer: Any, data: Any) -> None:
        """HiGHS asks now and then whether to go on."""
        self.reached = self.reached or seen.mip_dual_bound >= self.enough
        if self.reached or self.interrupted or self.stopped():
            answer.user_interrupt = True


class _Deaf(Exception):  # noqa: N818  (it ends a program, and is no error of anyone)
    """HiGHS goes on, though it was asked to stop."""


def _run(lp: pulp.LpProblem, watch: _Watch) -> None:
    """Run HiGHS in a thread of its own, and wait; :class:`_Deaf` if it does not stop when asked to."""
    import highspy

    lp.solverModel.setCallback(watch, None)
    lp.solverModel.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    thread = threading.Thread(target=lp.solverModel.run, daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not watch.stopped():
            thread.join(0.1)
    except KeyboardInterrupt:
        watch.interrupted = True
    thread.join(GRACE_SECONDS)
    if thread.is_alive():  # between two questions HiGHS may solve for a long time; it is left to itself
        raise _Deaf


def _build(graph: Remainder, below: float) -> _Model:
    spare = below - graph.constant
    largest = max(
        (int(part[part <= spare].max(initial=1)) for part in (*graph.costs, *(edge[2] for edge in graph.edges))),
        default=1,
    )
    model = _Model(pulp.LpProblem("fxpar", pulp.LpMinimize), largest / LARGEST)
    for costs in graph.costs:
        one_hot = [model.column(int(cost), integer=True) if cost <= spare else None for cost in costs]
        model.choices.append(one_hot)
        model.row([(column, 1.0) for column in one_hot if column is not None], pulp.LpConstraintEQ, 1)
    for a, b, matrix in graph.edges:
        sums = [[(column, -1.0)] if column is not None else [] for column in model.choices[a]]
        sums_b = [[(column, -1.0)] if column is not None else [] for column in model.choices[b]]
        for i, k in np.argwhere(matrix <= spare):
            if model.choices[a][i] is None or model.choices[b][k] is None:
                continue
            column = model.column(int(matrix[i, k]), integer=False)
            sums[i].append((column, 1.0))
            sums_b[k].append((column, 1.0))
        for terms in sums + sums_b:
            if terms:
                model.row(terms, pulp.LpConstraintEQ, 0)
    model.lp.setObjective(pulp.LpAffineExpression(model.objective))
    return model


def _memory_rows(model: _Model, graph: Remainder, moments: np.ndarray) -> None:
    """The limit at some moments, in units of the room."""
    for moment in moments.tolist():
        terms: list[tuple[pulp.LpVariable, float]] = []
        unit = max(int(graph.room[moment]), 1)
        for one_hot, parts in zip(model.choices, graph.held, strict=True):
            for start, end, usage in parts:
                if start <= moment < end:
                    terms += [
                        (column, int(held) / unit)
                        for column, held in zip(one_hot, usage, strict=True)
                        if column is not None and held
                    ]
        model.row(terms, pulp.LpConstraintLE, int(graph.room[moment]) / unit)
