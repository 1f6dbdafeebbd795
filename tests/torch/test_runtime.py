"""The small parts of the runtime that need no process group."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

from fxpar.errors import CallError, CaptureError
from fxpar.graph import Torch
from fxpar.runtime import modes
from fxpar.runtime.collectives import convert
from fxpar.runtime.guards import allow_use, refuse_use
from fxpar.runtime.modes import restored_modes
from fxpar.runtime.random import split_stream
from fxpar.runtime.simulate_ranks import run_simulated
from fxpar.runtime.skeleton import follow, mode_key, skeleton
from fxpar.runtime.targets import resolve, to_torch


def test_modes_are_restored_after_an_error_and_left_alone_without_one() -> None:
    with pytest.raises(ValueError, match="odd"), restored_modes():
        modes.enter_no_grad()
        modes.enter_autocast("cpu", torch.bfloat16, True)
        raise ValueError("odd")
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        modes.leave_no_grad(modes.enter_no_grad())
        assert not torch.is_grad_enabled()
    handle = modes.enter_autocast("cpu", torch.bfloat16, True)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    modes.leave_autocast(handle)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_guards_refuse_calls_and_hooks_and_can_be_taken_back() -> None:
    layer = nn.Linear(2, 2)
    refuse_use(layer, "mlp.up", "block 'mlp'")
    with pytest.raises(CallError, match=r"'mlp.up' was called by itself.*block 'mlp'"):
        copy.deepcopy(layer)(torch.ones(1, 2))
    with pytest.raises(CallError, match=r"a hook on 'mlp.up'"):
        layer.register_full_backward_hook(print)
    allow_use(layer)
    layer.register_forward_hook(lambda *_: None)
    assert layer(torch.ones(1, 2)).shape == (1, 2)


def test_a_skeleton_keeps_ties_and_follows_modes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    bare = skeleton(model)
    assert all(tensor.is_meta for tensor in bare.state_dict().values())
    assert bare[2].weight is bare[0].weight and not model[0].weight.is_meta
    model[1].eval()
    model[0].weight.requires_grad_(False)
    follow(bare, model)
    assert not bare[1].training and bare[0].training
    assert [p.requires_grad for p in bare.parameters()] == [p.requires_grad for p in model.parameters()]


def test_the_mode_key_tells_ways_of_calling_apart() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    modules = list(model.modules())
    keys = [mode_key(modules)]
    with torch.no_grad():
        keys.append(mode_key(modules))
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(mode_key(modules))
    model[1].eval()
    keys.append(mode_key(modules))
    model[0].weight.requires_grad_(False)
    keys.append(mode_key(modules))
    keys.append(mode_key(list(model.half().modules())))
    assert len(set(keys)) == len(keys)


def test_names_become_torch_objects() -> None:
    assert resolve("aten.mm.default") is torch.ops.aten.mm.default
    assert callable(resolve("local.mean_split"))
    for name in ("aten.no_such_thing.default", "mm", "nothing.mm.default"):
        with pytest.raises(CaptureError, match="there is no operation"):
            resolve(name)
    given = (Torch("dtype", "bfloat16"), (Torch("device", "cpu"), 2), Torch("memory_format", "contiguous_format"))
    assert to_torch(given, "meta") == (torch.bfloat16, (torch.device("meta"), 2), torch.contiguous_format)


def _noise(rank: int, x: torch.Tensor) -> torch.Tensor:
    with split_stream(rank):
        own = torch.rand_like(x)
    return torch.stack([torch.rand_like(x), own])


def test_simulated_ranks_draw_as_processes_do() -> None:
    """Common numbers are equal, own ones differ, and gradients of a conversion come back summed."""

    def module(rank: int) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        y = graph.call_function(convert, (x, "I", "R", True, "tp", 2, rank, ""))
        noise = graph.call_function(_noise, (rank, y))
        graph.output((y, noise))
        return fx.GraphModule({}, graph)

    x = [torch.ones(3, requires_grad=True) for _ in range(2)]
    seen: list[tuple[str, str, str, str]] = []
    outs = run_simulated([module(0), module(1)], [[x[0]], [x[1]]], watch=lambda *what: seen.append(what))
    assert torch.equal(outs[0][1][0], outs[1][1][0]) and not torch.equal(outs[0][1][1], outs[1][1][1])
    torch.autograd.backward([out[0].sum() for out in outs])
    assert all(torch.equal(leaf.grad, torch.full((3,), 2.0)) for leaf in x)  # type: ignore[arg-type]
    assert seen == [("none", "I", "R", "forward"), ("all_reduce", "I", "R", "backward")]
