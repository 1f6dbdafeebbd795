"""Rules of indexing with tensors: gather, scatter, index_select, index and index_put.

The indexed dim of the data stays whole, except in ``gather``, where each element is on one rank. The dims of the
indices, and those not indexed, may be split.
"""

from __future__ import annotations

from fxpar.graph import Graph, Node, Ref
from fxpar.rules.localise import Local, Split
from fxpar.rules.notation import Shape
from fxpar.rules.registry import Line, register, rule, shapes


def _aligned(data: Shape, index: Shape, dim: int, mark: str) -> tuple[list[str], list[str]]:
    """Dims of data and index: shared where their sizes are equal, whole where the index covers only a part."""
    left, right = [], []
    for place, (size, count) in enumerate(zip(data, index, strict=True)):
        shared = size == count and place != dim
        left.append(f"d{place}" if shared else f"d{place}!")
        right.append(f"d{place}" if shared else f"i{place}{mark}" if place == dim else f"i{place}!")
    return left, right


def _gather_split(split: Split, local: Local) -> Local:
    """Along a split dim, a rank finds the elements it has and gives zeros for the others."""
    if split.factor != "v":
        return local
    return Local("local.gather_split", (split.rule.size("v"), split.cuts, *local.args), local.kwargs)


@rule("aten.gather.default", local=_gather_split)
def gather(graph: Graph, node: Node) -> Line:
    """``out[i][j] = x[index[i][j]][j]`` for dim 0; linear in x."""
    (data, index), _ = shapes(graph, node)
    if not data or not index:
        return None
    dim = node.arg(1, "dim") % len(data)
    left, right = _aligned(data, index, dim, "")
    left[dim] = "v+~"
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(right)}; P 0"


@rule(
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter_add.default",
    "aten.scatter.reduce",
    "aten.scatter_reduce.two",
)
def scatter(graph: Graph, node: Node) -> Line:
    """Data with some elements replaced or added to: the scattered dim stays whole on both sides."""
    (data, index, *source), _ = shapes(graph, node)
    if not data or any(shape != index for shape in source):
        return None
    left, right = _aligned(data, index, node.arg(1, "dim") % len(data), "!")
    terms = [" ".join(left), " ".join(right), *([" ".join(right)] * len(source))]
    text = f"{', '.join(terms)} -> {' '.join(left)}"
    if node.op in ("aten.scatter.src", "aten.scatter_add.default"):
        return f"{text}; P 0,2"
    return f"{text}; P 0" if node.op == "aten.scatter.value" and node.arg(3, "value") == 0 else text


@rule("aten.index_select.default")
def index_select(graph: Graph, node: Node) -> Line:
    """Rows by number; linear in the data."""
    (data, index), _ = shapes(graph, node)
    if not data or not index:
        return None
    dims, dim = [f"d{place}" for place in range(len(data))], node.arg(1, "dim") % len(data)
    left, out = (" ".join([*dims[:dim], own, *dims[dim + 1 :]]) for own in ("v!", "i"))
    return f"{left}, i -> {out}; P 0"


@rule("aten.index_add.default", "aten.index_copy.default")
def index_add(graph: Graph, node: Node) -> Line:
    """Rows added to, or replaced; jointly linear in the data and the new rows."""
    (data, index, rows), _ = shapes(graph, node)
    if not data or not index or not rows:
        return None
    dims, dim = [f"d{place}" for place in range(len(data))], node.arg(1, "dim") % len(data)
    whole = " ".join([*dims[:dim], "v!", *dims[dim + 1 :]])
    return f"{whole}, i!, {' '.join([*dims[:dim], 'i!', *dims[dim + 1 :]])} -> {whole}; P 0,2"


@rule("aten.index_fill.int_Scalar")
def index_fill(graph: Graph, node: Node) -> Line:
    """Rows set to a number; linear if that is zero."""
    (data, index), _ = shapes(graph, node)
    if not data:
        return None
    dim = node.arg(1, "dim") % len(data)
    whole = " ".join(f"d{place}" + "!" * (place == dim) for place in range(len(data)))
    linear = "; P 0" * (node.arg(3, "value") == 0)
    return f"{whole}, {'i!' * len(index)} -> {whole}{linear}"


def _indexed(graph: Graph, node: Node, mark: str) -> tuple[list[str], list[str], list[str]] | None:
    """Terms of the data, of each index tensor, and of what ``data[indices]`` gives; ``None`` for masks."""
    indices = node.arg(1, "indices")
    data = graph.values[node.operands[0]].shape
    used = [place for place, item in enumerate(indices) if isinstance(item, Ref)]
    tensors = [graph.values[indices[place].value] for place in used]
    if not used or any(value.dtype in ("bool", "uint8") for value in tensors):
        return None
    rank = max(len(value.shape) for value in tensors)
    sizes = [max(value.shape[dim - rank] for value in tensors if len(value.shape) >= rank - dim) for dim in range(rank)]
    names = ["1" if size == 1 else f"i{dim}{mark}" for dim, size in enumerate(sizes)]
    terms = [
        " ".join("1" if size == 1 else names[rank - len(value.shape) + dim] for dim, size in enumerate(value.shape))
        for value in tensors
    ]
    left = [f"d{place}" + "!" * (place in used) for place in range(len(data))]
    kept = [name for place, name in enumerate(left) if place not in used]
    together = used == list(range(used[0], used[0] + len(used)))
    first = used[0] if together else 0  # torch puts index dims in front when the indexed dims are apart
    return left, terms, [*kept[:first], *names, *kept[first:]]


@rule("aten.index.Tensor")
def index(graph: Graph, node: Node) -> Line:
    """``x[i, :, j]`` with integer tensors that broadcast; linear in x."""
    found = _indexed(graph, node, "")
    if found is None:
        return None
    left, terms, out = found
    return f"{', '.join([' '.join(left), *terms])} -> {' '.join(out)}; P 0"


@rule("aten.index_put.default")
def index_put(graph: Graph, node: Node) -> Line:
    """``x[i] = v`` and ``x[mask] = v``: jointly linear in x and v; a mask is element-wise if v is one number."""
    operands, _ = shapes(graph, node)
    data, values = operands[0], operands[-1]
    found = _indexed(graph, node, "!")
    if found is None:
        masks = node.arg(1, "indices")
        if len(masks) != 1 or graph.values[masks[0].value].dtype != "bool" or any(size != 1 for size in values):
            return None
        dims = [f"d{place}" for place in range(len(data))]
        ones = " ".join("1" for _ in values)
        return f"{' '.join(dims)}, {' '.join(dims[: len(operands[1])])}, {ones} -> {' '.join(dims)}; P 0,2"
    left, terms, out = found
    if len(values) > len(out):
        return None
    aligned = out[len(out) - len(values) :]
    last = " ".join("1" if size == 1 else name for size, name in zip(values, aligned, strict=True))
    return f"{', '.join([' '.join(left), *terms, last])} -> {' '.join(left)}; P 0,{len(operands) - 1}"


register("aten.searchsorted.Tensor", "s!, ... -> ...")
