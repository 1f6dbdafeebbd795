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

from fxpar import tree_kernels
from fxpar.cost.trees import Arcs, tree_table
from fxpar.errors import SolverError


@dataclass(frozen=True, eq=False)
class Variable:
    """A decision: ``costs`` has the seconds of each choice; an infinite one may not be taken.

    ``bytes[rows, choices]`` is what each choice adds to each row of a memory limit; ``None`` for nothing.
    """

    name: str
    costs: np.ndarray
    bytes: np.ndarray | None = None

    def restrict(self, keep: np.ndarray) -> Variable:
        """The variable with fewer choices."""
        return Variable(self.name, self.costs[keep], None if self.bytes is None else self.bytes[:, keep])


@dataclass(frozen=True, eq=False)
class Factor:
    """Seconds of several choices together: a plain ``table``, or a conversion tree, or both (then they agree).

    Axis ``i`` of ``table`` is ``variables[i]``. A tree has conversion ``arcs`` between ``S`` states, as a matrix of
    seconds ``[S, S]`` or as :class:`~fxpar.cost.trees.Arcs` (share one among factors), which may carry bytes;
    ``variables[0]`` produces the value, in state ``states[0][choice]``; each further variable needs it in
    ``states[i][choice]``, or in all of ``states[i][choice, :]`` if it reads it several times. A tree's seconds and
    bytes count ``weight`` times.
    """

    variables: tuple[int, ...]
    table: np.ndarray | None = None
    arcs: np.ndarray | Arcs | None = None
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
    def conversions(self) -> Arcs:
        """Of a tree: its single conversions."""
        assert self.arcs is not None
        return Arcs.of(self.arcs)

    @cached_property
    def values(self) -> np.ndarray:
        """The table, computed from the tree if there is none; its size is the product of the numbers of choices."""
        if self.table is not None:
            return self.table
        return self.weight * tree_table(self.conversions, self.states[0], self.states[1:])

    def at(self, choices: Sequence[int]) -> float:
        """Seconds of one choice for each of ``variables``, in order."""
        if self.table is not None:
            return float(self.table[tuple(choices)])
        root, targets = self.ends(choices)
        return self.weight * float(tree_kernels.tree_costs(self.conversions.graph, [root], [targets])[0, 0])

    def ends(self, choices: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Of a tree: the state that is produced, and those that are needed, under one choice for each variable."""
        needed = {int(state) for states, choice in zip(self.states[1:], choices[1:], strict=True)
                  for state in np.ravel(states[choice])}  # fmt: skip
        return int(self.states[0][choices[0]]), tuple(sorted(needed))

    def restrict(self, keep: Sequence[np.ndarray]) -> Factor:
        """The factor over fewer choices: ``keep`` has those of each variable."""
        table = None if self.table is None else self.table[np.ix_(*keep)]
        states = tuple(state[index] for state, index in zip(self.states, keep, strict=True)) if self.states else ()
        return Factor(self.variables, table, self.arcs if self.arcs is None else self.conversions, states, self.weight)


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
            if not 0 < factor.weight < math.inf or not (factor.conversions.seconds >= 0).all():
                raise SolverError(f"factor on {names}: its weight and arcs must be positive")
            if tuple(len(states) for states in factor.states) != shape:
                raise SolverError(f"factor on {names}: it needs the states of {shape} choices")
        return self

    @cached_property
    def rows(self) -> int:
        """The number of rows of a memory limit that choices or conversions add bytes to."""
        held = [variable.bytes for variable in self.variables]
        held += [factor.conversions.bytes for factor in self.factors if factor.is_tree]
        return max((len(rows) for rows in held if rows is not None), default=0)

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
            reads = factor.reads
            if reads == 1:
                made, needed = (len(np.unique(states)) for states in factor.states)
                columns, rows = columns + made * needed, rows + made + needed
            elif reads > 1:
                number, arcs = len(factor.conversions), len(factor.conversions.ends)
                columns, rows = columns + arcs * (reads + 1), rows + reads * (arcs + number)
        return columns, rows


@dataclass(frozen=True)
class Solution:
    """A choice per variable, its ``cost`` in seconds, a proven lower ``bound``, and ``gap`` = (cost - bound) / cost.

    ``status`` is ``"optimal"`` or ``"time limit"``, or under a memory limit ``"within gap"`` (as asked) or
    ``"feasible"`` (it fits, and ``gap`` says how much better another might be). ``method`` says what proved it;
    ``variables`` and ``constraints`` are the size of the integer program (:meth:`CostTable.size`), whether or not it
    had to be built. Under a memory limit ``bytes`` has what each row comes to, and ``trees`` for each factor the
    arcs ``(from, to)`` of its tree (parents first; ``None`` for a table), which need not be the cheapest in seconds,
    and ``dual_bound`` is the bound that ``prices`` of a byte of each row give: one that mixtures of choices come near
    to, in which those that hold more than they may have the part ``share``. ``points`` are the seconds and bytes of the
    best that was looked at.
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
    bytes: tuple[float, ...] = ()
    trees: tuple[tuple[tuple[int, int], ...] | None, ...] = ()
    dual_bound: float = -math.inf
    share: float = 0.0
    prices: tuple[float, ...] = ()
    points: tuple[tuple[float, np.ndarray], ...] = ()
