"""Models that a user's own function builds.

In: ``"package.module:function"``. Out: :class:`ZooModel`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from fxpar.errors import CaptureError
from fxpar.inputs import derive_inputs
from fxpar.zoo.models import ZooModel


def load(spec: str) -> ZooModel:
    """What the function ``package.module:function`` returns, called without arguments.

    It returns a model, or ``model, args`` or ``model, args, kwargs`` or ``model, args, kwargs, whole``; inputs of a
    model alone are derived from it. The current directory counts as a place of modules. Raises :class:`CaptureError`.
    """
    module_name, _, function_name = spec.partition(":")
    try:
        function = getattr(_import(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CaptureError(
            f"{spec!r} cannot be loaded: {error}. Write package.module:function, a function without arguments that "
            "returns model, args, kwargs"
        ) from error
    return _checked(spec, function())


def _import(name: str) -> Any:
    here = "" in sys.path
    if not here:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    finally:
        if not here:
            sys.path.remove("")


def _checked(spec: str, built: Any) -> ZooModel:
    """Whatever a user's function returned, as a :class:`ZooModel`."""
    if isinstance(built, ZooModel):
        return built
    if isinstance(built, nn.Module):
        args, kwargs, description = derive_inputs(built)
        return ZooModel(built, args, kwargs, f"{spec}, assuming {description}")
    if isinstance(built, (tuple, list)) and 2 <= len(built) <= 4:
        parts: list[Any] = [*built, *([(), {}, ()][len(built) - 1 :])]
        model, args, kwargs, whole = parts
        if isinstance(model, nn.Module) and isinstance(args, (tuple, list)) and isinstance(kwargs, dict):
            return ZooModel(model, tuple(args), kwargs, spec, tuple(whole))
    raise CaptureError(
        f"{spec} returned {_kinds(built)}; it should return model, args, kwargs: an nn.Module, a tuple and a dict"
    )


def _kinds(built: Any) -> str:
    if isinstance(built, tuple):
        return f"({', '.join(type(item).__name__ for item in built)})"
    return type(built).__name__
