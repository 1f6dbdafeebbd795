"""What a stranger writes, on default configurations of transformers: it runs, with the numbers of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from training import (
    NO_DROPOUT,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    gpt2,
    ids,
    llama,
    mesh_of,
    randomized,
    whole,
)

import fxpar
from fxpar.errors import CallError, CaptureError
from fxpar.precision import Float64Casts
from fxpar.runtime.records import record_collectives

MODELS = {"llama": llama, "gpt2": gpt2}
TOLERANCE = 1e-9


def parallel(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    return fxpar.parallelize(model, mesh_of(), example_kwargs={"input_ids": batch, "labels": batch}, cluster="toy")


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def exact(name: str) -> bool:
    """With dropout off: a step, evaluation at another length, accumulation, plain state dicts, copies."""
    with Float64Casts():
        wanted, model = (MODELS[name](**(NO_DROPOUT if name == "gpt2" else {})).double() for _ in range(2))
        keys, kind = list(model.state_dict()), type(model)
        assert parallel(model, ids()) is model
        assert type(model) is kind and list(model.state_dict()) == keys
        assert all(isinstance(p, DTensor) for p in model.parameters())

        out, wanted_out = (m(input_ids=ids(), labels=ids()) for m in (model, wanted))
        assert type(out) is type(wanted_out) and out.past_key_values is None
        assert_close(out.logits, wanted_out.logits, TOLERANCE)
        assert_close(out.loss, wanted_out.loss, TOLERANCE)
        out.loss.backward()
        wanted_out.loss.backward()
        assert_same_gradients(model, wanted, TOLERANCE)

        with torch.no_grad():  # one way of calling it more, still in training mode
            assert_close(model(ids(2, 5)).logits, wanted(ids(2, 5)).logits, TOLERANCE)
        for half in ids(seed=1).split(2):  # gradients go on adding up
            (loss_of(model, half) / 2).backward()
            (loss_of(wanted, half) / 2).backward()
        assert_same_gradients(model, wanted, TOLERANCE)

        plain = randomized(copy.deepcopy(wanted), seed=8).state_dict()
        for m in (model, wanted):
            assert str(m.load_state_dict(plain)) == "<All keys matched successfully>"
            m.zero_grad()
        twin = copy.deepcopy(model)
        for m in (twin, wanted):
            loss_of(m, ids()).backward()
        assert all(p.grad is None for p in model.parameters())
        assert_same_gradients(twin, wanted, TOLERANCE)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert_same_parameters(model, wanted, 0.0)
    return True


@pytest.mark.parametrize("name", MODELS)
def test_without_dropout_every_number_is_that_of_one_process(name: str) -> None:
    assert all(run_ranks(2, exact, name, timeout=120))


def autocast(name: str) -> bool:
    """Outer autocast, float32 parameters: as close to the unsharded float32 numbers as the unsharded bfloat16 ones."""
    settings = NO_DROPOUT if name == "gpt2" else {}
    precise, wanted, model = (MODELS[name](**settings) for _ in range(3))
    parallel(model, ids())
    loss_of(precise, ids()).backward()
    with torch.autocast("cpu", torch.bfloat16):
        outs = [m(input_ids=ids(), labels=ids()) for m in (model, wanted)]
    assert outs[0].logits.dtype == outs[1].logits.dtype == torch.bfloat16
    for out in outs:
        out.loss.backward()
    assert_close(outs[0].loss, outs[1].loss, 1e-2)
    errors = []
    for p, q, r in zip(model.parameters(), wanted.parameters(), precise.parameters(), strict=True):
        assert p.grad.dtype == q.grad.dtype == torch.float32
        errors.append([float((whole(g) - r.grad).norm() / r.grad.norm()) for g in (p.grad, q.grad)])
    mine, theirs = (max(column) for column in zip(*errors, strict=True))
    assert theirs > 1e-4, "nothing was cast"
    assert mine < 2 * theirs, (mine, theirs)
    return True


@pytest.mark.parametrize("name", MODELS)
def test_outer_autocast(name: str) -> None:
    assert all(run_ranks(2, autocast, name, timeout=120))


def dropout() -> list[float]:
    """GPT-2 as it comes: dropout 0.1 everywhere. The same numbers on all ranks, and again with the same seed."""
    losses = []
    for _ in range(2):
        model = gpt2()
        torch.manual_seed(5)
        parallel(model, ids())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            loss = loss_of(model, ids())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        held = [float(whole(p).double().square().sum()) for p in model.parameters()]
    assert losses[:3] == losses[3:]
    wanted = gpt2()
    wanted.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    with torch.no_grad():
        assert float(loss_of(model, ids())) != float(loss_of(model, ids()))  # training mode: new masks
        for m in (model, wanted):
            m.eval()
        assert_close(model(ids(2, 5)).logits, wanted(ids(2, 5)).logits, 1e-5)
    return losses + held


def test_dropout_is_reproducible_and_the_same_on_all_ranks() -> None:
    first, second = run_ranks(2, dropout, timeout=120)
    assert first == second and len(set(first[:3])) == 3


def masks(p: float) -> Any:
    """What a whole dropout leaves of ones, through the model's own forward."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(p)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.drop(torch.relu(self.up(x)))
            return self.drop(torch.ones(64, 64) + 0 * x.sum()), self.down(hidden)

    model = fxpar.parallelize(Dropped(), mesh_of(), example_args=(torch.ones(4, 8),), cluster="toy")
    torch.manual_seed(100 + dist.get_rank())  # a loader may seed ranks apart
    mask, out = model(torch.ones(4, 8))
    out.sum().backward()
    gathered = [torch.zeros_like(mask) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mask.detach())
    kept = float((mask != 0).double().mean())
    return all(torch.equal(other, mask) for other in gathered) and abs(kept - (1 - p)) < 0.05


