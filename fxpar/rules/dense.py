"""Rules of matrix products: linear, mm, bmm, matmul, einsum and their kin.

Every product is linear in each of its operands, so partial sums pass through one of them at a time.
"""

from __future__ import annotations

from fxpar.graph import Graph, Node
from fxpar.rules.notation import Dim, show
from fxpar.rules.registry import Line, register, rule, shapes

register("aten.mm.default", "m k+~, k+ n~ -> m n; P 0 | 1")
register("aten.bmm.default", "b m k+, b k+ n -> b m n; P 0 | 1")
register("aten.mv.default", "m k+, k+ -> m; P 0 | 1")
register("aten.dot.default", "k+, k+ -> ; P 0 | 1")
register("aten.outer.default", "m, n -> m n; P 0 | 1")


@rule("aten.linear.default")
def linear(graph: Graph, node: Node) -> Line:
    """``x w^T``, and whole in the summed dim if a bias is added inside: split, it would be added on every rank."""
    if len(node.operands) == 3:
        return "... i!, o~ i!, o -> ... o"
    return "... i+~, o~ i+ -> ... o; P 0 | 1"


@rule("aten.matmul.default")
def matmul(graph: Graph, node: Node) -> Line:
    """Vectors, matrices and broadcast batches in all combinations."""
    (left, right), _ = shapes(graph, node)
    first: list[Dim] = [("k",)] if len(left) == 1 else [("m",), ("k",)]
    second: list[Dim] = [("k",)] if len(right) == 1 else [("k",), ("n",)]
    batches = broadcast_dims(left[:-2], right[:-2])
    out = [dim for dim in widest(batches)] + first[:-1] + second[1:]
    text = f"{show((*batches[0], *first))}, {show((*batches[1], *second))} -> {show(tuple(out))}"
    return text.replace("k", "k+") + "; P 0 | 1"


def broadcast_dims(*batches: tuple[int, ...]) -> tuple[tuple[Dim, ...], ...]:
    """One dim term per batch shape, right-aligned: size-1 dims carry no factor, equal ones share one.

    >>> broadcast_dims((8, 1), (4,))
    ((('b1',), ()), (('b0',),))
    """
    return tuple(
        tuple((f"b{place}",) if size > 1 else () for place, size in zip(range(len(batch))[::-1], batch, strict=True))
        for batch in batches
    )


def widest(terms: tuple[tuple[Dim, ...], ...]) -> tuple[Dim, ...]:
    """The broadcast of such terms.

    >>> widest((((), ('b0',)), (('b0',),)))
    ((), ('b0',))
    """
    length = max(map(len, terms), default=0)
    padded = [((),) * (length - len(term)) + term for term in terms]
    return tuple(max(column, key=len) for column in zip(*padded, strict=True))


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@rule("aten._grouped_mm.default")
def grouped_mm(graph: Graph, node: Node) -> Line:
    """Rows ``offs[g-1]:offs[g]`` times matrix ``g``; rows and matrices stay whole, as their pairing needs all of them.

    The kernel wants rows of whole 16-byte pieces, so that is the unit in which the other dims are cut.
    """
    operands, _ = shapes(graph, node)
    if [len(shape) for shape in operands] != [2, 3, 1]:
        return None
    unit = 16 // _BYTES[graph.values[node.operands[0]].dtype]
    return "t! (k+ u!), g! (k+ u!) (n u!), g! -> t! (n u!); P 0 | 1", {"u": unit}


@rule("aten.einsum.default")
def einsum(graph: Graph, node: Node) -> Line:
    """Any equation: letters are factors, those that do not come out are summed; repeated ones stay whole."""
    equation = str(node.arg(0, "equation")).replace(" ", "")
    operand_shapes, _ = shapes(graph, node)
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    letters = left.replace(",", "").replace("...", "")
    if not arrow:
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    dims = [_einsum_dims(term, len(shape)) for term, shape in zip(terms, operand_shapes, strict=True)]
    dots = max(
        (len(shape) - len(t.replace("...", "")) for t, shape in zip(terms, operand_shapes, strict=True)), default=0
    )
    out = _einsum_dims(right, len(right.replace("...", "")) + (dots if "..." in right else 0))
    sizes: dict[str, int] = {}
    for term, shape in zip(dims, operand_shapes, strict=True):
        for name, size in zip(term, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    whole = {name for term in (*dims, out) for name in term if term.count(name) > 1}
    mark = {name: "!" if name in whole else "" if name in out else "+" for name in sizes}
    texts = [
        " ".join("1" if size == 1 != sizes[name] else name + mark[name] for name, size in zip(term, shape, strict=True))
        for term, shape in zip(dims, operand_shapes, strict=True)
    ]
    each = " | ".join(map(str, range(len(terms))))
    return f"{', '.join(texts)} -> {' '.join(name + mark[name] for name in out)}; P {each}"


def _einsum_dims(term: str, rank: int) -> list[str]:
    """Factor names of one einsum term; the dims of ``...`` are numbered from the right."""
    before, dots, after = term.partition("...")
    spare = rank - len(before) - len(after) if dots else 0
    return [f"f{c}" for c in before] + [f"e{place}" for place in range(spare)[::-1]] + [f"f{c}" for c in after]
