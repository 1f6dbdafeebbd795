"""Names in a graph to torch objects: ``aten.add.Tensor`` to the overload, ``dtype:float32`` to ``torch.float32``.

In: names and torch-free constants of :mod:`fxpar.graph`. Out: what can be called and passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpar.errors import CaptureError
from fxpar.graph import Torch


def resolve(op: str) -> Callable[..., Any]:
    """The callable named ``op``: ``namespace.name.overload`` of ``torch.ops``, or ``local.<name>`` (local_ops).

    Raises :class:`CaptureError` if there is none.

    >>> resolve("aten.add.Tensor")
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    if op.startswith("local."):
        from fxpar.runtime.local_ops import LOCAL_OPS

        return LOCAL_OPS[op.removeprefix("local.")]
    try:
        namespace, name, overload = op.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (ValueError, AttributeError):
        raise CaptureError(f"there is no operation {op!r} here; import the package that registers it first") from None


def to_torch(arg: Any, device: torch.device | str) -> Any:
    """``arg`` with every :class:`Torch` constant replaced by the object; devices become ``device``.

    >>> to_torch((1, Torch("dtype", "float32")), "cpu")
    (1, torch.float32)
    """
    if isinstance(arg, Torch):
        return torch.device(device) if arg.kind == "device" else getattr(torch, arg.name)
    if isinstance(arg, (tuple, list)):
        return tuple(to_torch(item, device) for item in arg)
    return arg
