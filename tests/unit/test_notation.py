"""The rule language: what it reads, what it refuses, and how it says so."""

from __future__ import annotations

import pytest

from fxpar.errors import RuleError
from fxpar.rules.notation import Place, bind, parse, show


def test_marks_options_compounds_and_ones_are_read() -> None:
    pattern = parse("... i+ (h d!) 1, o i+ -> ... (h d!) o; P 0 | 1")
    assert pattern.inputs[0] == (("...",), ("i",), ("h", "d"), ())
    assert pattern.summed == {"i"}
    assert pattern.whole == {"d"}
    assert pattern.linear == ((0,), (1,))
    assert parse("a, a -> a; P 0,1").linear == ((0, 1),)


def test_a_mark_in_one_place_holds_in_all() -> None:
    rule = bind("a! b, a b -> a b", ((2, 4), (2, 4)), ((2, 4),))
    assert rule.factors == ("b",)


def test_a_scalar_has_an_empty_term_and_no_operands_are_an_empty_side() -> None:
    assert bind("a+ -> ", ((4,),), ((),)).places("a") == (Place(0, 0, 1),)
    assert bind(" -> a", (), ((4,),)).factors == ("a",)
    assert bind(" -> ", ((),), ((),)).inputs == ((),)


def test_dots_stand_for_the_same_dims_everywhere() -> None:
    rule = bind("... i+, o i+ -> ... o", ((2, 3, 4), (8, 4)), ((2, 3, 8),))
    assert rule.factors == ("_0", "_1", "i", "o")
    assert show(rule.outputs[0]) == "_0 _1 o"


def test_the_last_unknown_of_a_compound_follows_from_the_others() -> None:
    rule = bind("(k! o) -> o; P 0", ((12,),), ((4,),))
    assert dict(rule.sizes) == {"k": 3, "o": 4}
    assert rule.places("o") == (Place(0, 0, 3), Place(("out", 0), 0, 1))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("a b", "0 arrows"),
        ("a -> a -> a", "2 arrows"),
        ("(a b -> a b", "not closed"),
        ("a b) -> a b", "brackets"),
        ("((a) b) -> a b", "brackets"),
        ("(a ...) -> a ...", "brackets"),
        ("... a ... -> a", "more than one"),
        ("a 2 -> a", "cannot read '2'"),
        ("a? -> a", "cannot read '?'"),
        ("a+ a! -> ", "summed (+) and whole (!)"),
        ("a -> a; Q 0", "unknown option 'Q 0'"),
        ("a -> a; P x", "not a list of operand numbers"),
        ("a -> a; P 1", "beyond the 1"),
    ],
)
def test_a_malformed_line_is_refused_with_its_text_and_cause(text: str, cause: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert text in str(caught.value)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "cause"),
    [
        ("a b -> a b", ((2, 3, 4),), ((2, 3),), "has 3 dims"),
        ("a b -> a", ((2, 3),), ((2,),), "factor b is missing in an output"),
        ("a+ -> a", ((2,),), ((2,),), "summed (+) but stands in an output"),
        ("a a -> a", ((2, 2),), ((2,),), "twice in one term"),
        ("a, a -> a", ((2,), (3,)), ((2,),), "a dim of size 3 is not (a=2)"),
        ("1 a -> a", ((2, 3),), ((3,),), "a dim of size 2 is not (1)"),
        ("(a b) -> a! b!", ((7,),), ((2, 3),), "a dim of size 7"),
        ("(a! b!) -> ", ((6,),), ((),), "the sizes of ['a', 'b'] cannot be told"),
        ("... a, ... -> ... a", ((2, 3), (2, 3)), ((2, 3),), "'...' would stand for [1, 2] dims"),
        ("a -> a", ((2,), (2,)), ((2,),), "it has 1 operands and 1 outputs"),
    ],
)
def test_a_line_that_does_not_fit_says_shapes_and_cause(
    text: str, inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...], cause: str
) -> None:
    with pytest.raises(RuleError) as caught:
        bind(text, inputs, outputs)
    assert text in str(caught.value)
    assert str(inputs[0]) in str(caught.value)
    assert cause in str(caught.value)
