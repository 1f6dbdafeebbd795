"""The integer program: one-hot choices, flows for conversion trees; built with PuLP, solved in this process by HiGHS.

In: a :class:`~fxpar.solver.problem.CostTable`. Out: choices, and a proven bound. ``docs/milp.md`` has the formulas.
CBC, which PuLP brings along, stands in where ``highspy`` is not installed.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import pulp

from fxpar.cost.trees import tree_table
from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver.problem import CostTable, Factor, Variable

#: The largest cost in the program as the solver sees it: its tolerances (1e-6) are absolute, seconds are tiny.
LARGEST = 1e4

#: What HiGHS takes for the objective of a solution that it knows already: it drops what cannot be better.
CUTOFF = "objective_bound"

Terms = list[tuple[pulp.LpVariable, float]]


@dataclass(frozen=True)
class Incumbent:
    """The best choice found, a lower bound in seconds, whether the two were proven equal, and the solver's name."""

    choice: tuple[int, ...]
    bound: float
    proven: bool
    solver: str


@dataclass
class Model:
    """The PuLP problem while it is being built, with ``choices[variable][choice]``; costs are seconds times scale."""

    lp: pulp.LpProblem
    scale: float
    choices: list[list[pulp.LpVariable]] = field(default_factory=list)
    objective: Terms = field(default_factory=list)
    columns: int = 0
    rows: int = 0

    def column(self, cost: float, *, integer: bool = False) -> pulp.LpVariable:
        """A variable from 0 (to 1 if integer); an infinite cost fixes it at 0."""
        high = 0 if math.isinf(cost) else 1 if integer else None
        kind = pulp.LpInteger if integer else pulp.LpContinuous
        column = self.lp.add_variable(f"v{self.columns}", 0, high, kind)
        self.columns += 1
        self.objective.append((column, 0.0 if math.isinf(cost) else cost * self.scale))
        return column

    def row(self, terms: Terms, sense: int, right: float) -> None:
        """The constraint ``sum(terms) sense right``."""
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, f"c{self.rows}", right))
        self.rows += 1


def build(problem: CostTable) -> Model:
    """The integer program; it has :meth:`CostTable.size` variables and constraints."""
    model = Model(pulp.LpProblem("fxpar", pulp.LpMinimize), scale_of(problem))
    for variable in problem.variables:
        add_variable(model, variable)
    for factor in problem.factors:
        if not factor.is_tree:
            add_table(model, factor)
        elif factor.reads == 1:
            _edge(model, factor)
        else:
            _flows(model, factor)
    model.lp.setObjective(pulp.LpAffineExpression(model.objective))
    return model


def add_variable(model: Model, variable: Variable) -> None:
    """A variable per choice, one of which is taken."""
    one_hot = [model.column(float(cost), integer=True) for cost in variable.costs]
    model.choices.append(one_hot)
    model.row([(column, 1.0) for column in one_hot], pulp.LpConstraintEQ, 1)


def add_table(model: Model, factor: Factor) -> None:
    """A variable per finite entry; with each choice, the entries that have it sum to that choice."""
    entries = np.argwhere(np.isfinite(factor.values))
    columns = [model.column(float(factor.values[tuple(entry)])) for entry in entries]
    for axis, number in enumerate(factor.variables):
        sums: list[Terms] = [[(choice, -1.0)] for choice in model.choices[number]]
        for entry, column in zip(entries, columns, strict=True):
            sums[entry[axis]].append((column, 1.0))
        for terms in sums:
            model.row(terms, pulp.LpConstraintEQ, 0)


def _edge(model: Model, factor: Factor) -> None:
    """The tree of one consumer is a path: a variable per pair of states, which sum to either side's choice."""
    produced, needed = np.unique(factor.states[0]), np.unique(factor.states[1])
    costs = factor.weight * tree_table(factor.conversions, produced, [needed])
    pairs = [[model.column(float(cost)) for cost in row] for row in costs]
    for at, made in enumerate(produced):
        terms = _choosing(model, factor, 0, 0, int(made), -1.0)
        model.row(terms + [(column, 1.0) for column in pairs[at]], pulp.LpConstraintEQ, 0)
    for at, need in enumerate(needed):
        terms = _choosing(model, factor, 1, 0, int(need), -1.0)
        model.row(terms + [(row[at], 1.0) for row in pairs], pulp.LpConstraintEQ, 0)


def _flows(model: Model, factor: Factor) -> None:
    """Each reader draws a flow of one from the produced state along the arcs; an arc that any uses is paid once."""
    between = factor.conversions
    arcs = list(zip(between.sources.tolist(), between.ends.tolist(), strict=True))
    paid: list[pulp.LpVariable] | None = None
    for axis in range(1, len(factor.variables)):
        for use in range(factor.states[axis][:1].size):
            if paid is None:
                paid = [model.column(factor.weight * float(seconds)) for seconds in between.seconds]
            flow = [model.column(0.0) for _ in arcs]
            for state in range(len(between)):
                terms = _choosing(model, factor, 0, 0, state, 1.0) + _choosing(model, factor, axis, use, state, -1.0)
                terms += [(column, 1.0) for arc, column in zip(arcs, flow, strict=True) if arc[1] == state]
                terms += [(column, -1.0) for arc, column in zip(arcs, flow, strict=True) if arc[0] == state]
                model.row(terms, pulp.LpConstraintEQ, 0)
            for column, arc in zip(flow, paid, strict=True):
                model.row([(column, 1.0), (arc, -1.0)], pulp.LpConstraintLE, 0)


