"""FSDP2 on one axis of a mesh, fxpar on the other: the numbers of one process on the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training import assert_close, assert_same_parameters, ids, llama, mesh_of, whole

import fxpar
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
