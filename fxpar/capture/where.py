"""Where in the user's model something happens: module path, file and line.

In: Python frames. Out: short texts for graphs and error messages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

import fxpar

_LIBRARY = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(fxpar.__file__) + os.sep)


@dataclass(frozen=True)
class Where:
    """Where in the user's model something happens."""

    module: str
    source: str

    def __str__(self) -> str:
        return f"in {self.module or 'the root module'} at {self.source or 'an unknown line'}"


_LINES: dict[tuple[Any, int], str] = {}
_IS_LIBRARY: dict[Any, bool] = {}


def source_line(frame: Any) -> str:
    """``file:line`` of the innermost frame that belongs to neither torch nor fxpar."""
    while frame is not None:
        if not is_library(frame.f_code):
            return line_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def is_library(code: Any) -> bool:
    """Whether ``code`` belongs to torch or fxpar, not to the user's model."""
    library = _IS_LIBRARY.get(code)
    if library is None:
        library = _IS_LIBRARY[code] = code.co_filename.startswith((*_LIBRARY, "<"))
    return library


def line_of(code: Any, line: int) -> str:
    """``file:line``, the file as short as it can be."""
    text = _LINES.get((code, line))
    if text is None:
        name = code.co_filename
        _, installed, rest = name.rpartition(f"site-packages{os.sep}")
        name = rest if installed else os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
        text = _LINES[code, line] = f"{name}:{line}"
    return text
