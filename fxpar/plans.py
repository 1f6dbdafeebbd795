"""Plan: every choice made for a model on a mesh, what it should cost, and how sure the solver was.

In: plain values from the planner, or JSON. Out: :class:`Plan`, which :mod:`fxpar.rewrite` applies, JSON (a schema and
a version, never a pickle), and a digest that ranks compare. How a plan is found is :mod:`fxpar.solver`; how it is
shown is :mod:`fxpar.report`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fxpar.boundary import BoundaryRule
from fxpar.errors import PlanError
from fxpar.layout import Layout, Mesh, State, parse_state
from fxpar.rules.strategy import Strategy

SCHEMA = "fxpar.plan"
VERSION = 2

Arc = tuple[Layout, Layout]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one node does: a strategy per mesh axis."""

    strategies: tuple[Strategy, ...]

    @property
    def name(self) -> str:
        return " x ".join(strategy.name for strategy in self.strategies)

    @property
    def inputs(self) -> tuple[Layout, ...]:
        """The layout in which each operand is read."""
        return tuple(zip(*(strategy.inputs for strategy in self.strategies), strict=True))

    @property
    def outputs(self) -> tuple[Layout, ...]:
        """The layout of each output that is a tensor."""
        return tuple(zip(*(strategy.outputs for strategy in self.strategies), strict=True))


