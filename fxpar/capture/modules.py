"""Calls of modules during a capture: put into the graph, kept whole, or handed to the folding of blocks.

In: a call of a module as the model makes it. Out: its result, made of fakes.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpar.capture import opaque
from fxpar.capture.hooks import call_with_hooks
from fxpar.capture.recorder import plain_attributes
from fxpar.capture.structure import hooks_of
from fxpar.errors import CaptureError

if TYPE_CHECKING:
    from fxpar.capture.session import Session


def call(session: Session, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a module of the model, or of one that the forward made up."""
    if session.paused:
        return module.forward(*args, **kwargs)
    path = session.structure.paths.get(id(module))
    if path is None:
        path = f"{session.frame.prefix}{session.path}.<{type(module).__name__}>".lstrip(".")
    kwargs = without_cache(session, module, kwargs)
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in session.whole):
        session.kept_whole.add(path)
        return opaque.call_whole(session, module, path, args, kwargs)
    if session.call_block is not None and len(session.frames) == 1:
        session.calls[id(module)] = session.calls.get(id(module), 0) + 1
        return session.call_block(module, path, args, kwargs)
    return inline(session, module, path, args, kwargs)


def inline(session: Session, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the operations of ``module`` as part of the current frame."""
    if any(hook is not plain_attributes(module).get("forward") for hook in hooks_of(module)):
        return call_with_hooks(module, path, args, kwargs, functools.partial(run, session, module, path))
    return run(session, module, path, args, kwargs)


def run(session: Session, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of ``module``, and know in the meantime that it is running."""
    session.attributes.visit(module)
    relative = path.removeprefix(session.frame.prefix) if path != session.frame.prefix[:-1] else ""
    session.modules.append(relative)
    try:
        return module.forward(*args, **kwargs)
    except Exception:
        session.failed_in = session.failed_in or path
        raise
    finally:
        session.modules.pop()


def without_cache(session: Session, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turn a default ``use_cache=True`` off: a cache is for generating, and makes every layer different."""
    config = plain_attributes(module).get("config")
    if getattr(config, "use_cache", False) is not True or kwargs.get("use_cache") is not None:
        return kwargs
    if "use_cache" not in _parameters(type(module)):
        return kwargs
    note = "use_cache was turned off: a captured program does not fill key/value caches"
    if note not in session.notes:
        session.notes.append(note)
    return {**kwargs, "use_cache": False}


def check_whole(session: Session) -> None:
    """Raise :class:`CaptureError` for a pattern in ``whole`` that named no module that was called."""
    for pattern in session.whole:
        if not fnmatch.filter(session.kept_whole, pattern):
            paths = [path for path in session.structure.paths.values() if path]
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or paths[:3]
            raise CaptureError(f"whole={pattern!r} names no module that the forward calls; near it are {near}")


_PARAMETERS: dict[type, frozenset[str]] = {}


def _parameters(cls: type) -> frozenset[str]:
    """The names of the parameters of ``cls.forward``."""
    if cls not in _PARAMETERS:
        _PARAMETERS[cls] = frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]
    return _PARAMETERS[cls]
