"""Rules of normalisations: the dims that statistics run over stay whole, the others may be split."""

from __future__ import annotations

from fxpar.graph import Graph, Node, Ref
from fxpar.rules.localise import Local, Split
from fxpar.rules.registry import Line, rule, shapes


@rule(
    "aten.layer_norm.default", "aten.rms_norm.default", "aten.native_layer_norm.default", "aten._fused_rms_norm.default"
)
def layer_norm(graph: Graph, node: Node) -> Line:
    """Normalised dims whole; weight and bias, where given, have those dims only."""
    operands, outputs = shapes(graph, node)
    inner = " ".join(f"n{dim}!" for dim in range(len(node.arg(1, "normalized_shape"))))
    terms = [f"... {inner}"] + [inner] * (len(operands) - 1)
    ones = " ".join("1" for _ in node.arg(1, "normalized_shape"))
    outs = [f"... {inner}"] + [f"... {ones}"] * (len(outputs) - 1)
    return f"{', '.join(terms)} -> {', '.join(outs)}"


def _fewer_groups(split: Split, local: Local) -> Local:
    if split.factor != "g":
        return local
    return local.with_arg(1, "num_groups", split.node.arg(1, "num_groups") // split.degree)


@rule("aten.group_norm.default", local=_fewer_groups)
def group_norm(graph: Graph, node: Node) -> Line:
    """Channels in groups: whole groups may be dealt out, or the batch."""
    (source, *affine), _ = shapes(graph, node)
    spatial = " ".join(f"s{dim}!" for dim in range(len(source) - 2))
    terms = [f"n (g c!) {spatial}"] + ["(g c!)"] * len(affine)
    return f"{', '.join(terms)} -> n (g c!) {spatial}", {"g": node.arg(1, "num_groups")}


@rule("aten.batch_norm.default", "aten.instance_norm.default")
def batch_norm(graph: Graph, node: Node) -> Line:
    """Channels may be split; so may the batch, where its statistics are not taken over it."""
    (source, *channel), _ = shapes(graph, node)
    spatial = range(len(source) - 2)
    if node.op == "aten.instance_norm.default":
        if isinstance(node.arg(3, "running_mean"), Ref):
            return None
        batch, places = "n", "".join(f" s{dim}!" for dim in spatial)
    else:
        training = bool(node.arg(5, "training"))
        batch, places = "n" + "!" * training, "".join(f" s{dim}" + "!" * training for dim in spatial)
    return f"{', '.join([f'{batch} c{places}'] + ['c'] * len(channel))} -> {batch} c{places}"


@rule("aten._native_batch_norm_legit_functional.default")
def batch_norm_functional(graph: Graph, node: Node) -> Line:
    """Training statistics run over batch and places; the new running statistics come out per channel."""
    (source, *channel), outputs = shapes(graph, node)
    if not node.arg(5, "training"):
        return None
    places = "".join(f" s{dim}!" for dim in range(len(source) - 2))
    outs = [f"n! c{places}"] + ["c"] * (len(outputs) - 1)
    return f"{', '.join([f'n! c{places}'] + ['c'] * len(channel))} -> {', '.join(outs)}"
