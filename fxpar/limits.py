"""Priced space + a memory limit -> the fastest plan that fits it, or an error that says what would.

In: :class:`~fxpar.cost.price.Priced`, bytes per device. Out: a :class:`~fxpar.plans.Plan`. The solver bounds the rows
of :mod:`fxpar.cost.rows`; a found plan is then walked through exactly (:mod:`fxpar.cost.memory`), and where the rows
had left something out, it is added to them and the search goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fxpar.assemble import assemble
from fxpar.boundary import Boundary
from fxpar.cost.memory import memory
from fxpar.cost.price import Priced, price
from fxpar.cost.rows import KEPT, Passage, Rows, memory_rows, working_sets
from fxpar.cost.trees import Arcs, cheapest_tree
from fxpar.errors import InfeasibleError, SolverError
from fxpar.graph import Program, Ref
from fxpar.layout import Mesh, fits
from fxpar.plans import Memory, Plan
from fxpar.solver import solve
from fxpar.solver.problem import CostTable, Factor, Variable
from fxpar.space import Space, space

#: Corrections of the rows by what the exact walk finds.
MAX_ROUNDS = 8

#: When nothing fits, meshes up to this times as large are tried.
MAX_GROWTH = 64

#: A plan this near to the bound is within the gap that the solver aims at; this near, it is proven.
GAP, PROVEN_TO = 1e-3, 1e-9

Pins = Mapping[int, set[int]]


def plan_within(
    priced: Priced,
    limit_bytes: float,
    *,
    optimizer: str | None,
    pins: Pins | None = None,
    time_limit_seconds: float = 60.0,
) -> Plan:
    """The fastest plan whose step takes at most ``limit_bytes`` on each device.

    Raises :class:`InfeasibleError` with the least that is needed, what needs it, and what would make it fit.
    """
    return search_within(priced, limit_bytes, optimizer=optimizer, pins=pins, time_limit_seconds=time_limit_seconds)[0]


def search_within(
    priced: Priced,
    limit_bytes: float,
    *,
    optimizer: str | None,
    pins: Pins | None = None,
    time_limit_seconds: float = 60.0,
    prove: bool = True,
) -> tuple[Plan, float]:
    """What :func:`plan_within` gives, and the seconds that mixtures of such plans come near to.

    Without ``prove`` the integer program is left out, which takes most of the time and finds little more.
    """
    rows, best, taken = memory_rows(priced, optimizer), None, None
    dual_bound = 0.0
    bounds: list[float] = []  # the first is one of all plans; further searches leave some out
    for allowed in _ever_smaller(priced, pins):
        if taken is not None and all(choice in allowed.get(slot, {choice}) for slot, choice in enumerate(taken)):
            continue  # the best so far is the best of these, too
        found = _plan_with(priced, rows, limit_bytes, optimizer, allowed, time_limit_seconds, prove, bounds)
        if best is not None and (found is None or found[0].objective_seconds >= best.objective_seconds):
            break
        best, taken, dual_bound = found or (best, taken, dual_bound)
    if best is None:
        raise InfeasibleError(_why(priced, rows, limit_bytes, optimizer, pins))
    bound = min(bounds[0], best.objective_seconds)
    gap = (best.objective_seconds - bound) / best.objective_seconds if best.objective_seconds else 0.0
    status = "optimal" if gap <= PROVEN_TO else "within gap" if gap <= GAP else "feasible"
    return replace(best, bound_seconds=bound, gap=gap, status=status), dual_bound


def _ever_smaller(priced: Priced, pins: Pins | None) -> Iterator[Pins]:
    """``pins``, and ``pins`` without the choices whose working sets are large, for ever smaller ones.

    What is in use for a moment cannot be a row, as it is the largest of many; so it is bounded operation by operation.
    """
    sets = working_sets(priced.space)
    held = pins or {}
    yield held
    bound = max(
        float(sizes[sorted(held[slot]) if slot in held else slice(None)].min()) for slot, sizes in enumerate(sets)
    )
    largest = max(float(sizes.max()) for sizes in sets)
    while largest > bound:
        largest = max(largest / 2, bound)
        allowed = {slot: set(np.flatnonzero(sizes <= largest).tolist()) for slot, sizes in enumerate(sets)}
        narrowed = {slot: own & held.get(slot, own) for slot, own in allowed.items()}
        if not all(narrowed.values()):
            return
        yield narrowed


def _plan_with(
    priced: Priced,
    rows: Rows,
    limit_bytes: float,
    optimizer: str | None,
    pins: Pins,
    time_limit_seconds: float,
    prove: bool,
    bounds: list[float],
) -> tuple[Plan, tuple[int, ...], float] | None:
    """The fastest plan that fits and takes only choices in ``pins``, its choices, and the dual bound of its search."""
    program = priced.space.program
    left_out = np.full(2, float(sum(program.unused.values())))
    for _ in range(MAX_ROUNDS):
        limits = limit_bytes - left_out
        if (limits <= 0).any():
            return None
        try:
            solution = solve(
                rows.problem,
                pins=pins,
                limits_bytes=limits.tolist(),
                time_limit_seconds=time_limit_seconds,
                prove=prove,
            )
        except (InfeasibleError, SolverError):  # there is none, or none that the solver can find
            return None
        bounds.append(solution.bound)
        plan = assemble(
            priced,
            solution.choice,
            status=solution.status,
            bound_seconds=solution.bound,
            gap=solution.gap,
            passages=_passages(rows, solution.choice, solution.trees),
            objective_seconds=solution.cost,
        )
        needed = memory(program, plan, optimizer)
        if needed.peak_bytes <= limit_bytes:
            return replace(plan, memory=needed), solution.choice, solution.dual_bound
        walked = np.array([max(needed.phases["forward"], needed.phases["backward"]), needed.phases["optimizer"]])
        left_out = np.maximum(left_out, walked - np.array(solution.bytes))
    return None


def _passages(
    rows: Rows, choice: Sequence[int], trees: Sequence[Sequence[tuple[int, int]] | None]
) -> dict[int, Passage]:
    """What the solver's trees mean, for the flows that keep something."""
    return {number: flow.passage(choice, trees[number] or ()) for number, flow in rows.flows.items()}