@dataclass(frozen=True)
class GraphPlan:
    """Choices for one graph, in the graph's own order.

    ``digest`` is that of the graph it is for. ``inputs`` has a layout per ``Graph.inputs``, ``outputs`` one per flat
    output (``None`` for a constant), ``updates`` one per updated buffer. ``trees`` maps a value to its conversions,
    parents first: an operand is read in the state its value is produced in, or in one that its tree reaches. ``again``
    maps a value to the layouts, of those that its tree reaches, that are not kept for backward: they are made again
    from the layout it is produced in, along the tree, when backward first needs them.
    """

    digest: str
    inputs: tuple[Layout, ...]
    nodes: tuple[NodePlan, ...]
    outputs: tuple[Layout | None, ...]
    updates: tuple[Layout, ...] = ()
    trees: dict[int, tuple[Arc, ...]] = field(default_factory=dict)
    again: dict[int, tuple[Layout, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class Collective:
    """A collective of one step: ``wire_bytes`` are sent by each rank, ``count`` times, in ``phase`` of ``module``."""

    module: str
    phase: str
    kind: str
    axis: str
    wire_bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice, priced, with its best alternative: ``runner_up_seconds`` is what a step would take *more* with it."""

    graph: str
    module: str
    op: str
    source: str
    strategy: str
    seconds: float
    count: int = 1
    runner_up: str | None = None
    runner_up_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A parameter that every rank holds whole, and why."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """What is done to ``place`` (a module, or ``count`` of them by glob) on an axis: names of :mod:`fxpar.parts`."""

    place: str
    count: int
    axis: str
    styles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device in one training step (:func:`fxpar.cost.memory.memory`).

    ``buffer_bytes`` are buffers, constants and the inputs of the call; ``activation_bytes`` are kept from forward to
    backward; ``transient_bytes`` is the most that is in use beyond what stands or is kept: results, gradients on their
    way, gathered copies. ``peak_bytes`` is the most at any one time, in ``peak_phase``; ``phases`` has the most in each
    of ``"forward"``, ``"backward"`` and ``"optimizer"``. ``largest`` are the places of
    the model that keep most: parameters with gradients and optimizer states, and activations.
    """

    optimizer: str | None
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int
    transient_bytes: int
    peak_bytes: int
    peak_phase: str
    largest: tuple[tuple[str, int], ...] = ()
    phases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A whole plan. Times are seconds of one training step (forward, backward, optimizer), as the cluster prices it.

    ``status`` is ``"optimal"`` when the solver proved it, ``"time limit"`` when not, ``"given"`` for a layout that
    nobody searched. ``whole_seconds`` is the step without any split; ``split_seconds`` is the best step in which
    some parameter is split (``None`` if none can be). ``boundary`` says in which layouts inputs arrive and outputs
    leave, also of calls that are planned later. ``memory`` is what a step takes on each device, if it is known.
    ``parts`` says in words what is done where. ``calls`` has the module path and the graph of every call of a block, in
    order: equal blocks may be of several kinds, each with a graph's plan of its own. ``folding_gap`` is the share of
    the step that could be saved if every instance of a block were split in its own way, at most, or within a memory
    limit that binds at least (``None``: nobody has looked).
    """

    mesh: Mesh
    cluster: str
    program: str
    graphs: dict[str, GraphPlan]
    calls: tuple[tuple[str, str], ...]
    parameters: dict[str, Layout]
    collectives: tuple[Collective, ...] = ()
    objective_seconds: float = 0.0
    bound_seconds: float = 0.0
    gap: float = 0.0
    status: str = "given"
    whole_seconds: float = 0.0
    split_seconds: float | None = None
    parameter_bytes: int = 0
    unsplit: tuple[Unsplit, ...] = ()
    unruled_ops: tuple[tuple[str, str, int], ...] = ()
    choices: tuple[Choice, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    boundary: BoundaryRule = field(default_factory=BoundaryRule)
    memory: Memory | None = None
    parts: tuple[Part, ...] = ()
    folding_gap: float | None = None

    @property
    def instances(self) -> dict[str, str]:
        """The graph of every module that is called as a block, by path (of the last call, if it is several)."""
        return dict(self.calls)

    @property
    def digest(self) -> str:
        """A hash of what will be run: the mesh, the program and every choice; not of prices or timings."""
        core = [_mesh_out(self.mesh), self.program, _graphs_out(self.graphs), _layouts_out(self.parameters), self.calls]
        core += [] if self.boundary == BoundaryRule() else [_rule_out(self.boundary)]
        return hashlib.sha256(json.dumps(core).encode()).hexdigest()[:16]

    @property
    def unsplit_share(self) -> float:
        """The fraction of the parameter bytes that every rank holds whole."""
        return sum(item.bytes for item in self.unsplit) / self.parameter_bytes if self.parameter_bytes else 0.0

    def with_timings(self, **timings: float) -> Plan:
        """The same plan with further stage timings in seconds."""
        return replace(self, timings={**self.timings, **timings})

    def explain(self, module: str = "") -> str:
        """A line per operation under ``module``: its strategy, its seconds, and its runner-up's extra seconds.

        Raises :class:`PlanError` with the nearest names when no operation runs there.
        """
        from fxpar.report import explain

        return explain(self, module)

    def __str__(self) -> str:
        from fxpar.report import summary

        return summary(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan as JSON text; :meth:`from_json` reads it back to an equal plan."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "version": VERSION,
                "digest": self.digest,
                "mesh": _mesh_out(self.mesh),
                "cluster": self.cluster,
                "program": self.program,
                "graphs": _graphs_out(self.graphs),
                "calls": self.calls,
                "parameters": _layouts_out(self.parameters),
                "collectives": [[c.module, c.phase, c.kind, c.axis, c.wire_bytes, c.count] for c in self.collectives],
                "objective_seconds": self.objective_seconds,
                "bound_seconds": self.bound_seconds,
                "gap": self.gap,
                "status": self.status,
                "whole_seconds": self.whole_seconds,
                "split_seconds": self.split_seconds,
                "parameter_bytes": self.parameter_bytes,
                "unsplit": [[item.name, item.bytes, item.reason] for item in self.unsplit],
                "unruled_ops": self.unruled_ops,
                "choices": [[getattr(choice, name) for name in Choice.__slots__] for choice in self.choices],
                "timings": self.timings,
                "stats": self.stats,
                "notes": self.notes,
                "boundary": _rule_out(self.boundary),
                "memory": self.memory and {name: getattr(self.memory, name) for name in Memory.__slots__},
                "folding_gap": self.folding_gap,
                "parts": [[part.place, part.count, part.axis, part.styles] for part in self.parts],
            },
            indent=indent,
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read :meth:`to_json`'s text; raises :class:`PlanError` on any other."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"this is not a plan: {error}; pass the text that Plan.to_json() wrote") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise PlanError(f"this is not a plan: its schema is {found!r}, not {SCHEMA!r}")
        if data.get("version") != VERSION:
            raise PlanError(f"plan version {data.get('version')!r} cannot be read; this fxpar reads version {VERSION}")
        try:
            plan = _plan_in(data)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the plan's text is damaged: {type(error).__name__}: {error}") from error
        if plan.digest != data["digest"]:
            raise PlanError(f"the plan was changed: its digest is {plan.digest}, it says {data['digest']}")
        return plan


def _plan_in(data: dict[str, Any]) -> Plan:
    plain = ["cluster", "program", "objective_seconds", "bound_seconds", "gap", "status"]
    plain += ["whole_seconds", "split_seconds", "parameter_bytes", "timings", "stats"]
    return Plan(
        mesh=Mesh(tuple((name, degree) for name, degree in data["mesh"])),
        graphs={name: _graph_in(graph) for name, graph in data["graphs"].items()},
        calls=tuple((path, name) for path, name in data["calls"]),
        parameters={name: _layout_in(layout) for name, layout in data["parameters"].items()},
        collectives=tuple(Collective(*item) for item in data["collectives"]),
        unsplit=tuple(Unsplit(*item) for item in data["unsplit"]),
        unruled_ops=tuple((op, module, count) for op, module, count in data["unruled_ops"]),
        choices=tuple(Choice(*item) for item in data["choices"]),
        notes=tuple(data["notes"]),
        boundary=_rule_in(data.get("boundary", {})),
        memory=_memory_in(data.get("memory")),
        folding_gap=data.get("folding_gap"),
        parts=tuple(Part(place, count, axis, tuple(styles)) for place, count, axis, styles in data.get("parts", [])),
        **{name: data[name] for name in plain},
    )


def _memory_in(data: dict[str, Any] | None) -> Memory | None:
    if data is None:
        return None
    return Memory(**{**data, "largest": tuple((place, size) for place, size in data["largest"])})


def _rule_out(rule: BoundaryRule) -> dict[str, Any]:
    return {
        "data_axes": list(rule.data_axes),
        "inputs": _layouts_out(rule.inputs),
        "outputs": _layouts_out(rule.outputs),
    }


def _rule_in(data: dict[str, Any]) -> BoundaryRule:
    inputs, outputs = (
        {name: _layout_in(layout) for name, layout in data.get(kind, {}).items()} for kind in ("inputs", "outputs")
    )
    return BoundaryRule(tuple(data.get("data_axes", ())), inputs, outputs)


def _mesh_out(mesh: Mesh) -> list[list[Any]]:
    return [list(axis) for axis in mesh.axes]


def _layout_out(layout: Layout | None) -> list[str] | None:
    return None if layout is None else [str(state) for state in layout]


def _layout_in(text: list[str]) -> Layout:
    return tuple(parse_state(state) for state in text)


def _layouts_out(layouts: Mapping[str, Layout]) -> dict[str, list[str] | None]:
    return {name: _layout_out(layout) for name, layout in layouts.items()}


def _states(text: str) -> tuple[State, ...]:
    return tuple(parse_state(item) for item in text.split())


def _strategy_out(strategy: Strategy) -> list[Any]:
    inputs, outputs = (" ".join(map(str, states)) for states in (strategy.inputs, strategy.outputs))
    return [strategy.name, inputs, outputs, strategy.divided]


def _graphs_out(graphs: dict[str, GraphPlan]) -> dict[str, Any]:
    return {
        name: {
            "digest": graph.digest,
            "inputs": [_layout_out(layout) for layout in graph.inputs],
            "nodes": [[_strategy_out(strategy) for strategy in node.strategies] for node in graph.nodes],
            "outputs": [_layout_out(layout) for layout in graph.outputs],
            "updates": [_layout_out(layout) for layout in graph.updates],
            "trees": [
                [value, [[_layout_out(src), _layout_out(dst)] for src, dst in arcs]]
                for value, arcs in sorted(graph.trees.items())
            ],
            **({"again": _again_out(graph.again)} if graph.again else {}),
        }
        for name, graph in graphs.items()
    }


def _again_out(again: Mapping[int, tuple[Layout, ...]]) -> list[list[Any]]:
    return [[value, [_layout_out(layout) for layout in layouts]] for value, layouts in sorted(again.items())]


def _graph_in(data: dict[str, Any]) -> GraphPlan:
    return GraphPlan(
        digest=data["digest"],
        inputs=tuple(_layout_in(layout) for layout in data["inputs"]),
        nodes=tuple(
            NodePlan(tuple(Strategy(name, _states(ins), _states(outs), divided) for name, ins, outs, divided in node))
            for node in data["nodes"]
        ),
        outputs=tuple(None if layout is None else _layout_in(layout) for layout in data["outputs"]),
        updates=tuple(_layout_in(layout) for layout in data["updates"]),
        trees={value: tuple((_layout_in(src), _layout_in(dst)) for src, dst in arcs) for value, arcs in data["trees"]},
        again={value: tuple(map(_layout_in, layouts)) for value, layouts in data.get("again", [])},
    )
