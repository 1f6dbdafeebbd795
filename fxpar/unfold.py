"""A program with blocks -> the same program in one graph, where every instance of a block may be split in its own way.

In and out: :class:`~fxpar.graph.Program`. Planning the result shows what folding costs: the folded program has one
decision for all instances of a block, and the same optimum if the instances would all be split alike anyhow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxpar.graph import Footprint, Graph, Input, Node, Program, Ref, Value, map_refs


def unfolded(program: Program) -> Program:
    """Every call of a block replaced by the block's operations, with the parameters of the module that is called."""
    return _Inliner(program).program()


class _Inliner:
    """Builds one graph node by node; used once."""

    def __init__(self, program: Program) -> None:
        self.source = program
        self.values: list[Value] = []
        self.inputs: dict[tuple[str, str], Input] = {}
        self.nodes: list[Node] = []
        self.footprints: list[Footprint] = []
        self.updates: list[tuple[str, int]] = []

    def program(self) -> Program:
        outputs = self._graph("top", self.source.top, "", {})
        graph = Graph(
            self.source.top.name,
            tuple(self.values),
            tuple(self.inputs.values()),
            tuple(self.nodes),
            tuple(outputs),
            tuple(self.updates),
        )
        kept = {"top": tuple(self.footprints)} if self.source.footprints else {}
        return replace(self.source, top=graph, blocks={}, footprints=kept, recompute=()).verify()

    def _new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _graph(self, name: str, graph: Graph, module: str, given: dict[int, Any]) -> list[Any]:
        """Add one passage of a graph; ``given`` has what stands for its own inputs. Returns its outputs."""
        known = dict(given)
        for item in graph.inputs:
            if item.value not in known:
                known[item.value] = Ref(self._input(item, graph.values[item.value], module))

        def change(ref: Ref) -> Any:
            return known[ref.value]

        for index, node in enumerate(graph.nodes):
            if node.op.startswith("block:"):
                block = self.source.blocks[node.op.removeprefix("block:")]
                entries = [item.value for item in block.inputs if item.kind == "input"]
                passed = dict(zip(entries, map_refs(node.args, change), strict=True))
                results = self._graph(block.name, block, node.module, passed)
                known.update(
                    {out: result for out, result in zip(node.outputs, results, strict=True) if out is not None}
                )
                continue
            outs = tuple(None if out is None else self._new(graph.values[out]) for out in node.outputs)
            known.update(
                {
                    out: Ref(new)
                    for out, new in zip(node.outputs, outs, strict=True)
                    if out is not None and new is not None
                }
            )
            self.nodes.append(
                replace(
                    node,
                    args=map_refs(node.args, change),
                    kwargs=tuple((key, map_refs(arg, change)) for key, arg in node.kwargs),
                    outputs=outs,
                    module=".".join(part for part in (module, node.module) if part),
                )
            )
            if self.source.footprints:
                self.footprints.append(self.source.footprints[name][index])
        for buffer, value in graph.updates:
            self.updates.append((self.source.name_of(module, buffer), known[value].value))
        return list(map_refs(graph.outputs, change))

    def _input(self, item: Input, value: Value, module: str) -> int:
        """The value of a parameter, buffer, constant or input of the whole model; tied ones are one."""
        name = self.source.name_of(module, item.name)
        if (item.kind, name) not in self.inputs:
            self.inputs[item.kind, name] = Input(item.kind, name, self._new(value))
        return self.inputs[item.kind, name].value
