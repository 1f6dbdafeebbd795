"""The table of rewrites: a recorded operation -> the few canonical ones it is made of.

In: a :class:`Call`. Out: the values that take the place of the recorded outputs. An operation that is not in the
table stays, with its dims counted from the front (:mod:`fxpar.normalise.dims`). Shapes and dtypes are the recorded
ones, so most rewrites only say which canonical operation leads there.
"""

from __future__ import annotations

from fxpar.errors import CaptureError
from fxpar.normalise.arithmetic import ARITHMETIC
from fxpar.normalise.call import Call, Result, Rewrite, words
from fxpar.normalise.dims import REDUCTIONS, count_from_front
from fxpar.normalise.losses import LOSSES
from fxpar.normalise.views import VIEWS

#: Other names of the same operation, overload by overload.
SAME_AS = dict(
    pair.split("=")
    for pair in words(
        "__and__=bitwise_and __or__=bitwise_or __xor__=bitwise_xor __lshift__=bitwise_left_shift "
        "__rshift__=bitwise_right_shift divide=div true_divide=div multiply=mul subtract=sub negative=neg absolute=abs "
        "greater=gt greater_equal=ge less=lt less_equal=le not_equal=ne clip=clamp concat=cat concatenate=cat "
        "fix=trunc arccos=acos arcsin=asin arctan=atan arctan2=atan2 arccosh=acosh arcsinh=asinh arctanh=atanh "
        "ger=outer linalg_matmul=matmul special_softmax=softmax special_log_softmax=log_softmax special_expit=sigmoid "
        "special_erf=erf special_erfc=erfc special_exp2=exp2 special_expm1=expm1 special_log1p=log1p "
        "special_logsumexp=logsumexp special_logit=logit special_sinc=sinc special_round=round row_stack=vstack "
        "unsafe_split=split unsafe_split_with_sizes=split_with_sizes unsafe_chunk=chunk detach_copy=detach "
        "moveaxis=movedim"
    )
)

#: Arguments that say where or how a tensor lies in memory: they change no number.
MEMORY = frozenset(words("pin_memory layout memory_format non_blocking generator"))

#: By ``name.overload``, or by ``name`` for all overloads.
REWRITES: dict[str, Rewrite] = {**VIEWS, **ARITHMETIC, **REDUCTIONS, **LOSSES}


def canonical(call: Call) -> Result:
    """What takes the place of the outputs of ``call``."""
    op = call.node.op
    if not op.startswith("aten."):
        return call.keep()
    _, name, overload = op.split(".")
    if name.endswith("_") and not name.endswith("__"):
        raise CaptureError(f"{op} at {call.node.source or call.node.module} writes to its operand: not functional")
    name = SAME_AS.get(name, name)
    for noise in MEMORY & call.kwargs.keys():
        del call.kwargs[noise]
    for unset in ("dtype", "device"):
        if unset in call.kwargs and call.kwargs[unset] is None:
            del call.kwargs[unset]
    rewrite = REWRITES.get(f"{name}.{overload}") or REWRITES.get(name)
    if rewrite is not None:
        return rewrite(call)
    count_from_front(call, name, overload)
    return call.keep(f"aten.{name}.{overload}")
