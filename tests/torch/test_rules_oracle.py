"""Every strategy of every registered operation gives what the whole operation gives, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from fxpar.layout import local_sizes
from fxpar.rules import LOCALISERS, RULES
from fxpar.runtime.local_ops import piece
from tests.torch.oracle import Case, Sample, T, sample
from tests.torch.oracle_samples import random, samples

SAMPLES = list(samples())
RANDOM = list(random())


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small operations are quicker without threads, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def case_of(index: int) -> Case:
    return Case((SAMPLES + RANDOM)[index])


@pytest.mark.parametrize("index", range(len(SAMPLES)), ids=[f"{index}-{what}" for index, what in enumerate(SAMPLES)])
def test_every_strategy_equals_the_whole_operation(index: int) -> None:
    case = case_of(index)
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
        assert first.shape == second.shape == local_sizes(case.outs[0].shape, strategy.outputs[:1], (2,))
        assert not torch.equal(first, second)


def test_split_dropout_keeps_and_scales_or_drops_its_own_elements() -> None:
    case = Case(sample("dropout", T((64, 64), positive=True), 0.25, True))
    (split, *_) = (strategy for strategy in case.strategies(2) if strategy.divided)
    outs, grads = case.run(split, 2)
    for rank, ((out,), (grad,)) in enumerate(zip(outs, grads, strict=True)):
        kept = piece(case.tensors[0], 0, ((1, 2, rank),)) / 0.75
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
    cases = [(what.op, case_of(index)) for index, what in enumerate(SAMPLES + RANDOM)]
    split = {op for op, case in cases if any(strategy.divided for strategy in case.strategies(2))}
    assert set(RULES) - split == NEVER_SPLIT
    assert {op for op, _ in cases} == set(RULES)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        (sample("relu", T((4, 8))), "a b -> a b; P 0"),
        (sample("add.Tensor", T((4, 8)), 1.0), "a b -> a b; P 0"),
        (sample("softmax.int", T((4, 8)), 1), "a b -> a b"),
        (sample("amax", T((4, 8)), (1,)), "a b+ -> a"),
        (sample("mean.dim", T((4, 8)), (1,)), "a b+ -> a"),
        (sample("linear", T((4, 8)), T((12, 8)), T((12,))), "b i+, o i+, o -> b o"),
        (sample("linear", T((4, 8)), T((12, 8))), "b i+, o i+ -> b o; P 0,1"),
        (sample("layer_norm", T((4, 8)), (4, 8)), "a b! -> a b!"),
        (sample("embedding", T((16, 8)), T((4,), grad=False, data=[1, 9, 15, 3])), "v+ d, t -> t d"),
        (
            sample("scaled_dot_product_attention", *[T((2, 4, 8, 6))] * 3, None, 0.0, True),
            "b h q d!, b h k! d!, b h k! e! -> b h q e!",
        ),
        (sample("reshape", T((4, 8)), (32,)), "a b -> (b a)"),
        (sample("cumsum", T((4, 8)), 1), "a b -> a b"),
    ],
    ids=str,
)
def test_the_oracle_finds_a_wrong_rule(what: Sample, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LOCALISERS, what.op, raising=False)
    monkeypatch.setitem(RULES, what.op, wrong)
    case = Case(what)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        for strategy in case.strategies(2):
            case.check(strategy, 2)
