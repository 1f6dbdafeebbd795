"""Every error fxpar raises on purpose.

Messages say what was asked, what was found, where in the user's model, and what to do next.
"""

from __future__ import annotations


class FxparError(Exception):
    """The base of all errors raised by fxpar."""


class CaptureError(FxparError):
    """The model cannot be turned into a graph that computes the same numbers."""


class RuleError(FxparError):
    """A rule line is malformed or does not fit the operation it is registered for."""


class LayoutError(FxparError):
    """A state, mesh or split that does not exist or does not fit a tensor."""


class PlanError(FxparError):
    """A plan does not fit the model or the mesh, or its text cannot be read."""


class InfeasibleError(FxparError):
    """No plan satisfies what was asked."""


class ClusterError(FxparError):
    """A hardware description is missing, malformed or incomplete."""


class SolverError(FxparError):
    """The program could not be solved: bad input, or no solver is available."""


class RankError(FxparError):
    """Another rank failed, or the ranks disagree; the message names the rank."""


class CallError(FxparError):
    """A parallelized model, or a part of it, was called in a way it cannot be."""
