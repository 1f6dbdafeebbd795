"""Ranks that decide together: one computes and tells the others, or all learn that one failed.

In: a function to run and a mesh. Out: its result, or the same error on every rank. No rank is left waiting for one that
has failed, because the news travels in the very exchange that the others wait in. On a mesh of several axes it travels
along one axis after the other: a mesh has a process group per axis, and none of all its ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from fxpar import errors
from fxpar.errors import FxparError, RankError

T = TypeVar("T")

#: How long a rank waits for the others to come to a meeting that none was told of.
PATIENCE_SECONDS = 60.0


def meet(mesh: DeviceMesh, key: str, what: str, seconds: float | None = None) -> None:
    """Wait until all ranks of ``mesh`` do ``what``; raise :class:`RankError` if some are elsewhere.

    For what every rank should decide by itself: one that runs a collective instead would wait for this one for ever.
    It is told through the store of the default process group, under a ``key`` that is used once. ``seconds`` is
    :data:`PATIENCE_SECONDS` if left out.
    """
    ranks = _ranks(mesh)
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


def broadcast_from_first(compute: Callable[[], T], mesh: DeviceMesh, what: str) -> T:
    """Run ``compute`` on the mesh's first rank and return its (picklable) result on all of them.

    If it raises, the first rank raises that error; the others raise the same error if it is one of fxpar's, else
    :class:`RankError` with its text. ``what`` names the computation in it.
    """
    if mesh.size() == 1:
        return compute()
    box: list[Any] = [None]
    failure: Exception | None = None
    first = _ranks(mesh)[0]
    if dist.get_rank() == first:
        try:
            box[0] = ("result", compute())
        except Exception as error:
            failure, box[0] = error, ("error", _told(error))
    for group in _groups(mesh):  # after the first axis, the first rank of every group of the next one knows
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    kind, value = box[0]
    if failure is not None:
        raise failure
    if kind == "error":
        raise _heard(first, what, *value)
    return value


def all_succeed(compute: Callable[[], T], mesh: DeviceMesh, what: str) -> T:
    """Run ``compute`` on every rank and return each rank's own result; if one raises, every rank raises.

    A rank that failed raises its own error, the others one that tells the first failing rank's.
    """
    failure: Exception | None = None
    try:
        result = compute()
    except Exception as error:
        failure = error
    told = _exchange(None if failure is None else _told(failure), mesh)
    if failure is not None:
        raise failure
    for rank, news in zip(_ranks(mesh), told, strict=True):
        if news is not None:
            raise _heard(rank, what, *news)
    return result


def all_agree(value: str, mesh: DeviceMesh, what: str) -> None:
    """Raise :class:`RankError` on every rank unless all pass the same ``value``."""
    values, ranks = _exchange(value, mesh), _ranks(mesh)
    for rank, other in zip(ranks, values, strict=True):
        if other != values[0]:
            raise RankError(
                f"the ranks disagree about {what}: rank {ranks[0]} has {values[0]}, rank {rank} has {other}; "
                "build the same model from the same configuration on every rank, and give it inputs of equal shapes"
            )


def _exchange(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Every rank's value, in the mesh's order."""
    values = [value]
    for group in reversed(_groups(mesh)):
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, values, group=group)
        values = [item for part in lists for item in part]
    return values


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """This rank's process groups, one per axis, outermost first."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def _ranks(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh, in its order."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _told(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _heard(rank: int, what: str, kind: str, text: str) -> FxparError:
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, FxparError):
        return known(f"rank {rank}: {text}")
    return RankError(f"rank {rank} failed at {what}: {kind}: {text}")
