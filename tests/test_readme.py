"""The README's code and the examples run as they stand, the commands exist, and the map lists every file."""

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


def run(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would: on 2 processes if it makes a mesh."""
    launcher = [sys.executable]
    if "init_device_mesh" in script.read_text():
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launcher, str(script)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_code_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = run(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(script: Path) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


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


def test_the_map_lists_every_file() -> None:
    text = (ROOT / "docs" / "map.md").read_text()
    files = [path.relative_to(ROOT / "fxpar").as_posix() for path in (ROOT / "fxpar").rglob("*.py")]
    missing = [name for name in files if not name.endswith("__init__.py") and f"`{name}`" not in text]
    assert not missing
    for name in re.findall(r"^\| `([^`]+\.(?:py|cpp|toml))`", text, re.MULTILINE):
        assert (ROOT / "fxpar" / name).exists() or (ROOT / name).exists(), name
