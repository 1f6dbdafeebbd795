"""What crosses the border of a model on a mesh: in which layout every input arrives and every output leaves.

In: shapes and names of a call's tensors, which axes carry the batch, and what the user asked for by name. Out:
:class:`Boundary`, with layouts of global tensors. Placements of torch are read in :mod:`fxpar.placements`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxpar.errors import LayoutError
from fxpar.graph import Program, Ref
from fxpar.layout import I, Layout, Mesh, S, fits, nested_layout

#: Axes that carry the batch if nothing else is said.
DATA_AXES = (
    "dp", "ddp", "data", "data_parallel", "batch", "fsdp", "hsdp", "replicate", "shard",
    "dp_replicate", "dp_shard", "replica", "zero",
)  # fmt: skip

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BoundaryRule:
    """How boundaries are made, for any call: ``data_axes`` carry the batch; layouts by input and output name win."""

    data_axes: tuple[str, ...] = ()
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout] = field(default_factory=dict)

    def batch_layout(self, mesh: Mesh) -> Layout:
        """Dim 0 cut by every data axis, outermost first; whole on all others.

        >>> BoundaryRule(("dp", "fsdp")).batch_layout(Mesh.of({"dp": 2, "tp": 4, "fsdp": 2}))
        (S0, I, S0/2)
        """
        return nested_layout(tuple(S(0) if name in self.data_axes else I for name in mesh.names), mesh.degrees)


@dataclass(frozen=True)
class Boundary:
    """A layout per input of kind ``"input"`` of the top graph, and per flat output of it (``None`` for a constant).

    ``rule`` is what they were made by; ``notes`` are for the user.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    rule: BoundaryRule = BoundaryRule()
    notes: tuple[str, ...] = field(default=(), compare=False)


def data_axes_of(mesh: Mesh, asked: Iterable[str] | None) -> tuple[str, ...]:
    """The axes that carry the batch, in the mesh's order; raises :class:`LayoutError` for one that does not exist.

    >>> data_axes_of(Mesh.of({"dp": 2, "tp": 4}), None), data_axes_of(Mesh.of({"x": 2}), ["x"])
    (('dp',), ('x',))
    """
    if asked is None:
        return tuple(name for name in mesh.names if name.lower() in DATA_AXES)
    wanted = (asked,) if isinstance(asked, str) else tuple(asked)
    for name in wanted:
        if name not in mesh.names:
            raise LayoutError(f"data_axes has {name!r}, which is no axis of the mesh; it has {', '.join(mesh.names)}")
    return tuple(name for name in mesh.names if name in wanted)


def whole_boundary(program: Program, mesh: Mesh) -> Boundary:
    """Everything whole on every axis."""
    whole = (I,) * len(mesh.axes)
    inputs = [item for item in program.top.inputs if item.kind == "input"]
    return Boundary(
        (whole,) * len(inputs), tuple(whole if isinstance(out, Ref) else None for out in program.top.outputs)
    )


def input_layouts(tensors: Sequence[tuple[str, Shape]], rule: BoundaryRule, mesh: Mesh) -> tuple[Layout, ...]:
    """The layout of each input, given by name and *local* shape.

    The batch is dim 0 of the first input that has dims, and of every input whose dim 0 is as long. Raises
    :class:`LayoutError` for a layout that a tensor of that shape cannot have.
    """
    batch = next((shape[0] for _, shape in tensors if shape), None)
    usual, whole = rule.batch_layout(mesh), (I,) * len(mesh.axes)
    found = []
    for name, shape in tensors:
        layout = rule.inputs.get(name) or (usual if shape and shape[0] == batch else whole)
        _check_dims(layout, shape, f"input {name!r}")
        found.append(layout)
    return tuple(found)


def global_shape(local: Shape, layout: Layout, mesh: Mesh) -> Shape:
    """The shape of the whole tensor of which a rank has a ``local`` piece.

    >>> global_shape((3, 8), (S(0), I), Mesh.of({"dp": 2, "tp": 4}))
    (6, 8)
    """
    sizes = list(local)
    for state, degree in zip(layout, mesh.degrees, strict=True):
        if state.kind == "S":
            sizes[state.dim] *= degree
    return tuple(sizes)


def boundary_of(
    program: Program, inputs: tuple[Layout, ...], output_names: Sequence[str], rule: BoundaryRule, mesh: Mesh
) -> Boundary:
    """The boundary of a captured program whose inputs have layouts ``inputs``.

    An output that depends on the batch and whose dim 0 is as long as the (global) batch is cut like it. The names are
    those of the outputs that are tensors. Raises :class:`LayoutError` for an output that cannot be cut as asked.
    """
    graph = program.top
    given = [item.value for item in graph.inputs if item.kind == "input"]
    usual, whole = rule.batch_layout(mesh), (I,) * len(mesh.axes)
    carriers = [value for value, layout in zip(given, inputs, strict=True) if layout == usual != whole]
    lengths = {graph.values[value].shape[0] for value in carriers}
    dependent = _reached(program, carriers)
    names = iter(output_names)
    outputs: list[Layout | None] = []
    notes: list[str] = []
    for out in graph.outputs:
        if not isinstance(out, Ref):
            outputs.append(None)
            continue
        name, shape = next(names), graph.values[out.value].shape
        cut = out.value in dependent and bool(shape) and shape[0] in lengths
        layout = rule.outputs.get(name) or (usual if cut else whole)
        _check_dims(layout, shape, f"output {name!r}")
        if not fits(shape, layout, mesh.degrees):
            raise LayoutError(
                f"output {name!r} has the global shape {shape} and cannot be {_text(layout, mesh)}: the degrees do not "
                "divide it evenly; give it another placement in output_placements"
            )
        outputs.append(layout)
        if out.value in dependent and graph.values[out.value].grad and shape and not cut and name not in rule.outputs:
            notes.append(
                f"output {name!r} of shape {shape} depends on the batch, and its dim 0 is not the batch: every rank "
                "gets the whole of it, and a loss on it must be equal on all ranks; output_placements can say otherwise"
            )
    return Boundary(inputs, tuple(outputs), rule, tuple(notes))


def _reached(program: Program, values: Iterable[int]) -> set[int]:
    """The values of the top graph that depend on any of ``values``; a block's result on all that goes into it."""
    reached = set(values)
    for node in program.top.nodes:
        if any(operand in reached for operand in node.operands):
            reached.update(out for out in node.outputs if out is not None)
    return reached


def _check_dims(layout: Layout, shape: Shape, what: str) -> None:
    for state in layout:
        if state.kind == "S" and state.dim >= len(shape):
            raise LayoutError(f"{what} has {len(shape)} dims (shape {shape}) and cannot be {state}: it has no such dim")
        if state.kind not in "SI":
            raise LayoutError(f"{what} cannot be {state} at the border of the model; shard it or replicate it")


def averaging_share(layout: Layout, data_axes: Iterable[str], mesh: Mesh) -> int:
    """Among how many ranks' losses the gradient of an output is averaged: the data axes that cut it, multiplied.

    >>> averaging_share((S(0), S(1)), ("dp",), Mesh.of({"dp": 2, "tp": 4}))
    2
    """
    share = 1
    for state, (name, degree) in zip(layout, mesh.axes, strict=True):
        share *= degree if state.kind == "S" and name in data_axes else 1
    return share


def _text(layout: Layout, mesh: Mesh) -> str:
    return ", ".join(f"{state}@{name}" for state, name in zip(layout, mesh.names, strict=True))
