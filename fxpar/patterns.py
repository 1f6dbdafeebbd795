"""Module paths -> short texts: globs and spans that name several of them.

In and out: plain strings. :mod:`fxpar.report` and :mod:`fxpar.parts` write for people with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def pattern_of(paths: Iterable[str]) -> str:
    """One text for several module paths: ``*`` where they differ; a glob for each depth.

    >>> pattern_of(("model.layers.0", "model.layers.1", "head"))
    'model.layers.*, head'
    """
    depths: dict[int, list[list[str]]] = {}
    for path in dict.fromkeys(paths):
        depths.setdefault(path.count("."), []).append(path.split("."))
    return ", ".join(
        ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*same, strict=True))
        for same in depths.values()
    )


def joined(counts: dict[str, int], others: Sequence[str]) -> dict[str, int]:
    """Places with one glob for those that are alike, where it names none of the ``others``.

    >>> joined({"encoder.0": 2, "encoder.1": 1, "head": 1}, ["norm"])
    {'encoder.*': 3, 'head': 1}
    """
    alike: dict[int, list[str]] = {}
    for place in counts:
        alike.setdefault(place.count("."), []).append(place)
    found: dict[str, int] = {}
    for places in alike.values():
        glob = pattern_of(places)
        clear = any(part != "*" for part in glob.split("."))
        if clear and not any(other.count(".") == glob.count(".") and fnmatchcase(other, glob) for other in others):
            found[glob] = sum(counts[place] for place in places)
        else:
            found.update({place: counts[place] for place in places})
    return found


def spans_of(paths: Iterable[str]) -> str:
    """Module paths in order, with a span for numbers that follow one another.

    >>> spans_of(("model.layers.0", "model.layers.1", "model.layers.2", "model.layers.5", "head"))
    'model.layers.0-2, model.layers.5, head'
    """
    spans: list[tuple[str, str, str]] = []
    for path in dict.fromkeys(paths):
        stem, _, last = path.rpartition(".")
        follows = last.isdigit() and spans and spans[-1][0] == stem and spans[-1][2] == str(int(last) - 1)
        spans[-1:] = [(stem, spans[-1][1], last)] if follows else [*spans[-1:], (stem, last, last)]
    return ", ".join(
        f"{stem}{'.' if stem else ''}{first if first == last else f'{first}-{last}'}" for stem, first, last in spans
    )
