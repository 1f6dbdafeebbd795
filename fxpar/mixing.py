"""Priced program + a memory limit that binds -> the fastest plan, in which equal blocks may be of several kinds.

In: :class:`~fxpar.cost.price.Priced`, bytes per device. Out: a :class:`~fxpar.plans.Plan`. Folded instances are split
alike, so either all of them have what is fast or none. Where that leaves time on the table, blocks are divided: where
the mixture that just fits has its border, and in small programs also in halves, quarters, ..., and within the parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, pairwise

from fxpar.cost.price import Priced, price
from fxpar.divide import of_kinds, unused_name
from fxpar.errors import InfeasibleError
from fxpar.graph import Program
from fxpar.layout import Layout
from fxpar.least import why_nothing_fits
from fxpar.limits import GAP, LEAST_SECONDS, Within, bounded, lower_bound_seconds, search_within
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.space import Space, space

#: The part of a step that a further kind has to gain.
WORTHWHILE = GAP / 4

#: The most parts into which all blocks are divided at once. All operations may have so many ways together when that is
#: done, and so many when blocks are divided in two again.
MOST_PARTS, WAYS_IN_PARTS, WAYS_DIVIDED = 8, 20_000, 8_000

#: Borders that are tried where mixtures of plans say that they should be.
MOST_SHARES = 4


def plan_mixed(
    priced: Priced,
    limit_bytes: float,
    *,
    optimizer: str,
    constraints: Mapping[str, str | Layout] | None = None,
    time_limit_seconds: float = 60.0,
) -> Plan:
    """The fastest plan found whose step takes at most ``limit_bytes`` on each device.

    What prices of a byte leave to be gained says whether blocks are divided at all, and when the search for a better
    division ends; it ends as well when no division gains anything. The bound is one of all plans with the same kinds.
    Raises :class:`InfeasibleError` as :func:`fxpar.limits.plan_within` does.
    """
    end = time.perf_counter() + time_limit_seconds

    def search(
        some: Priced, *, prove: bool = False, start: tuple[int, ...] | None = None, like: Within | None = None
    ) -> Within | None:
        return search_within(
            some,
            limit_bytes,
            optimizer=optimizer,
            pins=pin(some.space, constraints=constraints),
            time_limit_seconds=max(LEAST_SECONDS, end - time.perf_counter()),
            prove=prove,
            start=start,
            like=like,
        )

    pins = pin(priced.space, constraints=constraints)
    can_divide = any(True for _ in divisions(priced.space.program))
    best, at = search(priced, prove=not can_divide), priced
    if best is None:
        raise InfeasibleError(why_nothing_fits(priced, limit_bytes, optimizer, pins))
    if not can_divide:
        return best.plan
    first, reachable_seconds, improved = best, best.dual_bound_seconds, True
    while improved and not _is_near(best.plan, reachable_seconds) and time.perf_counter() < end:
        improved, source, like = False, at.space, best
        if at is not priced and 2 * _ways(source) > WAYS_DIVIDED:
            break
        shares = [like.share] if like.share > 0 else []
        for apart in _candidates(source, shares):
            some = price(space(apart, source.mesh, source.boundary), priced.cluster)
            found = search(some, start=carried(source, like.choice, some.space), like=like)
            if 0 < len(shares) < MOST_SHARES:
                less = shares[-1] - 1 / most_instances(source.program)
                shares.append(less if found is None or found.share <= 0 else min(less, found.share))
            if found is not None and found.plan.objective_seconds < best.plan.objective_seconds * (1 - WORTHWHILE):
                best, at, improved = found, some, True
                reachable_seconds = max(reachable_seconds, found.dual_bound_seconds)
            if _is_near(best.plan, reachable_seconds) or time.perf_counter() > end:
                break
    if at is not priced:
        pins = pin(at.space, constraints=constraints)
        bound = lower_bound_seconds(at, limit_bytes, first.prices, optimizer=optimizer, pins=pins)
        return bounded(best.plan, bound)
    if not _is_near(best.plan, reachable_seconds) and _is_small(priced.space) and time.perf_counter() < end:
        proven = search(priced, prove=True, start=best.choice)
        if proven is not None:
            bound = max(best.plan.bound_seconds, proven.plan.bound_seconds)
            return bounded(min(best.plan, proven.plan, key=lambda plan: plan.objective_seconds), bound)
    return best.plan


def _is_near(plan: Plan, seconds: float) -> bool:
    return plan.objective_seconds - seconds <= GAP * plan.objective_seconds


def _is_small(space: Space) -> bool:
    """Whether it may be divided into many parts at once, or be given to the integer program."""
    return _ways(space) * MOST_PARTS <= WAYS_IN_PARTS


def _ways(space: Space) -> int:
    return sum(len(slot.ways) for slot in space.slots)


def carried(source: Space, choice: tuple[int, ...], target: Space) -> tuple[int, ...] | None:
    """The same choice in the space of a program that was divided further; ``None`` if it is not all there."""
    origin = {new: old for (_, new), (_, old) in zip(target.program.calls, source.program.calls, strict=True)}
    known = {
        (slot.kind, slot.graph, slot.index, slot.name): (len(slot.ways), index)
        for slot, index in zip(source.slots, choice, strict=True)
    }
    found = [known.get((slot.kind, origin.get(slot.graph, slot.graph), slot.index, slot.name)) for slot in target.slots]
    same = [pair[1] for pair, slot in zip(found, target.slots, strict=True) if pair and pair[0] == len(slot.ways)]
    return tuple(same) if len(same) == len(found) else None


def _candidates(source: Space, shares: list[float]) -> Iterator[Program]:
    """Divisions of a program, those that promise most first; ``shares`` may become more meanwhile.

    A large program is divided by ``shares`` alone.
    """
    program, seen, small = source.program, set[tuple[tuple[str, str], ...]](), _is_small(source)
    by_shares = (by_share(program, share) for share in shares)
    others = chain(divisions(program), in_parts(program)) if small else ()
    for apart in chain(by_shares, others):
        if apart.calls not in seen:
            seen.add(apart.calls)
            yield apart


def by_share(program: Program, share: float) -> Program:
    """``program`` with every kind of block divided in two, of which the second has at most the part ``share``."""
    return _bordered(program, lambda count: [count - min(count - 1, max(1, math.floor(share * count)))])


def divisions(program: Program) -> Iterator[Program]:
    """``program`` with every kind of block divided in two: in halves, then a quarter and the rest, and so on."""
    share = 1
    while 2 * share <= most_instances(program):
        share *= 2
        yield _bordered(program, partial(_last, share))


def in_parts(program: Program) -> Iterator[Program]:
    """``program`` with every kind of block divided into up to :data:`MOST_PARTS` parts as equal as can be."""
    if most_instances(program) > 2:
        yield _bordered(program, _equal)


def most_instances(program: Program) -> int:
    """Of how many modules there are calls of one block, at most."""
    return max((len(set(program.instances(block))) for block in program.blocks), default=0)


def _last(share: int, count: int) -> list[int]:
    return [count - max(1, count // share)]


def _equal(count: int) -> list[int]:
    return [count * part // MOST_PARTS for part in range(1, MOST_PARTS)]


def _bordered(program: Program, borders: Callable[[int], list[int]]) -> Program:
    """Every block with as many kinds as there are different borders within the number of its instances."""
    taken, kinds = dict[str, object](program.blocks), dict[tuple[str, str], str]()
    for block in program.blocks:
        own = tuple(dict.fromkeys(program.instances(block)))
        inside = sorted({border for border in borders(len(own)) if 0 < border < len(own)})
        for first, last in pairwise([*inside, len(own)]):
            name = unused_name(block.partition("/")[0], taken)
            taken[name] = None
            kinds |= {(block, path): name for path in own[first:last]}
    return of_kinds(program, kinds)
