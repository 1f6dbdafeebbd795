"""The ways of a whole mesh: a strategy per axis, and which of them go together.

In: what may be done on each axis alone (:mod:`fxpar.rules.generate`), or states per axis. Out: :class:`Ways`. Axes that
cut the same factor cut one after the other, the outer axis first; parameters at rest are cut in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product

import numpy as np

from fxpar.graph import Graph, Node
from fxpar.layout import Layout, S, State, fits, nests
from fxpar.rules.generate import strategies
from fxpar.rules.strategy import Strategy

Joint = tuple[Strategy, ...]


@dataclass(frozen=True, eq=False)
class Ways:
    """Ways of running something on a mesh: choice ``k`` takes strategy ``picks[k, i]`` of ``axes[i]`` on axis ``i``."""

    axes: tuple[tuple[Strategy, ...], ...]
    picks: np.ndarray
    #: What each axis may do alone: without cuts made finer because another axis has cut the same factor already.
    alone: tuple[tuple[Strategy, ...], ...]

    def __len__(self) -> int:
        return len(self.picks)

    def __getitem__(self, choice: int) -> Joint:
        return tuple(options[pick] for options, pick in zip(self.axes, self.picks[choice], strict=True))

    def name(self, choice: int) -> str:
        """The strategies' names, outermost axis first."""
        return joint_name(self[choice])

    def layout(self, choice: int, side: str, position: int) -> Layout:
        """The layout of input or output (``side``: ``"inputs"`` or ``"outputs"``) number ``position``."""
        return tuple(getattr(strategy, side)[position] for strategy in self[choice])


def joint_name(joint: Joint) -> str:
    """The name of a strategy per axis; just the name on one axis."""
    return " x ".join(strategy.name for strategy in joint)


def collected(joints: Iterable[Joint], alone: tuple[tuple[Strategy, ...], ...] | None = None) -> Ways:
    """The ways that are exactly ``joints``, in their order; there must be at least one."""
    rows: list[list[int]] = []
    options: list[dict[Strategy, int]] = []
    for joint in joints:
        options = options or [{} for _ in joint]
        rows.append([known.setdefault(item, len(known)) for known, item in zip(options, joint, strict=True)])
    axes = tuple(tuple(known) for known in options)
    return Ways(axes, np.array(rows), alone or axes)


def node_ways(
    graph: Graph, node: Node, degrees: Sequence[int], hints: Mapping[str, Iterable[int]] | None = None
) -> Ways:
    """Every way to run ``node`` on a mesh: on each axis what it may do alone, degrees multiplied where they must be.

    The first way is whole on all axes. An axis of degree 1 has everything: any other strategy is the same by another
    name.
    """
    alone = [
        strategies(graph, node, degree, hints) if degree > 1 else strategies(graph, node, 1)[:1] for degree in degrees
    ]
    sizes = _sizes(graph, node)
    # Equal rules give the very same tuples of strategies, whose hashes would take longer than all else here.
    key = (*map(id, alone), *degrees, sizes)
    if key not in _JOINED:
        _JOINED[key] = _joined(tuple(alone), tuple(degrees), sizes)
        if len(_JOINED) > MAX_KEPT:
            del _JOINED[next(iter(_JOINED))]
    return _JOINED[key]


#: Ways by their strategies' identities; they hold the strategies, so the identities stay theirs.
_JOINED: dict[tuple[object, ...], Ways] = {}

#: Entries of caches, at most.
MAX_KEPT = 4096


def _sizes(graph: Graph, node: Node) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    values = graph.values
    return (
        tuple(values[value].shape for value in node.operands),
        tuple(values[value].shape for value in node.outputs if value is not None),
    )


def _joined(
    alone: tuple[tuple[Strategy, ...], ...], degrees: tuple[int, ...], sizes: tuple[tuple[tuple[int, ...], ...], ...]
) -> Ways:
    if len(degrees) == 1:
        return Ways(alone, np.arange(len(alone[0]))[:, None], alone)
    return collected(_combinations(alone, degrees, sizes), alone)