def least_memory(priced: Priced, rows: Rows, optimizer: str | None, pins: Pins | None = None) -> tuple[Plan, Memory]:
    """The plan found to need the fewest bytes, and what it needs."""
    scale = 1e-12  # seconds only decide between equals

    def weighed(variable: Variable) -> Variable:
        assert variable.bytes is not None
        return Variable(variable.name, variable.bytes[KEPT] + scale * variable.costs)

    def light(factor: Factor) -> Factor:
        arcs = factor.conversions
        kept = np.zeros(len(arcs.ends)) if arcs.bytes is None else arcs.bytes[KEPT]
        return replace(factor, table=None, arcs=Arcs(arcs.start, arcs.ends, kept + scale * arcs.seconds))

    problem = CostTable(
        tuple(map(weighed, rows.problem.variables)), tuple(light(factor) for factor in rows.problem.factors)
    )
    found = [_lightest(priced, rows, problem, optimizer, allowed) for allowed in _ever_smaller(priced, pins)]
    return min(found, key=lambda pair: pair[1].peak_bytes)


def _lightest(priced: Priced, rows: Rows, problem: CostTable, optimizer: str | None, pins: Pins) -> tuple[Plan, Memory]:
    choice = solve(problem, pins=pins).choice
    trees: list[Sequence[tuple[int, int]] | None] = []
    for factor in problem.factors:
        root, targets = factor.ends([choice[variable] for variable in factor.variables])
        trees.append(cheapest_tree(factor.conversions, root, targets, range(len(factor.conversions))).arcs)
    plan = assemble(priced, choice, passages=_passages(rows, choice, trees))
    return plan, memory(priced.space.program, plan, optimizer)


