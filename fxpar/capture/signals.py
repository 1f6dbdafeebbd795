"""How a capture changes its mind. Not Exceptions: a model's own ``except Exception`` must not swallow them."""

from __future__ import annotations


class NotFoldableError(BaseException):
    """A block cannot be recorded apart from what surrounds it: record it in place."""


class RestartError(BaseException):
    """Record everything again, with the module classes ``fold`` folded too and ``keep_apart`` no longer."""

    def __init__(self, fold: frozenset[int] = frozenset(), keep_apart: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.fold, self.keep_apart = fold, keep_apart
