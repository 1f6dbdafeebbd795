"""fxpar: automatic tensor parallelism for PyTorch by torch.fx graph rewriting.

The public names are loaded when first used: importing torch takes seconds, and planning arithmetic does not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpar.api import parallelize, plan
    from fxpar.cluster import Cluster
    from fxpar.errors import FxparError
    from fxpar.layout import Mesh
    from fxpar.plans import Plan
    from fxpar.runtime.module import applied_plan
    from fxpar.solver.engine import solve
    from fxpar.solver.strategy_graph import StrategyGraph, read_graph
    from fxpar.verification import verify

__version__ = "0.1.0"

_HOME = {
    "Cluster": "fxpar.cluster",
    "FxparError": "fxpar.errors",
    "Mesh": "fxpar.layout",
    "Plan": "fxpar.plans",
    "parallelize": "fxpar.api",
    "applied_plan": "fxpar.runtime.module",
    "plan": "fxpar.api",
    "read_graph": "fxpar.solver.strategy_graph",
    "solve": "fxpar.solver.engine",
    "StrategyGraph": "fxpar.solver.strategy_graph",
    "verify": "fxpar.verification",
}

__all__ = [
    "Cluster",
    "FxparError",
    "Mesh",
    "Plan",
    "StrategyGraph",
    "__version__",
    "applied_plan",
    "parallelize",
    "plan",
    "read_graph",
    "solve",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxpar' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
