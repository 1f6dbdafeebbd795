"""FSDP2 on one axis of a mesh, fxpar on the other: the numbers of one process on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from training import NO_DROPOUT, assert_close, assert_same_parameters, gpt2, ids, llama, mesh_of, whole

import fxpar
from fxpar.errors import CallError
from fxpar.precision import Float64Casts

TOLERANCE = 1e-9


def with_fsdp() -> bool:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    whole_batch = ids()
    batch = whole_batch.chunk(2)[mesh.get_local_rank("dp")]
    with Float64Casts():
        wanted, model = llama().double(), llama().double()
        fxpar.parallelize(model, mesh["tp"], example_kwargs={"input_ids": batch, "labels": batch}, cluster="toy")
        assert any(p.placements[0].is_shard() for p in model.parameters())
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert all(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in model.parameters())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, wanted)]
        for _ in range(3):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            wanted_loss = wanted(input_ids=whole_batch, labels=whole_batch).loss
            wanted_loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            assert_close(mean / dist.get_world_size(), wanted_loss, TOLERANCE)
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, wanted)]
            assert_close(whole(norms[0]), norms[1], TOLERANCE)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, wanted, TOLERANCE)
        with torch.no_grad():  # another length, evaluated after training
            assert_close(model(ids(2, 5)).logits, wanted(ids(2, 5)).logits, TOLERANCE)
    return True


def test_fsdp2_on_blocks_and_root_of_the_other_axis() -> None:
    assert all(run_ranks(4, with_fsdp, timeout=180))


def mixed_precision() -> bool:
    """FSDP2 casts parameters when modules run; the graphs are those of a bfloat16 model, with its casts to float32."""
    mesh = mesh_of(1, 2, names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wanted, model = llama(), llama()
    fxpar.parallelize(model, mesh["tp"], example_kwargs={"input_ids": ids(), "labels": ids()}, cluster="toy")
    outs = []
    for m in (model, wanted):
        for block in m.model.layers:
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(m, mesh=mesh["dp"], mp_policy=policy)
        outs.append(m(input_ids=ids(), labels=ids()))
        outs[-1].loss.backward()
    assert outs[0].logits.dtype == outs[1].logits.dtype == torch.bfloat16
    assert outs[0].loss.dtype == outs[1].loss.dtype
    assert_close(outs[0].loss, outs[1].loss, 1e-3)  # without the cast of the logits, its own rounding is 4e-3
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert p.grad.dtype == q.grad.dtype == torch.float32
        assert_close(p.grad, q.grad, 5e-2, name)
    return True


def test_mixed_precision_of_fsdp2() -> None:
    assert all(run_ranks(2, mixed_precision))


def fused(mesh: Any, *, other: bool = False) -> nn.Module:
    """A GPT-2, its fused qkv held by heads on "tp"; on two axes FSDP2 over "dp" cuts the same dims again."""
    model = gpt2(**NO_DROPOUT).double()
    if other:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    tp = mesh["tp"] if mesh.ndim == 2 else mesh
    fxpar.parallelize(model, tp, example_kwargs={"input_ids": ids(), "labels": ids()}, cluster="toy")
    assert "StridedShard" in str(model.transformer.h[0].attn.c_attn.bias.placements)
    if mesh.ndim == 2:
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def assert_holds(state: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(wanted)
    for name, value in state.items():
        assert torch.equal(whole(value), wanted[name]), name


def save(folder: str) -> bool:
    """State dicts of a model that is cut twice: whole values, plain tensors, distributed checkpoints."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    mesh, wanted = mesh_of(2, 2, names=("dp", "tp")), gpt2(**NO_DROPOUT).double().state_dict()
    model = fused(mesh)
    assert_holds(model.state_dict(), wanted)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert dist.get_rank() or all(torch.equal(full[name], value) for name, value in wanted.items())
    dcp.save(model.state_dict(), checkpoint_id=folder)
    for how in ("plain", "checkpoint"):
        model = fused(mesh, other=True)
        state = model.state_dict()
        if how == "checkpoint":
            dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(wanted if how == "plain" else state)
        assert_holds(model.state_dict(), wanted)
        assert_close(model(ids()).logits, gpt2(**NO_DROPOUT).double()(ids()).logits, 1e-6)
    return True


def load(folder: str) -> bool:
    import torch.distributed.checkpoint as dcp

    model = gpt2(**NO_DROPOUT).double() if dist.get_world_size() == 1 else fused(mesh_of(), other=True)
    if dist.get_world_size() == 1:
        for p in model.parameters():
            p.data.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_holds(model.state_dict(), gpt2(**NO_DROPOUT).double().state_dict())
    return True


def test_checkpoints_of_fused_weights_under_fsdp2(tmp_path: Path) -> None:
    assert all(run_ranks(4, save, str(tmp_path / "state"), timeout=120))
    assert all(run_ranks(2, load, str(tmp_path / "state")))
    assert all(run_ranks(1, load, str(tmp_path / "state")))


def broadcast() -> bool:
    """torch fills parameters from one rank as if every piece were contiguous: noticed, not silently wrong."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = fused(mesh_of())
    full = gpt2().state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(CallError, match=r"c_attn\.weight is loaded from itself.*without broadcast_from_rank0"):
        set_model_state_dict(model, full, options=options)
    return True


def test_a_broadcast_that_torch_gets_wrong_is_an_error() -> None:
    assert all(run_ranks(2, broadcast))
