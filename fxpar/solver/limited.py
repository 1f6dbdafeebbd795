"""A memory limit: seconds are least among the choices and trees whose bytes fit, row by row.

In: a :class:`~fxpar.solver.problem.CostTable` with bytes, and limits. Out: :class:`Limited`. Bytes get prices (Lagrange
multipliers), so that the whole is an ordinary problem again, whose lower bound is one of the limited problem; prices
that raise it most are found by cutting planes (Kelley, 1960). What then lies between is closed by the integer program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fxpar.errors import InfeasibleError, SolverError
from fxpar.solver import elimination, reduce
from fxpar.solver.fronts import fronts
from fxpar.solver.narrowing import FEW, TOLERANCE, eliminated, promising
from fxpar.solver.outcomes import Outcome, Point, at_prices, measured, outcome, replace_costs
from fxpar.solver.problem import CostTable
from fxpar.solver.sweeping import Sweeps

#: Prices are changed until the bound is this near to the best, in parts of the gap that is asked for.
NEARER = 0.25

#: Outcomes that are handed on to further searches.
MOST_POINTS = 12

#: Changes of prices, at most.
MAX_PRICES = 40

#: Entries of all tables together, at most, when fronts are kept in them.
MAX_ENTRIES = 8_000

#: A limit is so many cells of the grid that points are told apart by.
CELLS = 400.0

#: Choices are mixed that add at most this part of the bound.
SHARE = 0.02

#: Pairs of sweeps at one price, at most; sweeping is slow once a pair raises the bound by less than this part of it.
MAX_PAIRS, SLOW = 60, 3e-5

#: Prices are searched for up to so many steps' seconds per limit; if nothing fits there, up to this times as many.
STEPS, MORE = 10.0, 100.0

#: Among equally cheap trees those with few bytes are taken: a limit of them costs at least this part of the bound.
TINY = 1e-10

#: The seconds of an outcome, and by how much it is above each limit, in parts of it.
Cut = tuple[float, np.ndarray]

#: Finds a choice of least cost and a lower bound.
Minimise = Callable[[CostTable], tuple[Sequence[int], float]]


@dataclass(frozen=True, eq=False)
class Limited:
    """The best that fits, a lower bound of all that fit, and the one that ``prices`` of a byte gave.

    At those prices some choices hold too much and others too little: mixed so that they hold just what they may, the
    first have the part ``share``.
    """

    best: Outcome
    bound: float
    dual_bound: float
    share: float
    prices: np.ndarray
    points: tuple[Point, ...]
    status: str
    by: str
    notes: tuple[str, ...]


def solve_limited(
    problem: CostTable,
    limits: np.ndarray,
    minimise: Minimise,
    *,
    gap: float,
    time_limit_seconds: float,
    prove: bool = True,
    start: tuple[int, ...] | None = None,
    points: Sequence[Point] = (),
) -> Limited:
    """The least seconds within ``limits`` (bytes, one per row; infinite ones do not bind).

    Stops when the bound is within ``gap`` of the best, or prices cannot raise it any more. Then, to ``prove`` more,
    comes the integer program. ``start`` is a choice to mix with what is found, and ``points`` are outcomes that there
    are, as an earlier search of the same choices found: they tell where prices have to be.
    Raises :class:`InfeasibleError` if nothing fits, :class:`SolverError` if nothing that fits was found.
    """
    begun = time.perf_counter()
    search = _Search(problem, limits, start)
    search.begin(minimise, points)
    rounds = 0
    while rounds < MAX_PRICES:
        blind = math.isinf(search.bound)  # what is known of other searches is no bound: look at least once
        done = search.best is not None and search.best.seconds - search.bound <= NEARER * gap * search.best.seconds
        late = time.perf_counter() - begun > time_limit_seconds
        if (not search.next_prices() or done or late) and not blind:
            break
        rounds += 1
        search.look()
        if search.best is None and search.at_the_edge():
            search.reach(minimise)
    search.mix()
    if search.best is None:
        search.reach(minimise)
        search.mix()
    if search.best is None:
        search.settle(gap, max(1.0, time_limit_seconds - (time.perf_counter() - begun)))
    if search.best is None:
        raise SolverError(
            f"nothing that fits into {_texts(limits)} was found, nor a proof that nothing does; "
            f"the nearest holds {_texts(search.nearest)}"
        )
    dual_bound = search.bound
    by, notes = "prices and bounds", [f"{rounds} prices of a byte"]
    left = time_limit_seconds - (time.perf_counter() - begun)
    if prove and search.best.seconds - search.bound > gap * search.best.seconds and left > 0:
        by, more = search.close(gap, left)
        notes += more
    best, bound = search.best, min(search.bound, search.best.seconds)
    proven = best.seconds - bound <= TOLERANCE * best.seconds
    within = best.seconds - bound <= gap * best.seconds
    status = "optimal" if proven else "within gap" if within else "feasible"
    return Limited(
        best,
        bound,
        dual_bound,
        search.share(),
        search.bound_prices / search.scale,
        search.best_points(),
        status,
        by,
        tuple(notes),
    )


def lower_bound(
    problem: CostTable, limits: np.ndarray, prices: np.ndarray, *, pins: Mapping[int, set[int]] | None = None
) -> float:
    """A lower bound of the seconds of all choices within ``limits`` that ``pins`` allow, at ``prices`` of a byte.

    Rows without a limit must have no price.
    """
    sweeps = Sweeps(reduce.restrict(problem, reduce.possible_choices(problem, pins)))
    sweeps.price(prices)
    for pair in range(MAX_PAIRS):
        if sweeps.pair() < SLOW * abs(sweeps.bound) and pair > 0:
            break
    bind = np.isfinite(limits)
    return sweeps.bound - float(prices[bind] @ limits[bind])


class _Search:
    """Prices (per limit, not per byte), the cuts they gave, the best that fits, and the best bound."""

    def __init__(self, problem: CostTable, limits: np.ndarray, start: tuple[int, ...] | None) -> None:
        self.problem, self.limits, self.start = problem, limits, start
        self.active = np.isfinite(limits)
        self.scale = np.where(self.active & (limits > 0), limits, 1.0)
        self.sweeps = Sweeps(problem)
        self.prices = np.zeros(len(limits))
        self.bound_prices, self.bound = self.prices, -math.inf
        self.best: Outcome | None = None
        self.cuts: list[Cut] = []
        self.points: list[Point] = []
        self.nearest = np.full(len(limits), np.inf)
        self.box = 0.0
        self.seen: dict[tuple[int, ...], Cut] = {}

    def begin(self, minimise: Minimise, points: Sequence[Point]) -> None:
        """What is best without limits: a bound, and all that there is to do if it fits. Or what is known already."""
        for seconds, held in points:
            self._cut(seconds, held)
        if points:
            return
        choice, self.bound = minimise(at_prices(self.problem, self.prices))
        self.seen[tuple(choice)] = self.add(outcome(self.problem, choice, self.bound * TINY / self.scale))

    def look(self) -> None:
        """Bound the problem at the current prices, and find a choice that is good at them."""
        per_byte = self.prices / self.scale
        self.sweeps.price(per_byte)
        problem = at_prices(self.problem, per_byte)
        allowance = float(per_byte[self.active] @ self.limits[self.active])
        for pair in range(MAX_PAIRS):
            gain = self.sweeps.pair()
            if math.isinf(self.sweeps.bound):
                raise InfeasibleError("no choices fit together, whatever they hold; loosen what is asked of them")
            if self.sweeps.bound - allowance > self.bound:
                self.bound, self.bound_prices = self.sweeps.bound - allowance, self.prices
            if pair > 0 and gain < SLOW * abs(self.sweeps.bound):
                break
        tiny = per_byte + self.sweeps.bound * TINY / self.scale
        if self.best is None and self.start is not None:
            self.add(outcome(self.problem, self.start, tiny))
        known = None if self.best is None else self.best.choice
        found = eliminated(problem, promising(self.sweeps.excess(), known))
        if found is not None:
            self.seen[found[0]] = self.add(outcome(self.problem, found[0], tiny))

    def add(self, found: Outcome) -> Cut:
        """A cut from a choice, which is the best if it fits and none was better."""
        self._cut(found.seconds, found.bytes)
        if found.fits(self.limits) and (self.best is None or found.seconds < self.best.seconds):
            self.best = found
        over = (found.bytes / self.scale)[self.active].max(initial=0.0)
        if over < (self.nearest / self.scale)[self.active].max(initial=-1.0):
            self.nearest = found.bytes
        return self.cuts[-1]

    def _cut(self, seconds: float, held: np.ndarray) -> None:
        self.points.append((seconds, held))
        self.cuts.append((seconds, np.where(self.active, (held - self.limits) / self.scale, 0.0)))
        self.box = self.box or STEPS * abs(seconds) or 1.0

    def next_prices(self) -> bool:
        """Where the cuts leave most room for a higher bound; false if there is none."""
        if not self.cuts:
            return False
        prices, most = _highest(self.cuts, self.box, self.active)
        moved = bool((np.abs(prices - self.prices) > 1e-9 * (1e-30 + np.abs(prices))).any())
        self.prices = prices
        return moved and most - self.bound > 1e-7 * abs(most)

    def share(self) -> float:
        """The part of what holds too much in the fastest mixture of two outcomes that just fits; 0 if there is none."""
        row = int(np.argmax(np.where(self.active, self.bound_prices, -1.0)))
        fitting = [(seconds, over[row]) for seconds, over in self.cuts if over[row] <= 0]
        found = [(math.inf, 0.0)]
        for fast, more in ((seconds, over[row]) for seconds, over in self.cuts if over[row] > 0):
            found += [(seconds + (fast - seconds) * part, part) for seconds, over in fitting
                      for part in [-over / (more - over)]]  # fmt: skip
        return min(found)[1]

    def best_points(self) -> tuple[Point, ...]:
        """The outcomes that are best at the prices of the best bound: as many that fit as that do not."""
        per_byte = self.bound_prices / self.scale
        different = {(seconds, *held.tolist()): (seconds, held) for seconds, held in self.points}.values()
        ordered = sorted(different, key=lambda point: point[0] + float(per_byte @ point[1]))
        fitting = [point for point in ordered if (point[1] <= self.limits).all()]
        others = [point for point in ordered if (point[1] > self.limits).any()]
        return (*fitting[: MOST_POINTS // 2], *others[: MOST_POINTS // 2])

    def mix(self) -> None:
        """Mix what is good at the prices of the best bound: elimination with fronts among few choices."""
        if self.best is not None and self.best.seconds - self.bound <= TOLERANCE * self.best.seconds:
            return
        per_byte = self.bound_prices / self.scale
        self.sweeps.price(per_byte)
        self.sweeps.pair()
        excess = self.sweeps.excess()
        value = {choice: seconds + float(self.bound_prices @ over) for choice, (seconds, over) in self.seen.items()}
        first = sorted(self.seen, key=value.__getitem__)[:2]
        if self.start is not None:
            self.add(outcome(self.problem, self.start, per_byte + self.bound * TINY / self.scale))
            first.append(self.start)
        scopes = [factor.variables for factor in self.problem.factors]
        found: tuple[list[np.ndarray], list[int]] | None = None
        for count in range(1, FEW + 1):
            keep = []
            for number, row in enumerate(excess):
                likely = np.argsort(row, kind="stable")[:count]
                likely = likely[row[likely] <= SHARE * abs(self.bound)]
                keep.append(np.unique(np.append(likely, [choice[number] for choice in first]).astype(np.int64)))
            order = elimination.elimination_order([len(row) for row in keep], scopes, MAX_ENTRIES)
            if order is None or order.entries > MAX_ENTRIES:
                break
            found = keep, order.variables
        if found is None:
            return
        keep, variables = found
        smaller = reduce.restrict(self.problem, keep)
        for index, trees in fronts(smaller, per_byte, self.scale / CELLS, variables):
            choice = [int(row[at]) for row, at in zip(keep, index, strict=True)]
            self.add(measured(self.problem, choice, trees))

    def close(self, gap: float, time_limit_seconds: float) -> tuple[str, list[str]]:
        """Drop what cannot be better than the best, and give the rest to the integer program if it is small enough."""
        assert self.best is not None
        per_byte = self.bound_prices / self.scale
        self.sweeps.price(per_byte)
        allowance = float(per_byte[self.active] @ self.limits[self.active])
        remain = math.inf
        for _ in range(MAX_PAIRS):
            self.sweeps.pair((self.best.seconds + allowance) * (1 + TOLERANCE))
            keep = [np.flatnonzero(np.isfinite(row)) for row in self.sweeps.excess()]
            before, remain = remain, sum(map(len, keep))
            if remain > 0.98 * before:
                break
        # PuLP takes longer to import than most programs take to solve.
        from fxpar.solver.limited_milp import solve_limited_milp

        notes = [f"{remain} choices could be better than the best"]
        smaller = reduce.restrict(self.problem, keep)
        found = solve_limited_milp(smaller, self.limits, gap=gap, time_limit_seconds=time_limit_seconds)
        if found is None:
            return "prices and bounds", [*notes, "too many for the integer program"]
        index, trees, bound = found
        if index is not None:
            self.add(measured(self.problem, [int(row[at]) for row, at in zip(keep, index, strict=True)], trees))
        self.bound = max(self.bound, min(bound, self.best.seconds))
        return "prices, bounds and the integer program", notes

    def settle(self, gap: float, time_limit_seconds: float) -> None:
        """Let the integer program find something that fits, or prove that there is nothing, if it is small enough."""
        from fxpar.solver.limited_milp import solve_limited_milp

        found = solve_limited_milp(self.problem, self.limits, gap=gap, time_limit_seconds=time_limit_seconds)
        if found is None:
            return
        index, trees, bound = found
        if index is not None:
            self.add(measured(self.problem, index, trees))
        elif math.isinf(bound):
            raise InfeasibleError(f"nothing fits into {_texts(self.limits)}, says the integer program")

    def at_the_edge(self) -> bool:
        return bool((self.prices >= self.box).any())

    def reach(self, minimise: Minimise) -> None:
        """Look for the fewest bytes, weighed by the prices; raises :class:`InfeasibleError` if they are too many."""
        weights = np.where(self.active, self.prices, 0.0)
        weights = weights / weights.sum() if weights.sum() > 0 else self.active / self.active.sum()
        for alone in (*np.eye(len(weights))[self.active], weights):
            held = replace_costs(self.problem, alone / self.scale)
            _, least = minimise(held)
            allowed = float(alone @ np.where(self.active, self.limits / self.scale, 0.0))
            if least > allowed * (1 + TOLERANCE):
                row = int(np.argmax(alone))
                needed = f"{least * self.scale[row]:,.0f} bytes in row {row}"
                if alone[row] != 1:
                    needed = f"{least / allowed:.4g} times as many bytes over all rows"
                raise InfeasibleError(f"nothing fits into {_texts(self.limits)}: at least {needed} are needed")
            # Many choices hold as little: of those, or nearly so, a fast one.
            steep = MORE * self.box * alone / self.scale
            self.add(outcome(self.problem, minimise(at_prices(self.problem, steep))[0], steep))
        self.box *= MORE


def _highest(cuts: Sequence[tuple[float, np.ndarray]], box: float, active: np.ndarray) -> tuple[np.ndarray, float]:
    """Prices in ``[0, box]`` at which the least of ``seconds + prices @ over`` is highest, and how high it is.

    It is a corner of a small polytope: all are tried.
    """
    rows = np.flatnonzero(active)
    seconds = np.array([cut[0] for cut in cuts])
    over = np.array([cut[1][rows] for cut in cuts])
    unit = np.eye(len(rows))
    # height - prices @ over <= seconds;  -prices <= 0;  prices <= box
    left = np.vstack([np.hstack([np.ones((len(cuts), 1)), -over]), np.pad(-unit, ((0, 0), (1, 0))),
                      np.pad(unit, ((0, 0), (1, 0)))])  # fmt: skip
    right = np.concatenate([seconds, np.zeros(len(rows)), np.full(len(rows), box)])
    corners = np.array(list(combinations(range(len(right)), len(rows) + 1)))
    corners = corners[(corners[:, 0] < len(cuts))]
    matrices = left[corners]
    good = np.abs(np.linalg.det(matrices)) > 1e-14
    points = np.linalg.solve(matrices[good], right[corners[good]][..., None])[..., 0]
    points = np.clip(points[:, 1:], 0.0, box)
    heights = (seconds + points @ over.T).min(axis=1)
    best = int(heights.argmax())
    prices = np.zeros(len(active))
    prices[rows] = points[best]
    return prices, float(heights[best])


def _texts(amounts: np.ndarray) -> str:
    return ", ".join(f"{amount:,.0f} bytes" if math.isfinite(amount) else "any number of bytes" for amount in amounts)
