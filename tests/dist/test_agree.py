"""Ranks that decide together: results, errors and disagreements reach every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from harness import run_ranks

from fxpar.errors import InfeasibleError, RankError
from fxpar.runtime.agree import all_agree, all_succeed, broadcast_from_first
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
    group = dist.group.WORLD
    start = time.monotonic()
    found = [
        outcome(lambda: broadcast_from_first(lambda: dist.get_rank() + 5, group, "planning")),
        outcome(lambda: broadcast_from_first(lambda: fail(InfeasibleError("no plan")), group, "planning")),
        outcome(lambda: broadcast_from_first(lambda: fail(ValueError("odd")), group, "planning")),
        outcome(lambda: all_succeed(lambda: fail_on(-1, ValueError()), group, "sharding")),
        outcome(lambda: all_succeed(lambda: fail_on(1, ValueError("odd")), group, "sharding")),
        outcome(lambda: all_agree("same", group, "the plan")),
        outcome(lambda: all_agree(str(dist.get_rank()), group, "the plan")),
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
