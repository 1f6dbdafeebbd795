"""Rewrites of casts, constants and arithmetic: affine operations come apart, arguments get one form.

In: a :class:`Call` of such an operation. Out: the canonical operations that make the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpar.graph import Ref, Torch
from fxpar.normalise.call import Call, Result, Rewrite, table

# ---- dtypes and constants ------------------------------------------------------------------------------------------


def cast(call: Call) -> Ref:
    return call.cast(call.args[0], call.out.dtype)


def full(position: int | None, value: Any = 0) -> Rewrite:
    """A constant tensor: the argument at ``position``, or ``value``."""
    return lambda call: call.full(value if position is None else call.arg(position, "fill_value"))


def fill_tensor(call: Call) -> Ref:
    return call.expand(call.cast(call.args[1], call.out.dtype), call.out.shape)


def arange(call: Call) -> Ref:
    start, end, step = {1: (0, *call.args, 1), 2: (*call.args, 1), 3: call.args}[len(call.args)]
    call.args = (start, end, step)
    call.kwargs = {"dtype": Torch("dtype", call.out.dtype), "device": call.kwargs.get("device", Torch("device", "cpu"))}
    (ref,) = call.keep("aten.arange.start_step")
    assert ref is not None
    return ref


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def add(call: Call, x: Ref, y: Ref) -> Ref:
    """``x + y`` in the dtype of ``x``: under autocast a bias is wider than what it is added to."""
    return call.new("aten.add.Tensor", x, call.cast(y, call.dtype(x)))


def scale(call: Call, x: Ref, factor: Any) -> Ref:
    return x if factor == 1 else call.new("aten.mul.Tensor", x, factor, shape=call.shape(x), of_dtype=call.dtype(x))


def linear(call: Call) -> Ref:
    bias = call.arg(2, "bias")
    out = call.new("aten.linear.default", *call.args[:2])
    return out if bias is None else add(call, out, bias)


def product_plus(op: str) -> Rewrite:
    """``beta * bias + alpha * (x @ w)``; with ``beta`` 0 the bias counts for nothing, even if it is not finite."""

    def rewrite(call: Call) -> Ref:
        bias, x, w = call.args[:3]
        beta, alpha = call.arg(3, "beta", 1), call.arg(4, "alpha", 1)
        product = scale(call, call.new(op, x, w), alpha)
        return product if beta == 0 else add(call, product, scale(call, call.cast(bias, call.out.dtype), beta))

    return rewrite


def rsub(call: Call) -> Ref:
    x, y, alpha = *call.args[:2], call.arg(2, "alpha", 1)
    return call.new("aten.sub.Tensor", y, x, **({} if alpha == 1 else {"alpha": alpha}))


def softmax(op: str) -> Callable[[Call], Ref]:
    def rewrite(call: Call) -> Ref:
        x = call.args[0]
        dim = call.dim(x, call.arg(1, "dim"))
        widened = call.arg(2, "dtype") is not None and call.out.dtype != call.dtype(x)
        return call.new(op, x, dim, *([Torch("dtype", call.out.dtype)] if widened else []))

    return rewrite


def softmax_or_half_to_float(op: str) -> Rewrite:
    """``_softmax(x, dim, half_to_float)``, the form after autograd."""
    widening = softmax(op)

    def rewrite(call: Call) -> Ref:
        call.args, call.kwargs = (*call.args[:2], True if call.args[2] else None), {}
        return widening(call)

    return rewrite


def dropout(call: Call) -> Result:
    p, train = call.arg(1, "p"), call.arg(2, "train")
    return call.keep() if train and p != 0 else call.args[0]


def attention(call: Call) -> Ref:
    """q, k and v in their places, all else by name, and only where it is not the default."""
    unset = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    given = unset | dict(zip(unset, call.args[3:], strict=False)) | call.kwargs
    kwargs = {name: given[name] for name in unset if isinstance(given[name], Ref) or given[name] != unset[name]}
    return call.new("aten.scaled_dot_product_attention.default", *call.args[:3], **kwargs)


def einsum(call: Call) -> Ref:
    return call.new("aten.einsum.default", call.args[0].replace(" ", ""), tuple(call.args[1]))


def pad(call: Call) -> Result:
    if call.arg(2, "mode", "constant") != "constant":
        return call.keep()
    return call.new("aten.constant_pad_nd.default", call.args[0], tuple(call.args[1]), call.arg(3, "value") or 0)


def divide_mode(call: Call) -> Result:
    if call.kwargs.get("rounding_mode") is not None:
        return call.keep()
    return call.new("aten.div.Tensor", *call.args[:2])


def rename(op: str) -> Rewrite:
    return lambda call: call.keep(op)


def detach(call: Call) -> Ref:
    return call.detach(call.args[0])


ARITHMETIC: dict[str, Rewrite] = {
    **table(cast, "to _to_copy type_as _autocast_to_reduced_precision _autocast_to_full_precision"),
    **table(full(None, 0), "zeros zeros_like new_zeros zero empty.memory_format empty_like new_empty"),
    **table(full(None, 1), "ones ones_like new_ones"),
    **table(full(0), "scalar_tensor"),
    **table(full(1), "full full_like fill.Scalar"),
    **table(full(2), "new_full"),
    **table(fill_tensor, "fill.Tensor"),
    **table(arange, "arange"),
    **table(linear, "linear"),
    **table(product_plus("aten.mm.default"), "addmm.default"),
    **table(product_plus("aten.bmm.default"), "baddbmm.default"),
    **table(product_plus("aten.mv.default"), "addmv"),
    **table(rsub, "rsub"),
    **table(softmax("aten.softmax.int"), "softmax.int"),
    **table(softmax("aten.log_softmax.int"), "log_softmax.int"),
    **table(softmax_or_half_to_float("aten.softmax.int"), "_softmax"),
    **table(softmax_or_half_to_float("aten.log_softmax.int"), "_log_softmax"),
    **table(dropout, "dropout feature_dropout alpha_dropout feature_alpha_dropout"),
    **table(attention, "scaled_dot_product_attention"),
    **table(einsum, "einsum"),
    **table(pad, "pad"),
    **table(divide_mode, "div.Tensor_mode div.Scalar_mode"),
    **table(rename("aten.div.Tensor"), "div.Scalar"),
    **table(rename("aten.maximum.default"), "max.other"),
    **table(rename("aten.minimum.default"), "min.other"),
    **table(detach, "detach"),
}
