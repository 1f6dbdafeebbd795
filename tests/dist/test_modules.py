"""Around a parallel model: checkpoint calls and hooks, other dtypes, replaced modules."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Block, Stack, assert_close, assert_same_gradients, mesh_of, rows, stack

import fxpar
from fxpar.errors import CallError, CaptureError

TOLERANCE = 1e-9


def parallel(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
    return fxpar.parallelize(model, mesh_of(), example_args=args, cluster="toy", **options)


class SelfCheckpointing(Block):
    """A block whose own forward checkpoints all that it does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Checkpointing(Stack):
    """The user's own loop checkpoints every block, the user's blocks checkpoint themselves, or a part is no block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "within":
            self.blocks = nn.ModuleList(SelfCheckpointing(8) for _ in range(3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.how == "around" else block(x)
        return checkpoint(self.head, x, use_reentrant=True) if self.how == "a part" else self.head(x)


def checkpointed(how: str) -> bool:
    """The forward's own checkpoint calls are kept: a block's activations are not stored, it runs again in backward."""
    torch.manual_seed(3)
    model, wanted = Checkpointing(how), Checkpointing(how)
    wanted.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        parallel(model, rows())
    told = [str(w.message) for w in seen if "activation checkpointing covers operations outside" in str(w.message)]
    assert bool(told) == (how == "a part" and not model.inp.weight.device_mesh.get_rank()), told
    runs = Counter[str]()
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: runs.update([str(number)]))
    for m in (model, wanted):
        m(rows()).square().mean().backward()
    assert_same_gradients(model, wanted, TOLERANCE)
    twice = 1 if how == "a part" else 2
    assert runs == {"0": twice, "1": twice, "2": twice}
    with torch.no_grad():
        model(rows())
    model(rows())
    assert runs == {"0": twice + 2, "1": twice + 2, "2": twice + 2}
    return True


@pytest.mark.parametrize("how", ["around", "within", "a part"])
def test_checkpoint_calls_in_a_forward_are_kept(how: str) -> None:
    assert all(run_ranks(2, checkpointed, how))


def hooks() -> bool:
    """Hooks on blocks and the root run; those on modules whose operations are inlined are refused, early and late."""
    wanted, model, seen = stack(), parallel(stack(), rows()), Counter[str]()
    model.register_forward_pre_hook(lambda *_: seen.update(["root"]))
    model.register_forward_hook(lambda _module, _args, out: out * 2)
    model.register_full_backward_hook(lambda *_: seen.update(["root backward"]))
    model.blocks[1].register_forward_hook(lambda _module, _args, out: out * 1.0)
    model.blocks[1].register_forward_pre_hook(lambda *_: seen.update(["block"]))
    model.blocks[1].register_full_backward_hook(lambda *_: seen.update(["block backward"]))
    model.blocks[2].down.weight.register_hook(lambda grad: grad * 3)
    model(rows()).square().mean().backward()
    (2 * wanted(rows())).square().mean().backward()
    wanted.blocks[2].down.weight.grad.mul_(3)
    assert_same_gradients(model, wanted, TOLERANCE)
    assert seen == {"root": 1, "root backward": 1, "block": 1, "block backward": 1}
    for path in ("head", "blocks.1.up"):
        with pytest.raises(CallError, match=rf"a hook on '{path}'.*would never run"):
            model.get_submodule(path).register_forward_hook(print)
        hooked = stack()
        hooked.get_submodule(path).register_forward_hook(print)
        before = dict(hooked.named_parameters())
        with pytest.raises(CaptureError, match=rf"'{path}' has hooks \(print\).*whole=\('{path}',\)"):
            parallel(hooked, rows())
        assert all(hooked.get_parameter(name) is p for name, p in before.items())
    calls: list[int] = []
    kept = stack()
    kept.head.register_forward_hook(lambda *_: calls.append(1))
    parallel(kept, rows(), whole=("head",))
    assert_close(kept(rows()), wanted(rows()), TOLERANCE)
    assert calls == [1]
    early = stack()
    early.blocks[0].register_forward_hook(lambda *_: calls.append(2))
    early.register_forward_hook(lambda *_: calls.append(3))
    parallel(early, rows())
    assert calls == [1], "a hook ran while the model was captured"
    early(rows())
    assert calls == [1, 2, 3]
    return True


def test_hooks() -> None:
    assert all(run_ranks(2, hooks))


def another_dtype() -> bool:
    """``model.double()`` after parallelizing: the numbers of a model that was always float64."""
    wanted, model = stack().float(), stack().float()
    parallel(model, rows().float())
    assert_close(model(rows().float()), wanted(rows().float()), 1e-6)
    for m in (model, wanted):
        m.double()
        m(rows()).square().mean().backward()
    assert_same_gradients(model, wanted, TOLERANCE)
    for m in (model, wanted):
        m.bfloat16()
    out = model(rows().bfloat16())
    assert out.dtype == torch.bfloat16
    assert_close(out, wanted(rows().bfloat16()), 3e-2)
    return True


def test_a_change_of_dtype() -> None:
    assert all(run_ranks(2, another_dtype))


def replaced_modules() -> bool:
    """A module put in the place of one whose operations are in a graph would never run: refused."""
    for path in ("head", "blocks.1.up"):
        model = parallel(stack(), rows())
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        setattr(model.get_submodule(parent), name, nn.Linear(8, 16 if parent else 8).double())
        with pytest.raises(CallError, match=rf"'{path}' was replaced or removed.*before parallelizing"):
            model(rows())
        setattr(model.get_submodule(parent), name, old)
        assert_close(model(rows()), stack()(rows()), TOLERANCE)
    return True


def test_replaced_modules_are_refused() -> None:
    assert all(run_ranks(2, replaced_modules))
