"""Rules of operations that only move elements: reshape, permute, expand, slice, cat and their kin.

All are linear, so partial sums pass. A dim that is cut, joined or shifted stays whole unless it falls into equal
pieces: then the pieces are a factor of their own, and what is inside a piece may be cut (as ``S(d/pieces)``).
"""

from __future__ import annotations

import math

from fxpar.graph import Graph, Node
from fxpar.rules.localise import Local, Split, out_sizes
from fxpar.rules.notation import Shape
from fxpar.rules.registry import Line, Localiser, register, rule, shapes

register("aten.tril.default", "... r! c! -> ... r! c!; P 0")
register("aten.triu.default", "... r! c! -> ... r! c!; P 0")


def names(shape: Shape, prefix: str = "d") -> list[str]:
    """A factor name per dim."""
    return [f"{prefix}{dim}" for dim in range(len(shape))]


def last_uneven(dims: list[str]) -> list[str]:
    """The same dims, the last of which may be in pieces that are not equal: see :func:`fxpar.rules.pointwise.line`."""
    return [*dims[:-1], *(f"{name}~" for name in dims[-1:])]


def one_to_one(operand: list[str], output: list[str]) -> str:
    """The line of a linear operation with one operand."""
    return f"{' '.join(operand)} -> {' '.join(output)}; P 0"


@rule("aten.reshape.default", local=out_sizes(1, "shape"))
def reshape(graph: Graph, node: Node) -> Line:
    """Both shapes in their common factors; where neither size divides the other, those dims stay whole."""
    ((source,), (target,)) = shapes(graph, node)
    left, right, sizes = refine(source, target)
    if left and right and left[-1] == right[-1] in sizes:
        left[-1] += "~"
    return f"{' '.join(left)} -> {' '.join(right)}; P 0", sizes


def refine(source: Shape, target: Shape) -> tuple[list[str], list[str], dict[str, int]]:
    """The common factors of two shapes of equal product: the dims of both in factors, and the factors' sizes.

    Walking both from the outermost dim, the next factor is the greatest common divisor of what is left of the two
    current dims. When both are left with something, no later cut is aligned until the dims end at the same element.

    >>> refine((2, 12), (2, 4, 3))
    (['f0', '(f1 f2)'], ['f0', 'f1', 'f2'], {'f0': 2, 'f1': 4, 'f2': 3})
    """
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    if math.prod(source) == 0:
        return [f"l{dim}!" for dim in range(len(source))], [f"r{dim}!" for dim in range(len(target))], sizes
    here = there = 0
    rest_here = rest_there = 1
    while True:
        while rest_here == 1 and here < len(source):
            rest_here, here = source[here], here + 1
        while rest_there == 1 and there < len(target):
            rest_there, there = target[there], there + 1
        if rest_here == 1 and rest_there == 1:
            break
        common = math.gcd(rest_here, rest_there)
        if common > 1:
            factor = f"f{len(sizes)}"
            sizes[factor] = common
            left[here - 1].append(factor)
            right[there - 1].append(factor)
        rest_here //= common
        rest_there //= common
        if rest_here > 1 and rest_there > 1:
            here, there = _whole_run(source, target, (here, rest_here), (there, rest_there), left, right, sizes)
            rest_here = rest_there = 1
    return [_dim(dim) for dim in left], [_dim(dim) for dim in right], sizes


def _whole_run(
    source: Shape,
    target: Shape,
    at: tuple[int, int],
    to: tuple[int, int],
    left: list[list[str]],
    right: list[list[str]],
    sizes: dict[str, int],
) -> tuple[int, int]:
    """Mark everything whole up to where both sides have covered equally many elements; return the next dims."""
    (here, covered), (there, reached) = at, to

    def add(dims: list[list[str]], dim: int, size: int) -> None:
        factor = f"w{len(sizes)}"
        sizes[factor] = size
        dims[dim].append(factor + "!")

    add(left, here - 1, covered)
    add(right, there - 1, reached)
    while covered != reached:
        if covered < reached:
            add(left, here, source[here])
            covered, here = covered * source[here], here + 1
        else:
            add(right, there, target[there])
            reached, there = reached * target[there], there + 1
    return here, there


def _dim(factors: list[str]) -> str:
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


@rule("aten.permute.default")
def permute(graph: Graph, node: Node) -> Line:
    """Dims in another order."""
    ((source,), _) = shapes(graph, node)
    dims = last_uneven(names(source))
    return one_to_one(dims, [dims[dim] for dim in node.arg(1, "dims")])


