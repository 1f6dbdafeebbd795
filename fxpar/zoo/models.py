"""Building a model of the zoo, and the inputs of one training step of it.

In: a name. Out: :class:`ZooModel`. Models are built from transformers' config classes, on the meta device unless they
are to be small and real. Weights are never downloaded.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpar.errors import CaptureError
from fxpar.zoo.sizes import ENTRIES


@dataclass(frozen=True)
class ZooModel:
    """A model in training mode, the arguments of one training step, and where its sizes are published.

    ``whole`` are patterns of modules to keep whole when it is captured.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str = ""
    whole: tuple[str, ...] = ()


#: The models that :func:`build` knows.
NAMES: tuple[str, ...] = tuple(ENTRIES)

SMALL_BATCH, SMALL_SEQUENCE = 4, 16


def build(
    name: str,
    *,
    shrink: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    batch: int | None = None,
    sequence: int | None = None,
) -> ZooModel:
    """The model ``name`` and the inputs of a training step, its loss included.

    At its published size it lies on the meta device in bfloat16; ``shrink`` makes it a few layers of width 64, real, in
    float32, without dropout. ``batch`` and ``sequence`` are in samples and tokens. Raises :class:`CaptureError` if
    there is no such model or transformers is not installed.

    >>> build("gpt-2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    fxpar.errors.CaptureError: there is no model 'gpt-2' in the zoo; did you mean gpt2...
    """
    if name not in ENTRIES:
        near = difflib.get_close_matches(name, NAMES, 3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise CaptureError(
            f"there is no model {name!r} in the zoo; {hint}It has {', '.join(NAMES)}. For a model of your own, write "
            "package.module:function, a function that returns model, args, kwargs"
        )
    entry = ENTRIES[name]
    dtype = dtype or (torch.float32 if shrink else getattr(torch, entry.dtype))
    device = torch.device(device or ("cpu" if shrink else "meta"))
    transformers = _transformers()
    config = getattr(transformers, entry.config)(**{**entry.both, **(entry.small if shrink else entry.sizes)})
    config.use_cache = False
    if hasattr(config, "num_local_experts"):
        # Both have static shapes. grouped_mm does only the work that is needed, but meta tensors must be bfloat16.
        config._experts_implementation = "grouped_mm" if dtype == torch.bfloat16 else "batched_mm"
    with device:
        model = getattr(transformers, entry.auto).from_config(config, dtype=dtype)
    if getattr(model, "loss_type", "") is None and entry.auto == "AutoModelForCausalLM":
        model.loss_type = "ForCausalLM"  # transformers falls back to it, with a warning, for GPT2LMHeadModel
    batch = batch or (SMALL_BATCH if shrink else entry.batch)
    sequence = sequence or (SMALL_SEQUENCE if shrink else entry.sequence)
    return ZooModel(model.train(), (), _step(config, batch, sequence, dtype, device), entry.source)


def _step(config: Any, batch: int, sequence: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Inputs and labels; real ones are the same on every call."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def ids(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device=device, generator=generator)

    if hasattr(config, "image_size"):
        shape = (batch, config.num_channels, config.image_size, config.image_size)
        pixels = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        return {"pixel_values": pixels, "labels": ids(config.num_labels, batch)}
    tokens = ids(config.vocab_size, batch, sequence)
    labels = ids(config.vocab_size, batch, sequence) if config.model_type in ("bert", "t5") else tokens
    return {"input_ids": tokens, "labels": labels}


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CaptureError(
            "the zoo builds its models from transformers' config classes, and transformers is not installed: "
            "pip install 'fxpar[zoo]'"
        ) from error
