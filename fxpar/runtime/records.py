"""What was communicated: a record per collective, kept only while :func:`record_collectives` is on.

In: calls from :mod:`fxpar.runtime.collectives`. Out: a list of :class:`~fxpar.plans.Collective`, one per
execution, to hold against the plan's. Predicting them is the planner's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxpar.cost.comm import wire_bytes
from fxpar.plans import Collective


class Recorder:
    """The list being filled, and the path of the block that is running (``""`` at the top level)."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.module = ""

    def add(self, kind: str, axis: str, degree: int, whole_bytes: int, phase: str, module: str) -> None:
        """Note one collective on a tensor of ``whole_bytes``, unsplit on ``axis``."""
        sent = round(wire_bytes(kind, whole_bytes, degree))
        self.collectives.append(Collective(module, phase, kind, axis, sent))


#: The recorder that is on, or None. Read as ``records.active`` so that a change is seen.
active: Recorder | None = None


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """Collect every collective this rank executes inside the ``with`` statement, in order.

    Compiled code (``torch.compile``) records nothing.

    >>> with record_collectives() as collectives:
    ...     pass
    >>> collectives
    []
    """
    global active
    outer, active = active, Recorder()
    try:
        yield active.collectives
    finally:
        active = outer


@contextmanager
def inside(module: str) -> Iterator[None]:
    """Operations run in here belong to the block at path ``module``."""
    if active is None:
        yield
        return
    recorder, outer = active, active.module
    recorder.module = module
    try:
        yield
    finally:
        recorder.module = outer


def running_module() -> str:
    """The path of the block that is running, if anyone wants to know."""
    return active.module if active is not None else ""