@rule("aten.expand.default", local=out_sizes(1, "size"))
def expand(graph: Graph, node: Node) -> Line:
    """New and repeated dims are factors that the operand lacks."""
    ((source,), (target,)) = shapes(graph, node)
    out = names(target)
    kept = out[len(target) - len(source) :]
    return one_to_one(
        ["1" if size == 1 else name for size, name in zip(source, kept, strict=True)],
        ["1" if size == 1 else name for size, name in zip(target, out, strict=True)],
    )


def piece(size: int, start: int, end: int) -> int:
    """The largest piece of a dim of ``size`` such that ``start:end`` is made of whole pieces.

    >>> piece(24, 8, 24), piece(10, 0, 7)
    (8, 1)
    """
    return math.gcd(size, start, end)


def _bounds(graph: Graph, node: Node, first: int) -> tuple[int, int, int, int, int]:
    """dim, start, end, step and the size of the sliced dim, from arguments that begin at ``first``."""
    dim = node.arg(first, "dim", 0)
    size = graph.values[node.operands[0]].shape[dim]
    start, end = node.arg(first + 1, "start"), node.arg(first + 2, "end")
    start = 0 if start is None else min(start + size if start < 0 else start, size)
    end = size if end is None else min(end + size if end < 0 else end, size)
    return dim, start, end, node.arg(first + 3, "step", 1), size


