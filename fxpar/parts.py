"""Program + chosen strategies -> what a plan is called: per group of parameters and mesh axis, in the field's words.

In: a :class:`~fxpar.graph.Program` and the :class:`~fxpar.plans.GraphPlan` of each of its graphs. Out:
:class:`~fxpar.plans.Part` records. Names are read off states and conversions alone, by :data:`STYLES`; how they are
printed is :mod:`fxpar.report`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fxpar.dims import Followed, batch, sequence, stream_of
from fxpar.graph import Graph, Node, Program
from fxpar.layout import Mesh, State
from fxpar.patterns import pattern_of, spans_of
from fxpar.plans import GraphPlan, Part
from fxpar.rules import rule_for
from fxpar.rules.notation import Rule

COLUMN, ROW, VOCABULARY, EXPERT = "column-parallel", "row-parallel", "vocabulary-parallel", "expert-parallel"
SEQUENCE, ULYSSES, DDP, FSDP = "sequence-parallel", "Ulysses", "DDP", "FSDP"
ALONG, ROWS, STORED = "sequence split", "rows split", "sharded at rest"

#: A name is left out if it holds for less than this share of a group's bytes.
SMALLEST_SHARE = 0.05

#: What the names mean, for a product of activations with a matrix of parameters on one axis.
STYLES = {
    COLUMN: "the matrix is cut along a dim of the output",
    ROW: "the matrix is cut along the dim that is summed",
    VOCABULARY: "a table is cut by its rows, or a head by the outputs that are rows of a table",
    EXPERT: "a batch of matrices is cut along a dim that activations and output have as well",
    SEQUENCE: "beside matrices that are cut, what lies between them works on pieces of the sequence",
    ULYSSES: "pieces of the sequence with whole matrices, and an all-to-all to pieces of the heads for attention",
    ALONG: "pieces of the sequence with whole matrices, also in attention",
    DDP: "pieces of the batch, the matrix whole at rest, its gradient summed",
    FSDP: "pieces of the activations, the matrix cut at rest, gathered to be read, its gradient scattered",
    ROWS: "pieces of another dim of the activations, with the whole matrix",
    STORED: "the matrix cut at rest, and gathered for what every rank computes",
}


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of activations with a matrix of parameters: input ``parameter`` of the graph is operand ``at``."""

    node: Node
    number: int
    rule: Rule
    parameter: int
    at: int


def parts_of(program: Program, mesh: Mesh, plans: Mapping[str, GraphPlan]) -> tuple[Part, ...]:
    """What is done on each axis, for every kind of block and every module outside of blocks that owns a matrix."""
    followed = batch(program), sequence(program)
    tables = {
        graph.values[graph.inputs[product.parameter].value].shape[0]
        for graph in program.graphs().values()
        for product in _products(graph)
        if product.node.op.startswith("aten.embedding")
    }
    found: list[Part] = []
    patterns = {name: pattern_of(program.instances(name)) for name in program.blocks}
    for name, graph in program.graphs().items():
        own = patterns.get(name, "")
        others = [path for path, block in program.calls if block != name]
        if any(fnmatchcase(path, glob) for path in others for glob in own.split(", ")):
            own = spans_of(program.instances(name))
        groups: dict[str, list[_Product]] = {}
        for product in _products(graph):
            place = product.node.module or graph.inputs[product.parameter].name.rpartition(".")[0]
            groups.setdefault(place if name == "top" else own, []).append(product)
        for place, products in groups.items():
            for axis, (axis_name, degree) in enumerate(mesh.axes):
                if degree > 1:
                    seen = _Seen(name, graph, plans[name], axis, followed, tables)
                    count = 1 if name == "top" else len(program.instances(name))
                    found.append(Part(place, count, axis_name, tuple(seen.styles(products))))
    return tuple(found)


def _products(graph: Graph) -> Iterator[_Product]:
    """Every product in a graph; a parameter may be cast or permuted before it is read."""
    owner = {item.value: index for index, item in enumerate(graph.inputs) if item.kind == "parameter"}
    for number, node in enumerate(graph.nodes):
        if node.op.startswith("block:") or not node.operands:
            continue
        if all(value in owner for value in node.operands):
            owner.update({out: owner[node.operands[0]] for out in node.outputs if out is not None})
            continue
        rule = rule_for(graph, node)
        for at, value in enumerate(node.operands):
            if (
                rule is not None
                and value in owner
                and len(graph.values[value].shape) > 1
                and _joins(graph, node, rule, at)
            ):
                yield _Product(node, number, rule, owner[value], at)


