"""The rule line: parse it, and fit it to the shapes of one operation.

In: a text such as ``"... i+, o i+ -> ... o; P 0 | 1"`` and the shapes of operands and outputs. Out: :class:`Rule`,
which says which factor stands in which dim. What a rule allows on a mesh axis is :mod:`fxpar.rules.generate`.
``docs/notation.md`` explains the language.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fxpar.errors import RuleError

Dim = tuple[str, ...]  # the factors of one dim, outermost first; () is a dim of size 1
Term = tuple[Dim, ...]
Shape = tuple[int, ...]

ELLIPSIS: Dim = ("...",)
MARKS = {"+": "summed", "!": "whole", "^": "reduced to the largest", "~": "uneven"}
_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([()])|(1)(?!\w)|([A-Za-z]\w*)([+!^~]*))")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed rule line, before it meets any shape."""

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    summed: frozenset[str]
    whole: frozenset[str]
    largest: frozenset[str]
    uneven: frozenset[str]
    linear: tuple[tuple[int, ...], ...]


class Place(NamedTuple):
    """Where a factor stands: operand number or ``("out", number)``, dim, and the product of the sizes before it."""

    where: int | tuple[str, int]
    dim: int
    leading: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule line fitted to one operation: the factors of every dim, and the size of every factor.

    ``summed`` factors leave a partial output when split, ``largest`` ones an output of which the ranks' largest counts;
    ``whole`` ones are never split, ``uneven`` ones also in pieces that are not equal, where they have a dim to
    themselves. Each entry of ``linear`` is a set of operands in which the operation is jointly linear, so that partial
    sums may pass through it.
    """

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    sizes: tuple[tuple[str, int], ...]
    summed: frozenset[str]
    whole: frozenset[str]
    largest: frozenset[str]
    uneven: frozenset[str]
    linear: tuple[tuple[int, ...], ...]

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors that may be split, in order of appearance."""
        return tuple(name for name, size in self.sizes if name not in self.whole and size > 1)

    def size(self, factor: str) -> int:
        """The size of ``factor``."""
        return dict(self.sizes)[factor]

    def places(self, factor: str) -> tuple[Place, ...]:
        """Every place of ``factor``, operands first."""
        return tuple(self._find(factor))

    def term(self, where: int | tuple[str, int]) -> Term:
        """The term of an operand number or ``("out", number)``."""
        return self.inputs[where] if isinstance(where, int) else self.outputs[where[1]]

    def _find(self, factor: str) -> Iterator[Place]:
        sizes = dict(self.sizes)
        sides: list[tuple[int | tuple[str, int], Term]] = list(enumerate(self.inputs))
        sides += [(("out", index), term) for index, term in enumerate(self.outputs)]
        for where, term in sides:
            for dim, atoms in enumerate(term):
                if factor in atoms:
                    yield Place(where, dim, math.prod(sizes[name] for name in atoms[: atoms.index(factor)]))


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Parse a rule line; raises :class:`RuleError` with the line and the cause.

    >>> parse("... i+, o i+ -> ... o; P 0 | 1").linear
    ((0,), (1,))
    """
    body, *options = text.split(";")
    sides = body.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {text!r}: write operands, one '->', then outputs; found {len(sides) - 1} arrows")
    marked: dict[str, set[str]] = {mark: set() for mark in MARKS}
    inputs, outputs = (
        tuple(_term(text, term, marked) for term in side.split(",")) if side.strip() else ((),) for side in sides
    )
    for one, other in (("+", "!"), ("+", "^"), ("!", "^"), ("!", "~")):
        if both := marked[one] & marked[other]:
            raise RuleError(
                f"rule {text!r}: {sorted(both)} cannot be {MARKS[one]} ({one}) and {MARKS[other]} ({other}) at once"
            )
    linear = tuple(group for option in options for group in _linear(text, option, len(inputs)))
    summed, whole, largest, uneven = (frozenset(marked[mark]) for mark in MARKS)
    return Pattern(text, inputs, outputs, summed, whole, largest, uneven, linear)


def _term(text: str, term: str, marked: dict[str, set[str]]) -> Term:
    dims: list[Dim] = []
    group: list[str] | None = None
    position = 0
    term = term.rstrip()
    while position < len(term):
        match = _TOKEN.match(term, position)
        if match is None:
            raise RuleError(f"rule {text!r}: cannot read {term[position:].strip()!r} in the term {term.strip()!r}")
        position = match.end()
        dots, bracket, one, name, marks = match.groups()
        if bracket == "(" and group is None:
            group = []
        elif bracket == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        elif bracket or (dots and group is not None):
            raise RuleError(f"rule {text!r}: brackets do not match, or hold '...', in the term {term.strip()!r}")
        elif dots:
            dims.append(ELLIPSIS)
        elif one:
            if group is None:
                dims.append(())
        else:
            for mark in marks:
                marked[mark].add(name)
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
    if group is not None:
        raise RuleError(f"rule {text!r}: a bracket is not closed in the term {term.strip()!r}")
    if dims.count(ELLIPSIS) > 1:
        raise RuleError(f"rule {text!r}: the term {term.strip()!r} has more than one '...'")
    return tuple(dims)


def _linear(text: str, option: str, operands: int) -> Iterator[tuple[int, ...]]:
    match = re.fullmatch(r"\s*P\s+(.*)", option, re.DOTALL)
    if match is None:
        raise RuleError(f"rule {text!r}: unknown option {option.strip()!r}; the one option is 'P <operands>'")
    for group in match[1].split("|"):
        try:
            members = tuple(int(member) for member in group.split(","))
        except ValueError:
            raise RuleError(f"rule {text!r}: {group.strip()!r} is not a list of operand numbers") from None
        if any(not 0 <= member < operands for member in members):
            raise RuleError(f"rule {text!r}: 'P {group.strip()}' names an operand beyond the {operands} it has")
        yield members


@lru_cache(maxsize=65536)
def bind(
    text: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], sizes: tuple[tuple[str, int], ...] = ()
) -> Rule:
    """Fit a rule line to shapes; ``sizes`` gives the factors that plain dims do not. Raises :class:`RuleError`.

    >>> bind("b (h d!) -> b h d!", ((2, 12),), ((2, 4, 3),)).places("h")
    (Place(where=0, dim=1, leading=1), Place(where=('out', 0), dim=1, leading=1))
    """
    pattern = parse(text)
    in_terms = () if pattern.inputs == ((),) and not inputs else pattern.inputs
    if len(in_terms) != len(inputs) or len(pattern.outputs) != len(outputs):
        raise _misfit(text, inputs, outputs, f"it has {len(in_terms)} operands and {len(pattern.outputs)} outputs")
    terms = _expand(text, in_terms + pattern.outputs, inputs + outputs, (inputs, outputs))
    known = _sizes(text, terms, inputs + outputs, dict(sizes), (inputs, outputs))
    ordered = tuple((name, known[name]) for name in dict.fromkeys(a for term in terms for dim in term for a in dim))
    rule = Rule(
        text,
        terms[: len(inputs)],
        terms[len(inputs) :],
        ordered,
        *(pattern.summed, pattern.whole, pattern.largest, pattern.uneven, pattern.linear),
    )
    for factor in rule.factors:
        _check_factor(rule, factor, inputs, outputs)
    return rule


def _expand(
    text: str, terms: tuple[Term, ...], shapes: tuple[Shape, ...], sides: tuple[tuple[Shape, ...], tuple[Shape, ...]]
) -> tuple[Term, ...]:
    counts = set()
    for term, shape in zip(terms, shapes, strict=True):
        spare = len(shape) - len(term) + (ELLIPSIS in term)
        if spare < 0 or (spare and ELLIPSIS not in term):
            raise _misfit(text, *sides, f"shape {shape} has {len(shape)} dims, its term {show(term)!r} does not")
        if ELLIPSIS in term:
            counts.add(spare)
    if len(counts) > 1:
        raise _misfit(text, *sides, f"'...' would stand for {sorted(counts)} dims at once")
    dots = tuple((f"_{index}",) for index in range(counts.pop())) if counts else ()
    return tuple(
        tuple(dim for part in term for dim in (dots if part == ELLIPSIS else (part,))) if ELLIPSIS in term else term
        for term in terms
    )


def _sizes(
    text: str,
    terms: tuple[Term, ...],
    shapes: tuple[Shape, ...],
    known: dict[str, int],
    sides: tuple[tuple[Shape, ...], tuple[Shape, ...]],
) -> dict[str, int]:
    dims = [
        (dim, size) for term, shape in zip(terms, shapes, strict=True) for dim, size in zip(term, shape, strict=True)
    ]
    for dim, size in dims:
        if len(dim) == 1:
            known.setdefault(dim[0], size)
    for dim, size in sorted(dims, key=lambda item: len(item[0])):
        unknown = [name for name in dim if name not in known]
        rest = math.prod(known.get(name, 1) for name in dim)
        if len(unknown) > 1:
            raise _misfit(text, *sides, f"the sizes of {unknown} cannot be told")
        if unknown and rest:
            known[unknown[0]] = size // rest
            rest *= known[unknown[0]]
        if rest != size:
            found = ", ".join(f"{name}={known.get(name)}" for name in dim) or "1"
            raise _misfit(text, *sides, f"a dim of size {size} is not ({found})")
    return known


def _check_factor(rule: Rule, factor: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> None:
    places = [place.where for place in rule.places(factor)]
    if len(set(places)) < len(places):
        raise _misfit(rule.text, inputs, outputs, f"factor {factor} stands twice in one term; mark it '!'")
    holding = sum(not isinstance(where, int) for where in places)
    if factor in rule.summed and holding:
        raise _misfit(rule.text, inputs, outputs, f"factor {factor} is summed (+) but stands in an output")
    if factor in rule.largest and holding:
        raise _misfit(rule.text, inputs, outputs, f"factor {factor} is reduced (^) but stands in an output")
    if factor not in rule.summed | rule.largest and holding < len(rule.outputs):
        raise _misfit(rule.text, inputs, outputs, f"factor {factor} is missing in an output; mark it '+' or '!'")


def show(term: Term) -> str:
    """A term as text.

    >>> show((("h", "d"), (), ("...",)))
    '(h d) 1 ...'
    """
    return " ".join("1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in term)


def _misfit(text: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], cause: str) -> RuleError:
    shown = ", ".join(map(str, inputs)) + " -> " + ", ".join(map(str, outputs))
    return RuleError(f"rule {text!r} does not fit shapes {shown}: {cause}")
