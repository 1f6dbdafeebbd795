"""A program with blocks -> the same program in which instances of a block are of several kinds, planned apart.

In and out: :class:`~fxpar.graph.Program`. Instances of one kind are split alike. They are of one kind as captured, of
several where different things are asked of them (:func:`asked_apart`), and where a memory limit lets only some of them
have what is fast (:mod:`fxpar.mixing`). Kinds have names, which a plan gives for every call (``Plan.calls``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from fxpar.graph import Graph, Program

_GLOB = frozenset("*?[")


def divided(program: Program, calls: Sequence[tuple[str, str]]) -> Program:
    """``program`` whose block calls are of the kinds named: ``(module path, kind)`` for each call, in order.

    A name that another block has already gets a number. A program that has other calls is left as it is.

    >>> from fxpar.graph import Node
    >>> nodes = tuple(Node("block:Layer", (), (), (), module=f"layers.{n}") for n in range(3))
    >>> program = Program(Graph("top", (), (), nodes, ()), {"Layer": Graph("Layer", (), (), (), ())})
    >>> apart = divided(program, [("layers.0", "Layer"), ("layers.1", "Layer"), ("layers.2", "Layer/2")])
    >>> {name: apart.instances(name) for name in apart.blocks}
    {'Layer': ('layers.0', 'layers.1'), 'Layer/2': ('layers.2',)}
    """
    same = [path for path, _ in calls] == [path for path, _ in program.calls]
    if not same or tuple(calls) == program.calls:
        return program
    names: dict[tuple[str, str], str] = {}
    blocks: dict[str, Graph] = {}
    footprints = {"top": program.footprints["top"]} if program.footprints else {}
    nodes, kinds = [], iter(calls)
    for node in program.top.nodes:
        if node.op.startswith("block:"):
            block, (_, wanted) = node.op.removeprefix("block:"), next(kinds)
            if (block, wanted) not in names:
                name = names[block, wanted] = unused_name(wanted, blocks)
                blocks[name] = replace(program.blocks[block], name=name)
                if program.footprints:
                    footprints[name] = program.footprints[block]
            node = replace(node, op=f"block:{names[block, wanted]}")
        nodes.append(node)
    return replace(program, top=replace(program.top, nodes=tuple(nodes)), blocks=blocks, footprints=footprints).verify()


def of_kinds(program: Program, kinds: Mapping[tuple[str, str], str]) -> Program:
    """``program`` in which calls are of the kinds named, by block and module path; others stay as they are."""
    return divided(program, [(path, kinds.get((block, path), block)) for path, block in program.calls])


def unused_name(wanted: str, taken: Mapping[str, object]) -> str:
    """``wanted``, or ``wanted/2``, ``wanted/3``, ... if it is taken.

    >>> unused_name("Layer", {}), unused_name("Layer", {"Layer": 0, "Layer/2": 0})
    ('Layer', 'Layer/3')
    """
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}/{number}"
    return name


def asked_apart(program: Program, wishes: Mapping[str, Hashable]) -> Program:
    """``program`` with instances of a block in kinds of their own where ``wishes``, by glob, ask for other things."""
    if not wishes:
        return program
    globs = {glob: wish for glob, wish in wishes.items() if _GLOB & set(glob)}
    kinds: dict[tuple[str, str], str] = {}
    taken: dict[str, object] = dict(program.blocks)
    for block, graph in program.blocks.items():
        names = _names(graph)
        found: dict[tuple[Hashable, ...], str] = {}
        for path in dict.fromkeys(program.instances(block)):
            whole = [program.name_of(path, name) if name else path for name in names]
            asked = tuple(
                (tuple(wish for glob, wish in globs.items() if fnmatchcase(name, glob)), wishes.get(name))
                for name in whole
            )
            if asked not in found:
                found[asked] = unused_name(block, taken) if found else block
                taken[found[asked]] = None
            kinds[block, path] = found[asked]
    return of_kinds(program, kinds)


def _names(graph: Graph) -> list[str]:
    """What can be named inside a block: its parameters, the modules in it, and (empty) itself."""
    modules = {node.module for node in graph.nodes}
    paths = {".".join(path.split(".")[:end]) for path in modules for end in range(path.count(".") + 2)}
    return [*(item.name for item in graph.inputs if item.kind == "parameter"), *sorted(paths | {""})]