def _joins(graph: Graph, node: Node, rule: Rule, operand: int) -> bool:
    """Whether the operation sums over a factor of the operand, together with another one, or looks it up by index."""
    outputs = {factor for term in rule.outputs for dim in term for factor in dim}
    gone = {factor for dim in rule.inputs[operand] for factor in dim} - outputs
    others = [(term, value) for at, (term, value) in enumerate(zip(rule.inputs, node.operands, strict=True))
              if at != operand]  # fmt: skip
    shared = {factor for term, _ in others for dim in term for factor in dim}
    looked_up = any(graph.values[value].dtype.startswith("int") for _, value in others)
    return bool(gone & shared) or (bool(gone) and looked_up)


class _Seen:
    """A graph on one axis."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        plan: GraphPlan,
        axis: int,
        followed: tuple[Followed, Followed],
        tables: set[int],
    ) -> None:
        self.name, self.graph, self.plan, self.axis = name, graph, plan, axis
        self.batch, self.sequence = followed
        self.tables = tables

    def styles(self, products: list[_Product]) -> list[str]:
        """The names that fit, by bytes of parameters, without those of a few bytes; those of a whole block last."""
        weights: Counter[str] = Counter()
        total = 0
        for product in products:
            size = self.graph.values[self.graph.inputs[product.parameter].value].bytes
            weights.update(dict.fromkeys(self._of_product(product), size))
            total += size
        weights = Counter({style: size for style, size in weights.items() if size >= SMALLEST_SHARE * total})
        whole = ALONG in weights
        del weights[ALONG]
        found = [style for style, _ in weights.most_common()]
        if self._heads_from_sequence():
            found.append(ULYSSES)
        elif {COLUMN, ROW, EXPERT} & set(found):
            found += [SEQUENCE] if self._stream_along_sequence(products) else []
        elif whole:
            found.append(ALONG)
        return found

    def _of_product(self, product: _Product) -> Iterator[str]:
        strategy = self.plan.nodes[product.number].strategies[self.axis]
        stored = self.plan.inputs[product.parameter][self.axis].kind == "S"
        read = strategy.inputs[product.at].kind == "S"
        if not strategy.divided:
            if stored and not read:
                yield STORED
            return
        if not read:
            if stored:
                yield FSDP
            cut = self._cut(product.number)
            if cut == "sequence":
                yield ALONG
            elif cut != "batch":
                yield ROWS
            elif not stored:
                yield DDP
            return
        summed = strategy.outputs[0].kind == "P"
        acted = any(state.kind == "S" for at, state in enumerate(strategy.inputs) if at != product.at)
        dim = strategy.inputs[product.at].dim
        shape = self.graph.values[product.node.operands[product.at]].shape
        table = product.node.op.startswith("aten.embedding")
        head = self.name == "top" and not table and not summed and shape[dim] in self.tables
        if not acted and (summed or head):
            yield VOCABULARY
        else:
            yield ROW if summed else EXPERT if acted else COLUMN

    def _cut(self, number: int) -> str:
        """Whether a node works on a piece of the ``"batch"`` or of the ``"sequence"``; empty if of neither."""
        strategy = self.plan.nodes[number].strategies[self.axis]
        if not strategy.divided:
            return ""
        factor, _, text = strategy.name.removeprefix("split:").partition("/")
        parts = int(text or 1)
        along, across = (found.nodes.get((self.name, number)) for found in (self.sequence, self.batch))
        if along and along[0] == factor and parts % along[1] == 0 and along != across:
            return "sequence"
        return "batch" if across and across[0] == factor else ""

    def _stream_along_sequence(self, products: list[_Product]) -> bool:
        """Whether most of what has the shape of the block's stream, and is no product, works on the sequence."""
        stream = stream_of(self.graph) if self.name != "top" else None
        if stream is None:
            return False
        shape, taken = self.graph.values[stream].shape, {product.number for product in products}
        cuts = [
            self._cut(number) == "sequence"
            for number, node in enumerate(self.graph.nodes)
            if number not in taken
            and any(out is not None and self.graph.values[out].shape == shape for out in node.outputs)
        ]
        return 2 * sum(cuts) > len(cuts)

    def _heads_from_sequence(self) -> bool:
        """Whether attention works on heads, and a tensor goes from pieces of the sequence to other pieces for it."""
        return any(
            "attention" in node.op and self._cut(number) == "" and self.plan.nodes[number].strategies[self.axis].divided
            for number, node in enumerate(self.graph.nodes)
        ) and any(
            src[self.axis].kind == dst[self.axis].kind == "S"
            and src[self.axis] != dst[self.axis]
            and self._is_sequence(value, src[self.axis])
            for value, arcs in self.plan.trees.items()
            for src, dst in arcs
        )

    def _is_sequence(self, value: int, state: State) -> bool:
        cut = self.sequence.values.get((self.name, value))
        return cut is not None and cut[0] == state.dim and state.parts % cut[1] == 0
