"""What the tests of training loops share: small models of transformers, meshes, and how far apart two models are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fxpar.runtime.checkpoints import whole_of

VOCABULARY = 96


def mesh_of(*shape: int, names: tuple[str, ...] | None = ("tp",)) -> DeviceMesh:
    """A mesh of gloo ranks; one axis over all of them by default."""
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def ids(batch: int = 4, length: int = 8, seed: int = 0) -> torch.Tensor:
    """The same token ids on every rank."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def randomized(model: nn.Module, seed: int = 7) -> nn.Module:
    """``model`` with no parameter left at zero or one, where a mistake might not be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    return model


def llama(**settings: Any) -> nn.Module:
    """A Llama of 2 layers on its default configuration but for the sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return randomized(
        LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 2, "vocab_size": VOCABULARY, **settings}))
    )


def gpt2(**settings: Any) -> nn.Module:
    """A GPT-2 of 2 layers on its default configuration (dropout 0.1, tied head) but for the sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    return randomized(
        GPT2LMHeadModel(
            GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM", **settings})
        )
    )


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three equal blocks between two linears, in float64."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(**sizes: int) -> nn.Module:
    torch.manual_seed(3)
    return randomized(Stack(**sizes))


def rows(count: int = 4, width: int = 8, seed: int = 1) -> torch.Tensor:
    """The same float64 input on every rank."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(tensor: Any) -> torch.Tensor:
    """The full value on every rank."""
    return (whole_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def assert_close(found: Any, wanted: Any, tolerance: float, what: str = "") -> None:
    """max|found - wanted| is at most ``tolerance`` times max|wanted|."""
    a, b = whole(found), whole(wanted)
    assert a.shape == b.shape and a.dtype == b.dtype, (what, a.shape, b.shape, a.dtype, b.dtype)
    error = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)
    assert error <= tolerance, f"{what} is off by {error:.1e}"


def assert_same_gradients(found: nn.Module, wanted: nn.Module, tolerance: float) -> None:
    """The same parameters have a gradient, and they are equal; tiny ones are held against the largest."""
    pairs = list(zip(found.named_parameters(), wanted.named_parameters(), strict=True))
    largest = max(float(b.grad.abs().max()) for _, (_, b) in pairs if b.grad is not None)
    for (name, a), (wanted_name, b) in pairs:
        assert name == wanted_name and (a.grad is None) == (b.grad is None), (name, wanted_name)
        if b.grad is not None:
            error = float((whole(a.grad) - whole(b.grad)).abs().max())
            error /= max(float(b.grad.abs().max()), 1e-3 * largest)
            assert error <= tolerance, f"the gradient of {name} is off by {error:.1e}"


def assert_same_parameters(found: nn.Module, wanted: nn.Module, tolerance: float) -> None:
    for (name, a), (wanted_name, b) in zip(found.named_parameters(), wanted.named_parameters(), strict=True):
        assert name == wanted_name
        assert_close(a, b, tolerance, name)


def train(
    model: nn.Module, loss_of: Any, steps: int = 3, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> list[torch.Tensor]:
    """``steps`` of AdamW with clipping, in place; the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
