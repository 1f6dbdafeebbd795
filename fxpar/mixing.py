"""Priced program + a memory limit that binds -> the fastest plan, in which instances of a block may be of two kinds.

In: :class:`~fxpar.cost.price.Priced`, bytes per device. Out: a :class:`~fxpar.plans.Plan`. Folded instances are split
alike, so either all of them have what is fast or none. Where that leaves time on the table, blocks are divided: the
best place for the border is looked for among halves, quarters, ..., and then within the parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fxpar.cost.price import Priced, price
from fxpar.divide import divided, unused_name
from fxpar.errors import InfeasibleError
from fxpar.graph import Program
from fxpar.layout import Layout
from fxpar.limits import GAP, LEAST_SECONDS, search_within
from fxpar.pins import pin
from fxpar.plans import Plan
from fxpar.space import space

#: The part of a step that a further kind has to gain.
WORTHWHILE = GAP / 4


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
    division ends. Raises :class:`InfeasibleError` as :func:`fxpar.limits.plan_within` does.
    """
    end = time.perf_counter() + time_limit_seconds

    def search(some: Priced, *, prove: bool = False) -> tuple[Plan, float]:
        return search_within(
            some,
            limit_bytes,
            optimizer=optimizer,
            pins=pin(some.space, constraints=constraints),
            time_limit_seconds=max(LEAST_SECONDS, end - time.perf_counter()),
            prove=prove,
        )

    folded = priced.space
    if not any(True for _ in divisions(folded.program)):
        return search(priced, prove=True)[0]
    best, reachable_seconds = search(priced)
    if _is_near(best, best.bound_seconds):
        return best
    program, bounds, improved = folded.program, [best.bound_seconds], True
    while improved and not _is_near(best, reachable_seconds):
        improved, source = False, program
        for apart in divisions(source):
            try:
                found, dual_bound = search(price(space(apart, folded.mesh, folded.boundary), priced.cluster))
            except InfeasibleError:  # the search for what fits is no proof: folded, something did
                continue
            bounds.append(found.bound_seconds)
            if found.objective_seconds < best.objective_seconds * (1 - WORTHWHILE):
                best, program, improved = found, apart, True
                reachable_seconds = max(reachable_seconds, dual_bound)
            if _is_near(best, reachable_seconds) or time.perf_counter() > end:
                improved = False
                break
    if program is folded.program:
        return search(priced, prove=True)[0]
    bound = min(best.objective_seconds, *bounds)
    return replace(best, bound_seconds=bound, gap=1.0 - bound / best.objective_seconds, status="feasible")


def _is_near(plan: Plan, seconds: float) -> bool:
    return plan.objective_seconds - seconds <= GAP * plan.objective_seconds


def divisions(program: Program) -> Iterator[Program]:
    """``program`` with every kind of block divided in two: in halves, then a quarter and the rest, and so on."""
    paths = {block: tuple(dict.fromkeys(program.instances(block))) for block in program.blocks}
    share = 1
    while 2 * share <= max(map(len, paths.values()), default=0):
        share *= 2
        taken, kinds = dict[str, object](program.blocks), dict[str, str]()
        for block, own in paths.items():
            if len(own) > 1:
                name = unused_name(block.partition("/")[0], taken)
                taken[name] = None
                kinds |= dict.fromkeys(own[len(own) - max(1, len(own) // share) :], name)
        yield divided(program, kinds)
