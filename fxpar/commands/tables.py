"""Tables: drawn with rich on a terminal, aligned plain text elsewhere.

In: a title, headers and rows of text. Out: text on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def plain(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table as aligned text; columns whose cells are all numbers are set right.

    >>> print(plain("", ("op", "count"), [("linear", "7"), ("add", "12")]))
    op      count
    linear      7
    add        12
    """
    body = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *body]) for i in range(len(headers))]
    right = _numeric(headers, body)

    def line(cells: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(parts).rstrip()

    return "\n".join(([title] if title else []) + [line(headers), *map(line, body)])


def show(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print the table to standard output, with rich if that is a terminal."""
    body = [list(row) for row in rows]
    if not sys.stdout.isatty():
        print(plain(title, headers, body), flush=True)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for header, to_right in zip(headers, _numeric(headers, body), strict=True):
        table.add_column(header, justify="right" if to_right else "left", overflow="fold")
    for row in body:
        table.add_row(*map(escape, row))
    Console().print(table)


def _numeric(headers: Sequence[str], body: Sequence[Sequence[str]]) -> list[bool]:
    def number(cell: str) -> bool:
        try:
            float(cell.split(" ")[0].replace(",", "").rstrip("%"))
        except ValueError:
            return cell in ("", "-")
        return True

    return [bool(body) and all(number(row[i]) for row in body) for i in range(len(headers))]
