"""Parallel models inside the usual surroundings: FSDP2, dropout, activation checkpointing, earlier optimizers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import CallError
from fxpar.runtime.records import record_collectives


class SelfRecomputing(nn.Module):
    """Wraps the forwards of its subclasses, as transformers' GradientCheckpointingLayer does."""

    recompute = False

    def __init_subclass__(cls) -> None:
        forward = cls.forward

        @functools.wraps(forward)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.recompute and type(self).forward is wrapped:
                return checkpoint(functools.partial(forward, self, **kwargs), *args, use_reentrant=False)
            return forward(self, *args, **kwargs)

        cls.forward = wrapped


class Layer(SelfRecomputing):
    """A pre-norm MLP with dropout in its middle."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Recomputed(nn.Module):
    """What torch's checkpoint_wrapper does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


class Stack(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Layer(16, 64, dropout) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack(dropout: float = 0.0) -> Stack:
    torch.manual_seed(0)
    return Stack(dropout).double()


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


#: Holds the two linear layers of each block in the way that splits the dropout between them.
MEGATRON = {"layers.*.up.weight": "S0@tp", "layers.*.down.weight": "S1@tp"}


def split(model: Stack, mesh: Any) -> Stack:
    return fxpar.parallelize(
        model, mesh, example_args=(rows().to(model.head.weight.dtype),), cluster="toy", constraints=MEGATRON
    )  # type: ignore[return-value]


def tp_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def with_fsdp() -> bool:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wanted, model = stack(), split(stack(), mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    pair = [
        (model, torch.optim.AdamW(model.parameters(), lr=0.1)),
        (wanted, torch.optim.AdamW(wanted.parameters(), lr=0.1)),
    ]
    mine = rows().chunk(2)[mesh.get_local_rank("dp")]
    for _ in range(2):
        norms = []
        for module, optimizer in pair:
            module(mine if module is model else rows()).square().mean().backward()
            norms.append(whole(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*norms, rtol=1e-10, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-8, atol=1e-8, msg=name)
    with pytest.raises(CallError, match=r"a hook on 'head'.*fully_shard"):
        fully_shard(split(stack(), mesh["tp"]).head, mesh=mesh["dp"])
    return True


def test_fsdp2_on_blocks_and_root_of_the_other_axis() -> None:
    assert all(run_ranks(4, with_fsdp, timeout=120))


def dropped(recompute: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, a second output, input gradient, and the hidden units that survive in the first layer, whole."""
    model = stack(0.5)
    torch.manual_seed(dist.get_rank())
    own = torch.rand(3)
    torch.manual_seed(dist.get_rank())
    model = split(model, tp_mesh())
    if recompute == "by wrapper":
        model.layers = nn.ModuleList(map(Recomputed, model.layers))
    for layer in model.layers:
        layer.recompute = recompute == "by class"
    x = rows().requires_grad_()
    out = model(x)
    with record_collectives() as backward:
        out.sum().backward()
    assert bool(recompute) == any(c.phase == "forward" for c in backward)
    again = model(rows())
    assert torch.equal(torch.rand(3), own)  # the caller's own random numbers are not touched
    # d out / d down.weight is zero exactly in the columns whose unit was dropped in every row, so use single rows.
    model.zero_grad()
    model(rows()[:1]).sum().backward()
    first = model.layers[0].layer if recompute == "by wrapper" else model.layers[0]
    alive = whole(first.down.weight.grad).abs().sum(0) > 0
    return out.detach(), again.detach(), x.grad, alive  # type: ignore[return-value]


def test_dropout_agrees_where_ranks_do_and_differs_where_they_split() -> None:
    (out, again, grad, alive), (out1, again1, grad1, _) = run_ranks(2, dropped, "")
    assert torch.equal(out, out1) and torch.equal(again, again1) and torch.equal(grad, grad1)
    assert not torch.equal(out, again)
    masks = alive.chunk(2)
    assert not torch.equal(*masks) and all(5 < mask.sum() < 27 for mask in masks)


@pytest.mark.parametrize("recompute", ["by wrapper", "by class"])
def test_recomputed_dropout_draws_the_same_masks(recompute: str) -> None:
    (out, again, grad, _), _ = run_ranks(2, dropped, "")
    (out1, again1, grad1, _), (_, _, grad2, _) = run_ranks(2, dropped, recompute)
    assert torch.equal(out, out1) and torch.equal(again, again1)
    torch.testing.assert_close(grad, grad1, rtol=1e-12, atol=1e-12)
    assert torch.equal(grad1, grad2)


def earlier_optimizer() -> bool:
    wanted, model = stack(), stack()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, wanted)]
    for step in range(3):
        if step == 1:  # with state: moments are cut like their parameters
            split(model, tp_mesh())
        for module, optimizer in zip((model, wanted), optimizers, strict=True):
            optimizer.zero_grad()
            module(rows()).square().mean().backward()
            optimizer.step()
    state = optimizers[0].state[model.layers[0].up.weight]["exp_avg"]
    assert state.placements == model.layers[0].up.weight.placements
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-8, atol=1e-8, msg=name)
    return True


def test_an_optimizer_made_before_goes_on_with_its_state() -> None:
    assert all(run_ranks(2, earlier_optimizer))


def modes() -> bool:
    """Eval, no_grad, autocast and frozen parameters are each captured once and computed as they are without splits."""
    wanted, model = stack(0.5), split(stack(0.5), tp_mesh())
    for module in (wanted, model):
        module.eval()
    torch.testing.assert_close(model(rows()), wanted(rows()))
    with torch.no_grad(), record_collectives() as collectives:
        torch.testing.assert_close(model(rows()), wanted(rows()))
    assert {c.phase for c in collectives} == {"forward"}
    single, single_wanted = split(stack().float(), tp_mesh()), stack().float()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = single(rows().float()), single_wanted(rows().float())
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    for module in (wanted, model):
        module.layers[0].requires_grad_(False)
        module(rows()).sum().backward()
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad)
    with pytest.raises(TypeError, match=r"unexpected keyword|got an unexpected"):
        model(rows(), wrong=1)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(copy.deepcopy(model)(rows()), wanted(rows()))
    return True


def test_modes() -> None:
    assert all(run_ranks(2, modes, timeout=120))
