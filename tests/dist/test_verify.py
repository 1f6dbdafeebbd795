"""``fxpar verify`` end to end: equal models, a model that differs, a rank that fails, a wrong name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fxpar import cli

MODELS = """
import torch
from torch import nn

CALLS = [0]


class Changing(nn.Module):
    '''Multiplies by the number of forward calls so far in this process: no graph can hold that.'''

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        CALLS[0] += 1
        return self.second(self.first(x).relu() * CALLS[0])


def mlp():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return model, (torch.randn(4, 8),), {}


def dropout():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    return model, (torch.randn(4, 8),), {}


def changing():
    return Changing(), (torch.randn(4, 8),), {}


def broken():
    raise ValueError("no such weights")

"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module in the current directory."""
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)


def verify(function: str, mesh: str = "tp=2") -> int:
    return cli.main(["verify", "--model", f"my_models:{function}", "--mesh", mesh])


def test_an_mlp_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("mlp") == 0
    out = capsys.readouterr().out
    assert "input gradient" in out
    assert "equal: every difference is at most 1e-09" in out


def test_ranks_of_data_axes_get_their_parts_of_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("mlp", "dp=2,tp=2") == 0
    assert "on dp=2 x tp=2" in capsys.readouterr().out
    assert verify("mlp", "dp=3") == 2
    assert "input 'input' of shape (4, 8) does not divide evenly over the data axes" in capsys.readouterr().err


def test_dropout_is_compared_in_eval_mode_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("dropout") == 0
    assert "compared in eval mode" in capsys.readouterr().out


def test_a_model_that_differs_is_reported_with_its_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("changing") == 1
    assert "NOT EQUAL: first layer that differs: first" in capsys.readouterr().out


def test_a_failing_rank_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("broken") == 2
    err = capsys.readouterr().err
    assert err.startswith("fxpar: RankError: rank ")
    assert "ValueError: no such weights" in err
