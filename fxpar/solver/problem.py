"""The priced program as plain numbers: variables with choices, and factors that price choices together.

In: arrays of seconds. Out: :class:`CostTable`, which :func:`fxpar.solver.solve` takes, and :class:`Solution`.
What a choice means is the business of whoever built the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpar.cost.trees import set_costs
from fxpar.errors import SolverError


@dataclass(frozen=True, eq=False)
class Variable:
    """A decision: ``costs`` has the seconds of each choice; an infinite one may not be taken."""

    name: str
    costs: np.ndarray


@dataclass(frozen=True, eq=False)
class Factor:
    """Seconds of several choices together: a plain ``table``, or a conversion tree, or both (then they agree).

    Axis ``i`` of ``table`` is ``variables[i]``. A tree has conversion costs ``arcs[S, S]``; ``variables[0]`` produces
    the value, in state ``states[0][choice]``; each further variable needs it in ``states[i][choice]``, or in all of
    ``states[i][choice, :]`` if it reads it several times. A tree's seconds count ``weight`` times.
    """

    variables: tuple[int, ...]
    table: np.ndarray | None = None
    arcs: np.ndarray | None = None
    states: tuple[np.ndarray, ...] = ()
    weight: float = 1.0

    @property
    def is_tree(self) -> bool:
        return self.arcs is not None

    @property
    def reads(self) -> int:
        """Of a tree: how often its value is read, over all consumers."""
        return sum(states[:1].size for states in self.states[1:])

    @cached_property
    def trees(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of a tree: weighted seconds by producer's state and by set of states, and each consumer's sets."""
        assert self.arcs is not None
        costs, masks = set_costs(self.arcs, self.states[1:])
        return self.weight * costs, masks

    @cached_property
    def values(self) -> np.ndarray:
        """The table, computed from the tree if there is none; its size is the product of the numbers of choices."""
        if self.table is not None:
            return self.table
        costs, masks = self.trees
        union = np.zeros((), dtype=np.int64)
        for mask in masks:
            union = union[..., None] | mask
        return costs[self.states[0].reshape((-1,) + (1,) * union.ndim), union[None]]

    def at(self, choices: Sequence[int]) -> float:
        """Seconds of one choice for each of ``variables``, in order."""
        if self.table is not None:
            return float(self.table[tuple(choices)])
        costs, masks = self.trees
        union = 0
        for mask, choice in zip(masks, choices[1:], strict=True):
            union |= int(mask[choice])
        return float(costs[self.states[0][choices[0]], union])

    def restrict(self, keep: Sequence[np.ndarray]) -> Factor:
        """The factor over fewer choices: ``keep`` has those of each variable."""
        table = None if self.table is None else self.table[np.ix_(*keep)]
        states = tuple(state[index] for state, index in zip(self.states, keep, strict=True)) if self.states else ()
        return Factor(self.variables, table, self.arcs, states, self.weight)


@dataclass(frozen=True, eq=False)
class CostTable:
    """Choose one entry of every variable so that the sum of their costs and of all factors is least.

    >>> Variable("a", np.array([0.0, 1.0])).name
    'a'
    """

    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...]

    def verify(self) -> CostTable:
        """Raise :class:`SolverError` unless all shapes fit and no number is nan or minus infinity; return self."""
        counts = self.counts
        for variable in self.variables:
            if variable.costs.ndim != 1 or not len(variable.costs) or not (variable.costs > -np.inf).all():
                raise SolverError(f"variable {variable.name}: costs {variable.costs} must be a row of numbers or inf")
        for number, factor in enumerate(self.factors):
            scope = factor.variables
            if len(set(scope)) != len(scope) or not all(0 <= variable < len(counts) for variable in scope):
                raise SolverError(f"factor {number} has variables {scope}; each must exist, and only once")
            names = ", ".join(self.variables[variable].name for variable in scope)
            shape = tuple(counts[variable] for variable in scope)
            if factor.table is not None and (factor.table.shape != shape or not (factor.table > -np.inf).all()):
                raise SolverError(f"factor on {names}: its table of {factor.table.shape} must be {shape} without nan")
            if factor.arcs is None:
                if factor.table is None:
                    raise SolverError(f"factor on {names} has neither a table nor a tree")
                continue
            if not 0 < factor.weight < math.inf or not (factor.arcs >= 0).all():
                raise SolverError(f"factor on {names}: its weight and arcs must be positive")
            if tuple(len(states) for states in factor.states) != shape:
                raise SolverError(f"factor on {names}: it needs the states of {shape} choices")
        return self

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of choices of each variable."""
        return tuple(len(variable.costs) for variable in self.variables)

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds of one choice per variable; the order of summation is fixed."""
        total = sum(float(variable.costs[index]) for variable, index in zip(self.variables, choice, strict=True))
        for factor in self.factors:
            total += factor.at([choice[variable] for variable in factor.variables])
        return total

    def size(self) -> tuple[int, int]:
        """Variables and constraints of the integer program of :mod:`fxpar.solver.milp`, by formula.

        A choice is a variable and a decision a constraint. A plain table has a variable per finite entry and a
        constraint per choice. The tree of one consumer has a variable per pair of states and a constraint per state.
        Any other has a flow per consumer on every finite arc, and a constraint per arc and per state.
        """
        columns, rows = sum(self.counts), len(self.counts)
        for factor in self.factors:
            if not factor.is_tree:
                columns += int(np.isfinite(factor.values).sum())
                rows += sum(factor.values.shape)
                continue
            assert factor.arcs is not None
            reads = factor.reads
            if reads == 1:
                made, needed = (len(np.unique(states)) for states in factor.states)
                columns, rows = columns + made * needed, rows + made + needed
            elif reads > 1:
                number = len(factor.arcs)
                arcs = int(np.isfinite(factor.arcs).sum()) - int(np.isfinite(np.diagonal(factor.arcs)).sum())
                columns, rows = columns + arcs * (reads + 1), rows + reads * (arcs + number)
        return columns, rows


@dataclass(frozen=True)
class Solution:
    """A choice per variable, its ``cost``, a proven lower ``bound``, and ``gap`` = (cost - bound) / cost.

    ``status`` is ``"optimal"`` or ``"time limit"``; ``method`` says what proved it; ``variables`` and ``constraints``
    are the size of the integer program (:meth:`CostTable.size`), whether or not it had to be built.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    gap: float
    status: str
    method: str
    seconds: float
    variables: int
    constraints: int
    log: tuple[str, ...] = ()
