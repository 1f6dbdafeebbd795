"""A call with the whole batch -> each rank's part of it, and the pieces that come out -> the whole.

In: arguments as one process would get them, a plan, a DeviceMesh. Out: arguments of this rank's call; functions that
put outputs, layers' outputs and gradients of inputs together. For comparing a parallel model with an unsharded one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxpar.boundary import BoundaryRule, averaging_share, data_axes_of, input_layouts
from fxpar.errors import LayoutError
from fxpar.layout import I, Layout, R, fits, local_layout
from fxpar.meshes import as_mesh
from fxpar.plans import Plan
from fxpar.runtime.collectives import Where, convert
from fxpar.runtime.dtensor import local_piece
from fxpar.runtime.records import record_collectives
from fxpar.training_step import Gather
from fxpar.trees import flatten_call, tensor_names, unflatten


def own_part(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None, mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Layout]]:
    """This rank's part of a call with the whole batch, and the layouts of its tensors by ``id``."""
    axes = as_mesh(mesh)
    rule = plan.boundary if plan else BoundaryRule(data_axes_of(axes, None))
    tensors, spec, _ = flatten_call(args, kwargs)
    names = tensor_names(model.forward, args, kwargs)
    layouts = input_layouts([(name, tuple(t.shape)) for name, t in zip(names, tensors, strict=True)], rule, axes)
    parts = []
    for name, tensor, layout in zip(names, tensors, layouts, strict=True):
        if not fits(tuple(tensor.shape), layout, axes.degrees):
            shape, degrees = tuple(tensor.shape), dict(axes.axes)
            raise LayoutError(f"input {name!r} of shape {shape} does not divide evenly over the data axes of {degrees}")
        parts.append(local_piece(tensor, layout, mesh).requires_grad_(tensor.requires_grad))
    own_args, own_kwargs = unflatten(spec, parts)
    return own_args, own_kwargs, {id(part): layout for part, layout in zip(parts, layouts, strict=True)}


class Gathers:
    """How pieces that a parallel model gives out are put together."""

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        self.plan = plan
        self.places = [
            Where(name, mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis).group_name)
            for axis, name in enumerate(plan.mesh.names)
        ]

    def layers(self) -> dict[str, Gather]:
        """For every folded block."""

        def gather(layouts: list[Layout], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [self.whole(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True)]

        return {
            path: partial(gather, [layout for layout in self.plan.graphs[name].outputs if layout is not None])
            for path, name in self.plan.instances.items()
        }

    def outputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The model's outputs. The mean of the ranks' losses is what an output's gradient is taken for, and here all
        ranks have the one loss on the whole: so each of them counts for all."""
        layouts = [layout for layout in self.plan.graphs["top"].outputs if layout is not None]
        found = []
        for tensor, layout in zip(tensors, layouts, strict=True):
            share = averaging_share(layout, self.plan.boundary.data_axes, self.plan.mesh)
            if tensor.requires_grad and share > 1:
                tensor.register_hook(partial(torch.mul, share))
            found.append(self.whole(tensor, layout))
        return found

    def gradient_in(self, layouts: dict[int, Layout]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The whole gradient of an input, whose layout is found by its ``id``."""

        def read(tensor: torch.Tensor) -> torch.Tensor:
            assert tensor.grad is not None, "asked only for inputs that have got a gradient"
            return self.whole(tensor.grad, layouts[id(tensor)]).clone()

        return read

    def whole(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        degrees = self.plan.mesh.degrees
        with record_collectives():  # these are ours, not the model's
            for axis, at in enumerate(self.places):
                state = local_layout(layout, degrees)[axis]
                target = I if state != R else R
                gradient = tensor.requires_grad
                tensor = convert(tensor, str(state), str(target), gradient, at.axis, at.degree, at.rank, at.group)
                layout = (*layout[:axis], I, *layout[axis + 1 :])
        return tensor
