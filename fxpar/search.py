"""Program + mesh + cluster -> Plan: space, price, solve, assemble, in order and timed.

In: a captured :class:`~fxpar.graph.Program`. Out: a :class:`~fxpar.plans.Plan`. Capturing comes before and rewriting
after (:mod:`fxpar.api`); nothing here needs torch.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fxpar.assemble import assemble
from fxpar.boundary import Boundary
from fxpar.cluster import Cluster
from fxpar.cost.memory import OPTIMIZERS, memory
from fxpar.cost.price import Priced, price
from fxpar.divide import asked_apart
from fxpar.errors import PlanError, RuleError
from fxpar.graph import Program
from fxpar.layout import Layout, Mesh
from fxpar.limits import search_within
from fxpar.mixing import plan_mixed
from fxpar.pins import parse_wish, pin
from fxpar.plans import Plan
from fxpar.progress import progress
from fxpar.solver import min_marginals, solve
from fxpar.space import Space, space
from fxpar.unfold import unfolded

#: Optima are proven to this relative precision: smaller differences are none.
PROVEN_TO = 1e-9


class Stages:
    """Names, times and (on request) dumps the stages of one planning run."""

    def __init__(self, dump: str | Path | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.dump = Path(dump) if dump else None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with progress(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def write(self, name: str, text: Callable[[], str]) -> None:
        """With ``dump``, write a stage's text form to the next numbered file; without, do not even make it."""
        if self.dump is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        number = len(list(self.dump.glob("[0-9][0-9]-*.txt")))
        (self.dump / f"{number:02d}-{name}.txt").write_text(text() + "\n")


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Meanwhile garbage is looked for only among what is made meanwhile.

    A search makes so many objects that Python goes through all that there are once or twice, torch's million among
    them; that takes longer than the search. If the program has set objects aside itself (``gc.freeze``), nothing is
    done.
    """
    mine = gc.isenabled() and not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


@only_new_garbage()
def search(
    program: Program,
    mesh: Mesh,
    cluster: Cluster,
    *,
    boundary: Boundary | None = None,
    parameters: Mapping[str, str | Layout] | None = None,
    optimizer: str = "adamw",
    memory_limit_bytes: float | None = None,
    strict: bool = False,
    check_folding: bool = False,
    time_limit_seconds: float = 60.0,
    stages: Stages | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """The cheapest plan for a captured program; ``parameters`` are states to hold, by glob.

    Inputs arrive and outputs leave as ``boundary`` says, whole if it is left out. ``optimizer`` names the one that
    will be used; ``memory_limit_bytes`` bounds what a rank holds at once. With ``check_folding`` the program is solved
    without blocks as well, and the plan says what folding costs: at most, or within a limit that binds at least; that
    takes up to ``time_limit_seconds`` once more.
    """
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer={optimizer!r} is not known here, only {', '.join(map(repr, OPTIMIZERS))}")
    limit = math.inf if memory_limit_bytes is None else memory_limit_bytes
    if limit < math.inf and not program.footprints:
        raise PlanError("memory_limit_bytes: the program says nothing about memory; capture a model")
    stages, end = stages or Stages(), time.perf_counter() + time_limit_seconds
    with stages.stage("space"):
        program = asked_apart(program, _read(parameters or {}, mesh))
        open_space = space(program, mesh, boundary)
    stages.write("space", open_space.text)
    if strict and open_space.unruled:
        listed = ", ".join(f"{op} in {module or 'the model'}" for op, module, _ in open_space.unruled)
        raise RuleError(f"strict=True, and these operations have no rule: {listed}; register one, or leave strict out")
    with stages.stage("price"):
        priced = price(open_space, cluster)
    with stages.stage("solve"):
        pins = pin(open_space, constraints=parameters)
        solution = solve(priced.problem, pins=pins, time_limit_seconds=time_limit_seconds)
        marginals = min_marginals(priced.problem, pins=pins) if solution.status == "optimal" else None
    with stages.stage("assemble"):
        found = assemble(
            priced,
            solution.choice,
            status=solution.status,
            bound_seconds=solution.bound,
            gap=solution.gap,
            marginals=marginals,
            notes=tuple(notes),
            stats=statistics(open_space, priced),
        )
        if program.footprints:
            found = replace(found, memory=memory(program, found, optimizer))
    binding = found.memory is not None and found.memory.peak_bytes > limit
    if binding:
        with stages.stage("fit"):
            fitting = plan_mixed(
                priced,
                limit,
                optimizer=optimizer,
                constraints=parameters,
                time_limit_seconds=end - time.perf_counter(),
            )
        found = replace(fitting, notes=found.notes, stats=found.stats)
    if check_folding:
        with stages.stage("unfold"):
            best: float | None
            if binding:
                loose = unfolded(program)
                apart = price(space(loose, mesh, boundary), cluster)
                held = pin(apart.space, constraints=parameters)
                alone = search_within(
                    apart, limit, optimizer=optimizer, pins=held, time_limit_seconds=time_limit_seconds
                )
                best = None if alone is None else alone.plan.objective_seconds
            else:
                best = _unfolded_bound_seconds(program, mesh, cluster, boundary, parameters, time_limit_seconds)
        if best is None:
            found = replace(found, notes=(*found.notes, "no plan that fits was found without folding"))
        else:
            share = 1.0 - best / found.objective_seconds if found.objective_seconds else 0.0
            found = replace(found, folding_gap=share if share > PROVEN_TO else 0.0)
    found = replace(found.with_timings(**stages.seconds), boundary=boundary.rule if boundary else found.boundary)
    stages.write("plan", found.__str__)
    stages.write("explain", found.explain)
    return found


def _read(wishes: Mapping[str, str | Layout], mesh: Mesh) -> dict[str, Hashable]:
    """Wishes that are equal where they ask for the same."""
    return {glob: parse_wish(wish, mesh).states if isinstance(wish, str) else wish for glob, wish in wishes.items()}


def _unfolded_bound_seconds(
    program: Program,
    mesh: Mesh,
    cluster: Cluster,
    boundary: Boundary | None,
    parameters: Mapping[str, str | Layout] | None,
    time_limit_seconds: float,
) -> float:
    """What a step takes at least when every instance of a block is split in its own way."""
    free = space(unfolded(program), mesh, boundary)
    pins = pin(free, constraints=parameters)
    return solve(price(free, cluster).problem, pins=pins, time_limit_seconds=time_limit_seconds).bound


def statistics(open_space: Space, priced: Priced) -> dict[str, int]:
    """The sizes that decide how long a search takes; the same for the same model on every machine."""
    program = open_space.program
    variables, constraints = priced.problem.size()
    return {
        "nodes": len(program.top.nodes)
        + sum(len(graph.nodes) * len(program.instances(name)) for name, graph in program.blocks.items()),
        "nodes_folded": sum(len(graph.nodes) for graph in program.graphs().values()),
        "unique_blocks": len(program.blocks),
        "slots": len(open_space.slots),
        "variables": variables,
        "constraints": constraints,
    }
