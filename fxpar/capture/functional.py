"""In-place operations and views, made functional while they are recorded.

In: views and written values. Out: operations that compute the same without writing: what is seen through a view, and
the whole with a part of it replaced. When they are needed is :mod:`fxpar.capture.writes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """One step from a tensor to a part or another arrangement of it: ``func(base, *rest)``, output ``index`` of it.

    ``offset`` is where, along the split dim, output ``index`` of a split begins. ``grad`` is the grad mode it ran in.
    """

    func: Any
    rest: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    index: int | None
    offset: int
    size: int
    grad: bool

    @property
    def name(self) -> str:
        return self.func._schema.name.removeprefix("aten::")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SPLITS = _words("chunk split split_with_sizes tensor_split hsplit vsplit dsplit")
_RESHAPES = _words(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as _reshape_alias ravel "
    "atleast_1d atleast_2d atleast_3d"
)
_SAME = _words(
    "alias to contiguous type_as dropout identity _to_copy expand expand_as positive conj resolve_conj "
    "resolve_neg lift_fresh feature_dropout alpha_dropout view_copy float"
)
_OTHER = _words(
    "transpose t permute movedim moveaxis swapaxes swapdims numpy_T mT mH adjoint matrix_H slice select narrow unbind "
    "diagonal detach real imag view_as_real view_as_complex unfold as_strided"
)


def view_step(func: Any, args: Any, kwargs: dict[str, Any], index: int | None, out: torch.Tensor, offset: int) -> View:
    """The step that ``func`` takes from its first argument to ``out``, its output ``index``."""
    view = View(func, tuple(args[1:]), tuple(kwargs.items()), index, offset, 0, torch.is_grad_enabled())
    return replace(view, size=out.shape[split_dim(view)]) if view.name in _SPLITS else view


def split_dim(view: View) -> int:
    """The dim along which a split cuts."""
    given = dict(view.kwargs).get("dim")
    if given is None and view.name in ("hsplit", "vsplit", "dsplit"):
        return {"hsplit": 1, "vsplit": 0, "dsplit": 2}[view.name]
    return given if given is not None else (view.rest[1] if len(view.rest) > 1 else 0)


Emit = Callable[..., torch.Tensor]


def replay(view: View, base: torch.Tensor, emit: Emit) -> torch.Tensor:
    """The view of ``base``, computed again."""
    with torch.set_grad_enabled(view.grad and torch.is_grad_enabled()):
        if view.index is None:
            return emit(view.func, base, *view.rest, **dict(view.kwargs))
        if view.name == "unbind":
            return emit(aten.select.int, base, _unbind_dim(view), view.index)
        return emit(aten.slice.Tensor, base, split_dim(view), view.offset, view.offset + view.size)


def put_back(view: View, base: torch.Tensor, new: torch.Tensor, emit: Emit) -> torch.Tensor | None:
    """``base`` with ``new`` in the place that the view shows; None if that is not known for this kind of view."""
    name, rest, kwargs = view.name, view.rest, dict(view.kwargs)
    if name in _SAME and new.shape == base.shape and new.dtype == base.dtype:
        return new
    if name == "detach":
        return None if base.requires_grad else new
    if name in _RESHAPES:
        return emit(aten.reshape.default, new, list(base.shape))
    if name in _SPLITS:
        return emit(aten.slice_scatter.default, base, new, split_dim(view), view.offset, view.offset + view.size)
    inverse = _INVERSES.get(name)
    return None if inverse is None else inverse(view, base, new, emit, rest, kwargs)


def _unbind_dim(view: View) -> int:
    return view.rest[0] if view.rest else dict(view.kwargs).get("dim", 0)


def _same_again(view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(view.func, new, *rest, **kwargs)


def _permute(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    dims = [dim % base.dim() for dim in (rest[0] if rest else kwargs["dims"])]
    return emit(aten.permute.default, new, [dims.index(dim) for dim in range(base.dim())])


def _movedim(view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    source, destination = rest
    return emit(view.func, new, destination, source)


def _slice(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.slice_scatter.default, base, new, *rest, **kwargs)


def _narrow(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    dim, start, length = rest
    return emit(aten.slice_scatter.default, base, new, dim, start, start + length)


def _select(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.select_scatter.default, base, new, *rest, **kwargs)


def _unbind(view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.select_scatter.default, base, new, _unbind_dim(view), view.index)


def _diagonal(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.diagonal_scatter.default, base, new, *rest, **kwargs)


def _as_complex(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.view_as_complex.default, new)


def _as_real(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.view_as_real.default, new)


def _real(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.complex.default, new, emit(aten.imag.default, base)) if base.is_complex() else new


def _imag(_view: View, base: Any, new: Any, emit: Emit, rest: Any, kwargs: Any) -> torch.Tensor:
    return emit(aten.complex.default, emit(aten.real.default, base), new)


_INVERSES: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(
        ("transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT", "mH", "adjoint", "matrix_H"), _same_again
    ),
    "permute": _permute,
    "movedim": _movedim,
    "moveaxis": _movedim,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "unbind": _unbind,
    "diagonal": _diagonal,
    "view_as_real": _as_complex,
    "view_as_complex": _as_real,
    "real": _real,
    "imag": _imag,
}


def is_known_view(func: Any) -> bool:
    """Whether ``func`` shows a part or another arrangement of its first argument in a way that can be replayed."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace == "aten" and (name in _SPLITS or name in _RESHAPES or name in _SAME or name in _OTHER)


def written_arguments(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """``(position, name, is an out argument)`` of every argument that ``func`` declares it writes to."""
    return tuple(
        (position, argument.name, argument.is_out)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def functional_form(func: Any) -> Any:
    """The operation that computes what ``func`` writes and writes nothing; None if there is none.

    It takes the same arguments, less the ``out`` ones.
    """
    namespace, _, name = func._schema.name.partition("::")
    wanted = [str(a.type) for a in func._schema.arguments if not a.is_out]
    # "add_" -> "add", "__iand__" -> "__and__"
    base = name.replace("__i", "__", 1) if name.startswith("__i") else name.removesuffix("_")
    for candidate in (base, f"{base}_functional", f"{base}_copy"):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            form = getattr(packet, overload)
            same = [str(a.type) for a in form._schema.arguments] == wanted
            if same and not form._schema.is_mutable:
                return form
    return None
