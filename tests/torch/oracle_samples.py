"""Samples of every registered operation: at least one each, small enough to run in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.torch.oracle import DTYPE, Sample, T, ints, mask, sample

X = T((4, 8))
POS = T((4, 8), positive=True)
INT = ints(4, 8, high=5)


def samples() -> Iterator[Sample]:
    """All of them."""
    for part in (dense, pointwise, pointwise_linear, shape, reduce, norm, attention, embed, uneven):
        yield from part()
    for part in (factory, index, conv):
        yield from part()


def dense() -> Iterator[Sample]:
    x, w = T((4, 8, 12)), T((16, 12))
    yield sample("linear", x, w)
    yield sample("linear", x, w, T((16,)))
    yield sample("linear", T((12,)), w)
    yield sample("linear", T((8, 12), grad=False), w)
    yield sample("linear", x, T((24, 12), grad=False))
    yield sample("mm", T((4, 8)), T((8, 12)))
    yield sample("bmm", T((4, 8, 12)), T((4, 12, 8)))
    yield sample("mv", T((4, 8)), T((8,)))
    yield sample("dot", T((8,)), T((8,)))
    yield sample("outer", T((4,)), T((8,)))
    for left, right in [
        ((8,), (8,)),
        ((4, 8), (8,)),
        ((8,), (8, 4)),
        ((4, 8), (8, 12)),
        ((4, 4, 8), (8, 12)),
        ((4, 8), (4, 8, 12)),
        ((4, 1, 4, 8), (8, 8, 12)),
        ((4, 4, 8), (8,)),
        ((8,), (4, 8, 4)),
        ((1, 4, 4, 8), (4, 1, 8, 12)),
    ]:
        yield sample("matmul", T(left), T(right))
    single = DTYPES["float32"]  # the kernel takes no float64; these numbers are whole, so sums are exact
    ends = T((4,), grad=False, dtype=single, data=torch.tensor([4, 8, 8, 16], dtype=torch.int32))
    yield sample("_grouped_mm", T((16, 32), dtype=single), T((4, 32, 64), dtype=single), ends)
    x, y = T((4, 8, 4)), T((4, 4, 12))
    yield sample("einsum", "bik,bkj->bij", (x, y))
    yield sample("einsum", "bik, bkj -> ij", (x, y))
    yield sample("einsum", "bik,bkj", (x, y))
    yield sample("einsum", "...ik,kj->...ij", (T((4, 4, 8, 4)), T((4, 12))))
    yield sample("einsum", "...ik,...kj", (T((4, 4, 8)), T((4, 1, 8, 4))))
    yield sample("einsum", "ii->i", (T((4, 4)),))
    yield sample("einsum", "ij->", (T((4, 8)),))
    yield sample("einsum", "i,j,k->kij", (T((4,)), T((8,)), T((4,))))
    yield sample("einsum", "bi,bj->bij", (T((1, 4)), T((4, 8))))


UNARY = """
abs asin asinh atan ceil cos cosh deg2rad digamma erf erfc exp exp2 expm1 floor frac lgamma log log10 log1p log2
nan_to_num reciprocal relu relu6 round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc i0 angle celu elu
gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish selu silu softplus softshrink isfinite isinf
isnan isneginf isposinf logical_not signbit isreal zeros_like ones_like
"""
SHRUNK = "acos atanh erfinv logit"  # defined between 0 and 1
BINARY = """
eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor isclose rsub.Tensor
pow.Tensor_Tensor float_power.Tensor_Tensor fmod.Tensor remainder.Tensor floor_divide atan2 hypot copysign.Tensor
logaddexp logaddexp2 xlogy.Tensor nextafter maximum minimum max.other min.other fmax fmin clamp_min.Tensor
clamp_max.Tensor heaviside polar complex copy
"""
WITH_NUMBER = """
eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar
float_power.Tensor_Scalar fmod.Scalar remainder.Scalar floor_divide.Scalar copysign.Scalar xlogy.Scalar_Other clamp
clamp_min clamp_max clip full_like fill.Scalar
"""
BITS = "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"


def pointwise() -> Iterator[Sample]:
    for op in UNARY.split():
        yield sample(op, POS)
    for op in SHRUNK.split():
        yield sample(op, T((4, 8), grad=False, data=[[(i + j + 1) / 20 for j in range(8)] for i in range(4)]))
    for op in BINARY.split():
        grad = op not in ("floor_divide", "nextafter", "heaviside", "copy")
        yield sample(op, T((4, 8), grad, positive=True), T((4, 8), grad, positive=True))
    yield sample("maximum", X, T((8,)))
    for op in WITH_NUMBER.split():
        yield sample(op, T((4, 8), op != "floor_divide.Scalar", positive=True), 0.5)
    for op in BITS.split():
        yield sample(f"{op}.Tensor", INT, ints(1, 8, high=5))
        yield sample(f"{op}.Scalar", INT, 3)
    for op in ("bitwise_left_shift.Tensor_Scalar", "bitwise_right_shift.Tensor_Scalar", "__lshift__.Scalar"):
        yield sample(op, INT, 1)
    yield sample("__rshift__.Scalar", INT, 1)
    yield sample("bitwise_not", INT)
    yield sample("acosh", T((4, 8), grad=False, data=[[1.0 + i + j for j in range(8)] for i in range(4)]))
    yield sample("round.decimals", X, decimals=1)
    yield sample("polygamma", 1, POS)
    yield sample("threshold", X, 0.1, 0.0)
    yield sample("rrelu", X, 0.2, 0.3, False)
    yield sample("pow.Scalar", 2.0, X)
    yield sample("xlogy.Scalar_Self", 2.0, POS)
    yield sample("clamp.Tensor", X, T((8,), positive=True), T((4, 1), positive=True))
    yield sample("clip.Tensor", X, None, T((4, 8)))
    yield sample("addcmul", X, T((8,)), T((4, 1)), value=2.0)
    yield sample("addcdiv", X, T((8,)), T((4, 1), positive=True))
    yield sample("lerp.Tensor", X, X, X)


def pointwise_linear() -> Iterator[Sample]:
    for op in ("neg", "positive", "clone", "detach", "conj_physical", "rad2deg"):
        yield sample(op, X)
    yield sample("real", T((4, 8), dtype=DTYPES["complex"]))
    yield sample("imag", T((4, 8), dtype=DTYPES["complex"]))
    for op in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "true_divide.Tensor"):
        yield sample(op, X, POS)
        yield sample(op, X, T((8,), positive=True))
        yield sample(op, T((4, 1, 8)), T((4, 1), positive=True))
        yield sample(op, X, 3.0)
        yield sample(op, X, T((4, 8), grad=False, positive=True))
        yield sample(op, X, T((), positive=True))
    yield sample("add.Tensor", X, X, alpha=2)
    yield sample("add.Tensor", INT, INT)
    yield sample("mul.Tensor", T((4, 8), dtype=DTYPES["complex"]), T((8,), dtype=DTYPES["complex"]))
    yield sample("div.Tensor_mode", X, POS, rounding_mode=None)
    yield sample("div.Tensor_mode", T((4, 8), grad=False), T((4, 8), grad=False), rounding_mode="floor")
    for op in ("mul.Scalar", "div.Scalar", "true_divide.Scalar"):
        yield sample(op, X, 3.0)
    yield sample("div.Scalar_mode", X, 3.0, rounding_mode=None)
    yield sample("where.self", mask(4, 8), X, T((8,)))
    yield sample("where.ScalarOther", mask(4, 8), X, 0.0)
    yield sample("where.ScalarOther", mask(4, 8), X, 1.0)
    yield sample("where.ScalarSelf", mask(1, 8), 0.0, X)
    yield sample("where.Scalar", mask(4, 8), 0.0, 1.0)
    yield sample("masked_fill.Scalar", X, mask(4, 1), 0.0)
    yield sample("masked_fill.Scalar", X, mask(4, 1), -1.0)
    yield sample("masked_fill.Tensor", X, mask(8), T(()))
    yield sample("lerp.Scalar", X, X, 0.3)
    yield sample("_to_copy", X, dtype=DTYPE["float64"])
    yield sample("_to_copy", T((4, 8), grad=False, dtype=DTYPES["float32"]), dtype=DTYPE["float64"])
    yield sample("_to_copy", T((4, 8), grad=False), dtype=DTYPE["int64"])
    yield sample("_to_copy", INT, dtype=DTYPE["bool"])
    yield sample("prelu", T((4, 8, 4)), T((8,)))
    yield sample("view_as_complex", T((4, 8, 2)))
    yield sample("view_as_real", T((4, 8), dtype=DTYPES["complex"]))


def shape() -> Iterator[Sample]:
    for source, target in [
        ((4, 8, 12), (4, 96)),
        ((4, 96), (4, 8, 12)),
        ((32, 12), (4, 8, 12)),
        ((4, 8, 4, 8), (32, 32)),
        ((4, 24), (4, 3, 8)),
        ((4, 1, 8), (4, 8)),
        ((4, 8), (1, 4, 1, 8)),
        ((24, 16), (16, 24)),
        ((8, 6, 4), (8, 4, 6)),
        ((4, 2, 16), (8, 4, 4)),
        ((8,), (8, 1)),
        ((1,), ()),
        ((), (1, 1)),
    ]:
        yield sample("reshape", T(source), target)
    yield sample("permute", T((4, 8, 12)), (2, 0, 1))
    yield sample("expand", T((4, 1, 8)), (4, 12, 8))
    yield sample("expand", T((8,)), (4, 8))
    yield sample("expand", T((1, 8), grad=False), (4, 8))
    for start, end in [(0, 8), (8, 16), (0, 24), (16, 24), (1, 5), (0, 16), (20, 24)]:
        yield sample("slice.Tensor", T((4, 24)), 1, start, end, 1)
    yield sample("slice.Tensor", T((24, 4)), 0, 0, 24, 2)
    yield sample("slice_scatter", T((4, 24)), T((4, 8)), 1, 8, 16, 1)
    yield sample("slice_scatter", T((4, 24)), T((4, 5)), 1, 8, 13, 1)
    yield sample("select.int", T((4, 8, 12)), 1, 3)
    yield sample("select_scatter", T((4, 8, 12)), T((4, 12)), 1, 3)
    yield sample("cat", (T((4, 8)), T((4, 8)), T((4, 8))), 1)
    yield sample("cat", (T((4, 8)), T((4, 4))), 1)
    yield sample("cat", (X, X))
    yield sample("stack", (X, X, X), 1)
    yield sample("stack", (X, X), 2)
    yield sample("stack", (X, X))
    yield sample("tril", T((4, 8, 8)), -1)
    yield sample("triu", T((4, 8, 8)))
    yield sample("flip", T((4, 8, 12)), (1,))
    yield sample("roll", T((4, 8, 12)), (1, 2), (0, 2))
    yield sample("roll", X, (1,))
    yield sample("repeat", T((4, 8)), (2, 1, 3))
    yield sample("repeat", T((1, 8)), (4, 1))
    yield sample("repeat_interleave.self_int", X, 3, 1)
    yield sample("repeat_interleave.self_int", X, 3)
    yield sample("constant_pad_nd", T((4, 8, 12)), (1, 2))
    yield sample("constant_pad_nd", T((4, 8, 12)), (0, 0, 1, 0), 2.0)
    yield sample("pad", T((4, 8, 12)), (1, 2), "reflect")
    yield sample("pad", T((4, 8, 12)), (1, 2), "constant", 0.0)
    yield sample("unfold", T((4, 8, 12)), 1, 3, 2)
    yield sample("diagonal", T((4, 8, 8)), 0, 1, 2)


def reduce() -> Iterator[Sample]:
    yield sample("histc", T((4, 8), grad=False), 5, -1, 1)
    yield sample("histc", T((4, 8), grad=False), 5)
    x = T((4, 8, 12))
    for op in ("sum.dim_IntList", "mean.dim"):
        yield sample(op, x, (1,))
        yield sample(op, x, (0, 2), True)
        yield sample(op, x, None)
        yield sample(op, T((4, 8), grad=False), (1,))
    yield sample("sum.dim_IntList", INT, (0,))
    yield sample("nansum", x, (1,))
    for op in ("sum", "mean", "max", "min", "median", "prod", "norm.Scalar", "var", "std"):
        yield sample(op, X)
    yield sample("amax", T((4, 8, 12), grad=False), (1,))
    yield sample("amax", T((4, 8, 12), grad=False), (0, 2), True)
    for op in ("amax", "amin"):
        yield sample(op, x, (1,), True)
    for op in ("argmax", "argmin", "argsort"):
        yield sample(op, T((4, 8), grad=False), 1)
    for op in ("max.dim", "min.dim", "median.dim", "mode", "prod.dim_int", "logcumsumexp", "cumsum", "cumprod"):
        yield sample(op, x, 1)
    for op in ("cummax", "cummin", "sort", "log_softmax.int", "softmax.int"):
        yield sample(op, x, 2)
    yield sample("_softmax", x, 1, False)
    yield sample("_log_softmax", x, 1, False)
    yield sample("logsumexp", x, (1,))
    yield sample("any", mask(4, 8))
    yield sample("all", mask(4, 8))
    for op in ("any.dim", "all.dim"):
        yield sample(op, mask(4, 8), 1, True)
    for op in ("any.dims", "all.dims"):
        yield sample(op, mask(4, 8, 4), (0, 1))
    yield sample("linalg_vector_norm", x, 2, (2,), True)
    yield sample("linalg_vector_norm", x)
    yield sample("norm.ScalarOpt_dim", x, 2, (1,))
    yield sample("kthvalue", x, 2, 1)
    yield sample("var.dim", x, (1,))
    yield sample("std.dim", x, (1,), False, True)
    for op in ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"):
        yield sample(op, x, (2,), correction=1, keepdim=True)
    yield sample("sort.stable", x, stable=True, dim=1)
    yield sample("topk", x, 3, 1)
    yield sample("glu", x, 1)
    yield sample("glu", T((4, 24)))
    yield sample("diff", x, 1, 1)


def norm() -> Iterator[Sample]:
    x, w = T((4, 8, 12)), T((12,))
    yield sample("layer_norm", x, (12,), w, w)
    yield sample("layer_norm", x, (12,), w, None)
    yield sample("layer_norm", x, (8, 12))
    yield sample("native_layer_norm", x, (12,), w, w, 1e-5)
    yield sample("rms_norm", x, (12,), w)
    yield sample("rms_norm", x, (12,))
    yield sample("_fused_rms_norm", x, (12,), w, 1e-6)
    image, c = T((4, 8, 4, 4)), T((8,))
    yield sample("group_norm", image, 4, c, c)
    yield sample("group_norm", T((4, 8)), 2)
    stats, spread = T((8,), grad=False), T((8,), grad=False, positive=True)
    yield sample("batch_norm", image, c, c, None, None, True, 0.1, 1e-5, False)
    yield sample("batch_norm", image, c, c, stats, spread, False, 0.1, 1e-5, False)
    yield sample("instance_norm", image, c, c, None, None, True, 0.1, 1e-5, False)
    yield sample("_native_batch_norm_legit_functional", image, c, c, stats, spread, True, 0.1, 1e-5)


def attention() -> Iterator[Sample]:
    op = "scaled_dot_product_attention"
    q, k, v = T((4, 8, 4, 6)), T((4, 8, 12, 6)), T((4, 8, 12, 10))
    yield sample(op, q, k, v)
    yield sample(op, q, k, v, None, 0.0, False, scale=0.3)
    square = T((4, 8, 4, 6))
    yield sample(op, square, square, square, None, 0.0, True)
    for shape in [(4, 12), (1, 1, 4, 12), (4, 1, 1, 12), (1, 8, 4, 12), (4, 8, 4, 12)]:
        yield sample(op, q, k, v, mask_all(*shape))
        yield sample(op, q, k, v, T(shape))
    yield sample(op, q, T((4, 2, 12, 6)), T((4, 2, 12, 10)), enable_gqa=True)
    yield sample(op, q, T((4, 4, 12, 6)), T((4, 4, 12, 10)), mask_all(4, 8, 4, 12), enable_gqa=True)
    yield sample(op, T((4, 8, 4, 6)), T((4, 4, 4, 6)), T((4, 4, 4, 6)), None, 0.0, True, enable_gqa=True)
    yield sample(op, q, T((4, 1, 12, 6)), T((4, 1, 12, 10)), enable_gqa=True)
    yield sample(op, T((4, 8, 6)), T((4, 12, 6)), T((4, 12, 6)))
    yield sample(op, T((1, 8, 4, 6)), T((4, 8, 12, 6)), T((4, 1, 12, 6)))
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    yield sample(flash, q, T((4, 8, 12, 6)), T((4, 8, 12, 6)))
    yield sample(flash, square, square, square, 0.0, True)
    yield sample(flash, q, T((4, 8, 12, 6)), T((4, 8, 12, 6)), attn_mask=T((1, 8, 4, 12), grad=False))


def mask_all(*shape: int) -> T:
    """A mask that hides something but never a whole row."""
    hidden = torch.zeros(shape, dtype=torch.bool)
    hidden[..., 3] = True
    return T(shape, grad=False, data=~hidden)


def embed() -> Iterator[Sample]:
    table = T((16, 8))
    yield sample("embedding", table, ints(4, 8, high=16))
    yield sample("embedding", table, T((4,), grad=False, data=[5, 3, 15, 5]), 5)
    yield sample("embedding", table, ints(4, 8, high=16), 1, True)
    yield sample("embedding", table, T((), grad=False, data=3))
    yield sample("embedding", T((13, 7)), T((4,), grad=False, data=[5, 3, 12, 5]), 5)
    yield sample("one_hot", ints(4, 8, high=5), 5)
    yield sample("bucketize.Tensor", T((4, 8), grad=False), T((3,), grad=False, data=[-0.5, 0.0, 0.5]))
    ignored = T((8,), grad=False, data=[1, -100, 3, 0, 4, -100, 2, 2])
    inner = T((4, 8), grad=False, data=[[(3 * i + j) % 5 if j else -100 for j in range(8)] for i in range(4)])
    weight = T((5,), grad=False, positive=True)
    for how in (0, 1, 2):
        for op in ("cross_entropy_loss", "nll_loss_nd"):
            yield sample(op, T((8, 5)), ignored, None, how)
            yield sample(op, T((8, 5)), ignored, weight, how)
            yield sample(op, T((4, 5, 8)), inner, weight, how, -100)
        yield sample("nll_loss", T((8, 5)), ignored, None, how)
        yield sample("cross_entropy_loss", T((8, 5)), ignored, None, how, -100, 0.1)
        yield sample("cross_entropy_loss", T((8, 5)), ignored, weight, how, -100, 0.1)
        yield sample("cross_entropy_loss", T((4, 5, 8)), T((4, 5, 8), positive=True), weight, how)
        for op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"):
            yield sample(op, X, T((4, 8), positive=True), how)
        yield sample("soft_margin_loss", X, T((4, 8), grad=False), how)
        target = T((4, 8), data=[[0.1] * 8] * 4)
        yield sample("binary_cross_entropy_with_logits", X, target, None, None, how)
        inside = T((4, 8), data=[[(i + j + 1) / 20 for j in range(8)] for i in range(4)])
        yield sample(
            "binary_cross_entropy", inside, T((4, 8), grad=False, positive=True, data=[[0.3] * 8] * 4), None, how
        )
    yield sample("cross_entropy_loss", T((5,)), T((), grad=False, data=2))
    yield from split_classes()
    yield sample("nll_loss_nd", T((8, 5)), T((8,), grad=False, data=[1, 2, 3, 0, 4, 1, 2, 2]), None, 1, 2)


def split_classes() -> Iterator[Sample]:
    """The two steps of a cross-entropy whose classes may be split, also unevenly."""
    uneven, targets = T((8, 13)), T((8,), grad=False, data=[1, -100, 3, 0, 12, -100, 11, 7])
    yield Sample("local.class_terms", (uneven, T((8,), grad=False), targets, None, -100, False))
    yield sample("amax", T((4, 13), grad=False), (1,))
    row = T((8,), grad=False, data=[1, -100, 3, 0, 11, -100, 2, 7])
    inner = T((4, 8), grad=False, data=[[(5 * i + j) % 12 if j else 3 for j in range(8)] for i in range(4)])
    weight = T((12,), grad=False, positive=True)
    for logits, target, ignored in (((8, 12), row, -100), ((4, 12, 8), inner, 3), ((12,), T((), data=5), -100)):
        positions = (*logits[:1], *logits[2:])[len(logits) == 1 :]
        near, terms = T(positions, grad=False), (T(positions, positive=True), T(positions))
        for weights, smoothing in ((None, 0.0), (weight, 0.0), (None, 0.1), (weight, 0.1)):
            among = weights if smoothing else None
            given = (T(logits), near, target, among, ignored, bool(smoothing))
            yield Sample("local.class_terms", given)
            for how in (0, 1, 2):
                sums = (*terms, T(positions) if smoothing else None)
                rest = (how, ignored, smoothing, 12, DTYPE["float64"])
                yield Sample("local.class_loss", (*sums, target, weights, *rest))


def uneven() -> Iterator[Sample]:
    """Features and vocabularies that no degree divides."""
    yield sample("linear", T((4, 3, 11)), T((13, 11)))
    yield sample("mm", T((4, 11)), T((11, 13)))
    yield sample("add.Tensor", T((2, 4, 13)), T((13,)))
    yield sample("reshape", T((2, 4, 13)), (8, 13))
    yield sample("permute", T((2, 4, 13)), (0, 2, 1))
    yield sample("slice.Tensor", T((2, 4, 13)), 1, 0, 3, 1)
    yield sample("select.int", T((2, 4, 13)), 1, 2)
    yield sample("gather", T((4, 13)), 1, ints(4, 2, high=13))


def factory() -> Iterator[Sample]:
    for op in ("zeros", "ones"):
        yield sample(op, (4, 8), dtype=DTYPE["float64"])
        yield sample(f"new_{op}", T((3,), grad=False), (4, 8))
    yield sample("full", (4, 8), 2.5)
    yield sample("new_full", T((3,), grad=False), (4, 8), 2.5)
    yield sample("arange", 8)
    yield sample("arange.start", 4, 12)
    yield sample("arange.start_step", 4, 12, 2)
    yield sample("eye", 4)
    yield sample("eye.m", 4, 8)
    yield sample("linspace", 0.0, 1.0, 8)
    yield sample("scalar_tensor", 3.0)
    yield sample("tril_indices", 4, 4)
    yield sample("triu_indices", 4, 4)


def random() -> Iterator[Sample]:
    """Operations whose split gives other numbers than the whole: see test_random_operations."""
    for op in ("rand", "randn"):
        yield sample(op, (8, 8))
    yield sample("randint", 1000, (8, 8))
    yield sample("randint.low", 10, 1000, (8, 8))
    yield sample("randperm", 8)
    still = T((8, 8), grad=False)
    for op in ("rand_like", "randn_like", "uniform", "normal_functional", "exponential"):
        yield sample(op, still)
    yield sample("randint_like", still, 1000)
    yield sample("randint_like.low_dtype", still, 10, 1000)
    yield sample("bernoulli", T((8, 8), grad=False, data=[[0.5] * 8] * 8))
    yield sample("bernoulli.p", still, 0.5)
    x = T((8, 8), positive=True)
    yield sample("dropout", x, 0.5, True)
    yield sample("alpha_dropout", x, 0.5, True)
    yield sample("native_dropout", x, 0.5, True)
    yield sample("rrelu", T((8, 8), data=[[-1.0] * 8] * 8), 0.1, 0.9, True)
    q = T((4, 8, 4, 6))
    yield sample("scaled_dot_product_attention", q, q, q, None, 0.5)
    yield sample("scaled_dot_product_attention", q, q, q, None, 0.5, True)


def index() -> Iterator[Sample]:
    x = T((4, 8, 12))
    yield sample("gather", x, 1, ints(4, 4, 12, high=8))
    yield sample("gather", x, 2, ints(4, 4, 8, high=12))
    yield sample("gather", T((8,)), 0, ints(4, high=8))
    yield sample("gather", T((4, 8)), 1, ints(4, 1, high=8))
    where = T((4, 4), grad=False, data=[[0, 3, 5, 7], [1, 2, 3, 4], [7, 6, 5, 4], [0, 2, 4, 6]])
    yield sample("scatter.src", X, 1, where, T((4, 4)))
    yield sample("scatter.value", X, 1, where, 0.0)
    yield sample("scatter.value", X, 1, where, 2.0)
    yield sample("scatter_add", X, 1, ints(4, 12, high=8), T((4, 12)))
    yield sample("scatter_add", x, 1, ints(4, 4, 8, high=8), T((4, 4, 8)))
    yield sample("scatter.reduce", T((4, 8), grad=False), 1, where, T((4, 4), grad=False), reduce="add")
    yield sample("scatter_reduce.two", X, 1, where, T((4, 4)), "amax")
    yield sample("index_select", x, 1, ints(4, high=8))
    rows = T((4,), grad=False, data=[6, 2, 0, 1])
    yield sample("index_add", x, 1, rows, T((4, 4, 12)))
    yield sample("index_copy", x, 1, rows, T((4, 4, 12)))
    yield sample("index_fill.int_Scalar", x, 1, rows, 0.0)
    yield sample("index_fill.int_Scalar", x, 1, rows, 1.0)
    for indices in [
        (ints(8, high=4),),
        (None, rows),
        (None, None, ints(4, 8, high=12)),
        (ints(4, 1, high=4), ints(8, high=8)),
        (None, ints(4, 1, high=8), ints(1, 8, high=12)),
        (ints(4, high=4), None, ints(8, 4, high=12)),
        (ints(high=4),),
        (mask(4),),
    ]:
        yield sample("index.Tensor", x, indices)
    yield sample("index_put", x, (None, rows), T((4, 4, 12)))
    yield sample("index_put", x, (None, rows), T((12,)))
    yield sample("index_put", x, (None, rows), T((4, 1, 12)), True)
    yield sample("index_put", x, (T((4,), grad=False, data=[0, 1, 2, 3]), None, rows), T((4, 8)))
    yield sample("index_put", x, (mask(4, 8),), T(()))
    yield sample("index_put", x, (mask(4, 8, 12),), T((1,)))
    yield sample("searchsorted.Tensor", T((3,), grad=False, data=[-0.5, 0.0, 0.5]), T((4, 8), grad=False))


def conv() -> Iterator[Sample]:
    for n in (1, 2, 3):
        x, w = T((4, 8, *[4] * n)), T((12, 8, *[2] * n))
        yield sample(f"conv{n}d", x, w)
        yield sample(f"conv{n}d", x, w, T((12,)), (2,) * n, (1,) * n)
        yield sample(f"conv{n}d.padding", x, w, None, (1,) * n, "same")
        transposed = "conv_transpose1d" if n == 1 else f"conv_transpose{n}d.input"
        yield sample(transposed, x, T((8, 4, *[2] * n)))
    yield sample("conv2d", T((8, 6, 6)), T((4, 8, 3, 3)))
    yield sample("conv1d", T((4, 8, 6)), T((16, 2, 3)), None, (1,), (0,), (1,), 4)
    yield sample("conv1d", T((4, 16, 6)), T((16, 4, 3)), T((16,)), (1,), (0,), (1,), 4)
    yield sample("conv1d", T((4, 8, 6)), T((8, 1, 3)), None, (1,), (0,), (1,), 8)
    yield sample("conv_transpose1d", T((4, 8, 6)), T((8, 4, 3)), T((16,)), (1,), (0,), (0,), 4)
    x = T((4, 8, 6, 6))
    yield sample("convolution", x, T((4, 8, 3, 3)), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    yield sample("convolution", x, T((8, 4, 3, 3)), T((16,)), (2, 2), (1, 1), (1, 1), True, (0, 0), 4)
    for n in (1, 2, 3):
        x = T((4, 8, *[6] * n))
        for op in ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"):
            yield sample(f"{op}{n}d", x, (2,) * n)
        yield sample(f"upsample_nearest{n}d.vec", x, (12,) * n, None)
    yield sample("max_pool2d_with_indices", T((4, 8, 6, 6)), (2, 2))
    yield sample("max_pool3d_with_indices", T((4, 8, 4, 4, 4)), (2, 2, 2))
    yield sample("upsample_linear1d.vec", T((4, 8, 6)), (12,), False, None)
    for mode in ("bilinear", "bicubic"):
        yield sample(f"upsample_{mode}2d.vec", T((4, 8, 6, 6)), (12, 12), False, None)
    yield sample("upsample_trilinear3d.vec", T((4, 8, 4, 4, 4)), (8, 8, 8), False, None)
    yield sample("pixel_shuffle", T((4, 32, 4, 8)), 2)
    yield sample("pixel_unshuffle", T((4, 4, 16, 8)), 2)
    yield sample("im2col", T((4, 8, 6, 6)), (2, 2), (1, 1), (0, 0), (2, 2))
    yield sample("bilinear", T((4, 8)), T((4, 4)), T((12, 8, 4)), None)
    yield sample("bilinear", T((4, 8)), T((4, 4)), T((12, 8, 4)), T((12,)))


DTYPES = {"complex": torch.complex128, "float32": torch.float32}
