"""PyTorch's own way to the layouts that are compared: ``parallelize_module`` on one axis, ``fully_shard`` on another.

In: a Llama of transformers and a mesh with the axis ``tp``, and perhaps ``dp``. Out: the same model, parallel. Tensor
parallelism is Megatron's, written with the styles of ``torch.distributed.tensor.parallel``; q, k and v (gate and up)
share one gather of their input. On ``dp`` every block and the root are sharded by FSDP2, as its documentation says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def torch_tp(model: nn.Module, mesh: DeviceMesh, *, free_after_forward: bool = False) -> nn.Module:
    """Megatron's layout: heads, inner features and vocabulary split, everything else whole on every rank of ``tp``.

    With ``free_after_forward``, which is FSDP2's default, blocks gather their parameters once more in backward.
    """
    return _fsdp(_tensor_parallel(model, mesh["tp"], Replicate(), {}), mesh, free_after_forward)


def torch_tp_sp(model: nn.Module, mesh: DeviceMesh, *, free_after_forward: bool = False) -> nn.Module:
    """The same with sequence parallelism: what lies between the split parts is cut along the sequence."""
    norms = ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
    more: dict[str, ParallelStyle] = {f"model.{name}": SequenceParallel() for name in norms}
    return _fsdp(_tensor_parallel(model, mesh["tp"], Shard(1), more), mesh, free_after_forward)


def _tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, between: Replicate | Shard, more: Mapping[str, ParallelStyle]
) -> nn.Module:
    whole = Replicate()
    heads_in = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": between},
        desired_input_kwarg_layouts={"hidden_states": whole},
        use_local_output=False,
    )
    inner_in = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,), use_local_output=False)
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    layer: dict[str, ParallelStyle] = {
        "self_attn": heads_in,
        "mlp": inner_in,
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")},
    }
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=whole),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
        **more,
    }
    return parallelize_module(model, mesh, plan)


def _fsdp(model: Any, mesh: DeviceMesh, free_after_forward: bool) -> nn.Module:
    if "dp" in (mesh.mesh_dim_names or ()):
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=free_after_forward)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)  # backward starts with it: its default
    return model  # type: ignore[no-any-return]
