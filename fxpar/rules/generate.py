"""From a rule to the strategies of one operation on one mesh axis, and to the links between strided cuts.

In: a node, its rule (:mod:`fxpar.rules.registry`) and the degree. Out: tuples of :class:`Strategy`, and
:class:`Link`. What a strategy costs is :mod:`fxpar.cost`, how it runs is :mod:`fxpar.rules.localise`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fxpar.graph import Graph, Node
from fxpar.layout import I, M, P, R, S, State, is_uneven
from fxpar.rules.notation import Place, Rule
from fxpar.rules.registry import rule_for
from fxpar.rules.strategy import Strategy

Kinds = tuple[tuple[bool, str], ...]  # per value: whether it carries a gradient, and its dtype
Hints = tuple[tuple[str, tuple[int, ...]], ...]


def strategies(
    graph: Graph, node: Node, degree: int, hints: Mapping[str, Iterable[int]] | None = None
) -> tuple[Strategy, ...]:
    """Every way to run ``node`` on an axis of ``degree``: whole, one factor split, or partial sums passed through.

    ``hints`` maps a factor to the part counts in which it may be cut as well (``S(d/k)``). Cuts are even, but for
    factors that the rule marks ``~``. Raises :class:`RuleError` if the registered rule does not fit the node.
    """
    values = graph.values
    ins = tuple((values[value].grad, values[value].dtype) for value in node.operands)
    outs = tuple((values[value].grad, values[value].dtype) for value in node.outputs if value is not None)
    frozen = tuple((name, tuple(sorted(parts))) for name, parts in sorted(hints.items())) if hints else ()
    return _enumerate(rule_for(graph, node), ins, outs, degree, frozen)


@lru_cache(maxsize=65536)
def _enumerate(rule: Rule | None, ins: Kinds, outs: Kinds, degree: int, hints: Hints) -> tuple[Strategy, ...]:
    replicated = tuple(R if grad else I for grad, _ in ins)
    found = [
        Strategy("whole:I", (I,) * len(ins), (I,) * len(outs)),
        Strategy("whole:R", replicated, tuple(R if grad else I for grad, _ in outs)),
    ]
    if rule is not None:
        wanted = dict(hints)
        for factor in rule.factors:
            for parts in (1, *(k for k in wanted.get(factor, ()) if k > 1)):
                if rule.size(factor) % (parts * degree) == 0 or (parts == 1 and _may_be_uneven(rule, factor, degree)):
                    found.append(_split(rule, factor, parts, replicated, len(outs)))
        found += [_partial(group, replicated, len(outs)) for group in rule.linear if _summable(group, ins, outs)]
    unique: dict[tuple[tuple[State, ...], tuple[State, ...]], Strategy] = {}
    for strategy in found:
        if not any(state == P and dtype == "bool" for state, (_, dtype) in zip(strategy.outputs, outs, strict=True)):
            unique.setdefault((strategy.inputs, strategy.outputs), strategy)
    return tuple(unique.values())


def _may_be_uneven(rule: Rule, factor: str, degree: int) -> bool:
    """Whether the rule lets uneven pieces of a factor be, and every dim of the factor can be cut so."""
    alone = all(rule.term(place.where)[place.dim] == (factor,) for place in rule.places(factor))
    return factor in rule.uneven and alone and is_uneven((rule.size(factor),), S(0), degree)


def _split(rule: Rule, factor: str, parts: int, replicated: tuple[State, ...], outputs: int) -> Strategy:
    cut = {place.where: S(place.dim, place.leading * parts) for place in rule.places(factor)}
    return Strategy(
        f"split:{factor}" if parts == 1 else f"split:{factor}/{parts}",
        tuple(cut.get(index, state) for index, state in enumerate(replicated)),
        tuple(cut.get(("out", index), M if factor in rule.largest else P) for index in range(outputs)),
        divided=True,
    )


def _partial(group: tuple[int, ...], replicated: tuple[State, ...], outputs: int) -> Strategy:
    return Strategy(
        f"partial:{','.join(map(str, group))}",
        tuple(P if index in group else state for index, state in enumerate(replicated)),
        (P,) * outputs,
    )


def _summable(group: tuple[int, ...], ins: Kinds, outs: Kinds) -> bool:
    """Whether partial sums make sense: real or complex numbers in, and out."""
    dtypes = [ins[index][1] for index in group] + [dtype for _, dtype in outs]
    return all(dtype.startswith(("float", "bfloat", "complex")) for dtype in dtypes)


@dataclass(frozen=True, slots=True)
class Link:
    """A splittable factor and all its places: a strided cut of one of them is a strided cut of all.

    A place with ``leading > 1`` is where such cuts are born: splitting the factor there wants the dim in
    ``leading`` parts.
    """

    factor: str
    size: int
    places: tuple[Place, ...]


def hint_links(graph: Graph, node: Node) -> tuple[Link, ...]:
    """The links of ``node``, one per factor that may be split; empty if it has no rule."""
    rule = rule_for(graph, node)
    return () if rule is None else _links(rule)


@lru_cache(maxsize=65536)
def _links(rule: Rule) -> tuple[Link, ...]:
    return tuple(Link(factor, rule.size(factor), rule.places(factor)) for factor in rule.factors)


def factor_hint_to_dim(place: Place, parts: int) -> int:
    """The parts in which the dim at ``place`` is cut when the factor there is cut in ``parts``.

    >>> factor_hint_to_dim(Place(0, 1, 3), 2)
    6
    """
    return place.leading * parts


def dim_hint_to_factor(rule: Rule, where: int | tuple[str, int], dim: int, parts: int) -> tuple[str, int] | None:
    """The factor, and its own parts, that is cut when ``dim`` of an operand or output is cut as ``S(dim/parts)``.

    With dim ``(a b c)``: ``a`` if ``parts`` is below and divides its size, else ``b`` if ``parts`` is a multiple of
    size ``a`` and the quotient is below and divides size ``b``, and so on. ``None`` if no factor fits, or it is whole.

    >>> from fxpar.rules.notation import bind
    >>> dim_hint_to_factor(bind("(k! o) -> k! o", ((12,),), ((3, 4),)), 0, 0, 6)
    ('o', 2)
    """
    sizes = dict(rule.sizes)
    term = rule.term(where)
    leading = 1
    for factor in term[dim] if dim < len(term) else ():
        own, rest = divmod(parts, leading)
        if rest:
            return None
        if own < sizes[factor]:
            return (factor, own) if sizes[factor] % own == 0 and factor in rule.factors else None
        leading *= sizes[factor]
    return None