def _choosing(model: Model, factor: Factor, axis: int, use: int, state: int, sign: float) -> Terms:
    """The choices of a factor's variable that give ``state`` at its ``use``."""
    states = factor.states[axis].reshape(len(factor.states[axis]), -1)[:, use]
    columns = model.choices[factor.variables[axis]]
    return [(column, sign) for column, found in zip(columns, states, strict=True) if found == state]


def scale_of(problem: CostTable) -> float:
    largest = 0.0
    for costs in [variable.costs for variable in problem.variables] + [
        factor.values if factor.arcs is None else factor.weight * factor.conversions.seconds
        for factor in problem.factors
    ]:
        finite = np.abs(costs[np.isfinite(costs)])
        largest = max(largest, float(finite.max(initial=0.0)))
    return LARGEST / largest if largest > 0 else 1.0


def solve_milp(problem: CostTable, time_limit_seconds: float, below: float = math.inf) -> Incumbent | None:
    """The best choice found within the time limit, or ``None`` if there was not time for any.

    Choices that cost ``below`` or more are of no interest: :class:`InfeasibleError` if all do.
    Raises :class:`InfeasibleError`, or :class:`SolverError` if there is no solver.
    """
    if not problem.variables:
        return Incumbent((), 0.0, True, "nothing left")
    model = build(problem)
    name, solver = _solver(time_limit_seconds)
    if name == "HiGHS" and math.isfinite(below):
        solver.optionsDict[CUTOFF] = below * model.scale
    model.lp.solve(solver)
    if model.lp.status == pulp.LpStatusInfeasible:
        names = ", ".join(variable.name for variable in problem.variables[:4])
        raise InfeasibleError(f"no choices of {names} fit together; loosen what is asked of them")
    values = [[column.value() or 0.0 for column in one_hot] for one_hot in model.choices]
    choice = tuple(int(np.argmax(row)) for row in values)
    cost = problem.cost(choice)
    if math.isinf(cost) or any(abs(max(row) - 1.0) > 1e-3 for row in values):
        return None
    proven = model.lp.sol_status == pulp.LpSolutionOptimal
    if proven and cost >= below:  # HiGHS calls optimal whatever it met there
        raise InfeasibleError(f"no choice costs less than {below:g}")
    bound = cost if proven else floor(problem)
    if name == "HiGHS" and not proven:
        bound = max(bound, bound_of(model, name))
    return Incumbent(choice, min(bound, cost), proven, name)


def floor(problem: CostTable) -> float:
    """A lower bound from looking at every cost alone."""
    return math.fsum(
        [float(variable.costs.min()) for variable in problem.variables]
        + [float(factor.values.min()) for factor in problem.factors if factor.arcs is None]
    )


def bound_of(model: Model, solver: str) -> float:
    """What a solved model's optimum is at least, in seconds."""
    if solver != "HiGHS":
        optimal = model.lp.sol_status == pulp.LpSolutionOptimal
        return (model.lp.objective.value() or 0.0) / model.scale if optimal else -math.inf
    return model.lp.solverModel.getInfo().mip_dual_bound / model.scale


def _solver(time_limit_seconds: float, gap: float = 1e-9) -> tuple[str, pulp.LpSolver]:
    """HiGHS, or CBC where there is no HiGHS, and its name; raises :class:`SolverError` if there is neither."""
    try:
        import highspy
    except ImportError:
        return "CBC", _cbc(time_limit_seconds, gap)

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:  # noqa: N802  (from the constructor; it would print a banner)
            self.silent()
            super().enableCallbacks()

    class InProcess(pulp.HiGHS):
        def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802
            lp.solverModel = Silent()
            for option, value in {"threads": 1, **self.optionsDict}.items():
                lp.solverModel.setOptionValue(option, value)

    tight = dict.fromkeys(("mip_abs_gap", "mip_feasibility_tolerance"), 1e-9) | {"mip_rel_gap": gap}
    return "HiGHS", InProcess(threads=1, msg=False, time_limit=float(time_limit_seconds), **tight)


def _cbc(time_limit_seconds: float, gap: float = 1e-9) -> pulp.LpSolver:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the one that PuLP brings along is to go in PuLP 4
        for make in (pulp.COIN_CMD, pulp.PULP_CBC_CMD):
            cbc = make(msg=False, timeLimit=time_limit_seconds, threads=1, gapRel=gap, gapAbs=1e-9)
            if cbc.available():
                return cbc
    raise SolverError("there is no MILP solver: install highspy (pip install highspy)")
