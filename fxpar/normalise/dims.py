"""Dims in arguments: counted from the front, written out, and reductions in one form.

In: a :class:`Call`. Out: its arguments changed in place (:func:`count_from_front`), or the canonical reduction.
"""

from __future__ import annotations

from collections.abc import Callable

from fxpar.graph import Ref
from fxpar.normalise.call import Call, Rewrite, words

#: Operation -> (position of its dim or dims, keyword, what stands for an argument not given).
DIMS: dict[str, tuple[int, str, int | None]] = {
    **dict.fromkeys(
        words(
            "cumsum cumprod cummax cummin logcumsumexp gather scatter scatter_add scatter_reduce index_select "
            "index_add index_copy index_fill index_reduce unfold softmax log_softmax argmax argmin flip prod aminmax "
            "count_nonzero"
        ),
        (1, "dim", None),
    ),
    "roll": (2, "dims", None),
    "topk": (2, "dim", -1),
    "kthvalue": (2, "dim", -1),
    "sort": (1, "dim", -1),
    "argsort": (1, "dim", -1),
    "mode": (1, "dim", -1),
    "glu": (1, "dim", -1),
    "diff": (2, "dim", -1),
    "cosine_similarity": (2, "dim", 1),
    "renorm": (2, "dim", None),
    "linalg_cross": (99, "dim", -1),
}

#: Overloads of the operations above, and of others, that have a dim only in that overload.
OVERLOAD_DIMS: dict[str, tuple[int, str, int | None]] = {
    **dict.fromkeys(words("max.dim min.dim median.dim nanmedian.dim any.dim all.dim"), (1, "dim", None)),
    "sort.stable": (99, "dim", -1),
    "argsort.stable": (99, "dim", -1),
    "repeat_interleave.self_Tensor": (2, "dim", None),
}

#: Two dims that name a plane.
PLANES: dict[str, tuple[int, str, str, int, int]] = {
    "diagonal": (2, "dim1", "dim2", 0, 1),
    "diagonal_scatter": (3, "dim1", "dim2", 0, 1),
    "diag_embed": (2, "dim1", "dim2", -2, -1),
}


def count_from_front(call: Call, name: str, overload: str) -> None:
    """Write the dims of an operation that stays as non-negative numbers, and defaults that are dims in full."""
    if name in PLANES:
        position, first, second, one, two = PLANES[name]
        rank = call.rank(call.args[0]) + (name == "diag_embed")
        for offset, keyword, unset in ((0, first, one), (1, second, two)):
            call.with_arg(position + offset, keyword, call.arg(position + offset, keyword, unset) % rank)
        return
    where = OVERLOAD_DIMS.get(f"{name}.{overload}") or DIMS.get(name)
    if where is None or not call.args or not isinstance(call.args[0], Ref):
        return
    position, keyword, default = where
    dims = call.arg(position, keyword, default)
    if isinstance(dims, bool) or dims is None:
        return
    if isinstance(dims, int):
        call.with_arg(position, keyword, call.dim(call.args[0], dims))
    elif isinstance(dims, tuple) and all(isinstance(dim, int) for dim in dims):
        call.with_arg(position, keyword, tuple(call.dim(call.args[0], dim) for dim in dims))


def _reduction(op: str, *, whole: bool = False) -> Callable[[Call], Ref]:
    """``op(x, dims, keepdim)``: every dim if ``whole`` or none is given, ``dtype`` only where it changes something."""

    def rewrite(call: Call) -> Ref:
        x, kwargs = call.args[0], {}
        dims, keepdim = (None, False) if whole else (call.arg(1, "dim"), bool(call.arg(2, "keepdim", False)))
        dtype = call.kwargs.get("dtype")
        if dtype is not None and (dtype.name != call.dtype(x) or "int" in dtype.name):  # small integers sum to int64
            kwargs["dtype"] = dtype
        return call.new(op, x, call.dims(x, dims), keepdim, **kwargs)

    return rewrite


def _spread(op: str, form: str) -> Callable[[Call], tuple[Ref | None, ...]]:
    """``var`` and ``std``: ``op(x, dims, correction=, keepdim=)``."""

    def rewrite(call: Call) -> tuple[Ref | None, ...]:
        x = call.args[0]
        dims, unbiased = (None, call.arg(1, "unbiased", True)) if form == "default" else (call.arg(1, "dim"), True)
        if form == "dim":
            unbiased = call.arg(2, "unbiased", True)
        correction = call.kwargs.get("correction") if form == "correction" else int(unbiased)
        keepdim = bool(call.arg(3 if form == "dim" else 99, "keepdim", False))
        call.args = (x, call.dims(x, dims))
        call.kwargs = {"correction": 1 if correction is None else correction, "keepdim": keepdim}
        return call.keep(op)

    return rewrite


def _vector_norm(call: Call) -> Ref:
    x, order = call.args[0], call.arg(1, "ord", 2)
    dtype = call.kwargs.get("dtype")
    kwargs = {} if dtype is None else {"dtype": dtype}
    dims, keepdim = call.dims(x, call.arg(2, "dim")), bool(call.arg(3, "keepdim", False))
    return call.new("aten.linalg_vector_norm.default", x, order, dims, keepdim, **kwargs)


def _norm(call: Call) -> Ref:
    """The old ``norm(x, p, dim, keepdim)``; ``p`` unset is 2."""
    order = call.arg(1, "p")
    call.args = (call.args[0], 2 if order is None else order, *call.args[2:])
    return _vector_norm(call)


REDUCTIONS: dict[str, Rewrite] = {
    "mean.default": _reduction("aten.mean.dim", whole=True),
    "mean.dim": _reduction("aten.mean.dim"),
    "sum.default": _reduction("aten.sum.dim_IntList", whole=True),
    "sum.dim_IntList": _reduction("aten.sum.dim_IntList"),
    "nansum": _reduction("aten.nansum.default"),
    "amax": _reduction("aten.amax.default"),
    "amin": _reduction("aten.amin.default"),
    "max.default": _reduction("aten.amax.default", whole=True),
    "min.default": _reduction("aten.amin.default", whole=True),
    "logsumexp": _reduction("aten.logsumexp.default"),
    **{
        f"{op}.{form}": _spread(f"aten.{op}.correction", form)
        for op in ("var", "std", "var_mean", "std_mean")
        for form in ("default", "dim", "correction")
    },
    "linalg_vector_norm": _vector_norm,
    **dict.fromkeys(words("norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype"), _norm),
}
