"""The layouts that people write by hand, as pins on any mesh: what a layout says is held, the solver fills in the rest.

In: the space of a model on a mesh. Out: :data:`Pins` per layout of :data:`LAYOUTS`. Batch and sequence are followed
through the graph (:mod:`fxpar.dims`), so these hold for any model; only tensor parallelism has recipes per family
(:mod:`benchmarks.megatron`) and transformers' own plans (:func:`transformers_pins`).

On one axis a layout is alone. On several, tensor and sequence parallelism are on the last, and the others carry the
batch: with whole parameters (DDP), or sharded ones (FSDP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce

from benchmarks.megatron import family_of, megatron_pins
from fxpar import dims
from fxpar.dims import Followed
from fxpar.errors import InfeasibleError, PlanError
from fxpar.layout import I, S, divides
from fxpar.pins import Pins, pin
from fxpar.rules import rule_for
from fxpar.space import Slot, Space

ATTENTION = "aten.scaled_dot_product_attention.default"


def both(*pins: Pins) -> Pins:
    """What several layouts leave together, each on its own axes; raises :class:`InfeasibleError` if nothing is left."""
    found: Pins = {}
    for slot, choices in (item for some in pins for item in some.items()):
        found[slot] = found.get(slot, choices) & choices
        if not found[slot]:
            raise InfeasibleError(f"slot {slot}: the layouts of two axes ask for different things")
    return found


def split(space: Space, followed: Followed, axes: Sequence[int]) -> Pins:
    """Everything that has a dim is split by it on ``axes``, the outer axis first.

    Raises :class:`InfeasibleError` where a value that enters a graph does not divide. An operation that cannot be split
    by it (one that needs the dim whole) is left open.
    """
    degrees, pins = space.mesh.degrees, Pins()
    axes = [axis for axis in axes if degrees[axis] > 1]
    graphs = space.program.graphs()
    for number, slot in enumerate(space.slots):
        graph = graphs[slot.graph]
        if slot.kind == "node" and (hit := followed.nodes.get((slot.graph, slot.index))) is not None:
            allowed = _where(slot, lambda choice, slot=slot, hit=hit: _splits(slot, choice, hit, axes, degrees))
            if allowed:
                pins[number] = allowed
        elif slot.kind in ("enter", "leave"):
            value = graph.inputs[slot.index].value if slot.kind == "enter" else graph.outputs[slot.index].value
            cut = followed.values.get((slot.graph, value))
            if cut is None:
                continue
            states = {axis: S(cut[0], parts) for axis, parts in _parts(cut[1], axes, degrees)}
            if not all(divides(graph.values[value].shape, state, degrees[axis]) for axis, state in states.items()):
                raise InfeasibleError(f"{slot.name} {graph.values[value]} cannot be {states}")
            pins[number] = _where(
                slot,
                lambda choice, slot=slot, states=states: all(
                    slot.ways.layout(choice, "outputs", 0)[axis] == state for axis, state in states.items()
                ),
            )
    return pins


def undivided(space: Space, axes: Sequence[int]) -> Pins:
    """What does not depend on the batch is computed on every rank of ``axes``."""
    touched = dims.dependent(space.program)
    graphs = space.program.graphs()
    return {
        number: _where(slot, lambda choice, slot=slot: not any(slot.ways[choice][axis].divided for axis in axes))
        for number, slot in enumerate(space.slots)
        if slot.kind == "node"
        and not any((slot.graph, value) in touched for value in graphs[slot.graph].nodes[slot.index].operands)
    }


def _where(slot: Slot, holds: Callable[[int], bool]) -> set[int]:
    return {choice for choice in range(len(slot.ways)) if holds(choice)}


def _parts(parts: int, axes: Iterable[int], degrees: Sequence[int]) -> Iterable[tuple[int, int]]:
    """For every axis the parts in which it finds a dim that the ones before have cut."""
    for axis in axes:
        yield axis, parts
        parts *= degrees[axis]


def _splits(slot: Slot, choice: int, hit: tuple[str, int], axes: Sequence[int], degrees: Sequence[int]) -> bool:
    joint = slot.ways[choice]
    for axis, parts in _parts(hit[1], axes, degrees):
        if joint[axis].name != f"split:{hit[0]}" + (f"/{parts}" if parts > 1 else ""):
            return False
    return True


def at_rest(space: Space, axes: Sequence[int], *, sharded: bool) -> Pins:
    """Parameters whole on ``axes``, or cut on as many of them as divide a dim."""
    pins: Pins = {}
    for number in set(space.parameter_slots.values()):
        ways = space.slots[number].ways
        layouts = [ways.layout(choice, "outputs", 0) for choice in range(len(ways))]
        cuts = [sum(layout[axis] != I for axis in axes) for layout in layouts]
        wanted = max(cuts) if sharded else 0
        pins[number] = {choice for choice, count in enumerate(cuts) if count == wanted}
    return pins


def data_parallel(space: Space, axes: Sequence[int], *, sharded: Sequence[int] = ()) -> Pins:
    """The batch on ``axes``; parameters at rest cut on ``sharded``, whole on the others of ``axes``."""
    whole = [axis for axis in axes if axis not in sharded]
    return both(
        split(space, dims.batch(space.program), axes),
        undivided(space, axes),
        at_rest(space, whole, sharded=False),
        at_rest(space, sharded, sharded=True),
    )


def ulysses(space: Space, axis: int) -> Pins:
    """Sequence shards everywhere (Jacobs et al., 2023), heads inside of attention, parameters whole."""
    degree, graphs = space.mesh.degrees[axis], space.program.graphs()
    pins = both(split(space, dims.sequence(space.program), [axis]), at_rest(space, [axis], sharded=False))
    for number, slot in enumerate(space.slots):
        if slot.kind != "node" or slot.name != ATTENTION:
            continue
        graph = graphs[slot.graph]
        rule = rule_for(graph, graph.nodes[slot.index])
        heads = rule.term(0)[-3][:1] if rule else ()
        pins[number] = _where(
            slot, lambda choice, slot=slot, heads=heads: slot.ways[choice][axis].name == f"split:{''.join(heads)}"
        )
        if not pins[number]:
            raise InfeasibleError(f"{degree} ranks do not divide the heads in {graph.nodes[slot.index].module}")
    if not any(slot.kind == "node" and slot.name == ATTENTION for slot in space.slots):
        raise PlanError("the model has no attention")
    return pins


def megatron(space: Space, axis: int, *, sequence_parallel: bool) -> Pins:
    """Tensor parallelism on ``axis``; raises :class:`PlanError` if no recipe fits the model."""
    family = family_of(space)
    if family is None:
        raise PlanError("Megatron-LM has no layout for this make of model")
    return megatron_pins(space, family, sequence_parallel=sequence_parallel, axis=space.mesh.names[axis])


#: transformers' styles: the state of a matrix (``-1`` and ``-2`` count dims from the end), and of a vector.
STYLES: dict[str, tuple[str, str]] = {
    "colwise": ("S-2", "S0"),
    "colwise_gather_output": ("S-2", "S0"),
    "colwise_rep": ("S-2", "S0"),
    "packed_colwise": ("S-2/2", "S0"),
    "rowwise": ("S-1", "I"),
    "rowwise_rep": ("S-1", "I"),
    "rowwise_split_input": ("S-1", "I"),
    "packed_rowwise": ("S-1/2", "I"),
    "embedding_rowwise": ("S-2", "I"),
    "embedding_colwise": ("S-1", "I"),
    "sequence_parallel": ("I", "I"),
    "replicated_with_grad_allreduce": ("I", "I"),
    "mla_kv_a_proj": ("I", "I"),
    "moe_tp_experts": ("I", "I"),
    "replicate": ("I", "I"),
}


def transformers_pins(space: Space, tp_plan: Mapping[str, str], axis: int) -> Pins:
    """The parameters of a ``tp_plan`` of transformers as it stores them on ``axis``; all others are whole.

    Raises :class:`PlanError` for a style that is not known, and :class:`InfeasibleError` for sizes that do not divide.
    """
    graphs, wishes = space.program.graphs(), {}
    for name, number in space.parameter_slots.items():
        slot = space.slots[number]
        graph = graphs[slot.graph]
        length = len(graph.values[graph.inputs[slot.index].value].shape)
        style = _style(name, tp_plan)
        if style not in STYLES:
            raise PlanError(f"{name}: transformers' style {style!r} is not among {', '.join(STYLES)}")
        state = STYLES[style][length == 1]
        for at in (1, 2):
            state = state.replace(f"S-{at}", f"S{length - at}")
        wishes[name] = f"{state}@{space.mesh.names[axis]}"
    return pin(space, parameters=wishes)


def _style(parameter: str, tp_plan: Mapping[str, str]) -> str:
    """The style of a parameter by its own name, or of the module that owns it."""
    for name in (parameter, parameter.rpartition(".")[0]):
        for pattern, style in tp_plan.items():
            if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                return style
    return "replicate"


def _axes(space: Space) -> list[int]:
    return list(range(len(space.mesh.axes)))


def _beside(inner: Callable[[Space, int], Pins], *, sharded: bool = False) -> Callable[[Space], Pins]:
    """``inner`` on the last axis, the batch on the others."""

    def layout(space: Space) -> Pins:
        *outer, last = _axes(space)
        rest = data_parallel(space, outer, sharded=outer if sharded else ())
        return reduce(both, [rest], inner(space, last))

    return layout


def _hsdp(space: Space) -> Pins:
    axes = _axes(space)
    if len(axes) < 2:
        raise PlanError("HSDP needs two axes")
    return data_parallel(space, axes, sharded=axes[1:])


def _two(layout: Callable[[Space], Pins]) -> Callable[[Space], Pins]:
    def on_two(space: Space) -> Pins:
        if len(_axes(space)) < 2:
            raise PlanError("this layout needs two axes")
        return layout(space)

    return on_two


def _tp(space: Space, axis: int) -> Pins:
    return megatron(space, axis, sequence_parallel=False)


def _tp_sp(space: Space, axis: int) -> Pins:
    return megatron(space, axis, sequence_parallel=True)


#: By name: pins for a model on a mesh. Raises :class:`InfeasibleError` where sizes do not divide, and
#: :class:`PlanError` where a layout has no meaning for a model or a mesh.
LAYOUTS: dict[str, Callable[[Space], Pins]] = {
    "DDP": lambda space: data_parallel(space, _axes(space)),
    "FSDP": lambda space: data_parallel(space, _axes(space), sharded=_axes(space)),
    "HSDP": _hsdp,
    "TP": _beside(_tp),
    "TP+SP": _beside(_tp_sp),
    "Ulysses": _beside(ulysses),
    "FSDP x TP": _two(_beside(_tp, sharded=True)),
    "FSDP x TP+SP": _two(_beside(_tp_sp, sharded=True)),
    "FSDP x Ulysses": _two(_beside(ulysses, sharded=True)),
}
