"""Priced space + a memory limit that nothing keeps -> the least that is needed, and an error that says what would fit.

In: :class:`~fxpar.cost.price.Priced` with its :class:`~fxpar.cost.rows.Rows`, bytes per device. Out: the plan that
needs the fewest bytes; a text. The search for the fastest plan that fits is :mod:`fxpar.limits`.
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
from fxpar.solver.outcomes import measured
from fxpar.solver.problem import CostTable, Factor, Variable
from fxpar.space import Space, space

#: When nothing fits, meshes up to this times as large are tried.
MAX_GROWTH = 64

#: What seconds weigh where bytes are made least.
LITTLE = 1e-3

Pins = Mapping[int, set[int]]


def ever_smaller(priced: Priced, pins: Pins | None) -> Iterator[Pins]:
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


def passages_of(
    rows: Rows, choice: Sequence[int], trees: Sequence[Sequence[tuple[int, int]] | None]
) -> dict[int, Passage]:
    """What the solver's trees mean, for the flows that keep something."""
    return {number: flow.passage(choice, trees[number] or ()) for number, flow in rows.flows.items()}


def least_memory(
    priced: Priced, rows: Rows, optimizer: str | None, pins: Pins | None = None
) -> tuple[Plan, Memory, tuple[int, ...], Pins]:
    """The plan found to need the fewest bytes, what it needs, its choice, and the choices among which it was found."""
    # Seconds decide between equals, of which there are many: whoever computes on whole tensors may keep none of them.
    least = [(float(item.bytes[KEPT].min()), float(item.costs.min())) for item in rows.problem.variables
             if item.bytes is not None]  # fmt: skip
    kept_bytes, seconds = (sum(column) for column in zip(*least, strict=True))
    scale = LITTLE * kept_bytes / seconds if seconds else 0.0

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
    found: list[tuple[Plan, Memory, tuple[int, ...], Pins]] = []
    choice: tuple[int, ...] | None = None
    for allowed in ever_smaller(priced, pins):
        if choice is None or not keeps(allowed, choice):
            choice = solve(problem, pins=allowed).choice
            found.append((*_planned(priced, rows, problem, choice, optimizer), choice, allowed))
    return min(found, key=lambda item: item[1].peak_bytes)


def keeps(allowed: Pins, choice: Sequence[int]) -> bool:
    """Whether ``choice`` is among what is allowed."""
    return all(index in allowed.get(slot, {index}) for slot, index in enumerate(choice))


def _planned(
    priced: Priced, rows: Rows, problem: CostTable, choice: Sequence[int], optimizer: str | None
) -> tuple[Plan, Memory]:
    trees: list[tuple[tuple[int, int], ...] | None] = []
    for factor in problem.factors:
        root, targets = factor.ends([choice[variable] for variable in factor.variables])
        trees.append(cheapest_tree(factor.conversions, root, targets, range(len(factor.conversions))).arcs)
    seconds = measured(rows.problem, choice, trees).seconds
    plan = assemble(priced, choice, passages=passages_of(rows, choice, trees), objective_seconds=seconds)
    return plan, memory(priced.space.program, plan, optimizer)


def why_nothing_fits(priced: Priced, limit_bytes: float, optimizer: str | None, pins: Pins | None) -> str:
    """Why no plan fits, and what would."""
    rows = memory_rows(priced, optimizer)
    plan, needed, *_ = least_memory(priced, rows, optimizer, pins)
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
    larger = None if pins else _larger_mesh(program, priced, limit_bytes, optimizer, needed)
    if larger is not None:
        lines.append(f"it would fit ({_gib(larger[1])}) on {dict(larger[0].axes)}, with the same batch in all")
    if len(lines) == 2:
        lines.append("use a larger mesh, a smaller batch, or loosen the constraints")
    lines.append("without memory_limit_bytes= the limit is what a device of the cluster has; math.inf lifts it")
    return "; ".join(lines)


def _larger_mesh(
    program: Program, priced: Priced, limit_bytes: float, optimizer: str | None, needed: Memory
) -> tuple[Mesh, int] | None:
    """The smallest mesh that is large enough, with one axis some power of two times as long; what it needs there."""
    axes = priced.space.mesh.axes
    times = 2
    while times <= MAX_GROWTH:
        # n times the devices need an n-th each, at best.
        for at in range(len(axes)) if needed.peak_bytes <= times * limit_bytes else ():
            grown = Mesh(tuple((name, n * times if axis == at else n) for axis, (name, n) in enumerate(axes)))
            border = _boundary_on(grown, priced.space)
            if border is None:
                continue
            try:
                larger = price(space(program, grown, border), priced.cluster)
                _, there, *_ = least_memory(larger, memory_rows(larger, optimizer), optimizer)
            except (InfeasibleError, SolverError):
                continue
            if there.peak_bytes <= limit_bytes:
                return grown, there.peak_bytes
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
