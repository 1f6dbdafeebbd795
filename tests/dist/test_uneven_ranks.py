"""A vocabulary that the number of ranks does not divide, on real ranks: training, clipping, saving and loading."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from training import NO_DROPOUT, assert_close, assert_same_gradients, assert_same_parameters, gpt2, mesh_of, train

import fxpar
from fxpar.precision import Float64Casts
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives

VOCABULARY = 53
TOLERANCE = 1e-9


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))


class Loss(nn.Module):
    """A language model whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2(vocab_size=VOCABULARY, **NO_DROPOUT).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def parallel(*shape: int, names: tuple[str, ...] = ("tp",)) -> nn.Module:
    """With the tied matrix split over the vocabulary, and the logits, and the look-up masked."""
    return fxpar.parallelize(
        Loss(),
        mesh_of(*shape, names=names),
        example_args=(ids(),),
        cluster="toy",
        constraints={"*.wte.weight": "S0@tp", "model.lm_head": "S2@tp", "*.wte": "P@tp"},
        **({"data_axes": ()} if len(shape) > 1 else {}),
    )


def loss_of(model: nn.Module) -> Tensor:
    return model(ids())


def trained(shape: tuple[int, ...], names: tuple[str, ...], folder: str) -> bool:
    with Float64Casts():
        wanted, start, model = Loss(), Loss(), parallel(*shape, names=names)
        table = model.model.transformer.wte.weight
        assert isinstance(table, DTensor) and model.model.lm_head.weight is table
        rank, degree = dist.get_rank() % model_degree(table), model_degree(table)
        assert any(isinstance(placement, Shard) for placement in table.placements)
        assert table.shape == (VOCABULARY, 32)
        assert table.to_local().shape[0] == len(torch.arange(VOCABULARY).chunk(degree)[rank])
        with record_collectives() as ran:
            loss_of(model).backward()
        loss_of(wanted).backward()
        planned = Counter({replace(item, count=1): item.count for item in applied_plan(model).collectives})
        if rank == 0:  # others send less, where another axis moves their smaller piece
            assert Counter(ran) == planned
        assert len(ran) == planned.total()
        for foreach in (False, True):
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e9, foreach=foreach) for m in (model, wanted)]
            assert_close(norms[0], norms[1], TOLERANCE)
        assert_same_gradients(model, wanted, TOLERANCE)
        for m in (model, wanted):
            m.zero_grad()
        losses = train(wanted, loss_of)
        assert_close(torch.stack(train(model, loss_of)), torch.stack(losses), TOLERANCE)
        assert_same_parameters(model, wanted, TOLERANCE)
        saved_and_loaded(model, wanted, start, folder)
    return True


def model_degree(table: DTensor) -> int:
    mesh = table.device_mesh
    return next(mesh.size(axis) for axis, at in enumerate(table.placements) if isinstance(at, Shard))


def saved_and_loaded(model: nn.Module, wanted: nn.Module, start: nn.Module, folder: str) -> None:
    """By DCP, sharded and whole, and from plain tensors."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.load_state_dict(start.state_dict())
    assert_same_parameters(model, start, 0.0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_same_parameters(model, wanted, TOLERANCE)
    model.load_state_dict(start.state_dict())
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
    assert_same_parameters(model, wanted, TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "names"), [((2,), ("tp",)), ((4,), ("tp",)), ((2, 2), ("up", "tp"))], ids=["2", "4", "2x2"]
)
def test_a_tied_vocabulary_in_uneven_pieces(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.Size(shape).numel()
        assert all(run_ranks(ranks, trained, shape, names, str(Path(folder) / "saved"), timeout=180))
