"""Rewrites of operations that move elements about: views, repetitions, pieces, and putting pieces together.

In: a :class:`Call` of such an operation. Out: reshape, permute, expand, slice, select, cat and the two scatters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from fxpar.graph import Ref
from fxpar.normalise.call import Call, Result, Rewrite, table

# ---- the same elements in another shape ----------------------------------------------------------------------------


def identity(call: Call) -> Ref:
    return call.args[0]


def reshape(call: Call) -> Ref:
    return call.reshape(call.args[0], call.out.shape)


def expand(call: Call) -> Ref:
    return call.expand(call.args[0], call.out.shape)


def transpose(call: Call) -> Ref:
    x = call.args[0]
    dims = list(range(call.rank(x)))
    one, two = (call.dim(x, dim) for dim in call.args[1:3] or (-2, -1))
    if dims:
        dims[one], dims[two] = dims[two], dims[one]
    return call.permute(x, dims)


def adjoint(call: Call) -> Ref:
    x = transpose(call) if call.rank(call.args[0]) > 1 else call.args[0]
    return call.new("aten.conj_physical.default", x) if call.out.dtype.startswith("complex") else x


def conj(call: Call) -> Ref:
    if call.out.dtype.startswith("complex"):
        return call.new("aten.conj_physical.default", call.args[0])
    return call.args[0]


def real(call: Call) -> Result:
    return call.args[0] if call.dtype(call.args[0]) == call.out.dtype else call.keep()


def permute(call: Call) -> Ref:
    return call.permute(call.args[0], call.dims(call.args[0], call.args[1]))


def reverse_dims(call: Call) -> Ref:
    return call.permute(call.args[0], range(call.rank(call.args[0]))[::-1])


def movedim(call: Call) -> Ref:
    x = call.args[0]
    source, destination = call.dims(x, call.args[1]), call.dims(x, call.args[2])
    moved = dict(zip(destination, source, strict=True))
    rest = iter(dim for dim in range(call.rank(x)) if dim not in source)
    return call.permute(x, [moved[dim] if dim in moved else next(rest) for dim in range(call.rank(x))])


def repeat(call: Call) -> Ref:
    """Tiling: each dim becomes (times, size), the first of them expanded, and both merged again."""
    x, times = call.args[0], tuple(call.args[1])
    rank = max(call.rank(x), len(times))
    times = (1,) * (rank - len(times)) + times
    sizes = (1,) * (rank - call.rank(x)) + call.shape(x)
    apart = [part for n, size in zip(times, sizes, strict=True) for part in ((1, size) if n != 1 else (size,))]
    tiled = [part for n, size in zip(times, sizes, strict=True) for part in ((n, size) if n != 1 else (size,))]
    return call.reshape(call.expand(call.reshape(x, apart), tiled), call.out.shape)


def repeat_interleave(call: Call) -> Ref:
    x, times, dim = call.args[0], call.args[1], call.arg(2, "dim")
    if dim is None:
        x, dim = call.reshape(x, (math.prod(call.shape(x)),)), 0
    dim, shape = call.dim(x, dim) + 1, call.shape(x)
    apart, repeated = ((*shape[:dim], n, *shape[dim:]) for n in (1, times))
    return call.reshape(call.expand(call.reshape(x, apart), repeated), call.out.shape)


def broadcast_tensors(call: Call) -> Result:
    return tuple(call.expand(x, call.out.shape) for x in call.args[0])


def meshgrid(call: Call) -> Result:
    grid = []
    for index, x in enumerate(call.args[0]):
        dim = 1 - index if call.arg(1, "indexing") == "xy" and index < 2 and len(call.args[0]) > 1 else index
        size = math.prod(call.shape(x))
        line = call.reshape(x, [size if d == dim else 1 for d in range(len(call.out.shape))])
        grid.append(call.expand(line, call.out.shape))
    return tuple(grid)


# ---- pieces and their opposite -------------------------------------------------------------------------------------


def slice_(call: Call) -> Ref:
    x, dim = call.args[0], call.dim(call.args[0], call.arg(1, "dim", 0))
    start, end = call.arg(2, "start"), call.arg(3, "end")
    size = call.shape(x)[dim]
    return call.slice(x, dim, 0 if start is None else start, size if end is None else end, call.arg(4, "step", 1))


def narrow(call: Call) -> Result:
    x, dim, start, length = (call.arg(i, name) for i, name in enumerate(("self", "dim", "start", "length")))
    if isinstance(start, Ref):
        return call.keep()
    dim = call.dim(x, dim)
    start %= call.shape(x)[dim] + (start >= 0)
    return call.slice(x, dim, start, start + length)


SplitDim = Callable[[Call], int]


def _named_dim(call: Call) -> int:
    """The dim of the splits that take one."""
    return call.dim(call.args[0], call.arg(2, "dim", 0))


def _second_dim(call: Call) -> int:
    """The dim of ``hsplit``: the second, or the only one."""
    return min(1, call.rank(call.args[0]) - 1)


def pieces(dim_of: SplitDim = _named_dim) -> Rewrite:
    """Neighbouring slices; the recorded outputs tell their sizes."""

    def rewrite(call: Call) -> Result:
        x, dim = call.args[0], dim_of(call)
        cuts, start = [], 0
        for out in call.outs:
            assert out is not None
            cuts.append(call.slice(x, dim, start, start + out.shape[dim]))
            start += out.shape[dim]
        return tuple(cuts)

    return rewrite


def pieces_at(dim_of: SplitDim = _named_dim) -> Rewrite:
    """Cuts at given indices: unlike the other splits they may overlap or leave a gap."""

    def rewrite(call: Call) -> Result:
        x, dim = call.args[0], dim_of(call)
        bounds = [0, *call.arg(1, "indices"), call.shape(x)[dim]]
        return tuple(call.slice(x, dim, start, end) for start, end in pairwise(bounds))

    return rewrite


def select(call: Call) -> Ref:
    x = call.args[0]
    return call.select(x, call.dim(x, call.arg(1, "dim")), call.arg(2, "index"))


def unbind(call: Call) -> Result:
    x = call.args[0]
    dim = call.dim(x, call.arg(1, "dim", 0))
    return tuple(call.select(x, dim, index) for index in range(len(call.outs)))


def select_scatter(call: Call) -> Result:
    x, dim = call.args[0], call.dim(call.args[0], call.arg(2, "dim"))
    return call.new("aten.select_scatter.default", x, call.args[1], dim, call.arg(3, "index") % call.shape(x)[dim])


def slice_scatter(call: Call) -> Ref:
    x, src = call.args[:2]
    dim, start, end = call.dim(x, call.arg(2, "dim", 0)), call.arg(3, "start"), call.arg(4, "end")
    size = call.shape(x)[dim]
    bounds = slice(start, end, call.arg(5, "step", 1)).indices(size)
    if bounds == (0, size, 1):
        return copy(call)
    return call.new("aten.slice_scatter.default", x, src, dim, *bounds)


def copy(call: Call) -> Ref:
    """``src`` in the dtype and shape of what it is copied over."""
    return call.expand(call.cast(call.args[1], call.out.dtype), call.out.shape)


def cat(call: Call, parts: Sequence[Ref], dim: int) -> Ref:
    return parts[0] if len(parts) == 1 else call.new("aten.cat.default", tuple(parts), dim)


def concatenate(call: Call) -> Ref:
    rank = len(call.out.shape)
    parts = [x for x in call.args[0] if call.rank(x) == rank]  # an empty one-dim tensor may stand among them
    parts = [call.cast(x, call.out.dtype) for x in parts]
    return cat(call, parts, call.arg(1, "dim", 0) % rank)


def stack(call: Call) -> Ref:
    shape, dim = list(call.out.shape), call.arg(1, "dim", 0) % len(call.out.shape)
    shape[dim] = 1
    return cat(call, [call.reshape(call.cast(x, call.out.dtype), shape) for x in call.args[0]], dim)


def stack_along(dim: int) -> Rewrite:
    """hstack, vstack and dstack: tensors get leading or trailing dims until they have dim ``dim``."""

    def rewrite(call: Call) -> Ref:
        parts = []
        for x in call.args[0]:
            shape = call.shape(x)
            if len(shape) < 2 and dim != 1:
                shape = (1, *(shape or (1,)))
            shape = (*(shape or (1,)), *(1,) * (dim + 1 - len(shape))) if dim == 2 else shape or (1,)
            parts.append(call.reshape(call.cast(x, call.out.dtype), shape))
        return cat(call, parts, min(dim, len(call.out.shape) - 1))

    return rewrite


VIEWS: dict[str, Rewrite] = {
    **table(identity, "contiguous alias clone lift_fresh lift lift_fresh_copy positive resolve_conj resolve_neg"),
    **table(identity, "alias_copy pin_memory"),
    **table(reshape, "view.default reshape _unsafe_view view_as reshape_as flatten unflatten ravel _reshape_alias"),
    **table(reshape, "squeeze unsqueeze atleast_1d.default atleast_2d.default atleast_3d.default view_copy.default"),
    **table(reshape, "squeeze_copy unsqueeze_copy"),
    **table(transpose, "transpose t mT swapaxes swapdims transpose_copy t_copy"),
    **table(adjoint, "mH adjoint matrix_H"),
    **table(conj, "conj _conj conj_physical"),
    **table(real, "real"),
    **table(permute, "permute permute_copy"),
    **table(reverse_dims, "numpy_T"),
    **table(movedim, "movedim"),
    **table(expand, "expand expand_as broadcast_to expand_copy"),
    **table(repeat, "repeat tile"),
    **table(repeat_interleave, "repeat_interleave.self_int"),
    **table(broadcast_tensors, "broadcast_tensors"),
    **table(meshgrid, "meshgrid"),
    **table(slice_, "slice.Tensor slice_copy"),
    **table(narrow, "narrow"),
    **table(pieces(), "chunk split split_with_sizes tensor_split.sections split_with_sizes_copy"),
    **table(pieces_at(), "tensor_split.indices"),
    **table(pieces(_second_dim), "hsplit.int"),
    **table(pieces_at(_second_dim), "hsplit.array"),
    **table(pieces(lambda call: 0), "vsplit.int"),
    **table(pieces_at(lambda call: 0), "vsplit.array"),
    **table(pieces(lambda call: 2), "dsplit.int"),
    **table(pieces_at(lambda call: 2), "dsplit.array"),
    **table(select, "select.int select_copy.int"),
    **table(unbind, "unbind.int unbind_copy.int"),
    **table(select_scatter, "select_scatter"),
    **table(slice_scatter, "slice_scatter"),
    **table(copy, "copy"),
    **table(concatenate, "cat.default"),
    **table(stack, "stack"),
    **table(stack_along(1), "hstack"),
    **table(stack_along(0), "vstack"),
    **table(stack_along(2), "dstack"),
}
