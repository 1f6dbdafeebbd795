"""What nodes are said to keep for backward is what torch keeps when the program runs for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxpar.capture import capture
from fxpar.capture.evaluate import evaluate
from fxpar.graph import Footprint, Graph
from tests.models import MODELS


def kept_when_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Bytes of memory that autograd keeps in one real forward; and those of the model and the call among it."""
    captured = capture(model, args, kwargs)
    sizes: dict[int, int] = {}
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        evaluate(captured, model, args, kwargs)
    given = [*model.parameters(), *model.buffers(), *(t for t in (*args, *kwargs.values()) if torch.is_tensor(t))]
    outside = {tensor.untyped_storage().data_ptr() for tensor in given}
    return sum(size for key, size in sizes.items() if key not in outside), len(kept)


def kept_as_said(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The same bytes from footprints, by following views; every block is called with its own memory."""
    program = capture(model, args, kwargs, fold=False).program
    graph, footprints = program.top, program.footprints["top"]
    base = {item.value: item.value for item in graph.inputs}
    given = set(base)
    kept, own = set(), 0
    for node, footprint in zip(graph.nodes, footprints, strict=True):
        outputs = [out for out in node.outputs if out is not None]
        for out, view in zip(outputs, footprint.views, strict=True):
            base[out] = out if view is None else base[node.operands[view]]
        kept |= {base[node.operands[position]] for position in footprint.operands}
        kept |= {base[outputs[position]] for position in footprint.outputs}
        own += footprint.own_bytes
    return own + sum(graph.values[value].bytes for value in kept - given)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_keeps(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    model.train()
    real, count = kept_when_run(model, args, kwargs)
    assert count > 10
    assert kept_as_said(model, args, kwargs) == pytest.approx(real, rel=0.01)


def footprints_of(model: nn.Module, *args: torch.Tensor) -> tuple[Graph, dict[str, list[Footprint]]]:
    program = capture(model, args).program
    found: dict[str, list[Footprint]] = {}
    for node, footprint in zip(program.top.nodes, program.footprints["top"], strict=True):
        found.setdefault(node.op.split(".")[1], []).append(footprint)
    return program.top, found


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = (x * self.weight).transpose(0, 1)
        return turned.reshape(24).exp().reshape(2, 12)[:, :3].sum()


def test_views_share_memory_and_copies_do_not() -> None:
    _, found = footprints_of(_Views(), torch.ones(4, 6))
    assert found["mul"] == [Footprint(operands=(0,), views=(None,))]  # x needs no gradient: the weight is not kept
    assert found["permute"] == [Footprint(views=(0,))]
    assert [item.views for item in found["reshape"]] == [(None,), (0,)]
    assert found["slice"] == [Footprint(views=(0,))]
    assert found["exp"] == [Footprint(outputs=(0,), views=(None,))]


def test_nothing_is_kept_without_a_gradient() -> None:
    frozen = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)).requires_grad_(False)
    _, found = footprints_of(frozen, torch.ones(2, 4))
    assert found and all(
        not item.operands and not item.outputs and not item.own_bytes for items in found.values() for item in items
    )


def test_what_an_operation_keeps_of_its_own() -> None:
    _, found = footprints_of(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.5)), torch.ones(2, 3, 4))
    assert [item.own_bytes for item in found["layer_norm"]] == [2 * 2 * 3 * 4]  # mean and rstd
    assert [item.own_bytes for item in found["dropout"]] == [2 * 3 * 8 * 4]  # on a CPU the mask is not a bool
    assert all(item.forward_bytes >= item.own_bytes for item in (*found["layer_norm"], *found["dropout"]))


def test_scratch_memory_of_a_backward_made_of_several_operations() -> None:
    query = torch.ones(1, 2, 16, 8)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Dropout is not in the fused kernel of a CPU: the scores are made, and kept.
            return nn.functional.scaled_dot_product_attention(x * self.scale, x, x, dropout_p=0.5)

    _, found = footprints_of(Attention(), query)
    scores = 2 * 16 * 16 * 4
    (attention,) = found["scaled_dot_product_attention"]
    assert attention.own_bytes >= 2 * scores and attention.backward_bytes >= scores
    assert attention.forward_bytes >= attention.own_bytes


def test_the_text_form_shows_it_and_the_digest_does_not() -> None:
    program = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),)).program
    assert "(keeps in0)" in program.text() and "(keeps out0)" in program.text()
    assert "keeps" not in program.top.text(canonical=True)


class Counting(nn.Module):
    """Writes to itself whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.seen = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs, self.seen = self.runs + 1, x
        return x * 2


def test_a_module_kept_whole_is_left_as_it_was() -> None:
    """Asking what it keeps runs it on fakes; its hooks must not see them, and it must not hold them."""
    model = nn.Sequential(nn.Linear(4, 4), Counting())
    calls: list[int] = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    capture(model, (torch.zeros(2, 4),), whole=("1",))
    assert (model[1].runs, model[1].seen, calls) == (0, None, [])
