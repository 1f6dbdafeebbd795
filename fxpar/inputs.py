"""Example inputs for a model that was given without any: from its config, or from the module that reads them first.

In: an ``nn.Module``. Out: arguments that its forward takes, with sizes chosen here, and a sentence that says so. What
a size should be is the user's to say; these are only good enough to plan with.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxpar.errors import CaptureError

BATCH = 8
MAX_SEQUENCE = 2048  # of a language model whose config allows more
UNSTATED_SEQUENCE = 512  # of a language model whose config does not say
SEQUENCES = (128, 64, 16)  # of anything else that reads a sequence
IMAGE_SIZES = (224, 64, 32, 28)
TRIES = 16

Derived = tuple[tuple[Any, ...], dict[str, Any], str]


def derive_inputs(model: nn.Module, *, device: str | torch.device | None = None) -> Derived:
    """Arguments, keyword arguments and their description, for calling ``model`` (on its own device by default).

    Raises :class:`CaptureError` if the model does not tell; the message names what its forward takes.

    >>> args, kwargs, description = derive_inputs(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    >>> description
    'input = float32 (8, 16)'
    """
    first = next(model.parameters(), torch.empty(0))
    device = first.device if device is None else torch.device(device)
    config = getattr(model, "config", None)
    if hasattr(config, "model_type") and hasattr(model, "main_input_name"):
        kwargs = _from_config(model, config, device)
        if kwargs is not None:
            return (), kwargs, ", ".join(f"{name} = {_describe(value)}" for name, value in kwargs.items())
    names = _required(model)
    count = len(names) if len(names) == 1 or type(model).__module__.startswith("torch.nn.") else 0
    tried = []
    for shape, dtype in _candidates(model) if count else ():
        if _accepts(model, [torch.empty(shape, dtype=dtype, device="meta")] * count):
            args = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in names)
            return args, {}, ", ".join(f"{name} = {_describe(args[0])}" for name in names)
        tried.append(f"{_name(dtype)} {shape}")
    call = ", ".join("torch.zeros(...)" for _ in names) + ("," if len(names) == 1 else "")
    raise CaptureError(
        f"{type(model).__name__} was given without example inputs, and they cannot be derived from it. Its forward is "
        f"forward{inspect.signature(model.forward)}; "
        + (f"tried {', '.join(tried)}. " if tried else "nothing was tried. ")
        + f"Pass example_args=({call}) with tensors like those of a training step, or example_kwargs={{...}}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: torch.Tensor) -> str:
    return f"{_name(value.dtype)} {tuple(value.shape)}"


def _float_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _from_config(model: nn.Module, config: Any, device: torch.device) -> dict[str, Any] | None:
    """The inputs of a transformers model, by the name of its main input."""
    main = str(model.main_input_name)
    if main == "pixel_values" and getattr(config, "image_size", None):
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (BATCH, getattr(config, "num_channels", 3), height, width)
        return {main: torch.zeros(shape, dtype=_float_dtype(model), device=device)}
    if main != "input_ids":
        return None
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    longest = next((n for n in (getattr(config, name, None) for name in names) if n), UNSTATED_SEQUENCE)
    ids = torch.zeros((BATCH, min(longest, MAX_SEQUENCE)), dtype=torch.int64, device=device)
    return {main: ids, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {main: ids}


def _required(model: nn.Module) -> list[str]:
    """The names of the arguments that a call must give; a forward of ``*args`` alone takes one input."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named if p.default is p.empty] or ([] if named else ["input"])


def _candidates(model: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes that modules with parameters of their own could read, in the order of registration."""
    real, found = _float_dtype(model), {}
    for module in model.modules():
        dtype = torch.int64 if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else real
        found.update(dict.fromkeys((shape, dtype) for shape in _shapes_read_by(module)))
    return list(found)[:TRIES]


def _shapes_read_by(module: nn.Module) -> list[tuple[int, ...]]:
    flat, sequences = (BATCH,), [(BATCH, size) for size in SEQUENCES]
    if isinstance(module, nn.Linear):
        return [(*lead, module.in_features) for lead in (flat, *sequences)]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return [*sequences, flat]
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        dims = len(module.kernel_size)
        sizes = IMAGE_SIZES if dims == 2 else SEQUENCES if dims == 1 else (32,)
        return [(*flat, module.in_channels, *(size,) * dims) for size in sizes]
    if isinstance(module, nn.MultiheadAttention):
        return [(*lead, module.embed_dim) for lead in sequences]
    if isinstance(module, nn.RNNBase):
        return [(*lead, module.input_size) for lead in sequences]
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return [(*lead, *module.normalized_shape) for lead in (flat, *sequences)]
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return [(*flat, module.num_features, *(32,) * dims) for dims in (0, 1, 2, 3)]
    # transformers' Conv1D and layers written by hand: a matrix, read from either side
    matrix = next((p for p in module.parameters(recurse=False) if p.dim() == 2), None)
    return [] if matrix is None else [(*lead, size) for size in matrix.shape for lead in (flat, *sequences)]


def _accepts(model: nn.Module, args: list[torch.Tensor]) -> bool:
    """Whether ``model`` runs on tensors of these shapes, tried without memory and without leaving a trace."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    with _unchanged(model), torch.no_grad(), torch.device("meta"):
        try:
            torch.func.functional_call(model, meta, tuple(args))
        except Exception:  # whatever a model does with an input that is not for it
            return False
    return True


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what a forward writes to its modules (caches, counters)."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [
        (module, dict(module.__dict__), {table: dict(module.__dict__[table]) for table in tables})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, content in contents.items():
                module.__dict__[table].clear()
                module.__dict__[table].update(content)
