"""Rules of operations that work element by element, with broadcasting, whatever their other arguments are.

Each is registered with the operands in which it is linear: ``""`` none, ``"joint"`` in all its tensors together,
``"each"`` in any one of them, ``"first"`` in the first argument if that is a tensor, or a function of the node.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from fxpar.graph import Graph, Node, Ref, Torch
from fxpar.rules.notation import Shape
from fxpar.rules.registry import Line, Localiser, register, shapes

Linear = str | Callable[[Graph, Node], str]


def register_pointwise(op: str, linear: Linear = "", local: Localiser | None = None) -> None:
    """Register ``op`` as a broadcasting element-wise operation that is linear as described."""

    def source(graph: Graph, node: Node) -> Line:
        operands, outputs = shapes(graph, node)
        text = line(operands, outputs)
        groups = linear(graph, node) if callable(linear) else _groups(linear, node)
        return f"{text}; P {groups}" if groups else text

    register(op, source, local)


@lru_cache(maxsize=16384)
def line(operands: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> str:
    """The rule line of a broadcast; dims of size 1 carry no factor, the last may be in uneven pieces.

    The sizes of features and vocabularies, which stand there, are the model's; those of batches are chosen to divide.

    >>> line(((4, 1, 3), (2, 3)), ((4, 2, 3),))
    'a 1 c~, b c~ -> a b c~'
    """
    rank = len(outputs[0])

    def term(shape: Shape) -> str:
        first = rank - len(shape)
        names = ["1" if size == 1 else _name(first + dim) for dim, size in enumerate(shape)]
        return " ".join(names) + "~" * bool(names and names[-1] != "1")

    return ", ".join(map(term, operands)) + " -> " + ", ".join(map(term, outputs))


def _name(dim: int) -> str:
    return chr(ord("a") + dim) if dim < 26 else f"d{dim}"


def _groups(linear: str, node: Node) -> str:
    count = len(node.operands)
    if linear == "joint" and all(isinstance(arg, Ref) for arg in node.args[:count]):
        return ",".join(map(str, range(count)))
    if linear == "each":
        return " | ".join(map(str, range(count)))
    return "0" if linear == "first" and isinstance(node.args[0], Ref) else ""


def _sum_of_tensors(graph: Graph, node: Node) -> str:
    """``a + alpha b``; with an added number it is affine: partial sums would add the number on every rank."""
    return "0,1" if len(node.operands) == 2 else ""


def _quotient(graph: Graph, node: Node) -> str:
    rounded = node.kwarg("rounding_mode") is not None
    return "0" if isinstance(node.args[0], Ref) and not rounded else ""


def _where(graph: Graph, node: Node) -> str:
    """Linear in the branches; a branch that is a number must be zero."""
    numbers = [arg for arg in node.args[1:3] if not isinstance(arg, Ref)]
    return ",".join(str(index) for index in range(1, 3 - len(numbers))) if not any(numbers) else ""


def _masked_fill(graph: Graph, node: Node) -> str:
    value = node.arg(2, "value")
    return "0,2" if isinstance(value, Ref) else "0" if value == 0 else ""


_PRECISION = {"bfloat16": 1, "float16": 1, "float32": 2, "float64": 3, "complex64": 2, "complex128": 3}


def _cast(graph: Graph, node: Node) -> str:
    """Rounding each summand is not rounding the sum: only casts that lose nothing are linear."""
    source = graph.values[node.operands[0]].dtype
    target = node.kwarg("dtype")
    name = target.name if isinstance(target, Torch) else source
    exact = name == source or _PRECISION.get(name, 0) > _PRECISION.get(source, 9)
    return "0" if exact and source.startswith("complex") == name.startswith("complex") else ""


# One name per word; the overload is "default" unless given.
_NONLINEAR = """
abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac
lgamma log log10 log1p log2 logit nan_to_num polygamma reciprocal relu relu6 round round.decimals rsqrt sgn sigmoid
sign sin sinc sinh sqrt square tan tanh trunc i0 angle
celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish selu silu softplus
softshrink threshold
isfinite isinf isnan isneginf isposinf logical_not bitwise_not signbit isreal
eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
logical_and logical_or logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar
bitwise_xor.Tensor bitwise_xor.Scalar __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor
__xor__.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar __lshift__.Scalar __rshift__.Scalar
isclose
add.Scalar sub.Scalar rsub.Scalar rsub.Tensor pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar float_power.Tensor_Scalar
float_power.Tensor_Tensor
fmod.Scalar fmod.Tensor remainder.Scalar remainder.Tensor floor_divide floor_divide.Scalar atan2 hypot copysign.Tensor
copysign.Scalar logaddexp logaddexp2 xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other nextafter
maximum minimum max.other min.other fmax fmin clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor
clip clip.Tensor heaviside
addcmul addcdiv lerp.Tensor polar complex
zeros_like ones_like full_like fill.Scalar copy
"""
_LINEAR: dict[str, Linear] = {
    "neg.default": "joint",
    "positive.default": "joint",
    "clone.default": "joint",
    "detach.default": "joint",
    "real.default": "joint",
    "imag.default": "joint",
    "conj_physical.default": "joint",
    "rad2deg.default": "joint",
    "add.Tensor": _sum_of_tensors,
    "sub.Tensor": _sum_of_tensors,
    "mul.Tensor": "each",
    "mul.Scalar": "each",
    "div.Tensor": _quotient,
    "div.Scalar": _quotient,
    "div.Tensor_mode": _quotient,
    "div.Scalar_mode": _quotient,
    "true_divide.Tensor": _quotient,
    "true_divide.Scalar": _quotient,
    "where.self": _where,
    "where.ScalarSelf": _where,
    "where.ScalarOther": _where,
    "where.Scalar": "",
    "masked_fill.Scalar": _masked_fill,
    "masked_fill.Tensor": _masked_fill,
    "lerp.Scalar": "joint",
    "_to_copy.default": _cast,
}

for _word in _NONLINEAR.split():
    register_pointwise("aten." + (_word if "." in _word else f"{_word}.default"))
for _op, _linear in _LINEAR.items():
    register_pointwise(f"aten.{_op}", _linear)

register("aten.prelu.default", "n c ..., c -> n c ...")
register("aten.view_as_complex.default", "... c! -> ...; P 0")
register("aten.view_as_real.default", "... -> ... c!; P 0")
