"""Tables: drawn with rich on a terminal, aligned plain text elsewhere.

In: a title, a header and rows of text. Out: text on standard output. The text form alone is
:func:`fxpar.report.table`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from fxpar.report import table


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to standard output, with rich if that is a terminal.

    >>> show("counts", ("op", "count"), [("linear", "7"), ("add", "12")])
    counts
    op      count
    ------  -----
    linear  7
    add     12
    """
    if not sys.stdout.isatty():
        print("\n".join([title, *table(header, rows)]), flush=True)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(*header, title=title, title_justify="left", header_style="bold")
    for row in rows:
        drawn.add_row(*map(escape, row))
    Console().print(drawn)
