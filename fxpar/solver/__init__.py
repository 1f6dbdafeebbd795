"""Choose one entry per variable of a priced program at least total cost, and prove it."""

from fxpar.solver.problem import CostTable, Factor, Solution, Variable
from fxpar.solver.solving import METHODS, min_marginals, solve

__all__ = ["METHODS", "CostTable", "Factor", "Solution", "Variable", "min_marginals", "solve"]
