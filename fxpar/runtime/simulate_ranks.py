"""All ranks of a mesh in one process: their graphs run in lockstep, operation by operation.

In: one rewritten GraphModule per rank and their flat inputs. Out: flat outputs per rank, differentiable. Conversions
are made jointly, by this module's own reading of the table in :mod:`fxpar.layout`, so it needs no process group and
checks plans quickly. :func:`~fxpar.runtime.records.record_collectives` finds what the first rank takes part in. It is
for tests: it saves no time and no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.layout import COLLECTIVES, CONVERSIONS
from fxpar.runtime import modes, records
from fxpar.runtime.blocks import call_block
from fxpar.runtime.collectives import convert, cut, uneven_size

#: Called with (kind, source state, target state, phase) for every conversion executed.
Watcher = Callable[[str, str, str, str], None]
#: Called with (kind, values per rank, source state, target state, phase) before a step of a conversion runs.
Note = Callable[[str, Sequence[Tensor], str, str, str], None]
Modules = Mapping[str, Sequence[fx.GraphModule]]


def run_simulated(
    modules: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    *,
    call: Callable[[str, str, list[tuple[Any, ...]]], list[Any]] | None = None,
    watch: Watcher | None = None,
) -> list[tuple[Any, ...]]:
    """Run one GraphModule per rank on ``inputs[rank]``; returns ``outputs[rank]``.

    Ranks exchange within groups of one name (the last argument of a conversion).
    ``call(name, module, tensors per rank) -> outputs per rank`` runs the blocks that the graphs call.
    """
    watch = watch or _unwatched
    ranks = range(len(modules))
    given = [iter(flat) for flat in inputs]
    held: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    for nodes in zip(*(module.graph.nodes for module in modules), strict=True):
        first = nodes[0]
        if first.op == "placeholder":
            results = [None] * len(modules) if first.target == "call_block" else [next(flat) for flat in given]
        elif first.op == "output":
            return [tuple(fx.map_arg(node.args[0], held[rank].__getitem__)) for rank, node in enumerate(nodes)]
        else:
            filled = [_filled(node, held[rank]) for rank, node in enumerate(nodes)]
            results = _step(nodes, modules, filled, call, watch)
        for rank, node in enumerate(nodes):
            held[rank][node] = results[rank]
    raise ValueError("a graph has no output")


def _filled(node: fx.Node, held: dict[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return fx.map_arg(node.args, held.__getitem__), fx.map_arg(node.kwargs, held.__getitem__)


def _step(nodes: Any, modules: Any, filled: Any, call: Any, watch: Watcher) -> list[Any]:
    """One operation on every rank."""
    if nodes[0].target is convert:
        return _convert([args for args, _ in filled], watch)
    if nodes[0].target is call_block and call is not None:
        _, name, module = filled[0][0][:3]
        with records.inside(module):
            return call(name, module, [args[3:] for args, _ in filled])
    if nodes[0].target in modes.CALLS:  # all ranks share this thread's modes
        return [nodes[0].target(*filled[0][0])] * len(nodes)
    stream = torch.get_rng_state()
    results = []
    for node, module, (args, kwargs) in zip(nodes, modules, filled, strict=True):
        torch.set_rng_state(stream)  # ranks draw from equal streams
        target = module.get_submodule(node.target) if node.op == "call_module" else node.target
        results.append(target(*args, **kwargs))
    return results


def _convert(calls: Sequence[tuple[Any, ...]], watch: Watcher) -> list[Any]:
    """One conversion on every rank; those of one group exchange their pieces. Only the first group is noted."""
    groups: dict[str, list[int]] = {}
    for number, call in enumerate(calls):
        groups.setdefault(call[-1], []).append(number)
    results: list[Any] = [None] * len(calls)
    for at, members in enumerate(groups.values()):
        members.sort(key=lambda number: int(calls[number][-2]))
        src, dst, grad, axis = calls[members[0]][1:5]
        values = [calls[number][0] if grad else calls[number][0].detach() for number in members]
        note = functools.partial(_note, watch, axis, records.running_module()) if at == 0 else _unnoted
        made = _Joint.apply(src, dst, note, *values)
        for number, value in zip(members, made, strict=True):
            results[number] = value
    return results


def _note(
    watch: Watcher, axis: str, module: str, kind: str, values: Sequence[Tensor], src: str, dst: str, phase: str
) -> None:
    """Tell who watches, and record a collective. The first rank's piece is the largest: all are made as long."""
    watch(kind, *((src, dst) if phase == "forward" else (dst, src)), phase)
    if kind in COLLECTIVES and records.active is not None:
        degree, x = len(values), values[0]
        whole_bytes = x.numel() * x.element_size() * (degree if src[0] == "S" else 1)
        if kind != "all_gather" and (size := uneven_size(dst)):
            whole_bytes = whole_bytes // size * -(-size // degree) * degree
        records.active.add(kind, axis, degree, whole_bytes, phase, module)


def _unwatched(*_: str) -> None:
    """Nobody looks."""


def _unnoted(*_: Any) -> None:
    """Another group does the same at the same time."""


class _Joint(torch.autograd.Function):
    """All ranks' values in, all ranks' values out."""

    @staticmethod
    def forward(ctx: Any, src: str, dst: str, note: Note, *values: Tensor) -> Any:
        ctx.src, ctx.dst, ctx.note = src, dst, note
        kind = CONVERSIONS[src[0], dst[0]].forward
        note(kind, values, src, dst, "forward")
        return tuple(_run(kind, list(values), src, dst))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kind = CONVERSIONS[ctx.src[0], ctx.dst[0]].backward
        ctx.note(kind, grads, ctx.dst, ctx.src, "backward")
        return None, None, None, *_run(kind, list(grads), ctx.dst, ctx.src)


def _run(kind: str, values: list[Tensor], src: str, dst: str) -> list[Tensor]:
    n = len(values)
    if kind == "none":
        return [value.clone() for value in values]
    if kind == "keep":
        return [values[0].clone(), *(torch.zeros_like(value) for value in values[1:])]
    if kind == "slice":
        return [_take(value, dst, n, rank) for rank, value in enumerate(values)]
    if kind == "pad":
        zeros = [torch.zeros_like(value) for value in values]
        return [_whole([*zeros[:r], values[r], *zeros[r + 1 :]], src) for r in range(n)]
    if kind == "all_reduce" and src == "M":
        return [functools.reduce(torch.maximum, values).clone() for _ in range(n)]
    if kind == "all_reduce":
        return [sum(values[1:], values[0]).clone() for _ in range(n)]
    if kind == "reduce_scatter":
        return [_take(sum(values[1:], values[0]), dst, n, rank) for rank in range(n)]
    whole = _whole(values, src)
    if kind == "all_gather":
        return [whole.clone() for _ in range(n)]
    return [_take(whole, dst, n, rank) for rank in range(n)]  # all_to_all


def _take(whole: Tensor, state: str, degree: int, rank: int) -> Tensor:
    """The ``rank``-th of ``degree`` pieces of each of the state's parts, joined."""
    dim, parts = cut(state)
    return torch.cat([part.chunk(degree, dim)[rank] for part in whole.chunk(parts, dim)], dim)


def _whole(pieces: list[Tensor], state: str) -> Tensor:
    dim, parts = cut(state)
    chunks = [piece.chunk(parts, dim) for piece in pieces]
    return torch.cat([chunk[part] for part in range(parts) for chunk in chunks], dim)
