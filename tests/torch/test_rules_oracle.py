"""Every strategy of every registered operation gives what the whole operation gives, forward and backward."""

from __future__ import annotations

import pytest
import torch

from fxpar.rules import RULES
from fxpar.rules.localise import local_sizes
from fxpar.runtime.local_ops import piece
from tests.torch.oracle import Case, Sample, T, sample
from tests.torch.oracle_samples import random, samples

SAMPLES = list(samples())
RANDOM = list(random())


@pytest.mark.parametrize("what", SAMPLES, ids=[f"{index}-{what}" for index, what in enumerate(SAMPLES)])
def test_every_strategy_equals_the_whole_operation(what: Sample) -> None:
    case = Case(what)
    for degree in (2, 4):
        for strategy in case.strategies(degree):
            try:
                case.check(strategy, degree)
            except Exception as error:
                raise AssertionError(f"{strategy} at degree {degree}: {error}") from error


@pytest.mark.parametrize("what", RANDOM, ids=str)
def test_random_operations_agree_whole_and_differ_split(what: Sample) -> None:
    case = Case(what)
    for strategy in case.strategies(2):
        if not strategy.divided:
            case.check(strategy, 2)  # all ranks draw the same, also for summands
            continue
        (first, *_), (second, *_) = case.run(strategy, 2)[0]
        assert first.shape == second.shape == local_sizes(case.outs[0].shape, strategy.outputs[0], 2)
        assert not torch.equal(first, second)


def test_split_dropout_keeps_and_scales_or_drops_its_own_elements() -> None:
    case = Case(sample("dropout", T((64, 64), positive=True), 0.25, True))
    (split, *_) = (strategy for strategy in case.strategies(2) if strategy.divided)
    outs, grads = case.run(split, 2)
    for rank, ((out,), (grad,)) in enumerate(zip(outs, grads, strict=True)):
        kept = piece(case.tensors[0], 0, 1, 2, rank) / 0.75
        assert ((out == 0) | torch.isclose(out, kept)).all()
        assert ((out == 0) == (grad == 0)).all()
        assert 0.15 < (out == 0).double().mean() < 0.35
    assert ((outs[0][0] == 0) != (outs[1][0] == 0)).any()


#: Reductions of everything that are not sums have no dim left to split, and counted dims are made whole.
NEVER_SPLIT = {
    *("aten.max.default", "aten.min.default", "aten.median.default", "aten.prod.default", "aten.norm.Scalar"),
    *("aten.any.default", "aten.all.default", "aten.var.default", "aten.std.default"),
    *("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.eye.default", "aten.eye.m"),
    *("aten.linspace.default", "aten.scalar_tensor.default", "aten.randperm.default"),
    *("aten.tril_indices.default", "aten.triu_indices.default"),
}


def test_every_rule_has_a_sample_that_is_split() -> None:
    cases = [(what.op, Case(what)) for what in SAMPLES + RANDOM]
    split = {op for op, case in cases if any(strategy.divided for strategy in case.strategies(2))}
    assert set(RULES) - split == NEVER_SPLIT
    assert {op for op, _ in cases} == set(RULES)
