"""A parallel model is the same module object: numbers, training loop, copies, checkpoints, hooks and refusals."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from toy_program import ROWS, WIDTH, Toy, batch, parallel, plan_for, program, reference, toy

from fxpar.errors import CallError
from fxpar.layout import Mesh
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out, more = model(x)
    return out.square().sum() + more["h"].sin().sum()


def assert_same(model: Toy, wanted: Toy, *, tolerance: float = 1e-11) -> None:
    """Parameters, gradients and buffers are equal."""
    for (name, p), (wanted_name, q) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert name == wanted_name and type(p) is DTensor and (p.grad is None) == (q.grad is None), name
        torch.testing.assert_close(whole(p), q, rtol=tolerance, atol=tolerance, msg=name)
        if q.grad is not None:
            assert p.grad.placements == p.placements
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=tolerance, atol=tolerance, msg=name)
    torch.testing.assert_close(model.seen, wanted.seen, rtol=tolerance, atol=tolerance)


def training(seeds: range) -> bool:
    """Outputs, gradients of parameters and input, collectives, and two optimizer steps, for random plans."""
    for seed in seeds:
        wanted = reference()
        model = toy(seed=dist.get_rank())  # other ranks' values are replaced by the first's
        before = dict(model.named_parameters())
        optimizer, wanted_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, wanted))
        assert parallel(model, mesh(), seed) is model
        assert all(p is not before[name] and before[name].numel() == 0 for name, p in model.named_parameters())
        assert model.head.weight is model.inp.weight
        for step in range(2):
            x, y = batch().requires_grad_(), batch().requires_grad_()
            with record_collectives() as collectives:
                loss = loss_of(model, x)
                loss.backward()
            wanted_loss = loss_of(wanted, y)
            wanted_loss.backward()
            torch.testing.assert_close(loss, wanted_loss, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-11)
            assert_same(model, wanted)
            planned = {(c.module, c.phase, c.kind, c.axis, c.wire_bytes): c.count
                       for c in applied_plan(model).collectives if c.wire_bytes}  # fmt: skip
            counted: dict[Any, int] = {}
            for c in collectives:
                key = (c.module, c.phase, c.kind, c.axis, c.wire_bytes)
                counted[key] = counted.get(key, 0) + 1
            assert counted == planned, (seed, step)
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, wanted)]
            torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-11, atol=1e-11)
            for o in (optimizer, wanted_optimizer):
                o.step()
                o.zero_grad()
            assert_same(model, wanted, tolerance=1e-7)
    return True


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_training_is_that_of_the_unsharded_model_for_random_plans(degree: int) -> None:
    assert all(run_ranks(degree, training, range(4 if degree == 4 else 12), timeout=120))


def variations() -> bool:
    """New shapes, no_grad, deepcopy, activation checkpointing, hooks."""
    recaptured: list[int] = []
    wanted, model = reference(), parallel(toy(), mesh(), 3, recaptured)
    with torch.no_grad():
        torch.testing.assert_close(model(batch())[0], wanted(batch())[0])
    assert recaptured == [ROWS]
    for _ in range(2):
        wanted.seen = torch.zeros(8, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(model(batch(8))[0], wanted(batch(8))[0])
    assert recaptured == [ROWS, 8]

    wanted = reference()
    clone = copy.deepcopy(model)
    loss_of(model, batch()).backward()
    assert clone.inp.weight.grad is None and clone.inp.weight is clone.head.weight
    loss_of(wanted, batch()).backward()
    loss_of(clone, batch()).backward()
    assert_same(clone, wanted)
    with torch.no_grad():
        clone.inp.weight.zero_()
    assert clone(batch())[0].abs().max() == 0 and model(batch())[0].abs().max() > 0

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)

    wanted, model, calls = reference(), parallel(toy(), mesh(), 4), []
    model.blocks[0].register_forward_pre_hook(lambda _module, args: calls.append(len(args)))
    model.blocks[0].register_forward_hook(lambda _module, _args, out: {**out, "out": out["out"] * 1.0})
    model.blocks[0], model.blocks[1] = Checkpointed(model.blocks[0]), Checkpointed(model.blocks[1])
    loss_of(model, batch()).backward()
    loss_of(wanted, batch()).backward()
    model.blocks[0], model.blocks[1] = model.blocks[0].inner, model.blocks[1].inner
    assert_same(model, wanted)
    assert calls == [1, 1]  # forward, and recompute in backward
    return True


def test_new_shapes_copies_checkpointing_and_hooks() -> None:
    assert all(run_ranks(2, variations))


def refusals() -> bool:
    model = parallel(toy(), mesh(), 0)
    with pytest.raises(CallError, match=r"'blocks.0' was called by itself"):
        model.blocks[0](batch())
    with pytest.raises(CallError, match=r"'head' was called by itself.*graph of the model"):
        model.head(batch())
    with pytest.raises(CallError, match=r"'blocks.1.up' was called by itself.*graph of block 'blocks.1'"):
        model.blocks[1].up(batch())
    with pytest.raises(CallError, match=r"a hook on 'head'.*would never run"):
        model.head.register_forward_hook(print)
    with pytest.raises(CallError, match=r"already"):
        parallel(model, mesh(), 0)
    with pytest.raises(CallError, match=r"not parallel"):
        applied_plan(toy())
    with pytest.raises(CallError, match=r"an input is a DTensor"):
        model(DTensor.from_local(batch(), mesh()))
    hooked = toy()
    hooked.inp.weight.register_hook(print)
    with pytest.raises(CallError, match=r"'inp.weight' has hooks"):
        parallel(hooked, mesh(), 0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in range(8, 8 + 4 * 20, 4):
            model(batch(rows))
    assert len([w for w in seen if "9 different ways" in str(w.message)]) == 1
    return True


def test_refusals_say_what_to_do() -> None:
    assert all(run_ranks(2, refusals))


def strided_seed(degree: int) -> int:
    """A random plan that holds up.weight as S(0/3)."""
    found = program()
    return next(
        seed
        for seed in range(1000)
        if str(plan_for(found, Mesh.of({"tp": degree}), seed).parameters["blocks.0.up.weight"][0]) == "S0/3"
    )


def save(folder: str, seed: int) -> bool:
    import torch.distributed.checkpoint as dcp

    model = parallel(toy(), mesh(), seed)
    assert "StridedShard" in str(model.blocks[0].up.weight.placements)
    assert list(model.state_dict()) == list(toy().state_dict())
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return True


def load(folder: str, seed: int) -> bool:
    import torch.distributed.checkpoint as dcp

    model = parallel(toy(seed=9), mesh(), seed)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_same(model, reference())
    plain = toy(seed=9)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder)
    return all(torch.equal(value, reference().state_dict()[name]) for name, value in state.items())


def test_distributed_checkpoints_move_between_degrees(tmp_path: Any) -> None:
    assert all(run_ranks(4, save, str(tmp_path), strided_seed(4)))
    assert all(run_ranks(2, load, str(tmp_path), strided_seed(2)))
    assert all(run_ranks(1, load, str(tmp_path), 0))


def plain_states(seed: int) -> bool:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    wanted, model = reference(), parallel(toy(seed=9), mesh(), seed)
    for assign in (False, True):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert str(model.load_state_dict(wanted.state_dict(), assign=assign)) == "<All keys matched successfully>"
        torch.testing.assert_close(model(batch())[0], wanted(batch())[0])
    model = parallel(toy(), mesh(), seed)  # assigning has parted the tied parameters, as in any model
    wanted, loaded = reference(), parallel(toy(seed=9), mesh(), 7)
    loaded.load_state_dict(model.state_dict())  # from other placements
    assert_same(loaded, wanted)
    with pytest.raises(RuntimeError, match=r"size mismatch for inp.weight"):
        model.load_state_dict({**wanted.state_dict(), "inp.weight": torch.zeros(3, 3)})
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert dist.get_rank() != 0 or all(torch.equal(full[key], value) for key, value in wanted.state_dict().items())
    set_model_state_dict(loaded, wanted.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same(loaded, wanted)
    return True


def test_plain_state_dicts_load() -> None:
    assert all(run_ranks(2, plain_states, strided_seed(2)))


def on_meta() -> bool:
    with torch.device("meta"):
        model = Toy().double()
    parallel(model, mesh(), 5)
    assert all(p.to_local().is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(reference().state_dict())
    wanted = reference()
    loss_of(model, batch()).backward()
    loss_of(wanted, batch()).backward()
    assert_same(model, wanted)
    return True


def test_a_model_on_meta_is_filled_later() -> None:
    assert all(run_ranks(2, on_meta))


def compiled() -> bool:
    wanted, model = reference(), parallel(toy(), mesh(), 6)
    fast = torch.compile(model, backend="aot_eager")
    loss_of(fast, batch()).backward()
    loss_of(wanted, batch()).backward()
    assert_same(model, wanted)
    return True


def test_torch_compile() -> None:
    assert all(run_ranks(2, compiled, timeout=180))