def _combinations(
    alone: tuple[tuple[Strategy, ...], ...], degrees: tuple[int, ...], sizes: tuple[tuple[tuple[int, ...], ...], ...]
) -> Iterable[Joint]:
    for joint in product(*alone):
        names = [strategy.name.partition("/")[0] for strategy in joint if strategy.divided]
        if len(set(names)) == len(names):
            yield joint
            continue
        nested = _nested(joint, degrees)
        if _even(nested, degrees, sizes):
            yield nested


def _nested(joint: Joint, degrees: Sequence[int]) -> Joint:
    """The strategies with equal cuts of one factor made one after the other."""
    seen: dict[str, int] = {}  # a cut -> in how many pieces it is made already
    found = []
    for strategy, degree in zip(joint, degrees, strict=True):
        if strategy.divided:
            before = seen.get(strategy.name, 1)
            seen[strategy.name] = before * degree
            strategy = finer(strategy, before)
        found.append(strategy)
    return tuple(found)


def finer(strategy: Strategy, times: int) -> Strategy:
    """``strategy`` with its factor seen in ``times`` as many parts: what is left after a cut in ``times`` pieces."""
    if times == 1:
        return strategy
    factor, _, parts = strategy.name.partition("/")

    def cut(states: tuple[State, ...]) -> tuple[State, ...]:
        return tuple(S(state.dim, state.parts * times) if state.kind == "S" else state for state in states)

    name = f"{factor}/{int(parts or 1) * times}"
    return replace(strategy, name=name, inputs=cut(strategy.inputs), outputs=cut(strategy.outputs))


def _even(joint: Joint, degrees: Sequence[int], sizes: tuple[tuple[tuple[int, ...], ...], ...]) -> bool:
    """Whether every operand and output can be in its layout."""
    for side, shapes in zip(("inputs", "outputs"), sizes, strict=True):
        layouts = zip(*(getattr(strategy, side) for strategy in joint), strict=True)
        if not all(fits(shape, layout, degrees) for shape, layout in zip(shapes, layouts, strict=True)):
            return False
    return True


States = tuple[tuple[State, ...], ...]  # per axis


@lru_cache(maxsize=MAX_KEPT)
def layouts_of(states: States, shape: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[Layout, ...]:
    """The layouts of a tensor that is in any of ``states[i]`` on axis ``i``; a dim is cut by the outer axis first.

    >>> layouts_of(((S(0),), (S(0),)), (8,), (2, 4))
    ((S0, S0/2),)
    """
    return _fitting((_in_order(layout, degrees, range(len(degrees))) for layout in product(*states)), shape, degrees)


@lru_cache(maxsize=MAX_KEPT)
def layouts_at_rest(states: States, shape: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[Layout, ...]:
    """Like :func:`layouts_of`, with dims cut in any order of the axes: the last to cut can be gathered alone.

    >>> layouts_at_rest(((S(0),), (S(0),)), (8,), (2, 4))
    ((S0, S0/2), (S0/4, S0))
    """
    orders = list(permutations(range(len(degrees))))
    return _fitting(
        (_in_order(layout, degrees, order) for layout in product(*states) for order in orders), shape, degrees
    )


def _fitting(layouts: Iterable[Layout], shape: tuple[int, ...], degrees: Sequence[int]) -> tuple[Layout, ...]:
    return tuple(layout for layout in dict.fromkeys(layouts) if fits(shape, layout, degrees))


def _in_order(layout: Layout, degrees: Sequence[int], order: Iterable[int]) -> Layout:
    """``layout`` with cuts of one dim that cross made one after the other, in ``order``."""
    cuts = [state.dim for state in layout if state.kind == "S"]
    if len(set(cuts)) == len(cuts):
        return layout
    found = list(layout)
    placed: list[int] = []
    for axis in order:
        state, degree = layout[axis], degrees[axis]
        crossed = [other for other in placed if not nests(state, degree, found[other], degrees[other])]
        if crossed:
            outer = max(crossed, key=lambda other: found[other].parts)
            found[axis] = S(state.dim, found[outer].parts * degrees[outer])
        placed.append(axis)
    return tuple(found)
