"""Put a model's parameters and buffers in their places: DTensors in the plan's layouts, equal values on all ranks.

In: a model with plain parameters, a layout per parameter, a DeviceMesh. Out: DTensor parameters under the same names,
also in optimizers that were made before, and buffers with the first rank's values. (A Parameter cannot become a DTensor
in place: the two classes differ in object layout.) How a DTensor is made is :mod:`fxpar.runtime.dtensor`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxpar.errors import CallError, LayoutError
from fxpar.layout import I, Layout
from fxpar.runtime.dtensor import as_dtensor, local_piece


def check_parameters(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Raise before anything is changed if a parameter cannot be replaced, or a name is unknown."""
    known = dict(model.named_parameters(remove_duplicate=False))
    for name in layouts:
        if name not in known:
            raise LayoutError(f"the plan holds a parameter {name!r}, which the model does not have")
    for name, parameter in known.items():
        if isinstance(parameter, DTensor):
            raise CallError(
                f"parameter {name!r} is a DTensor already; parallelize a model once, and before fully_shard"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise CallError(f"parameter {name!r} has hooks, which sharding would drop; register them afterwards")


def shard_parameters(model: nn.Module, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> None:
    """Replace every parameter by a DTensor in its layout (whole if it has none).

    Values are those of the mesh's first rank; parameters on ``meta`` stay there. Tied parameters stay one object. The
    old parameters are emptied: using one by mistake is an error, and their memory is free.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    chosen = {id(known[name]): layout for name, layout in layouts.items()}
    placed = {old: chosen.get(id(old), (I,) * mesh.ndim) for old in model.parameters()}
    replaced = {old: _sharded_parameter(old, layout, mesh) for old, layout in placed.items()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, replaced[parameter])  # not in the table: modules such as LSTM watch it
    _follow_in_optimizers(replaced, placed, mesh)
    for old in replaced:
        old.grad, old.data = None, old.data.new_empty(0)


def _sharded_parameter(old: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    new = nn.Parameter(_sharded(old, layout, mesh), old.requires_grad)
    if old.grad is not None:
        new.grad = _sharded(old.grad, layout, mesh)
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
    return new


def _sharded(tensor: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    whole = tensor.detach() if tensor.is_meta else from_first(tensor, mesh)
    return as_dtensor(local_piece(whole, layout, mesh), layout, mesh, tensor.shape)


def _follow_in_optimizers(
    replaced: dict[nn.Parameter, nn.Parameter], placed: dict[nn.Parameter, Layout], mesh: DeviceMesh
) -> None:
    """Let every optimizer that holds old parameters hold the new ones, with its state cut like them."""
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]:
        for group in optimizer.param_groups:
            group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        for old in [parameter for parameter in optimizer.state if parameter in replaced]:
            optimizer.state[replaced[old]] = {
                key: _sharded(value, placed[old], mesh)
                if isinstance(value, Tensor) and value.shape == old.shape and value.dim()
                else value
                for key, value in optimizer.state.pop(old).items()
            }


def share_buffers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every buffer the values of the mesh's first rank, on the mesh's device; buffers stay plain tensors."""
    done: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                if id(buffer) not in done:
                    done[id(buffer)] = _shared_buffer(buffer, mesh)
                module._buffers[name] = done[id(buffer)]


def _shared_buffer(buffer: Tensor, mesh: DeviceMesh) -> Tensor:
    value = from_first(buffer, mesh)
    if value.device != buffer.device:
        return value
    if not torch.equal(value, buffer):  # an expanded buffer, which cannot be written to, is mostly equal already
        buffer.copy_(value)
    return buffer


def from_first(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mesh's first rank's value of ``tensor``, as a contiguous tensor on the mesh's device."""
    device = mesh_device(mesh)
    value = tensor.detach().to(device).contiguous()
    if value.data_ptr() == tensor.data_ptr():
        value = value.clone()
    if value.numel():
        flat = value.view(-1).view(torch.uint8)  # as bytes: process groups do not carry every dtype
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
    return value


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank's tensors."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
