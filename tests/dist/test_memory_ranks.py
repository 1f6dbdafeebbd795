"""What plans predict of memory is what ranks have in use, to within a tenth."""

from __future__ import annotations

import pytest

from benchmarks.memory import Configuration, run
from fxpar.plans import Memory
from tests.dist.harness import run_ranks

TOLERANCE = 0.1


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration("llama", (("tp", 2),)),
        Configuration("gpt2", (("tp", 2),), cluster="h100", optimizer="sgd"),
        Configuration("llama_recompute", (("tp", 2),)),
        Configuration("bert", (("dp", 2), ("tp", 2))),
        Configuration("vit", (("tp", 2),), seed=4),
    ],
    ids=lambda item: f"{item.model}-{'x'.join(str(n) for _, n in item.axes)}{'' if item.seed is None else '-drawn'}",
)
def test_predicted_is_measured(configuration: Configuration) -> None:
    found = run_ranks(configuration.size, run, configuration, timeout=120)
    predicted, peaks = found[0]
    assert isinstance(predicted, Memory) and len(peaks) == configuration.size
    assert predicted.peak_bytes == pytest.approx(max(peaks), rel=TOLERANCE)
    # Not by chance: each part that can be counted alone is there, and activations are not a rounding error.
    assert predicted.activation_bytes > 0.2 * predicted.peak_bytes
    assert predicted.optimizer_bytes == (2 if configuration.optimizer == "adamw" else 0) * predicted.gradient_bytes
