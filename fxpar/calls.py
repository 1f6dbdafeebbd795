"""One rank's call of a model -> the captured program of the whole batch, and its boundary.

In: a model, the arguments that this rank calls it with, and what stays the same for all calls. Out: a
:class:`~fxpar.capture.Captured` whose shapes are those of all ranks together, and a
:class:`~fxpar.boundary.Boundary`. Nothing is planned here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxpar.boundary import Boundary, BoundaryRule, boundary_of, global_shape, input_layouts
from fxpar.capture import LOSS_ARGS, Captured, capture
from fxpar.errors import CallError, CaptureError, PlanError
from fxpar.graph import Ref, Value
from fxpar.inputs import derive_inputs
from fxpar.layout import I, Layout, Mesh
from fxpar.placements import layouts_by_name
from fxpar.plans import Plan
from fxpar.trees import flatten_call, tensor_names, unflatten


@dataclass(frozen=True)
class Calls:
    """What holds for every call of a model: the mesh, the rule of its boundary, modules to keep whole, its loss.

    ``input_placements`` and ``output_placements`` are as the user gave them; once a first call has shown what they
    name, they are in ``rule``.
    """

    mesh: Mesh
    rule: BoundaryRule
    whole: Sequence[str] = ()
    loss_fn: Callable[..., Any] | None = None
    input_placements: Any = None
    output_placements: Any = None

    def settled(self, rule: BoundaryRule) -> Calls:
        """For further calls, which need not have the same inputs and outputs."""
        return replace(self, rule=rule, input_placements=None, output_placements=None)


def capture_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], calls: Calls
) -> tuple[Captured, Boundary]:
    """Capture ``model`` on the whole batch of which ``args`` and ``kwargs`` are this rank's piece.

    Raises :class:`~fxpar.errors.CaptureError`, and :class:`~fxpar.errors.LayoutError` for placements that do not fit.
    """
    mesh, rule = calls.mesh, calls.rule
    tensors, _, _ = flatten_call(args, kwargs)
    names = tensor_names(model.forward, args, kwargs)
    if calls.input_placements is not None:
        dims = [(name, tensor.dim()) for name, tensor in zip(names, tensors, strict=True)]
        asked = layouts_by_name(calls.input_placements, dims, mesh, "input_placements")
        rule = replace(rule, inputs={**rule.inputs, **asked})
    layouts = input_layouts([(name, tuple(t.shape)) for name, t in zip(names, tensors, strict=True)], rule, mesh)
    args, kwargs = enlarged(args, kwargs, layouts, mesh)
    captured = capture(model, args, kwargs, whole=calls.whole, loss_fn=calls.loss_fn)
    if calls.output_placements is not None:
        values = [
            captured.program.top.values[out.value] for out in captured.program.top.outputs if isinstance(out, Ref)
        ]
        dims = [(name, len(value.shape)) for name, value in zip(captured.output_names, values, strict=True)]
        asked = layouts_by_name(calls.output_placements, dims, mesh, "output_placements")
        rule = replace(rule, outputs={**rule.outputs, **asked})
    boundary = boundary_of(captured.program, layouts, captured.output_names, rule, mesh)
    return replace(captured, notes=(*captured.notes, *boundary.notes)), boundary


def call_text(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The tensors of a call as an error shows them.

    >>> call_text(nn.Linear(3, 2), (torch.zeros(4, 3),), {})
    'input float32[4,3]'
    """
    tensors, _, _ = flatten_call(args, kwargs)
    named = zip(tensor_names(model.forward, args, kwargs), tensors, strict=True)
    return ", ".join(f"{name} {Value(tuple(t.shape), str(t.dtype).removeprefix('torch.'))}" for name, t in named)


