"""An ordinary training loop around a parallel model: optimizers, frozen and tied parameters, shapes, dispatches."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    NO_DROPOUT,
    Stack,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    gpt2,
    ids,
    mesh_of,
    rows,
    stack,
    train,
    whole,
)

import fxpar
from fxpar.precision import Float64Casts

TOLERANCE = 1e-9


def parallel(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
    return fxpar.parallelize(model, mesh_of(), example_args=args, cluster="toy", **options)


def square(model: nn.Module) -> torch.Tensor:
    return model(rows()).square().mean()


def optimizers() -> bool:
    """foreach, fused and plain AdamW, made before and after sharding, with gradient clipping, on a tied GPT-2."""

    def loss_of(model: nn.Module) -> torch.Tensor:
        return model(input_ids=ids(), labels=ids()).loss

    with Float64Casts():
        wanted = gpt2(**NO_DROPOUT).double()
        start = gpt2(**NO_DROPOUT).double()
        losses = train(wanted, loss_of)
        for options in ({}, {"foreach": True}, {"fused": True}):
            model = gpt2(**NO_DROPOUT).double()
            early = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
            fxpar.parallelize(model, mesh_of(), example_kwargs={"input_ids": ids(), "labels": ids()}, cluster="toy")
            assert_losses(train(model, loss_of, optimizer=early), losses)
            assert_same_parameters(model, wanted, TOLERANCE)
            model.load_state_dict(start.state_dict())
            assert_losses(train(model, loss_of, **options), losses)
            assert_same_parameters(model, wanted, TOLERANCE)
            assert model.lm_head.weight is model.transformer.wte.weight
            assert len(list(model.parameters())) == len(list(wanted.parameters()))
            for foreach in (False, True):
                loss_of(model).backward()
                loss_of(wanted).backward()
                norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in (model, wanted)]
                assert_close(norms[0], norms[1], TOLERANCE)
                assert_same_gradients(model, wanted, TOLERANCE)
                model.zero_grad()
                wanted.zero_grad()
    return True


def assert_losses(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert_close(torch.stack(found), torch.stack(wanted), TOLERANCE)


def test_optimizers_made_before_and_after() -> None:
    assert all(run_ranks(2, optimizers, timeout=120))


class Partly(Stack):
    """A stack with a layer that the forward never uses, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8).double()
        self.register_buffer("scale", torch.full((8,), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


def partly() -> nn.Module:
    torch.manual_seed(4)
    model = Partly()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


def frozen_and_unused() -> bool:
    """Frozen and unused parameters keep ``grad`` None, the input gets its gradient, thawing later works."""
    wanted, model = partly(), partly()
    parallel(model, rows().requires_grad_())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    x, y = rows().requires_grad_(), rows().requires_grad_()
    for m, given in ((model, x), (wanted, y)):
        m(given).square().mean().backward()
    assert_close(x.grad, y.grad, TOLERANCE)
    assert_same_gradients(model, wanted, TOLERANCE)
    assert model.extra.weight.grad is None and model.blocks[1].up.weight.grad is None
    assert_losses(train(model, square), train(wanted, square))
    for m in (model, wanted):
        m.zero_grad()
        for parameter in m.parameters():
            parameter.requires_grad_(not parameter.requires_grad)
        m(rows()).square().mean().backward()
    assert_same_gradients(model, wanted, TOLERANCE)
    assert_same_parameters(model, wanted, TOLERANCE)
    return True


def test_frozen_and_unused_parameters_and_the_gradient_of_the_input() -> None:
    assert all(run_ranks(2, frozen_and_unused))
    assert all(run_ranks(4, frozen_and_unused))


def variable_shapes() -> bool:
    """New batch sizes, ``no_grad`` evaluation in between, accumulation over unequal batches."""
    wanted, model = stack(), parallel(stack(), rows())
    for count in (4, 2, 3, 1, 4):
        for m in (model, wanted):
            (m(rows(count)).square().sum() / 14).backward()
        with torch.no_grad():
            out = model(rows(count + 3))
            assert_close(out, wanted(rows(count + 3)), TOLERANCE)
            assert not out.requires_grad
        with torch.inference_mode():
            assert_close(model(rows(2)), wanted(rows(2)), TOLERANCE)
    assert_same_gradients(model, wanted, TOLERANCE)
    return True


def test_new_batch_sizes_and_evaluation_between_accumulated_steps() -> None:
    assert all(run_ranks(2, variable_shapes))


class DTensorOperations(TorchDispatchMode):
    """Counts the operations that are called on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def dispatches() -> tuple[Counter[str], ...]:
    """The operations that go through DTensor's dispatch: in forward, in the first backward, in the second."""
    model, found = parallel(stack(), rows()), []
    with DTensorOperations() as control:
        model.head.weight + model.head.weight
    assert control.counts.total() == 1, "nothing is counted"
    for _ in range(2):
        with DTensorOperations() as forward:
            loss = square(model)
        with DTensorOperations() as backward:
            loss.backward()
        found += [forward.counts, backward.counts]
    parameters = len(list(model.parameters()))
    assert not found[0] and not found[2], found
    assert found[1].total() <= parameters and set(found[1]) <= {"aten.detach.default"}, found
    assert found[3].total() <= parameters and set(found[3]) <= {"aten.add_.Tensor", "aten.add.Tensor"}, found
    return tuple(found)


def test_no_dtensor_dispatch_in_forward_and_one_per_parameter_in_backward() -> None:
    run_ranks(2, dispatches)


def compiled() -> bool:
    """torch.compile of a parallel model: the numbers of one process, in forward and backward."""
    wanted, model = stack(), parallel(stack(), rows())
    fast = torch.compile(model, backend="aot_eager")
    for m in (fast, wanted):
        m(rows()).square().mean().backward()
    assert_same_gradients(model, wanted, TOLERANCE)
    assert_losses(train(fast, square), train(wanted, square))
    return True


def test_torch_compile() -> None:
    assert all(run_ranks(2, compiled, timeout=180))


def ties() -> bool:
    """Linears that share a weight, across blocks too, stay one parameter whose gradients are summed."""

    def tied() -> nn.Module:
        model = stack()
        model.head.weight = model.inp.weight
        model.blocks[2].up.weight = model.blocks[0].up.weight
        return model

    wanted, model = tied(), tied()
    parallel(model, rows())
    assert_losses(train(model, square, steps=4), train(wanted, square, steps=4))
    assert_same_parameters(model, wanted, TOLERANCE)
    assert model.head.weight is model.inp.weight and model.blocks[2].up.weight is model.blocks[0].up.weight
    return True


def test_tied_parameters_stay_tied() -> None:
    assert all(run_ranks(2, ties))


def rematerialized_variants_warn() -> int:
    """A warning after 8 ways of calling the model, once."""
    model = parallel(stack(), rows())
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        for count in range(1, 13):
            model(rows(count))
    return len([w for w in seen if "different ways of calling" in str(w.message)])


def test_many_shapes_warn_once() -> None:
    assert run_ranks(2, rematerialized_variants_warn) == [1, 1]


def whole_values() -> bool:
    """Gradients have the placements of their parameters, which are plain DTensors on the given mesh."""
    mesh = mesh_of()
    model = fxpar.parallelize(stack(), mesh, example_args=(rows(),), cluster="toy")
    square(model).backward()
    for p in model.parameters():
        assert isinstance(p, DTensor) and isinstance(p, nn.Parameter) and p.device_mesh == mesh
        assert p.grad.placements == p.placements and p.grad.device_mesh == mesh
        assert whole(p.grad).shape == p.shape
    return True


def test_parameters_and_gradients_are_dtensors_on_the_given_mesh() -> None:
    assert all(run_ranks(2, whole_values))
