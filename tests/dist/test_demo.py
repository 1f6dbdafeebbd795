"""The demonstration, with two steps instead of thirty."""

from __future__ import annotations

import math
import re

import pytest

from fxpar import cli
from fxpar.demo import TOLERANCE, Run, batches, compare


def test_the_demo_trains_both_ways_and_agrees(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--steps", "2"]) == 0
    out = capfd.readouterr().out
    assert "on tp=2 (toy): optimal" in out
    assert f"at most {TOLERANCE}" in out
    counts = re.search(r"(\d+) collectives in a step are planned, (\d+) were executed", out)
    assert counts
    assert int(counts[1]) == int(counts[2]) > 0


@pytest.mark.parametrize(("losses", "worst"), [([5.0, 4.0], 0.0), ([5.0, 4.4], 0.1), ([5.0, math.nan], math.inf)])
def test_the_largest_relative_difference_decides(losses: list[float], worst: float) -> None:
    assert compare(Run([5.0, 4.0], 0.1), Run(losses, 0.1), 2) == pytest.approx(worst)


def test_the_text_is_the_same_on_every_rank_and_fits_a_byte() -> None:
    first, again = batches(2), batches(2)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert all(ids.min() >= 0 and ids.max() < 256 for ids in first)
