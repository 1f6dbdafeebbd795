"""Zoo models have their published sizes, small ones train, and a normalised recording of them is exact."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from fxpar import zoo
from fxpar.capture import capture
from fxpar.capture.evaluate import evaluate
from fxpar.errors import CaptureError
from fxpar.normalise import normalise

pytest.importorskip("transformers")

#: Billions of parameters, as published.
SIZES = {
    "gpt2": 0.124,
    "gpt3-175b": 175,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405,
    "bert-large": 0.34,
    "t5-11b": 11,
    "vit-large": 0.307,
    "mixtral-8x7b": 46.7,
}


def test_every_model_has_a_published_size() -> None:
    assert set(zoo.NAMES) == set(SIZES)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_published_sizes_without_memory(name: str) -> None:
    zoo.build("gpt2", shrink=True)  # transformers is imported
    start = time.perf_counter()
    built = zoo.build(name)
    assert time.perf_counter() - start < 10
    tensors = [*built.model.parameters(), *built.model.buffers(), *built.kwargs.values()]
    assert {t.device.type for t in tensors} == {"meta"}
    assert {p.dtype for p in built.model.parameters()} == {torch.bfloat16}
    assert built.model.num_parameters() / 1e9 == pytest.approx(SIZES[name], rel=0.03)
    assert built.model.training
    assert "arXiv" in built.source or "Radford" in built.source


@pytest.mark.parametrize("name", zoo.NAMES)
def test_small_models_train_and_are_the_same_every_time(name: str) -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        built = zoo.build(name, shrink=True)
        out = built.model(*built.args, **built.kwargs)
        losses.append(out.loss)
    losses[0].backward()
    assert torch.equal(*losses)
    assert not [n for n, p in built.model.named_parameters() if p.shape and 0 in p.shape]
    assert built.model.num_parameters() < 300_000


@pytest.mark.parametrize("name", zoo.NAMES)
def test_captured_program_is_the_model(name: str) -> None:
    torch.manual_seed(0)
    built = zoo.build(name, shrink=True, dtype=torch.float64)
    model = built.model
    captured = capture(model, built.args, built.kwargs, whole=built.whole)
    results = []
    for out in (model(*built.args, **built.kwargs), evaluate(captured, model, built.args, built.kwargs)):
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(out.loss, parameters)
        results.append({"loss": out.loss, "logits": out.logits, **dict(zip(names, gradients, strict=True))})
    for key, want in results[0].items():
        # Norms and rotary embeddings of these models run in float32 whatever their dtype.
        torch.testing.assert_close(results[1][key], want, rtol=1e-6, atol=1e-7, msg=f"{name}: {key} differs")


@pytest.mark.parametrize("name", zoo.NAMES)
def test_capture_of_the_published_size_is_normal(name: str) -> None:
    built = zoo.build(name)
    program = capture(built.model, built.args, built.kwargs, whole=built.whole).program
    for graph in program.graphs().values():
        assert normalise(graph) == graph
    assert len(program.blocks) >= 1


def test_batch_and_sequence_can_be_chosen() -> None:
    built = zoo.build("llama3-8b", batch=2, sequence=128)
    assert {tuple(value.shape) for value in built.kwargs.values()} == {(2, 128)}


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(CaptureError, match="did you mean llama3-8b"):
        zoo.build("llama-8b")


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CaptureError, match=r"pip install 'fxpar\[zoo\]'"):
        zoo.build("gpt2")


FUNCTIONS = """
import torch
from torch import nn

def full():
    return nn.Linear(4, 2), (torch.zeros(3, 4),), {}, ("head",)

def pair():
    return nn.Linear(4, 2), [torch.zeros(3, 4)]

def alone():
    return nn.Linear(4, 2)

def wrong():
    return nn.Linear(4, 2), torch.zeros(3, 4)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_models.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    return "my_models"


def test_user_functions(functions: str) -> None:
    full = zoo.load(f"{functions}:full")
    assert (tuple(full.args[0].shape), full.kwargs, full.whole) == ((3, 4), {}, ("head",))
    assert isinstance(zoo.load(f"{functions}:pair").args, tuple)
    assert "float32 (8, 4)" in zoo.load(f"{functions}:alone").source


@pytest.mark.parametrize(
    ("spec", "message"),
    [("my_models:none", "none"), ("no_such_module:f", "no_such_module"), ("my_models:wrong", r"\(Linear, Tensor\)")],
)
def test_user_functions_that_do_not_fit(functions: str, spec: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        zoo.load(spec)
