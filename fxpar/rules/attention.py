"""The rule of scaled dot-product attention, in all its variants."""

from __future__ import annotations

from fxpar.graph import Graph, Node
from fxpar.rules.dense import broadcast_dims, widest
from fxpar.rules.localise import Local, Split
from fxpar.rules.notation import Dim, show
from fxpar.rules.registry import Line, rule, shapes


def _split_attention(split: Split, local: Local) -> Local:
    """A piece of the rows needs a mask that knows which rows it has; dropout draws for its own piece."""
    if split.factor == "q" and split.node.arg(5, "is_causal", False):
        local = Local("local.attention_rows", (split.rule.size("q"), split.cuts, *local.args), local.kwargs)
    if split.node.arg(4, "dropout_p", 0.0):
        local = Local("local.random_split", (local.target, split.rank, *local.args), local.kwargs)
    return local


@rule("aten.scaled_dot_product_attention.default", local=_split_attention)
def attention(graph: Graph, node: Node) -> Line:
    """Batch, heads and queries may be split, keys may not; linear in the values.

    With grouped-query attention the query heads are ``(g r)`` and the key and value heads ``g``: splitting ``g`` deals
    out whole groups, splitting ``r`` deals out query heads and leaves keys and values whole.
    """
    (query, key, value, *mask), _ = shapes(graph, node)
    batches = list(broadcast_dims(query[:-2], key[:-2], value[:-2]))
    sizes: dict[str, int] = {}
    if node.kwarg("enable_gqa", False) and query[-3] != key[-3]:
        sizes = {"g": key[-3], "r": query[-3] // key[-3]}
        batches = [(*batches[0][:-1], ("g", "r")), *((*batch[:-1], ("g",)) for batch in batches[1:])]
    lead = [show(batch) for batch in batches]
    terms = [f"{lead[0]} q d!", f"{lead[1]} k! d!", f"{lead[2]} k! e!"]
    terms += [_mask_term(shape, widest(tuple(batches)), "q") for shape in mask]
    return f"{', '.join(terms)} -> {show(widest(tuple(batches)))} q e!; P 2", sizes


def _mask_term(shape: tuple[int, ...], batch: tuple[Dim, ...], rows: str) -> str:
    dims = [*batch, (rows,), ("k!",)][-len(shape) :]
    return " ".join("1" if size == 1 else show((dim,)) for size, dim in zip(shape, dims, strict=True))


@rule("aten._scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention(graph: Graph, node: Node) -> Line:
    """The CPU kernel: the same, with the row sums as a second output."""
    if node.arg(3, "dropout_p", 0.0):
        return None
    (_, _, _, *mask), _ = shapes(graph, node)
    rows = "q!" if node.arg(4, "is_causal", False) else "q"
    terms = [f"b h {rows} d!", "b h k! d!", "b h k! e!"]
    terms += [_mask_term(shape, (("b",), ("h",)), rows) for shape in mask]
    return f"{', '.join(terms)} -> b h {rows} e!, b h {rows}"
