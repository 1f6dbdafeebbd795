"""Priced program + a memory limit that binds -> the fastest plan, in which equal blocks may be of several kinds.

In: :class:`~fxpar.cost.price.Priced`, bytes per device. Out: a :class:`~fxpar.plans.Plan`. Folded instances are split
alike, so either all of them have what is fast or none. Where that leaves time on the table, blocks are divided: the
best place for the border is looked for among halves, quarters, ..., and then within the parts.
"""

from __future__ import annotations

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
from fxpar.limits import GAP, LEAST_SECONDS, Within, bounded, search_within
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.space import Space, space

#: The part of a step that a further kind has to gain.
WORTHWHILE = GAP / 4

#: The most parts into which all blocks are divided at once. All operations may have so many ways together when that is
#: done, and so many when blocks are divided in two again.
MOST_PARTS, WAYS_IN_PARTS, WAYS_DIVIDED = 8, 20_000, 8_000


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
    division ends; it ends as well when no division into two, and none into equal parts, gains anything.
    Raises :class:`InfeasibleError` as :func:`fxpar.limits.plan_within` does.
    """
    end = time.perf_counter() + time_limit_seconds

    def search(some: Priced, *, prove: bool = False, start: tuple[int, ...] | None = None) -> Within | None:
        return search_within(
            some,
            limit_bytes,
            optimizer=optimizer,
            pins=pin(some.space, constraints=constraints),
            time_limit_seconds=max(LEAST_SECONDS, end - time.perf_counter()),
            prove=prove,
            start=start,
        )

    pins = pin(priced.space, constraints=constraints)
    can_divide = any(True for _ in divisions(priced.space.program))
    best, at = search(priced, prove=not can_divide), priced
    if best is None:
        raise InfeasibleError(why_nothing_fits(priced, limit_bytes, optimizer, pins))
    if not can_divide:
        return best.plan
    reachable_seconds, lower_seconds = best.dual_bound_seconds, best.plan.bound_seconds
    improved = True
    while improved and not _is_near(best.plan, reachable_seconds) and time.perf_counter() < end:
        improved, source, known = False, at.space, best.choice
        if at is not priced and 2 * _ways(source) > WAYS_DIVIDED:
            break
        parts = in_parts(source.program) if _ways(source) * MOST_PARTS <= WAYS_IN_PARTS else ()
        for apart in chain(divisions(source.program), parts):
            some = price(space(apart, source.mesh, source.boundary), priced.cluster)
            found = search(some, start=carried(source, known, some.space))
            if found is not None:
                lower_seconds = min(lower_seconds, found.plan.bound_seconds)
            if found is not None and found.plan.objective_seconds < best.plan.objective_seconds * (1 - WORTHWHILE):
                best, at, improved = found, some, True
                reachable_seconds = max(reachable_seconds, found.dual_bound_seconds)
            if _is_near(best.plan, reachable_seconds) or time.perf_counter() > end:
                break
    if at is priced and not _is_near(best.plan, lower_seconds) and time.perf_counter() < end:
        proven = search(priced, prove=True, start=best.choice)
        if proven is not None and proven.plan.objective_seconds < best.plan.objective_seconds:
            best = proven
    return bounded(best.plan, lower_seconds)


def _is_near(plan: Plan, seconds: float) -> bool:
    return plan.objective_seconds - seconds <= GAP * plan.objective_seconds


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
