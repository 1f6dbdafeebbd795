"""A loss inside of a model or outside of it, on the whole batch in one process, and ten steps of training with it.

The bars of models on meshes are held against these: with real processes, and with simulated ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.models import LENGTH, MODELS, VOCABULARY, Built

#: Of AdamW, and the norm to which gradients are clipped.
LEARNING_RATE, LARGEST_NORM = 1e-3, 0.1


def built(name: str, inside: bool) -> Built:
    """The model and the whole batch; with labels, of which rows have different numbers, if the loss is inside."""
    model, args, kwargs = MODELS[name]()
    generator = torch.Generator().manual_seed(9)
    batch = len(args[0] if args else kwargs["input_ids"])
    if inside and name == "vit":
        kwargs = {**kwargs, "labels": torch.randint(8, (batch,), generator=generator)}
    elif inside:
        labels = torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)
        labels[0, 2:] = labels[1, :3] = -100
        kwargs = {**kwargs, "labels": labels}
    return model, args, kwargs


def outside_loss(logits: Tensor) -> Tensor:
    """A mean of a function of a model's outputs, as a training loop would compute it."""
    return logits.log_softmax(-1)[..., :5].square().mean()


def loss_of(out: Any, inside: bool) -> Tensor:
    """The model's own loss, or the one outside."""
    loss: Tensor = out.loss if inside else outside_loss(out.logits)
    return loss


def ten_steps(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inside: bool, mesh: DeviceMesh | None = None
) -> list[float]:
    """The losses of ten AdamW steps with gradient clipping (the mean of the ranks'), and the clipped norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for _ in range(10):
        loss = loss_of(model(*args, **kwargs), inside)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        norms.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        if mesh is not None and not inside:
            torch.distributed.all_reduce(shown, group=mesh.get_group("dp"))
            shown /= mesh["dp"].size()
        losses.append(shown.item())
    return losses + norms
