"""Run a function on n gloo ranks, in worker processes that live as long as the test session.

``run_ranks(n, fn, *args)`` runs ``fn(*args)`` on ``n`` ranks with ``torch.distributed`` initialised and returns the
results in rank order. A failing rank's traceback is raised here; ranks that hang are killed.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

#: After one rank has failed, the others get this long to fail or finish by themselves.
GRACE_SECONDS = 1.0


class RankFailure(AssertionError):  # noqa: N818
    """A rank raised, hung or died."""


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Crew:
    """Workers of one process group, which lives as long as they do.

    What torch keeps of a mesh (such as the names of its groups) outlives the mesh, and is taken for an equal mesh's.
    """

    def __init__(self, n: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.workers = [_Worker() for _ in range(n)]

    def send(self, task: bytes) -> None:
        for rank, worker in enumerate(self.workers):
            store = os.path.join(self.folder.name, "store")
            worker.pipe.send_bytes(pickle.dumps((rank, len(self.workers), store, task)))

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.folder.cleanup()


#: By number of ranks.
_crews: dict[int, _Crew] = {}


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """``fn(*args)`` on ``n`` ranks; ``fn`` is a module-level function, arguments and results can be pickled."""
    if n not in _crews:
        _crews[n] = _Crew(n)
    try:
        _crews[n].send(pickle.dumps((fn, args)))
    except OSError as error:
        _crews.pop(n).stop()
        raise RankFailure(f"a worker died before it was asked to run {fn.__name__}") from error
    results, failures = _collect(_crews[n].workers, time.monotonic() + timeout)
    hung = [rank for rank in range(n) if rank not in results and rank not in failures]
    if hung or failures:
        _crews.pop(n).stop()
    if failures:
        raise RankFailure("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items()))
    if hung:
        raise RankFailure(f"ranks {hung} did not finish within {timeout} s")
    return [results[rank] for rank in range(n)]


def _collect(crew: list[_Worker], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and tracebacks by rank, each in order of arrival."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(crew)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                good, value = False, "the process died"
            if good:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return results, failures


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, n, store, task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            fn, args = pickle.loads(task)
            gc.unfreeze()  # whatever an earlier function has left
            random.seed(0)
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            if not dist.is_initialized():
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
            answer = pickle.dumps((True, fn(*args)))
            dist.barrier()
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


@atexit.register
def _stop_all() -> None:
    for crew in _crews.values():
        crew.stop()
