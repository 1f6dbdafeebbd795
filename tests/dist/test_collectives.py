"""Every conversion on real ranks, against what the states mean (docs/states.md), forward and backward."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from fxpar.layout import CONVERSIONS
from fxpar.plans import Collective
from fxpar.runtime.collectives import convert, join, split
from fxpar.runtime.records import inside, record_collectives

STATES = ("S0", "S1", "S2", "S1/3", "S1/2", "R", "I", "P", "M")
PAIRS = tuple((a, b) for a, b in itertools.permutations(STATES, 2) if (a[0], b[0]) in CONVERSIONS)
SHAPE = (4, 24, 8)


def summands(whole: torch.Tensor, degree: int) -> list[torch.Tensor]:
    parts = [torch.randn(whole.shape, dtype=torch.float64).to(whole.dtype) for _ in range(degree - 1)]
    return [*parts, whole - sum(parts)]


def to_locals(whole: torch.Tensor, state: str, degree: int) -> list[torch.Tensor]:
    """What each rank holds of a value in ``state``."""
    if state[0] == "S":
        return list(split(whole, state, degree))
    if state == "M":
        below = torch.rand((degree, *whole.shape), dtype=torch.float64)
        return list((whole - (below - below.amin(0))).to(whole.dtype))
    return summands(whole, degree) if state == "P" else [whole] * degree


def gradient_locals(whole: torch.Tensor, state: str, degree: int) -> list[torch.Tensor]:
    """What each rank holds of the gradient of a value in ``state``."""
    dual = {"R": "P", "P": "I", "I": "I"}
    return to_locals(whole, dual.get(state, state), degree)


def errors(pieces: list[torch.Tensor], whole: torch.Tensor, state: str) -> float:
    """The largest deviation of what the ranks hold from ``whole`` in ``state``."""
    if state[0] == "S":
        return (join(torch.stack(pieces), state) - whole).abs().max().item()
    if state == "P":
        return (sum(pieces) - whole).abs().max().item()
    return max((piece - whole).abs().max().item() for piece in pieces)


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return out


def where() -> tuple[str, int, int, str]:
    return "tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name


def every_pair(pairs: tuple[tuple[str, str], ...], compiled: bool) -> dict[tuple[str, str], tuple[float, float]]:
    torch.manual_seed(0)
    n, rank, place = dist.get_world_size(), dist.get_rank(), where()
    wholes, cotangents = torch.randn(2, len(pairs), *SHAPE, dtype=torch.float64)
    pieces = [to_locals(x, src, n)[rank] for x, (src, _) in zip(wholes, pairs, strict=True)]
    leaves = [x.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in pieces]

    def convert_all(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [convert(x, src, dst, True, *place) for x, (src, dst) in zip(xs, pairs, strict=True)]

    run = torch.compile(convert_all, backend="aot_eager", fullgraph=True) if compiled else convert_all
    results = run(leaves)
    grads = [gradient_locals(g, dst, n)[rank] for g, (_, dst) in zip(cotangents, pairs, strict=True)]
    torch.autograd.backward(results, grads)
    found = {}
    for (src, dst), x, y, whole, cotangent in zip(pairs, leaves, results, wholes, cotangents, strict=True):
        back = {"R": "P", "P": "I", "M": "I"}.get(src, src)
        found[src, dst] = errors(gathered(y.detach()), whole, dst), errors(gathered(x.grad), cotangent, back)
    return found


@pytest.mark.parametrize("degree", [2, 4])
def test_every_conversion_in_both_directions(degree: int) -> None:
    for found in run_ranks(degree, every_pair, PAIRS, False):
        assert {pair: errors for pair, errors in found.items() if max(errors) > 1e-12} == {}
        assert len(found) == len(PAIRS)


def test_every_kind_of_conversion_compiled() -> None:
    kinds = {(src[0], dst[0]): (src, dst) for src, dst in PAIRS}
    pairs = (*kinds.values(), ("S1", "S1/3"), ("S0", "S1/3"))
    for found in run_ranks(2, every_pair, pairs, True, timeout=120):
        assert {pair: errors for pair, errors in found.items() if max(errors) > 1e-12} == {}
        assert len(found) == len(set(pairs)) >= len(CONVERSIONS)


def odd_dtypes() -> list[bool]:
    n, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for dtype in (torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.complex64):
        whole = torch.arange(4 * 24 * 8).view(SHAPE).remainder(3).to(dtype)
        for src, dst in (("S1", "I"), ("S1/3", "S0"), ("S1", "S1/2"), ("I", "S2"), ("S2", "P")):
            y = convert(to_locals(whole, src, n)[rank], src, dst, False, *where())
            held = gathered(y) if dtype is not torch.int16 else [p.short() for p in gathered(y.int())]
            if dst[0] == "S":
                good = torch.equal(join(torch.stack(held), dst), whole)
            else:
                good = torch.equal(sum(p.to(torch.complex128) for p in held) / (n if dst == "I" else 1), whole + 0j)
            found.append(good and y.dtype == dtype)
        if dtype is torch.bool:
            continue
        if not dtype.is_complex:
            y = convert(whole - 1 if rank == 0 else whole, "M", "I", False, *where())
            found.append(torch.equal(y, whole) and y.dtype == dtype)
        for dst in ("I", "S1/3"):
            y = convert(whole if rank == 0 else torch.zeros_like(whole), "P", dst, False, *where())
            wanted = whole if dst == "I" else split(whole, dst, n)[rank]
            found.append(torch.equal(y, wanted) and y.dtype == dtype)
    return found


def test_dtypes_that_groups_do_not_carry() -> None:
    for found in run_ranks(2, odd_dtypes):
        assert all(found)


def recorded() -> list[Collective]:
    x = torch.randn(4, 6, requires_grad=True)
    with record_collectives() as collectives:
        with inside("layers.3"):
            y = convert(x, "S0", "R", True, *where())
            z = convert(y, "R", "I", True, *where())
        z.sum().backward()
    convert(x, "S0", "I", True, *where())
    return collectives


def test_records_name_what_ran() -> None:
    sent = 2 * 4 * 6 * 4 // 2
    for collectives in run_ranks(2, recorded):
        assert collectives == [
            Collective("layers.3", "forward", "all_gather", "tp", sent),
            Collective("layers.3", "backward", "reduce_scatter", "tp", sent),
        ]


def twice() -> str:
    x = torch.randn(2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(convert(x, "I", "R", True, *where()).square().sum(), x, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_second_derivatives_are_refused() -> None:
    assert all("differentiate twice" in text for text in run_ranks(2, twice))


def test_degree_one_converts_nothing() -> None:
    x = torch.randn(2, 2)
    assert convert(x, "S0", "R", True, "tp", 1, 0, "") is x


def fail_on(rank: int) -> None:
    warnings.simplefilter("ignore")
    if dist.get_rank() == rank:
        raise ValueError("this rank is odd")
    dist.barrier()


def test_the_harness_reports_a_failing_rank() -> None:
    with pytest.raises(AssertionError, match=r"rank 1:\n(.|\n)*this rank is odd"):
        run_ranks(2, fail_on, 1)
    assert run_ranks(2, dist.get_rank) == [0, 1]
