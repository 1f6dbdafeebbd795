"""A captured program against the model it is of: outputs, gradients, buffers, and the model left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpar import trees
from fxpar.capture import Captured, capture
from fxpar.capture.evaluate import evaluate

TOLERANCE = 1e-10


class Of(nn.Module):
    """A function ``f(module, *args)`` as the forward of a module with these attributes."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter) and name.startswith("buffer"):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def f64(*shape: int, grad: bool = True) -> Tensor:
    """A random double tensor, a leaf of autograd."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, those that are not saved too."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named}


def results(run: Callable[[], Any], leaves: Sequence[Tensor]) -> tuple[list[Any], list[Tensor | None]]:
    """The flat outputs of ``run``, and the gradients of a fixed weighting of them with respect to ``leaves``."""
    torch.manual_seed(1)
    tensors, spec = trees.flatten(run())
    total = torch.zeros((), dtype=torch.float64)
    for index, tensor in enumerate(tensors):
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = weights.unsqueeze(-1) if tensor.is_complex() else weights
            total = total + (flat.double() * weights).sum()
    grads: list[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        for leaf in leaves:
            leaf.grad = None
        total.backward()
        grads = [leaf.grad for leaf in leaves]
    constants = [leaf for leaf in spec.leaves if leaf is not trees.TENSOR]
    return [*tensors, *constants, spec], grads


def close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_kind = (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        return same_kind and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return bool(a == b)


def prove(
    model: nn.Module,
    *args: Any,
    whole: Sequence[str] = (),
    fold: bool = True,
    tolerance: float = TOLERANCE,
    eager: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Captured:
    """Capture, check that the model was left alone, and that program and model agree in all they produce.

    ``eager`` are keyword arguments that only the model gets.
    """
    before, attributes = state(model), {id(m): dict(vars(m)) for m in model.modules()}
    rng = torch.get_rng_state()
    captured = capture(model, args, kwargs, whole=whole, fold=fold)
    assert torch.equal(torch.get_rng_state(), rng), "capture drew random numbers"
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(model).items()), "capture changed the model"
    for module in model.modules():
        then = attributes[id(module)]
        assert vars(module).keys() == then.keys()
        assert all(value is then[name] for name, value in vars(module).items())
    twin = copy.deepcopy(model)
    inputs = [tensor for tensor in trees.flatten((args, kwargs))[0] if tensor.requires_grad]
    wanted, wanted_grads = results(lambda: model(*args, **kwargs, **(eager or {})), [*model.parameters(), *inputs])
    found, found_grads = results(lambda: evaluate(captured, twin, args, kwargs), [*twin.parameters(), *inputs])
    assert len(wanted) == len(found)
    for index, (a, b) in enumerate(zip(wanted, found, strict=True)):
        assert close(a, b, tolerance), f"output {index}: {a} is not {b}"
    names = [*(name for name, _ in model.named_parameters()), *(f"input {i}" for i in range(len(inputs)))]
    for name, a, b in zip(names, wanted_grads, found_grads, strict=True):
        if a is None:
            assert b is None or not bool(b.any()), f"{name} has no gradient, the program gives it one"
        else:
            assert b is not None and close(a, b, tolerance), f"gradient of {name}: {a} is not {b}"
    after, twin_after = state(model), state(twin)
    for name in after:
        assert close(after[name], twin_after[name], tolerance), f"{name} ends as {twin_after[name]}, not {after[name]}"
    return captured


def ops(captured: Captured) -> list[str]:
    """The operations of all graphs."""
    return [node.op for graph in captured.program.graphs().values() for node in graph.nodes]
