"""The README's code runs as it stands, and its commands exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fxpar import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_code_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    launcher = [sys.executable]
    if "init_device_mesh" in code:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert program == "fxpar"
    if arguments != ["--version"]:
        cli.parser().parse_args(arguments)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_zoo_model_of_the_readme_exists() -> None:
    from fxpar import zoo

    listed = re.search(r"a name of the zoo \(([^;]+);", README.replace("\n", " "))
    assert listed
    assert {name.strip() for name in listed[1].split(",")} == set(zoo.NAMES)
