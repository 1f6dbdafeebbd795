"""A model under a memory limit on real ranks: gathered weights are made again in backward, the numbers stay right."""

from __future__ import annotations

import torch
from harness import run_ranks
from torch import nn
from training import assert_close, assert_same_gradients, mesh_of

import fxpar
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives

WIDTH = 96
#: Weights are wide and the batch is small: FSDP must be asked for.
SHARDED = {"*.weight": "S0@dp"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def limited(*shape: int, names: tuple[str, ...]) -> int:
    """How many values the plan makes again; the loss and gradients are those of one process on the whole batch."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh, model, whole = mesh_of(*shape, names=names), Stack(), Stack()
    whole.load_state_dict(model.state_dict())
    batch = torch.randn(64, WIDTH)
    mine = batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    options = {"example_args": (mine,), "cluster": "h100", "constraints": SHARDED}
    free = fxpar.plan(whole, dict(zip(names, shape, strict=True)), **options)
    assert free.memory is not None
    limit = int(0.8 * free.memory.peak_bytes)
    fxpar.parallelize(model, mesh, memory_limit_bytes=limit, **options)
    plan = applied_plan(model)
    assert plan.memory is not None and plan.memory.peak_bytes <= limit
    with record_collectives() as ran:
        loss = model(mine)
        loss.backward()
    assert len(ran) == sum(item.count for item in plan.collectives)
    wanted = whole(batch)
    wanted.backward()
    assert_close(loss.detach(), wanted.detach(), 1e-12)
    assert_same_gradients(model, whole, 1e-9)
    return sum(len(layouts) for graph in plan.graphs.values() for layouts in graph.again.values())


def test_a_limited_model_on_a_data_axis() -> None:
    assert run_ranks(4, on_data)[0] > 0


def on_data() -> int:
    return limited(4, names=("dp",))


def on_both() -> int:
    return limited(2, 2, names=("dp", "tp"))


def test_a_limited_model_on_a_data_and_a_tensor_axis() -> None:
    assert len(set(run_ranks(4, on_both))) == 1
