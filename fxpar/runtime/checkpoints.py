"""Saving and loading: plain tensors into sharded parameters, and strided shards for torch.distributed.checkpoint.

In: hooks called by ``state_dict`` and ``load_state_dict``. Out: state dicts with the model's own keys, whose values are
DTensors that ``torch.distributed.checkpoint`` can save and load on any mesh. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, distribute_tensor

from fxpar.errors import CallError
from fxpar.runtime.dtensor import strided_cut
from fxpar.trees import flatten


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
        if isinstance(value, DTensor):
            if value.placements == parameter.placements and value.device_mesh == parameter.device_mesh:
                continue
            value = value.full_tensor()
        whole = value.detach().to(parameter.to_local().device)
        state_dict[prefix + name] = _like(whole, parameter)


def _like(whole: Tensor, parameter: DTensor) -> DTensor:
    """``whole``, which every rank has, as a DTensor placed like ``parameter``."""
    cut = strided_cut(parameter)
    if cut is None:
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return cut.distributed(whole)


def _describe_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            describe(value)


def describe(value: DTensor) -> DTensor:
    """Tell ``torch.distributed.checkpoint`` which pieces of the whole a strided shard holds; return ``value``.

    ``state_dict`` does this for parameters. An optimizer's state needs it too, before it is saved or loaded: see
    :func:`describe_all`.
    """
    if strided_cut(value) is not None:
        chunks = _Chunks(value)
        value.__dict__.update(
            __create_write_items__=chunks.write_items,
            __create_chunk_list__=chunks.chunk_list,
            __get_tensor_shard__=chunks.shard,
        )
    return value


def describe_all(state: Any) -> Any:
    """:func:`describe` for every DTensor in a nested state dict, which is returned."""
    for tensor in flatten(state)[0]:
        if isinstance(tensor, DTensor):
            describe(tensor)
    return state


class _Chunks:
    """The separate pieces of a strided shard, in the terms of ``torch.distributed._checkpointable``."""

    def __init__(self, value: DTensor) -> None:
        cut = strided_cut(value)
        assert cut is not None
        self.local, self.whole_size = value.to_local(), value.shape
        self.dim, self.starts, self.size = cut.dim, cut.starts(), cut.chunk_size()

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        sizes = torch.Size(self.size if dim == self.dim else n for dim, n in enumerate(self.whole_size))
        for start in self.starts:
            yield ChunkStorageMetadata(
                torch.Size(start if dim == self.dim else 0 for dim in range(len(self.whole_size))), sizes
            )

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
        assert index.offset is not None
        start = index.offset[self.dim]
        if start not in self.starts:
            raise CallError(f"this rank has no piece of {index.fqn} at {tuple(index.offset)}; it has {self.starts}")
        return self.local.narrow(self.dim, self.starts.index(start) * self.size, self.size)
