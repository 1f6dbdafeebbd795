"""``fxpar plan`` end to end, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fxpar
from fxpar import cli

MODELS = """
import torch
from torch import nn


def mlp():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        return model, (torch.empty(64, 1024),), {}


class Exponential(nn.Module):
    def forward(self, x):
        return torch.linalg.matrix_exp(x)


def unruled():
    return nn.Sequential(nn.Linear(8, 8), Exponential()), (torch.ones(8, 8),), {}
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "plan_models", raising=False)


def plan(*flags: str, model: str = "plan_models:mlp") -> int:
    return cli.main(["plan", "--model", model, "--mesh", "tp=4", "--cluster", "toy", *flags])


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    out = capsys.readouterr().out
    assert "on tp=4 (toy): optimal" in out
    assert "0.weight" in out


def test_json_reads_back_and_is_all_of_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--json") == 0
    text = capsys.readouterr().out
    assert json.loads(text)["schema"] == "fxpar.plan"
    assert fxpar.Plan.from_json(text).parameters["0.weight"]


def test_explain_shows_choices_and_refuses_unknown_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--explain", "0") == 0
    assert "runner-up" in capsys.readouterr().out
    assert plan("--explain", "layers.7") == 2
    assert "layers.7" in capsys.readouterr().err


def test_every_stage_is_dumped_in_order(tmp_path: Path) -> None:
    assert plan("--dump", "stages") == 0
    names = sorted(path.name for path in (tmp_path / "stages").iterdir())
    assert [name[:2] for name in names] == [f"{number:02d}" for number in range(len(names))]
    assert "program" in names[0]
    assert any("plan" in name for name in names)


def test_strict_refuses_an_operation_without_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model="plan_models:unruled") == 0
    assert "no rule, computed whole: aten.linalg_matrix_exp" in capsys.readouterr().out
    assert plan("--strict", model="plan_models:unruled") == 2
    assert "RuleError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "lama3-8b", "--mesh", "tp=2"], "did you mean"),
        (["--model", "plan_models:nothing", "--mesh", "tp=2"], "plan_models:nothing"),
        (["--model", "plan_models:mlp", "--mesh", "tp=2", "--cluster", "h1000"], "no cluster 'h1000'"),
        (["--model", "plan_models:mlp", "--mesh", "a=2,b=2,c=2,d=2"], "a, b, c, d"),
    ],
)
def test_mistakes_are_one_message(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err
