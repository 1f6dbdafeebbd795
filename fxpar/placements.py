"""What the user says about placements of inputs and outputs -> layouts by name.

In: a pytree of DTensor placements, or a dict from names to such. Out: a layout per tensor that is named. Layouts of
parameters at rest are :mod:`fxpar.runtime.dtensor`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard

from fxpar.errors import LayoutError
from fxpar.layout import I, Layout, Mesh, S, State, nested_layout
from fxpar.trees import named_parts


def layouts_by_name(asked: Any, tensors: Sequence[tuple[str, int]], mesh: Mesh, option: str) -> dict[str, Layout]:
    """Layouts of tensors, given by name and number of dims, as ``asked``.

    ``asked`` is a pytree with a sequence of placements (one per mesh axis) per tensor, in the tensors' order, ``None``
    where the rule is to decide; or a dict from names to such. A name stands for all that it contains (``"batch"`` for
    ``"batch['ids']"``), a number for the tensor at that position. Raises :class:`LayoutError`, naming ``option``, for
    names that do not exist, for another number of tensors, and for placements that are no shard and no replicate.

    >>> mesh = Mesh.of({"a": 2, "b": 4})
    >>> layouts_by_name({"x": [Shard(-1), Shard(1)]}, [("x", 2), ("y", 1)], mesh, "input_placements")
    {'x': (S1, S1/2)}
    """
    found: dict[str, Layout] = {}
    names = [name for name, _ in tensors]
    for index, placements in _by_position(asked, names, option):
        if placements is not None:
            name, dims = tensors[index]
            found[name] = _layout(placements, dims, mesh, f"{option}: {name!r}")
    return found


def _by_position(asked: Any, names: list[str], option: str) -> Iterator[tuple[int, Any]]:
    """The placements asked for, with the position of the tensor they are for."""
    if not isinstance(asked, Mapping):
        given = [leaf for _, leaf in named_parts(asked, _is_leaf)]
        if len(given) != len(names):
            raise LayoutError(
                f"{option} has placements for {len(given)} tensors, and there are {len(names)}: {', '.join(names)}; "
                "give one for each (None where fxpar is to decide), or a dict from names to placements"
            )
        yield from enumerate(given)
        return
    for key, part in asked.items():
        key = names[key] if isinstance(key, int) and key in range(len(names)) else str(key)
        for name, placements in named_parts({key: part}, _is_leaf):
            fitting = [index for index, other in enumerate(names) if _contains(name, other)]
            if not fitting:
                near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
                raise LayoutError(
                    f"{option} names {name!r}, which does not exist; nearest: {', '.join(near) or 'none: no tensors'}"
                )
            yield from ((index, placements) for index in fitting)


def _is_leaf(part: Any) -> bool:
    if part is None or isinstance(part, Placement):
        return True
    return isinstance(part, (tuple, list)) and bool(part) and all(isinstance(item, Placement) for item in part)


def _contains(name: str, other: str) -> bool:
    return other == name or other.startswith((f"{name}[", f"{name}."))


def _layout(placements: Any, dims: int, mesh: Mesh, what: str) -> Layout:
    given = (placements,) if isinstance(placements, Placement) else placements
    if not isinstance(given, (tuple, list)):
        raise LayoutError(f"{what} is {given!r}; give a placement per mesh axis, such as (Shard(0), Replicate())")
    if len(given) != len(mesh.axes):
        raise LayoutError(f"{what} has {len(given)} placements; the mesh has {len(mesh.axes)}: {', '.join(mesh.names)}")
    return nested_layout(tuple(_state(placement, dims, what) for placement in given), mesh.degrees)


def _state(placement: Placement, dims: int, what: str) -> State:
    if type(placement) is Replicate:
        return I
    if type(placement) is not Shard:
        raise LayoutError(f"{what} is {placement}; at the border of a model a tensor is Shard(dim) or Replicate()")
    if not -dims <= placement.dim < dims:
        raise LayoutError(f"{what} is {placement}, and the tensor has {dims} dims")
    return S(placement.dim % dims)
