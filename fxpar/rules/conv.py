"""Rules of convolutions, pooling and resampling: batch and channels may be split, places stay whole."""

from __future__ import annotations

from fxpar.graph import Graph, Node, Ref
from fxpar.rules.localise import Local, Split
from fxpar.rules.registry import Line, rule, shapes

_GROUPS = {"aten.convolution.default": 8}  # where the groups stand among the arguments; 6 in all others


def _groups(node: Node) -> int:
    return int(node.arg(_GROUPS.get(node.op, 6), "groups", 1))


def _fewer_groups(split: Split, local: Local) -> Local:
    if split.factor != "g":
        return local
    return local.with_arg(_GROUPS.get(local.target, 6), "groups", _groups(split.node) // split.degree)


@rule(
    *("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.convolution.default"),
    *("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding"),
    *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
    local=_fewer_groups,
)
def convolution(graph: Graph, node: Node) -> Line:
    """Batch, output channels, groups, and input channels unless a bias is added inside (once per rank if split)."""
    (source, weight, *bias), _ = shapes(graph, node)
    spatial = len(weight) - 2
    batch = "n" if len(source) == len(weight) else ""
    places, window, out_places = (" ".join(f"{name}{dim}!" for dim in range(spatial)) for name in "pwq")
    groups = _groups(node)
    transposed = "transpose" in node.op or (node.op == "aten.convolution.default" and bool(node.arg(6, "transposed")))
    summed = "i!" if bias else "i+"
    inner, outer = (f"(g {summed})", "(g o)") if groups > 1 else (summed, "o")
    kernel = f"{inner} o" if transposed else f"{outer} {summed}"
    terms = [f"{batch} {inner} {places}", f"{kernel} {window}", *([outer] * len(bias))]
    text = f"{', '.join(terms)} -> {batch} {outer} {out_places}"
    return (text if bias else f"{text}; P 0 | 1"), ({"g": groups} if groups > 1 else {})


def _windowed(*ops: str, spatial: int, linear: bool = False) -> None:
    """Register operations on the last ``spatial`` dims that treat all leading dims alike."""

    @rule(*ops)
    def windowed(graph: Graph, node: Node) -> Line:
        (source, *more), outputs = shapes(graph, node)
        if more:
            return None
        lead = " ".join(f"d{dim}" for dim in range(len(source) - spatial))
        ins, outs = (" ".join(f"{name}{dim}!" for dim in range(spatial)) for name in "pq")
        return f"{lead} {ins} -> {', '.join([f'{lead} {outs}'] * len(outputs))}" + "; P 0" * linear


for _n in (1, 2, 3):
    _windowed(f"aten.avg_pool{_n}d.default", f"aten.adaptive_avg_pool{_n}d.default", spatial=_n, linear=True)
    _windowed(f"aten.max_pool{_n}d.default", f"aten.adaptive_max_pool{_n}d.default", spatial=_n)
    _windowed(f"aten.upsample_nearest{_n}d.vec", spatial=_n, linear=True)
_windowed("aten.max_pool2d_with_indices.default", spatial=2)
_windowed("aten.max_pool3d_with_indices.default", spatial=3)
_windowed("aten.upsample_linear1d.vec", spatial=1, linear=True)
_windowed("aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec", spatial=2, linear=True)
_windowed("aten.upsample_trilinear3d.vec", spatial=3, linear=True)


@rule("aten.pixel_shuffle.default")
def pixel_shuffle(graph: Graph, node: Node) -> Line:
    """Channels become places."""
    factor = node.arg(1, "upscale_factor")
    return "... (c r! s!) h w -> ... c (h r!) (w s!); P 0", {"r": factor, "s": factor}


@rule("aten.pixel_unshuffle.default")
def pixel_unshuffle(graph: Graph, node: Node) -> Line:
    """Places become channels."""
    factor = node.arg(1, "downscale_factor")
    return "... c (h r!) (w s!) -> ... (c r! s!) h w; P 0", {"r": factor, "s": factor}


@rule("aten.im2col.default")
def im2col(graph: Graph, node: Node) -> Line:
    """Windows as columns: ``(channels x window, places)``."""
    (source,), _ = shapes(graph, node)
    batch = "n " * (len(source) == 4)
    return f"{batch}c h! w! -> {batch}(c k!) p!; P 0"


@rule("aten.bilinear.default")
def bilinear(graph: Graph, node: Node) -> Line:
    """``x^T W y`` per output; a bias inside keeps the summed dims whole."""
    if isinstance(node.arg(3, "bias"), Ref):
        return "... i!, ... j!, o i! j!, o -> ... o"
    return "... i+, ... j+, o i+ j+ -> ... o; P 0 | 1 | 2"