def _why(priced: Priced, rows: Rows, limit_bytes: float, optimizer: str | None, pins: Pins | None) -> str:
    """Why no plan fits, and what would."""
    plan, needed = least_memory(priced, rows, optimizer, pins)
    program, mesh = priced.space.program, priced.space.mesh
    most = "; ".join(f"{place or 'the model'} {_gib(size)}" for place, size in needed.largest[:4])
    lines = [
        f"no plan on {dict(mesh.axes)} fits in {_gib(limit_bytes)} per device; the least found needs "
        f"{_gib(needed.peak_bytes)} in its {needed.peak_phase}: parameters {_gib(needed.parameter_bytes)}, gradients "
        f"{_gib(needed.gradient_bytes)}, optimizer {_gib(needed.optimizer_bytes)}, activations "
        f"{_gib(needed.activation_bytes)}, in transit {_gib(needed.transient_bytes)}",
        f"most is needed by {most}",
    ]
    again = replace(program, recompute=tuple(plan.instances))
    recomputed = memory(again, plan, optimizer).peak_bytes if plan.instances else math.inf
    if recomputed <= limit_bytes:
        lines.append(
            f"it would fit ({_gib(recomputed)}) if every block were recomputed in backward: wrap them in "
            "torch.utils.checkpoint.checkpoint"
        )
    larger = None if pins else _larger_mesh(program, priced, limit_bytes, optimizer)
    if larger is not None:
        lines.append(f"it would fit ({_gib(larger[1])}) on {dict(larger[0].axes)}, with the same batch in all")
    if len(lines) == 2:
        lines.append("use a larger mesh, a smaller batch, or loosen the constraints")
    lines.append("without memory_limit_bytes= the limit is what a device of the cluster has; math.inf lifts it")
    return "; ".join(lines)


def _larger_mesh(
    program: Program, priced: Priced, limit_bytes: float, optimizer: str | None
) -> tuple[Mesh, int] | None:
    """The smallest mesh that is large enough, with one axis some power of two times as long; what it needs there."""
    axes = priced.space.mesh.axes
    times = 2
    while times <= MAX_GROWTH:
        for at in range(len(axes)):
            grown = Mesh(tuple((name, n * times if axis == at else n) for axis, (name, n) in enumerate(axes)))
            border = _boundary_on(grown, priced.space)
            if border is None:
                continue
            try:
                larger = price(space(program, grown, border), priced.cluster)
                _, needed = least_memory(larger, memory_rows(larger, optimizer), optimizer)
            except (InfeasibleError, SolverError):
                continue
            if needed.peak_bytes <= limit_bytes:
                return grown, needed.peak_bytes
        times *= 2
    return None


def _boundary_on(grown: Mesh, space: Space) -> Boundary | None:
    """The boundary with the batch cut by the axes of another mesh; ``None`` if it does not divide, or was given."""
    border, mesh, program = space.boundary, space.mesh, space.program
    if border.rule.inputs or border.rule.outputs:
        return None
    old, new = (border.rule.batch_layout(each) for each in (mesh, grown))
    inputs = tuple(new if layout == old else layout for layout in border.inputs)
    outputs = tuple(new if layout == old else layout for layout in border.outputs)
    top = program.top
    values = [item.value for item in top.inputs if item.kind == "input"]
    pairs = list(zip(values, inputs, strict=True))
    for out, layout in zip(top.outputs, outputs, strict=True):
        if isinstance(out, Ref) and layout is not None:
            pairs.append((out.value, layout))
    if not all(fits(top.values[value].shape, layout, grown.degrees) for value, layout in pairs):
        return None
    return replace(border, inputs=inputs, outputs=outputs)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**26 else f"{size / 2**20:.3g} MiB"
