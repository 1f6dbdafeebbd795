"""How large the search is for every zoo model: planning time follows from these sizes, and no clock is read.

The sizes are compared with a committed file. To accept new ones: ``python tests/torch/test_search_size.py``.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from fxpar import zoo
from fxpar.capture import capture
from fxpar.cluster import Cluster
from fxpar.cost.price import price
from fxpar.layout import Mesh
from fxpar.search import statistics
from fxpar.space import space

pytest.importorskip("transformers")

BASELINE = Path(__file__).parents[1] / "golden" / "search_size.json"
UPDATE = "python tests/torch/test_search_size.py"
KEYS = ("nodes", "nodes_folded", "unique_blocks", "slots", "variables", "constraints")


def sizes(name: str) -> dict[str, int]:
    """The sizes of the search for ``name`` on 8 ranks."""
    model = zoo.build(name)
    program = capture(model.model, model.args, model.kwargs, whole=model.whole).program
    found = space(program, Mesh.of({"tp": 8}))
    stats = statistics(found, price(found, Cluster.load("h100")))
    return {key: stats[key] for key in KEYS}


def compare(name: str, now: dict[str, int], before: dict[str, int]) -> tuple[list[str], list[str]]:
    """What grew and what shrank, a line each."""
    lines = {key: f"{name}: {key.replace('_', ' ')} {before[key]} -> {now[key]}" for key in KEYS}
    return [lines[key] for key in KEYS if now[key] > before[key]], [
        lines[key] for key in KEYS if now[key] < before[key]
    ]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_search_does_not_grow(name: str) -> None:
    grew, shrank = compare(name, sizes(name), json.loads(BASELINE.read_text())[name])
    assert not grew, f"the search grew: {'; '.join(grew)}. If that is meant, run {UPDATE} and commit {BASELINE.name}"
    if shrank:
        warnings.warn(f"the search shrank: {'; '.join(shrank)}; run {UPDATE} to hold it there", stacklevel=1)


def test_every_model_has_a_baseline() -> None:
    assert set(json.loads(BASELINE.read_text())) == set(zoo.NAMES)


def test_depth_costs_no_decisions() -> None:
    baseline = json.loads(BASELINE.read_text())
    assert all(baseline["llama3-70b"][key] == baseline["llama3-405b"][key] for key in ("slots", "variables"))


def test_growth_is_seen() -> None:
    before = dict.fromkeys(KEYS, 10)
    assert compare("m", {**before, "variables": 11, "slots": 9}, before) == (
        ["m: variables 10 -> 11"],
        ["m: slots 10 -> 9"],
    )


if __name__ == "__main__":
    BASELINE.write_text(json.dumps({name: sizes(name) for name in zoo.NAMES}, indent=1) + "\n")
