"""Ranks that decide together: one computes and tells the others, or all learn that one failed.

In: a function to run and a process group. Out: its result, or the same error on every rank. No rank is left waiting for
one that has failed, because the news travels in the very exchange that the others wait in.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fxpar import errors
from fxpar.errors import FxparError, RankError

T = TypeVar("T")

#: How long a rank waits for the others to come to a meeting that none was told of.
PATIENCE_SECONDS = 60.0


def meet(group: dist.ProcessGroup, key: str, what: str, seconds: float | None = None) -> None:
    """Wait until all ranks of ``group`` do ``what``; raise :class:`RankError` if some are elsewhere.

    For what every rank should decide by itself: one that runs a collective instead would wait for this one for ever.
    It is told through the store of the default process group, under a ``key`` that is used once. ``seconds`` is
    :data:`PATIENCE_SECONDS` if left out.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    store, keys = _get_default_store(), {rank: f"fxpar/{key}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], what)
    patience = PATIENCE_SECONDS if seconds is None else seconds
    try:
        store.wait(list(keys.values()), timedelta(seconds=patience))
    except RuntimeError:
        missing = [rank for rank in ranks if not store.check([keys[rank]])]
        raise RankError(
            f"rank {dist.get_rank()} is {what}, and after {patience:.0f} s rank {', '.join(map(str, missing))} is not; "
            "call the model with inputs of equal shapes, and in the same mode, on all ranks of the mesh"
        ) from None


def broadcast_from_first(compute: Callable[[], T], group: dist.ProcessGroup, what: str) -> T:
    """Run ``compute`` on the group's first rank and return its (picklable) result on all of them.

    If it raises, the first rank raises that error; the others raise the same error if it is one of fxpar's, else
    :class:`RankError` with its text. ``what`` names the computation in it.
    """
    if dist.get_world_size(group) == 1:
        return compute()
    box: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            box[0] = ("result", compute())
        except Exception as error:
            failure, box[0] = error, ("error", _told(error))
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    kind, value = box[0]
    if failure is not None:
        raise failure
    if kind == "error":
        raise _heard(0, what, *value)
    return value


def all_succeed(compute: Callable[[], T], group: dist.ProcessGroup, what: str) -> T:
    """Run ``compute`` on every rank and return each rank's own result; if one raises, every rank raises.

    A rank that failed raises its own error, the others one that tells the first failing rank's.
    """
    failure: Exception | None = None
    try:
        result = compute()
    except Exception as error:
        failure = error
    told = _exchange(None if failure is None else _told(failure), group)
    if failure is not None:
        raise failure
    for rank, news in enumerate(told):
        if news is not None:
            raise _heard(rank, what, *news)
    return result


def all_agree(value: str, group: dist.ProcessGroup, what: str) -> None:
    """Raise :class:`RankError` on every rank unless all pass the same ``value``."""
    values = _exchange(value, group)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise RankError(
                f"the ranks disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}; "
                "build the same model from the same configuration and inputs on every rank"
            )


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _told(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _heard(rank: int, what: str, kind: str, text: str) -> FxparError:
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, FxparError):
        return known(f"rank {rank}: {text}")
    return RankError(f"rank {rank} failed at {what}: {kind}: {text}")
