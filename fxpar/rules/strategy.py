"""What an operation does on one mesh axis: the state of every operand and output.

In: nothing. Out: :class:`Strategy`, which :mod:`fxpar.rules` yields, the solver chooses and the rewriter applies.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.layout import State


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operation on one axis.

    ``name`` is ``"whole:I"``, ``"whole:R"``, ``"split:<factor>"``, ``"split:<factor>/<parts>"`` or
    ``"partial:<operands>"``. ``inputs`` has a state per operand (in :attr:`fxpar.graph.Node.operands` order),
    ``outputs`` one per output that is a tensor. When ``divided``, a rank does ``1/degree`` of the work, else all of it.
    """

    name: str
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    divided: bool = False
