"""Does a plan fit a program on a mesh? Checked between planning and rewriting, before anything is changed.

In: graphs, their plans, the mesh. Out: nothing, or a :class:`~fxpar.errors.PlanError` that names the operation, its
module and source line, shapes, states and axes. Whether a plan is *good* is not asked here.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpar.errors import PlanError
from fxpar.graph import Graph, Node, Program, Ref
from fxpar.layout import CONVERSIONS, Layout, Mesh, can_be, fits, is_uneven, without_gradient
from fxpar.plans import GraphPlan, NodePlan, Plan
from fxpar.rules.generate import strategies


def check_program(program: Program, plan: Plan) -> None:
    """Raise :class:`PlanError` unless ``plan`` is for ``program``, fits every graph, and blocks fit their calls."""
    if plan.program != program.digest():
        raise PlanError(
            f"the plan is for another program ({plan.program}, this model gives {program.digest()}); "
            "make a plan with this model, these input shapes and these settings"
        )
    for name, graph in program.graphs().items():
        if name not in plan.graphs:
            raise PlanError(f"the plan has no choices for graph {name!r}, only for {sorted(plan.graphs)}")
        check_graph(graph, plan.graphs[name], plan.mesh)
    for node, chosen in zip(program.top.nodes, plan.graphs["top"].nodes, strict=True):
        if node.op.startswith("block:"):
            name = node.op.removeprefix("block:")
            block, inside = program.blocks[name], plan.graphs[name]
            enter = [at for item, at in zip(block.inputs, inside.inputs, strict=True) if item.kind == "input"]
            leave = [at for at in inside.outputs if at is not None]
            if list(chosen.inputs) != enter or list(chosen.outputs) != leave:
                raise PlanError(
                    f"{node.module} is called with {_all(chosen.inputs)} -> {_all(chosen.outputs)}, "
                    f"but {node.op} takes {_all(enter)} -> {_all(leave)} on {_axes(plan.mesh)}"
                )


def check_graph(graph: Graph, plan: GraphPlan, mesh: Mesh) -> None:
    """Raise :class:`PlanError` unless every state exists where it is read and divides its tensor."""
    if plan.digest != graph.digest():
        raise PlanError(f"graph {graph.name}: the plan is for another graph ({plan.digest}, found {graph.digest()})")
    counts = (
        ("inputs", len(plan.inputs), len(graph.inputs)),
        ("nodes", len(plan.nodes), len(graph.nodes)),
        ("outputs", len(plan.outputs), len(graph.outputs)),
        ("updates", len(plan.updates), len(graph.updates)),
    )
    for what, planned, found in counts:
        if planned != found:
            raise PlanError(f"graph {graph.name} has {found} {what}, the plan has {planned}")
    for value, layout, where in _produced(graph, plan):
        _check_state(graph, mesh, value, layout, where)
    for node, chosen in zip(graph.nodes, plan.nodes, strict=True):
        if not node.op.startswith("block:"):
            _check_uneven(graph, mesh, node, chosen)
    produced = {value: plain(layout, graph, value) for value, layout, _ in _produced(graph, plan)}
    held = {(value, layout) for value, layout in produced.items()}
    for value, arcs in plan.trees.items():
        if value not in produced:
            raise PlanError(f"graph {graph.name}: the plan converts %{value}, which nothing produces")
        for src, dst in arcs:
            where = f"graph {graph.name}: conversion of {_named(graph, value)} from {_all([src])}"
            _check_state(graph, mesh, value, dst, where)
            if (value, plain(src, graph, value)) not in held:
                raise PlanError(f"{where} to {_all([dst])}: it is not in that state there on {_axes(mesh)}")
            changed = [(a.kind, b.kind) for a, b in zip(src, dst, strict=True) if a != b]
            if len(changed) != 1 or changed[0] not in CONVERSIONS:
                raise PlanError(f"{where} to {_all([dst])} is not one conversion on one axis of {_axes(mesh)}")
            held.add((value, plain(dst, graph, value)))
    for value, layouts in plan.again.items():
        if value not in produced:
            raise PlanError(f"graph {graph.name}: the plan makes %{value} again, which nothing produces")
        for layout in layouts:
            at = plain(layout, graph, value)
            if (value, at) not in held or at == produced[value]:
                is_what = "the one it is produced in" if at == produced[value] else "none that its conversions reach"
                raise PlanError(
                    f"graph {graph.name}: {_named(graph, value)} is to be made again in backward as {_all([layout])} "
                    f"on {_axes(mesh)}, but that layout is {is_what}; leave it out of GraphPlan.again"
                )
    for value, layout, where in _read(graph, plan):
        if (value, plain(layout, graph, value)) not in held:
            have = sorted(_all([at]) for number, at in held if number == value)
            raise PlanError(
                f"{where}: reads {_named(graph, value)} as {_all([layout])} on {_axes(mesh)}, "
                f"but it is only there as {', '.join(have)}"
            )


def plain(layout: Layout, graph: Graph, value: int) -> Layout:
    """``layout`` with ``R`` written ``I`` if ``value`` carries no gradient."""
    return layout if graph.values[value].grad else tuple(without_gradient(state) for state in layout)


def where_is(node: Node) -> str:
    """The node as an error names it."""
    return f"{node.op} in module {node.module or '(root)'!r} ({node.source or 'source unknown'})"


def _named(graph: Graph, value: int) -> str:
    """A value with its shape and where it comes from, as an error names it."""
    item = next((item for item in graph.inputs if item.value == value), None)
    node = next((node for node in graph.nodes if value in node.outputs), None)
    origin = f"{item.kind} {item.name}" if item else f"result of {where_is(node)}" if node else "made by nothing"
    return f"%{value} {graph.values[value]} ({origin})"


def _produced(graph: Graph, plan: GraphPlan) -> Iterator[tuple[int, Layout, str]]:
    for item, layout in zip(graph.inputs, plan.inputs, strict=True):
        yield item.value, layout, f"graph {graph.name}: {item.kind} {item.name}"
    for node, chosen in zip(graph.nodes, plan.nodes, strict=True):
        tensors = [out for out in node.outputs if out is not None]
        if len(tensors) != len(chosen.outputs) or len(node.operands) != len(chosen.inputs):
            raise PlanError(
                f"{where_is(node)}: has {len(node.operands)} operands and {len(tensors)} outputs, strategy "
                f"{chosen.name} has {len(chosen.inputs)} and {len(chosen.outputs)}"
            )
        for value, layout in zip(tensors, chosen.outputs, strict=True):
            yield value, layout, f"{where_is(node)}, strategy {chosen.name}"


def _read(graph: Graph, plan: GraphPlan) -> Iterator[tuple[int, Layout, str]]:
    for node, chosen in zip(graph.nodes, plan.nodes, strict=True):
        for value, layout in zip(node.operands, chosen.inputs, strict=True):
            yield value, layout, f"{where_is(node)}, strategy {chosen.name}"
    for index, (out, at) in enumerate(zip(graph.outputs, plan.outputs, strict=True)):
        if isinstance(out, Ref):
            if at is None:
                raise PlanError(f"graph {graph.name}: the plan gives no state for output {index}")
            yield out.value, at, f"graph {graph.name}: output {index}"
    for (name, value), layout in zip(graph.updates, plan.updates, strict=True):
        yield value, layout, f"graph {graph.name}: new value of buffer {name}"


def _check_state(graph: Graph, mesh: Mesh, value: int, layout: Layout, where: str) -> None:
    meta = graph.values[value]
    if len(layout) != len(mesh.axes):
        raise PlanError(f"{where}: {_all([layout])} has {len(layout)} states, the mesh has axes {_axes(mesh)}")
    for state, (axis, degree) in zip(layout, mesh.axes, strict=True):
        if not can_be(meta.shape, state, degree):
            raise PlanError(f"{where}: {meta} cannot be {state}@{axis}; degree {degree} does not divide it evenly")
    if not fits(meta.shape, layout, mesh.degrees):
        raise PlanError(f"{where}: {meta} cannot be {_all([layout])} on {_axes(mesh)}; two cuts of one dim cross")


def _check_uneven(graph: Graph, mesh: Mesh, node: Node, chosen: NodePlan) -> None:
    """Uneven pieces are not for every operation."""
    values = (*node.operands, *(out for out in node.outputs if out is not None))
    for strategy, (axis, degree) in zip(chosen.strategies, mesh.axes, strict=True):
        for value, state in zip(values, (*strategy.inputs, *strategy.outputs), strict=True):
            meta = graph.values[value]
            if is_uneven(meta.shape, state, degree) and strategy not in strategies(graph, node, degree):
                raise PlanError(
                    f"{where_is(node)}, strategy {strategy.name}: {meta} cannot be {state}@{axis}; degree {degree} "
                    "does not divide it evenly, and this operation needs equal pieces"
                )


def _all(layouts: list[Layout] | tuple[Layout, ...]) -> str:
    return ", ".join("*".join(map(str, layout)) for layout in layouts) or "nothing"


def _axes(mesh: Mesh) -> str:
    return "*".join(f"{axis}={degree}" for axis, degree in mesh.axes)
