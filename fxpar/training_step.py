"""The numbers of one training step by name, and how far two such steps are apart.

In: a model and its inputs. Out: :class:`Step` (outputs, gradients, parameters after one AdamW step), and
:class:`Difference` per tensor. How the model is sharded, and on which processes it runs, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar.errors import FxparError
from fxpar.runtime.checkpoints import whole_of

#: Errors are relative to the larger of a tensor's own largest entry and this share of the largest of its kind: some
#: gradients (key biases) are mathematically zero.
FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """One compared tensor: ``error`` is max|a-b| / max(max|b|, FLOOR * largest of its kind)."""

    kind: str
    name: str
    error: float


@dataclass(frozen=True)
class Step:
    """One training step's numbers by kind and name, whole and on the CPU."""

    tensors: dict[str, dict[str, torch.Tensor]]

    def compare(self, wanted: Step) -> list[Difference]:
        found = []
        for kind, tensors in wanted.tensors.items():
            mine = self.tensors[kind]
            if mine.keys() != tensors.keys():
                raise FxparError(f"{kind}s differ in name: {sorted(mine.keys() ^ tensors.keys())[:5]}")
            largest = max((_largest(tensor) for tensor in tensors.values()), default=0.0)
            for name, tensor in tensors.items():
                found.append(Difference(kind, name, _error(mine[name], tensor, largest)))
        return found


#: The whole values of the tensors that a layer, or the model, gave out, in their order.
Gather = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def train_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    layers: Mapping[str, Gather] | None = None,
    outputs: Gather | None = None,
    input_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Step:
    """Forward, backward from fixed random cotangents, and one AdamW step.

    ``layers`` are modules whose outputs count too, each with how its tensors are made whole; ``outputs`` makes the
    model's own whole, and lets their gradients pass; ``input_gradient`` gives the whole gradient of an input. Raises
    :class:`FxparError` if no output carries a gradient.
    """
    read_gradient = input_gradient or _gradient
    inputs = {name: tensor for name, tensor in named_tensors({"args": args, "kwargs": kwargs}) if tensor.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with _watched(model, layers or {}) as seen:
        out = dict(named_tensors(model(*args, **kwargs), "output"))
    if outputs is not None:
        out = dict(zip(out, outputs(list(out.values())), strict=True))
    _cotangent_sum(out, seed).backward()
    parameters = dict(model.named_parameters())
    gradients = {name: _whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    input_gradients = {name: read_gradient(tensor) for name, tensor in inputs.items() if tensor.grad is not None}
    optimizer.step()
    for tensor in inputs.values():
        tensor.grad = None
    return Step(
        {
            "layer output": seen,
            "output": {name: _whole(tensor) for name, tensor in out.items()},
            "gradient": gradients,
            "input gradient": input_gradients,
            "parameter after a step": {name: _whole(p) for name, p in parameters.items()},
        }
    )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()


def _cotangent_sum(out: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """A scalar whose gradient with respect to every output is random, and the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    terms = [
        (tensor * torch.randn(tensor.shape, generator=generator)).sum() / max(1, tensor.numel()) ** 0.5
        for tensor in out.values()
        if tensor.requires_grad
    ]
    if not terms:
        raise FxparError("no output of the model carries a gradient; verify needs a model in training form")
    return torch.stack(terms).sum()


@contextmanager
def _watched(model: nn.Module, layers: Mapping[str, Gather]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the outputs of ``layers`` by path, call and position, in the order of the calls."""
    seen: dict[str, torch.Tensor] = {}
    calls: dict[str, int] = {}

    def watch(path: str, gather: Gather) -> Any:
        def hook(_module: nn.Module, _args: Any, result: Any) -> None:
            calls[path] = calls.get(path, 0) + 1
            call = f" (call {calls[path]})" if calls[path] > 1 else ""
            names, tensors = zip(*named_tensors(result, path), strict=True)
            for name, tensor in zip(names, gather([tensor.detach() for tensor in tensors]), strict=True):
                seen[name + call] = tensor.clone()

        return model.get_submodule(path).register_forward_hook(hook)

    hooks = [watch(path, gather) for path, gather in layers.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, with its path.

    >>> [name for name, _ in named_tensors({"a": torch.ones(1), "b": (torch.ones(1), None)})]
    ['a', 'b[0]']
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        yield from named_tensors({field.name: getattr(value, field.name) for field in fields(value)}, name)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(item, change) for item in value)
    return value


def double(value: Any) -> Any:
    """Floating inputs in float64, carrying a gradient."""
    return _map_tensors(value, lambda t: t.detach().double().requires_grad_() if t.is_floating_point() else t)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value on every rank, apart from any later change of ``tensor``."""
    tensor = tensor.detach()
    return whole_of(tensor) if isinstance(tensor, DTensor) else tensor.clone()


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _error(mine: torch.Tensor, wanted: torch.Tensor, largest: float) -> float:
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return float("inf")
    if not wanted.numel():
        return 0.0
    if not wanted.is_floating_point() and not wanted.is_complex():
        return 0.0 if torch.equal(mine, wanted) else float("inf")
    difference = _largest(mine - wanted)
    return difference / max(_largest(wanted), FLOOR * largest) if difference else 0.0
