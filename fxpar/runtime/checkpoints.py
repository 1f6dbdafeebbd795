"""Saving and loading: plain tensors into sharded parameters, and strided shards for torch.distributed.checkpoint.

In: hooks called by ``state_dict`` and ``load_state_dict``. Out: state dicts with the model's own keys, whose values are
DTensors that ``torch.distributed.checkpoint`` can save and load on any mesh. Describing them communicates nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxpar.errors import CallError
from fxpar.runtime.dtensor import Pieces, is_misread, is_strided, strided_pieces


def install(module: nn.Module) -> None:
    """Add the hooks to one module, for its own parameters."""
    module.register_load_state_dict_pre_hook(_distribute_values)
    module.register_state_dict_post_hook(_describe_values)


def _distribute_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: cut whole tensors like the parameters they are for."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
            continue  # not ours, or load_state_dict reports it
        if value is parameter and strided_pieces(parameter) is not None:
            raise CallError(
                f"{prefix}{name} is loaded from itself. torch.distributed.checkpoint.state_dict does so after filling "
                "parameters from one rank (broadcast_from_rank0=True), and puts wrong numbers into those that are held "
                f"in separate parts, as this one is ({parameter.placements}): load again, with the whole state dict on "
                "every rank and without broadcast_from_rank0, or with torch.distributed.checkpoint.load"
            )
        if isinstance(value, DTensor):
            if value.placements == parameter.placements and value.device_mesh == parameter.device_mesh:
                continue
            value = whole_of(value)
        whole = value.detach().to(parameter.to_local().device)
        state_dict[prefix + name] = _like(whole, parameter)


def _like(whole: Tensor, parameter: DTensor) -> DTensor:
    """``whole``, which every rank has, as a DTensor placed like ``parameter``."""
    pieces = strided_pieces(parameter)
    if pieces is None:
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return pieces.of(whole)


def whole_of(value: DTensor) -> Tensor:
    """The whole value on every rank, also where ``full_tensor`` gets the order of the rows wrong."""
    pieces = strided_pieces(value)
    return pieces.gather() if pieces is not None and is_misread(value) else value.full_tensor()


def _describe_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            describe(value)


def describe(value: DTensor) -> DTensor:
    """Tell ``torch.distributed.checkpoint`` which pieces of the whole a strided shard holds; return ``value``.

    ``state_dict`` does this for parameters, every optimizer step for the optimizer's state.
    """
    pieces = strided_pieces(value)
    if pieces is not None:
        chunks = _Chunks(pieces)
        value.__dict__.update(
            __create_write_items__=chunks.write_items,
            __create_chunk_list__=chunks.chunk_list,
            __get_tensor_shard__=chunks.shard,
        )
        if is_misread(value):
            value.__dict__.update(full_tensor=pieces.gather, redistribute=partial(_redistributed, value))
    return value


def _redistributed(
    value: DTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
) -> DTensor:
    """``value.redistribute``, from the right order of the rows."""
    mesh = device_mesh or value.device_mesh
    return distribute_tensor(whole_of(value), mesh, placements or value.placements, src_data_rank=None)


@cache
def describe_optimizers() -> None:
    """From now on, describe the state of every optimizer of strided shards when it has made a step."""
    register_optimizer_step_post_hook(_describe_state)


def _describe_state(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and is_strided(parameter):
            for value in state.values():
                if isinstance(value, DTensor) and "__create_chunk_list__" not in value.__dict__:
                    describe(value)


class _Chunks:
    """The separate pieces of a strided shard, in the terms of ``torch.distributed._checkpointable``."""

    def __init__(self, pieces: Pieces) -> None:
        self.local, self.whole_size = pieces.tensor.to_local(), pieces.tensor.shape
        runs = itertools.product(*(pieces.runs(dim) for dim in range(pieces.tensor.ndim)))
        self.at = {torch.Size(start for start, _, _ in run): tuple(place[1:] for place in run) for run in runs}

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, places in self.at.items():
            yield ChunkStorageMetadata(offsets, torch.Size(size for _, size in places))

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        return list(self._chunks())

    def write_items(self, fqn: str, _value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole_size),
            )
            for chunk in self._chunks()
        ]

    def shard(self, index: MetadataIndex) -> Tensor:
        """A view of the piece at ``index``, to be written from or read into."""
        places = self.at.get(index.offset) if index.offset is not None else None
        if places is None:
            raise CallError(f"this rank has no piece of {index.fqn} at {index.offset}; it has {list(self.at)}")
        return self.local[tuple(slice(start, start + size) for start, size in places)]
