"""Run a function on several CPU processes that form one gloo group.

In: a picklable function of (rank, job). Out: rank 0's text. A rank that fails ends all of them, and its own message is
the one that is raised. What the ranks do is the caller's business.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from fxpar.errors import FxparError, RankError

RankFunction = Callable[[int, Any], str]


def run_ranks(function: RankFunction, size: int, job: Any, *, timeout_seconds: float = 600.0) -> str:
    """Call ``function(rank, job)`` on ``size`` new processes, one thread each; return what rank 0 returned.

    Raises :class:`RankError` with the first failing rank's message; the other ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="fxpar-") as name:
        folder = Path(name)
        # It would report the ranks that it ends; our own message says which rank failed and why.
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
        try:
            torch.multiprocessing.spawn(_enter, (function, size, job, folder, timeout_seconds), nprocs=size)
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            raise _first_failure(folder, error) from None
        return (folder / "result").read_text()


def _enter(rank: int, function: RankFunction, size: int, job: Any, folder: Path, timeout_seconds: float) -> None:
    os.environ["RANK"] = str(rank)  # as torchrun sets it: only rank 0 shows progress
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        result = function(rank, job)
        if rank == 0:
            (folder / "result").write_text(result)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException as error:
        # The order of failures is the order of these names: a rank that fails because another one did comes later.
        known = isinstance(error, FxparError)
        message = f"{type(error).__name__}: {error}" if known else traceback.format_exc().strip()
        (folder / f"failed-{time.time_ns():020}-{rank}").write_text(message)
        raise


def _first_failure(folder: Path, error: Exception) -> RankError:
    failures = sorted(folder.glob("failed-*"))
    if not failures:
        return RankError(f"a rank ended without a message: {error}")
    return RankError(f"rank {failures[0].name.rpartition('-')[2]} failed: {failures[0].read_text()}")