def _local_bounds(first: int) -> Localiser:
    def change(split: Split, local: Local) -> Local:
        _, start, end, _, _ = _bounds(split.graph, split.node, first)
        if split.factor == "o":
            local = local.with_arg(first + 1, "start", start // split.degree)
            return local.with_arg(first + 2, "end", end // split.degree)
        return local

    return change


def _pieces(graph: Graph, node: Node, first: int, dims: list[str]) -> tuple[list[str], list[str], dict[str, int]]:
    """The dims of the whole and of the slice, with the sliced dim in pieces."""
    dim, start, end, step, size = _bounds(graph, node, first)
    whole, part = list(dims), list(dims)
    own = piece(size, start, end) if step == 1 and end > start else 0
    if own == size:
        return whole, part, {}
    if own > 1:
        whole[dim], part[dim] = "(k! o)", "(m! o)"
        return whole, part, {"o": own}
    whole[dim], part[dim] = "k!", "m!"
    return whole, part, {}


@rule("aten.slice.Tensor", local=_local_bounds(1))
def slice_(graph: Graph, node: Node) -> Line:
    """A slice made of equal pieces may be cut inside the pieces."""
    ((source,), _) = shapes(graph, node)
    whole, part, sizes = _pieces(graph, node, 1, last_uneven(names(source)))
    return one_to_one(whole, part), sizes


@rule("aten.slice_scatter.default", local=_local_bounds(2))
def slice_scatter(graph: Graph, node: Node) -> Line:
    """The first operand with a slice replaced by the second."""
    ((source, _), _) = shapes(graph, node)
    whole, part, sizes = _pieces(graph, node, 2, names(source))
    return f"{' '.join(whole)}, {' '.join(part)} -> {' '.join(whole)}; P 0,1", sizes


@rule("aten.select.int")
def select(graph: Graph, node: Node) -> Line:
    """One index of a dim, which stays whole."""
    ((source,), _) = shapes(graph, node)
    dims, dim = last_uneven(names(source)), node.arg(1, "dim")
    return one_to_one([*dims[:dim], "s!", *dims[dim + 1 :]], dims[:dim] + dims[dim + 1 :])


@rule("aten.select_scatter.default")
def select_scatter(graph: Graph, node: Node) -> Line:
    """The first operand with one index of a dim replaced by the second."""
    ((source, _), _) = shapes(graph, node)
    dims, dim = names(source), node.arg(2, "dim")
    whole = " ".join([*dims[:dim], "s!", *dims[dim + 1 :]])
    return f"{whole}, {' '.join(dims[:dim] + dims[dim + 1 :])} -> {whole}; P 0,1"


@rule("aten.cat.default")
def cat(graph: Graph, node: Node) -> Line:
    """Equal operands are pieces of the joined dim; unequal ones leave it whole."""
    operands, (target,) = shapes(graph, node)
    dim = node.arg(1, "dim", 0)
    if any(len(shape) != len(target) for shape in operands):
        return None  # torch drops empty one-dim operands; such a use is computed whole
    dims = names(target)
    equal = len({shape[dim] for shape in operands}) == 1
    terms = [
        " ".join([*dims[:dim], "o" if equal else f"o{index}!", *dims[dim + 1 :]]) for index in range(len(operands))
    ]
    out = " ".join([*dims[:dim], "(k! o)" if equal else "k!", *dims[dim + 1 :]])
    joint = ",".join(map(str, range(len(operands))))
    return f"{', '.join(terms)} -> {out}; P {joint}"


@rule("aten.stack.default")
def stack(graph: Graph, node: Node) -> Line:
    """A new dim, which stays whole."""
    operands, (target,) = shapes(graph, node)
    dims, dim = names(operands[0]), node.arg(1, "dim", 0) % len(target)
    joint = ",".join(map(str, range(len(operands))))
    term = " ".join(dims)
    return f"{', '.join([term] * len(operands))} -> {' '.join([*dims[:dim], 'n!', *dims[dim:]])}; P {joint}"


@rule("aten.flip.default", "aten.roll.default")
def shift(graph: Graph, node: Node) -> Line:
    """Dims that are flipped or rolled stay whole."""
    ((source,), _) = shapes(graph, node)
    dims = node.arg(1 if node.op == "aten.flip.default" else 2, "dims", ())
    moved = {dim % len(source) for dim in ((dims,) if isinstance(dims, int) else dims or range(len(source)))}
    marked = [name + "!" * (dim in moved) for dim, name in enumerate(names(source))]
    return one_to_one(marked, marked)


@rule("aten.repeat.default")
def repeat(graph: Graph, node: Node) -> Line:
    """Each dim some number of times in a row: the copies are pieces."""
    ((source,), (target,)) = shapes(graph, node)
    counts = node.arg(1, "repeats")
    new = len(target) - len(source)
    dims = [f"d{dim}" if size > 1 else "1" for dim, size in enumerate(source)]
    out = [f"n{dim}!" for dim in range(new)]
    sizes: dict[str, int] = {}
    for dim, (name, count) in enumerate(zip(dims, counts[new:], strict=True)):
        sizes |= {f"r{dim}": count} if count > 1 else {}
        out.append(name if count == 1 else f"r{dim}!" if name == "1" else f"(r{dim}! {name})")
    return one_to_one(dims, out), sizes


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(graph: Graph, node: Node) -> Line:
    """Each element some number of times in a row: the copies are the inner factor."""
    ((source,), _) = shapes(graph, node)
    dim, count = node.arg(2, "dim"), node.arg(1, "repeats")
    if dim is None or node.kwarg("output_size") is not None:
        return None
    dims = names(source)
    dim %= len(dims)
    return one_to_one(dims, [*dims[:dim], f"({dims[dim]} r!)", *dims[dim + 1 :]]), {"r": count}


@rule("aten.constant_pad_nd.default", "aten.pad.default")
def pad(graph: Graph, node: Node) -> Line:
    """Padded dims stay whole; only padding with zeros or with the tensor's own elements is linear."""
    ((source,), _) = shapes(graph, node)
    mode = "constant" if node.op == "aten.constant_pad_nd.default" else node.arg(2, "mode", "constant")
    value = node.arg(2 if node.op == "aten.constant_pad_nd.default" else 3, "value") if mode == "constant" else None
    widths = node.arg(1, "pad")
    padded = {len(source) - 1 - place // 2 for place, width in enumerate(widths) if width or mode != "constant"}
    dims = names(source)
    left = [name if dim not in padded else f"i{dim}!" for dim, name in enumerate(dims)]
    right = [name if dim not in padded else f"o{dim}!" for dim, name in enumerate(dims)]
    line = one_to_one(left, right)
    return line if not value else line.partition(";")[0]


@rule("aten.unfold.default")
def unfold(graph: Graph, node: Node) -> Line:
    """Sliding windows of one dim, which stays whole."""
    ((source,), _) = shapes(graph, node)
    dims, dim = names(source), node.arg(1, "dimension")
    return one_to_one([*dims[:dim], "i!", *dims[dim + 1 :]], [*dims[:dim], "o!", *dims[dim + 1 :], "w!"])


@rule("aten.diagonal.default")
def diagonal(graph: Graph, node: Node) -> Line:
    """The diagonal of two dims, which stay whole."""
    ((source,), _) = shapes(graph, node)
    dims = names(source)
    pair = {node.arg(2, "dim1", 0) % len(source), node.arg(3, "dim2", 1) % len(source)}
    left = [name + "!" * (dim in pair) for dim, name in enumerate(dims)]
    return one_to_one(left, [name for dim, name in enumerate(dims) if dim not in pair] + ["g!"])
