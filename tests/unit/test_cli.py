"""The command line: flags, messages, exit statuses; nothing is planned here."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import fxpar
from fxpar import cli, kernels
from fxpar.commands.options import mesh_axes, positive
from fxpar.errors import CaptureError


def test_version_says_which_core_computes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"fxpar {fxpar.__version__} (")
    assert out.split("(")[1].startswith(f"{kernels.DEFAULT} core")


@pytest.mark.parametrize("text", ["tp", "tp=", "=4", "tp=x", "tp=0", "tp=-1", "tp=2,tp=2", "tp=2,", "4", ""])
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        mesh_axes(text)


def test_mesh_axes_keep_their_order() -> None:
    assert list(mesh_axes("dp=2, tp=4").items()) == [("dp", 2), ("tp", 4)]


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", ""])
def test_positive_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        positive(text)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "COMMAND"),
        (["plan"], "--model"),
        (["plan", "--model", "gpt2"], "--mesh"),
        (["plan", "--model", "gpt2", "--mesh", "tp8"], "'tp8' is not an axis"),
        (["paln"], "invalid choice: 'paln'"),
        (["demo", "--steps", "0"], "not a whole number from 1"),
    ],
)
def test_wrong_flags_are_explained(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_error_is_a_message_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise CaptureError("the model cannot be traced")

    monkeypatch.setattr("fxpar.commands.planning.run", fail)
    assert cli.main(["plan", "--model", "gpt2", "--mesh", "tp=2"]) == 2
    assert capsys.readouterr().err == "fxpar: CaptureError: the model cannot be traced\n"


def test_a_mesh_that_cannot_be_used_is_refused_before_any_process_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--model", "gpt2", "--mesh", "a=2,b=2,c=2,d=2"]) == 2
    assert "LayoutError: the mesh has axes a, b, c, d" in capsys.readouterr().err


def test_neither_import_nor_help_loads_torch() -> None:
    script = (
        "import sys, fxpar, fxpar.cli\n"
        "try: fxpar.cli.main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--dump DIR" in done.stdout


def test_public_names_are_listed_and_unknown_ones_refused() -> None:
    assert set(fxpar.__all__) <= set(dir(fxpar))
    with pytest.raises(AttributeError, match="no attribute 'paralellize'"):
        fxpar.paralellize  # noqa: B018