def test_whole_dropout_draws_the_same_mask_on_all_ranks() -> None:
    assert all(run_ranks(2, masks, 0.3))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT-2 with dropout off after a step of AdamW."""
    model = gpt2().double().eval()
    if dist.get_world_size() > 1:
        parallel(model, ids())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, ids()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder: str) -> dict[str, str]:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    values = [{name: whole(value).clone() for name, value in flat(part).items()} for part in state.values()]
    loss_of(model, ids()).backward()
    optimizer.step()
    values.append({name: whole(value) for name, value in model.state_dict().items()})
    if dist.get_rank() == 0:
        torch.save(values, f"{folder}.pt")
    return {name: str(p.placements) for name, p in model.named_parameters()}


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state dict, by path."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}/"))
        elif isinstance(value, torch.Tensor):
            found[prefix + name] = value
    return found


def load(folder: str) -> bool:
    """The same weights and optimizer state on another degree, and the same next step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    weights, moments, after = torch.load(f"{folder}.pt")
    model, optimizer = trained()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert list(model.state_dict()) == list(weights)
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), weights[name]), name
    for name, value in flat(state_of(model, optimizer)["optimizer"]).items():
        assert torch.equal(whole(value), moments[name]), name
    loss_of(model, ids()).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert_close(value, after[name], 1e-6, name)
    return True


def test_checkpoints_move_between_degrees(tmp_path: Path) -> None:
    placements = run_ranks(4, save, str(tmp_path / "state"), timeout=120)[0]
    assert "StridedShard" in placements["transformer.h.0.attn.c_attn.weight"]  # the fused qkv is held by heads
    assert all(run_ranks(2, load, str(tmp_path / "state"), timeout=120))
    assert all(run_ranks(1, load, str(tmp_path / "state"), timeout=120))


def generating(name: str) -> bool:
    """Without a cache it works; with one it is refused by name, and the model is none the worse for it."""
    wanted, model = MODELS[name]().eval(), MODELS[name]().eval()
    parallel(model, ids())
    prompt, options = ids(1, 4), {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(
        model.generate(prompt, use_cache=False, **options), wanted.generate(prompt, use_cache=False, **options)
    )
    with pytest.raises(CaptureError, match=r"the argument cache is .*DynamicCache.*keeps no key/value cache"):
        model.generate(prompt, **options)
    with pytest.raises(CallError, match=r"was called by itself.*call that, or keep .* as it is with whole="):
        model.base_model(prompt)
    with pytest.raises(CallError, match=r"'lm_head' was called by itself"):
        model.lm_head(torch.zeros(1, 1, 32))
    with torch.no_grad():
        assert_close(model(prompt).logits, wanted(prompt).logits, 1e-5)
    return True


@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str) -> None:
    assert all(run_ranks(2, generating, name, timeout=120))


def checkpointing(name: str) -> bool:
    """``gradient_checkpointing_enable`` before parallelizing: equal gradients, and blocks run again in backward."""
    with Float64Casts():
        settings = NO_DROPOUT if name == "gpt2" else {}
        wanted, model = (MODELS[name](**settings).double() for _ in range(2))
        model.gradient_checkpointing_enable()
        parallel(model, ids())
        with record_collectives() as forward:
            loss = loss_of(model, ids())
        with record_collectives() as backward:
            loss.backward()
        blocks = [c for c in forward if c.module]
        assert blocks and [c for c in backward if c.module and c.phase == "forward"] != []
        loss_of(wanted, ids()).backward()
        assert_same_gradients(model, wanted, TOLERANCE)
        model.gradient_checkpointing_disable()
        with record_collectives() as forward:
            loss = loss_of(model, ids())
        with record_collectives() as backward:
            loss.backward()
        assert forward and not [c for c in backward if c.phase == "forward"]
    return True


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_of_transformers(name: str) -> None:
    assert all(run_ranks(2, checkpointing, name, timeout=120))
