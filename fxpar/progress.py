"""What a long step is doing, on a terminal only.

In: the name of a stage. Out: a spinner on standard error while the stage runs; nothing at all where standard error is
not a terminal, or on ranks other than 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

_live: list[Status] = []
_names: list[str] = []


def shown() -> bool:
    """Whether progress is shown: standard error is a terminal, and this is rank 0 or no rank at all."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


@contextmanager
def progress(name: str) -> Iterator[None]:
    """Show ``name`` while the body runs; inside another stage, show both.

    >>> with progress("solve"):
    ...     print("quiet unless on a terminal")
    quiet unless on a terminal
    """
    if not shown():
        yield
        return
    _names.append(name)
    try:
        if _live:
            _live[0].update(": ".join(_names))
            yield
            return
        with _spinner(name):
            yield
    finally:
        _names.pop()
        if _live:
            _live[0].update(": ".join(_names))


@contextmanager
def _spinner(name: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(name) as status:
        _live.append(status)
        try:
            yield
        finally:
            _live.pop()
