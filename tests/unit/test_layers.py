"""Imports point one way, only some files import torch, and private torch APIs stay in few places. All read by AST."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fxpar"

#: Lowest first. A file may import from a lower line, and from its own unit (a file, or a folder with all in it).
#: Where a folder's files stand on different lines, the longest name wins.
ORDER = (
    ("errors", "progress", "trees"),
    ("layout", "kernels", "bounds_reference"),
    ("tree_kernels",),
    ("cluster", "graph"),
    ("rules", "boundary", "divide", "unfold"),
    ("plans", "patterns", "hints", "dims", "normalise", "cost.comm", "cost.compute", "cost.trees"),
    ("report", "legality", "space", "solver.problem"),
    ("remade",),
    ("solver", "runtime", "places", "parts"),
    ("cost", "capture", "fuse"),
    ("traffic",),
    ("pins", "assemble", "inputs", "rewrite", "placements", "meshes"),
    ("binding", "least", "calls"),
    ("limits",),
    ("mixing",),
    ("search",),
    ("api",),
    ("zoo", "tables", "precision", "processes", "training_step"),
    ("whole_batch",),
    ("verification", "demo"),
    ("commands",),
    ("cli",),
    ("__main__",),
)

#: Units whose files import torch; all others can be used without it.
TORCH = {
    "api",
    "binding",
    "calls",
    "capture",
    "demo",
    "fuse",
    "inputs",
    "meshes",
    "placements",
    "precision",
    "processes",
    "rewrite",
    "runtime",
    "training_step",
    "trees",
    "verification",
    "whole_batch",
    "zoo",
}

#: A record may print itself: these imports stand inside a function, and are the only ones that point up.
INSIDE_FUNCTIONS_UPWARD = {("plans", "report")}

#: What a saved plan needs to run. The runtime imports nothing else of fxpar.
RUNTIME_MAY_IMPORT = {"errors", "layout", "graph", "plans", "rules", "cost.comm", "runtime", "trees"}

#: A name of torch that is not public, up to where it gets private (``torch._C`` is too wide: one step further).
PRIVATE = re.compile(r"^torch(\.[a-zA-Z]\w*)*\.(_C\.\w+|(?!_C\b)_[a-zA-Z]\w*)")


@dataclass(frozen=True)
class Import:
    """``source`` imports ``target`` (both dotted, below fxpar unless ``target`` starts with torch)."""

    source: str
    target: str
    line: int
    at_top: bool


def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name below ``fxpar`` (``""`` is the package itself)."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[Import]:
    """The imports of one file, those under ``if TYPE_CHECKING`` left out."""

    def visit(nodes: list[ast.stmt], at_top: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(name, alias.name, node.lineno, at_top)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}:{node.lineno}: write imports in full"
                for alias in node.names:
                    yield Import(name, f"{node.module}.{alias.name}", node.lineno, at_top)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from visit(node.orelse, at_top)
            else:
                inside = at_top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                    yield from visit(getattr(node, field, []), inside)

    yield from visit(ast.parse(MODULES[name].read_text()).body, True)


def own(target: str) -> str | None:
    """The module of fxpar that an import loads, or None if it is another package's."""
    if target.split(".")[0] != "fxpar":
        return None
    name = target.removeprefix("fxpar").removeprefix(".")
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def unit(name: str) -> tuple[int, str]:
    """The line of ORDER and the unit that a file belongs to."""
    fits = [
        (line, known)
        for line, row in enumerate(ORDER)
        for known in row
        if name == known or name.startswith(f"{known}.")
    ]
    assert fits, f"fxpar/{name.replace('.', '/')}.py stands on no line of ORDER: add it where it belongs"
    return max(fits, key=lambda fit: len(fit[1]))


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_point_down(name: str) -> None:
    line, mine = unit(name)
    for found in imports(name):
        target = own(found.target)
        if not target:
            continue
        other_line, other = unit(target)
        if not found.at_top and (mine, other) in INSIDE_FUNCTIONS_UPWARD:
            continue
        assert other == mine or other_line < line, f"{name}:{found.line} ({mine}) imports {target} ({other}) upward"


def test_the_package_itself_imports_nothing_when_loaded() -> None:
    assert not [found for found in imports("") if found.target.split(".")[0] in ("fxpar", "torch")]


def test_no_import_cycles() -> None:
    edges = {
        name: {target for found in imports(name) if found.at_top and (target := own(found.target)) and target != name}
        for name in MODULES
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("name", [name for name in MODULES if name and unit(name)[1] not in TORCH])
def test_works_without_torch(name: str) -> None:
    direct = [found for found in imports(name) if found.target.split(".")[0] in ("torch", "transformers")]
    assert not direct, f"{name}:{direct[0].line} imports {direct[0].target}; only {sorted(TORCH)} may"
    reached, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        parts = current.split(".")
        waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]
        waiting += [target for found in imports(current) if found.at_top and (target := own(found.target))]
        for found in imports(current):
            assert not (found.at_top and found.target.split(".")[0] == "torch"), f"{name} loads torch by {current}"


def test_runtime_does_not_know_the_planner() -> None:
    for name in MODULES:
        if name.split(".")[0] != "runtime":
            continue
        for found in imports(name):
            target = own(found.target)
            assert not target or unit(target)[1] in RUNTIME_MAY_IMPORT, f"{name}:{found.line} imports {target}"


def names_of_torch(name: str) -> Iterator[str]:
    """Every dotted name below torch that a file imports or writes out."""
    yield from (found.target for found in imports(name))
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_each_private_torch_name_is_known_to_one_file() -> None:
    users: dict[str, set[str]] = {}
    for name in MODULES:
        for found in names_of_torch(name):
            if match := PRIVATE.match(found):
                users.setdefault(match[0], set()).add(name)
    assert users
    assert not {found: names for found, names in users.items() if len(names) > 1}


def test_no_module_hides_a_public_function() -> None:
    from fxpar import __all__

    assert not set(__all__) & {name.split(".")[0] for name in MODULES}


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    skipped = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT.parent / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert not [name for name in folders for pattern in skipped if fnmatch(name, pattern)]