def enlarged(
    args: tuple[Any, ...], kwargs: dict[str, Any], layouts: Sequence[Layout], mesh: Mesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every tensor that is a piece as large as the whole, on ``meta``: capturing reads no numbers.

    >>> (x,), _ = enlarged((torch.zeros(2, 3),), {}, [(I,)], Mesh.of({"dp": 4}))
    >>> x.shape
    torch.Size([2, 3])
    """
    tensors, spec, _ = flatten_call(args, kwargs)
    wholes = [
        tensor
        if all(state == I for state in layout)
        else _whole(tensor, global_shape(tuple(tensor.shape), layout, mesh))
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    whole_args, whole_kwargs = unflatten(spec, wholes)
    return whole_args, whole_kwargs


def _whole(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor of ``shape`` with the order of strides, and the place in autograd, of ``piece``."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (piece.stride(dim), -dim)):
        strides[dim], step = step, step * max(1, shape[dim])
    whole = torch.empty_strided(shape, strides, dtype=piece.dtype, device="meta", requires_grad=piece.requires_grad)
    if piece.requires_grad and not piece.is_leaf:
        with torch.enable_grad():
            whole = whole.clone()
    return whole


def example_call(
    model: nn.Module,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    loss_args: Sequence[Any] | None,
    calls: Calls,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one rank's call: the example inputs, or inputs derived from the model if there are none."""
    if args is None and kwargs is None:
        args, kwargs, description = derive_inputs(model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            where = " on each rank" if calls.rule.data_axes else ""
            print(f"fxpar: no example inputs given; assuming {description}{where}")
    call = dict(kwargs or {})
    if loss_args is not None:
        call[LOSS_ARGS] = tuple(loss_args)
    return tuple(args or ()), call


def check_same_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise :class:`PlanError` unless ``plan`` was made for ``mesh``."""
    if plan.mesh != mesh:
        raise PlanError(f"the plan is for a mesh {dict(plan.mesh.axes)}, and this one is {dict(mesh.axes)}; plan again")


def check_plan(plan: Plan, mesh: Mesh, captured: Captured, boundary: Boundary) -> None:
    """Raise :class:`PlanError` unless ``plan`` is for ``mesh``, and for inputs and outputs in these layouts."""
    check_same_mesh(plan, mesh)
    if plan.program != captured.program.digest():
        return  # refused with its own message when it is bound
    kinds = [item.kind for item in captured.program.top.inputs]
    enter = tuple(at for kind, at in zip(kinds, plan.graphs["top"].inputs, strict=True) if kind == "input")
    made = Boundary(enter, plan.graphs["top"].outputs, plan.boundary)
    if made != boundary:
        raise PlanError(
            f"the plan takes inputs as {made.inputs} and gives outputs as {made.outputs}, data axes "
            f"{made.rule.data_axes}; asked for are {boundary.inputs} and {boundary.outputs}, data axes "
            f"{boundary.rule.data_axes}; leave data_axes and placements out, or plan again with them"
        )


def check_loss(loss_fn: Callable[..., Any] | None, example_loss_args: Sequence[Any] | None) -> None:
    """Raise unless a loss and its example arguments are both given or both left out, and the loss has no parameters."""
    if loss_fn is None:
        if example_loss_args is not None:
            raise CallError(
                "example_loss_args without loss_fn; pass loss_fn=, which is called loss_fn(output, *loss_args)"
            )
        return
    if not callable(loss_fn):
        raise CallError(f"loss_fn is a {type(loss_fn).__name__}; pass a function, called loss_fn(output, *loss_args)")
    if example_loss_args is None:
        raise CallError(
            "loss_fn without example_loss_args; pass those of one call, such as example_loss_args=(labels,), or () if "
            "the output is all that the loss needs"
        )
    if isinstance(loss_fn, nn.Module):
        name = next((name for name, _ in loss_fn.named_parameters()), None)
        if name is not None:
            raise CaptureError(
                f"loss_fn is a {type(loss_fn).__name__} with a parameter, {name!r}: it would be neither sharded nor "
                "in the model's state_dict; make it a part of the model"
            )


def check_loss_args(
    model: nn.Module, kwargs: dict[str, Any], loss_fn: Callable[..., Any] | None, *, training: bool
) -> None:
    """Raise :class:`CallError` for a call in training mode without the loss' arguments, or with such but no loss."""
    if loss_fn is None:
        takes = LOSS_ARGS in inspect.signature(model.forward).parameters
        if LOSS_ARGS in kwargs and not takes:
            raise CallError(f"{LOSS_ARGS} was given, but the model was parallelized without loss_fn=")
    elif LOSS_ARGS not in kwargs:
        if training:
            raise CallError(
                f"the model was parallelized with a loss: call it with {LOSS_ARGS}=(...), what loss_fn takes after the "
                "output, and it returns the loss; without, only in eval mode, it returns its output"
            )
    elif not isinstance(kwargs[LOSS_ARGS], tuple):
        kind = type(kwargs[LOSS_ARGS]).__name__
        raise CallError(f"{LOSS_ARGS} is a {kind}; pass a tuple, such as {LOSS_ARGS}=(labels,)")
