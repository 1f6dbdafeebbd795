"""Every strategy of every registered operation gives what the whole operation gives, forward and backward."""

from __future__ import annotations

import pytest

from fxpar.rules import RULES
from tests.torch.oracle import Case, Sample
from tests.torch.oracle_samples import samples

SAMPLES = list(samples())


@pytest.mark.parametrize("what", SAMPLES, ids=[f"{index}-{what}" for index, what in enumerate(SAMPLES)])
def test_every_strategy_equals_the_whole_operation(what: Sample) -> None:
    case = Case(what)
    for degree in (2, 4):
        for strategy in case.strategies(degree):
            try:
                case.check(strategy, degree)
            except Exception as error:
                raise AssertionError(f"{strategy} at degree {degree}: {error}") from error


#: Reductions of everything that are not sums have no dim left to split.
NEVER_SPLIT = {f"aten.{name}.default" for name in ("max", "min", "median", "prod", "any", "all", "var", "std")} | {
    "aten.norm.Scalar"
}


def test_every_rule_has_a_sample_that_is_split() -> None:
    split = set()
    for what in SAMPLES:
        if any(strategy.divided for strategy in Case(what).strategies(2)):
            split.add(what.op)
    assert set(RULES) - split == NEVER_SPLIT
    assert {what.op for what in SAMPLES} == set(RULES)
