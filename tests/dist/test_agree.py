"""Ranks that decide together: results, errors and disagreements reach every rank."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxpar
from fxpar.errors import InfeasibleError, RankError
from fxpar.runtime import agree
from fxpar.runtime.agree import all_agree, all_succeed, broadcast_from_first, meet
from fxpar.runtime.random import SharedStream, split_stream


def outcome(call: object) -> tuple[str, str]:
    try:
        return "result", str(call())  # type: ignore[operator]
    except Exception as error:
        return type(error).__name__, str(error)


def fail(error: Exception) -> None:
    raise error


def fail_on(rank: int, error: Exception) -> int:
    if dist.get_rank() == rank:
        raise error
    return dist.get_rank()


def all_cases() -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    start = time.monotonic()
    found = [
        outcome(lambda: broadcast_from_first(lambda: dist.get_rank() + 5, mesh, "planning")),
        outcome(lambda: broadcast_from_first(lambda: fail(InfeasibleError("no plan")), mesh, "planning")),
        outcome(lambda: broadcast_from_first(lambda: fail(ValueError("odd")), mesh, "planning")),
        outcome(lambda: all_succeed(lambda: fail_on(-1, ValueError()), mesh, "sharding")),
        outcome(lambda: all_succeed(lambda: fail_on(1, ValueError("odd")), mesh, "sharding")),
        outcome(lambda: all_agree("same", mesh, "the plan")),
        outcome(lambda: all_agree(str(dist.get_rank()), mesh, "the plan")),
    ]
    assert time.monotonic() - start < 10
    return found


def test_every_rank_hears_of_results_and_errors() -> None:
    first, second = run_ranks(2, all_cases)
    assert first[0] == second[0] == ("result", "5")
    assert first[1] == ("InfeasibleError", "no plan")
    assert second[1] == ("InfeasibleError", "rank 0: no plan")
    assert first[2] == ("ValueError", "odd")
    assert second[2] == ("RankError", "rank 0 failed at planning: ValueError: odd")
    assert (first[3], second[3]) == (("result", "0"), ("result", "1"))
    assert first[4] == ("RankError", "rank 1 failed at sharding: ValueError: odd")
    assert second[4] == ("ValueError", "odd")
    assert first[5] == second[5] == ("result", "None")
    assert first[6] == second[6]
    assert first[6][0] == RankError.__name__ and "rank 0 has 0, rank 1 has 1" in first[6][1]


def on_two_axes() -> list[tuple[str, str]]:
    """A (2, 2) mesh in another order than the ranks', and a part on the outer two of three axes."""
    torch_mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    part = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))["a", "b"]
    rank = dist.get_rank()
    return [
        outcome(lambda: broadcast_from_first(lambda: rank + 5, torch_mesh, "planning")),
        outcome(lambda: broadcast_from_first(lambda: fail(ValueError("odd")), torch_mesh, "planning")),
        outcome(lambda: all_succeed(lambda: fail_on(2, ValueError("odd")), torch_mesh, "sharding")),
        outcome(lambda: all_agree("same" if rank != 1 else "other", torch_mesh, "the plan")),
        outcome(lambda: all_agree("same", part, "the plan")),
        outcome(lambda: broadcast_from_first(lambda: rank + 7, part, "planning")),
        outcome(lambda: meet(torch_mesh, f"two {os.getppid()}", "calling")),
    ]


def test_on_two_axes_everything_reaches_every_rank_once() -> None:
    found = run_ranks(4, on_two_axes)
    for rank, (told, failed, odd, differ, same, seven, met) in enumerate(found):
        assert told == ("result", "5") and seven == ("result", "7") and same == met == ("result", "None")
        assert failed == (
            ("ValueError", "odd") if rank == 0 else ("RankError", "rank 0 failed at planning: ValueError: odd")
        )
        assert odd == (
            ("ValueError", "odd") if rank == 2 else ("RankError", "rank 2 failed at sharding: ValueError: odd")
        )
        assert differ[0] == "RankError" and "rank 0 has same, rank 1 has other" in differ[1]


def draws() -> tuple[list[float], list[float], list[float], list[float]]:
    """Common and own numbers of a shared stream, the same again after a recompute, and the user's own next number."""
    torch.manual_seed(dist.get_rank())
    stream = SharedStream(11, torch.device("cpu"))

    def region() -> tuple[list[float], list[float]]:
        common = torch.rand(3).tolist()
        with split_stream(dist.get_rank()):
            own = torch.rand(3).tolist()
        return common + torch.rand(1).tolist(), own

    with stream.current():
        state = torch.get_rng_state()
        common, own = region()
        torch.set_rng_state(state)
        assert region() == (common, own)
    with stream.current():
        assert torch.rand(3).tolist() != common[:3]
    mine = torch.rand(2).tolist()
    torch.manual_seed(dist.get_rank())
    return common, own, mine, torch.rand(2).tolist()


def test_common_numbers_agree_own_numbers_differ_and_the_users_stream_is_untouched() -> None:
    (common, own, mine, wanted), (common1, own1, mine1, wanted1) = run_ranks(2, draws)
    assert common == common1 and len(set(own + own1)) == 6 and not set(own) & set(common)
    assert (mine, mine1) == (wanted, wanted1)


def late() -> list[tuple[str, str]]:
    """Rank 1 comes to two meetings, rank 0 only to the second, before it to a collective that needs rank 1."""
    mesh, key = init_device_mesh("cpu", (2,)), f"late {os.getppid()}"
    if dist.get_rank() == 1:
        found = [outcome(lambda: meet(mesh, f"{key}/0", "calling with another shape", seconds=1.0))]
    else:
        found = []
    dist.all_reduce(torch.ones(1))
    return [*found, outcome(lambda: meet(mesh, f"{key}/1", "calling with another shape", seconds=30.0))]


def test_a_rank_that_comes_alone_says_who_is_missing() -> None:
    first, second = run_ranks(2, late)
    assert first == [("result", "None")]
    kind, message = second[0]
    assert kind == "RankError"
    assert "rank 1 is calling with another shape, and after 1 s rank 0 is not" in message
    assert second[1:] == [("result", "None")]


def shapes_differ() -> tuple[str, str]:
    """Rank 1 calls with another batch than rank 0: it must not wait for ever."""
    agree.PATIENCE_SECONDS = 2.0
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        fxpar.parallelize(model, mesh, example_args=(torch.zeros(4, 8),), cluster="toy")
        if dist.get_rank() == 0:
            return "result", "not called: it would wait for rank 1 until that rank ends"
        return outcome(lambda: model(torch.zeros(6, 8)))
    finally:
        agree.PATIENCE_SECONDS = 60.0


def test_other_shapes_on_one_rank_alone_are_an_error_there() -> None:
    _, (kind, message) = run_ranks(2, shapes_differ)
    assert kind == "RankError"
    assert "inputs of equal shapes" in message
