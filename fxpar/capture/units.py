"""Blocks: recorded once as a graph of their own, and called by every module that would record the same.

In: calls of modules whose class is worth folding. Out: a node per call, a :class:`Unit` per distinct graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpar import trees
from fxpar.capture import modules, writes
from fxpar.capture.frame import Frame, Memory, constant
from fxpar.capture.reads import Reads
from fxpar.capture.recorder import storage_key, unheard
from fxpar.capture.session import Session
from fxpar.capture.signals import NotFoldableError, RestartError
from fxpar.capture.structure import descendants, is_block, tie_pattern
from fxpar.errors import CaptureError
from fxpar.graph import Graph, Node, Ref
from fxpar.normalise import normalise

#: For how many calls of a block fakes are made at once.
BATCH = 16

_Meta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


@dataclass
class Unit:
    """One recorded block.

    ``metas`` has size, stride, dtype and requires-grad of each tensor it returns. ``reads`` are the attributes that
    another module must share to be the same block; None if it also wrote some, so that no other may be. ``shares``
    tells that results lie in the memory of an input, a parameter or of one another; ``recompute`` that the forward
    checkpoints all that it does.
    """

    number: int
    kind: int
    name: str
    path: str
    graph: Graph
    in_spec: trees.Spec
    out_spec: trees.Spec
    metas: list[_Meta]
    reads: Reads | None
    reals: dict[str, torch.Tensor]
    shares: bool
    recompute: bool
    calls: list[str] = field(default_factory=list)
    spare: list[list[torch.Tensor]] = field(default_factory=list)
    _normal: Graph | None = None

    def normal(self, name: str | None = None) -> Graph:
        """The normal form of the block's graph."""
        if self._normal is None:
            self._normal = normalise(self.graph)
        graph = self._normal
        if name is None:
            return graph
        return Graph(name, graph.values, graph.inputs, graph.nodes, graph.outputs, graph.updates)

    def signature(self) -> tuple[Any, ...]:
        """Equal for blocks that may be called in one another's place."""
        graph = self.normal()
        names = tuple((item.kind, item.name) for item in graph.inputs if item.kind != "input")
        updates = tuple(name for name, _ in graph.updates)
        return graph.digest(), self.in_spec, self.out_spec, names, updates


class Units:
    """The blocks of one capture. ``kinds`` are the classes of modules to fold."""

    def __init__(self, session: Session, kinds: frozenset[int], banned: frozenset[int]) -> None:
        self.session, self.kinds, self.settled = session, set(kinds - banned), set(kinds | banned)
        self.units: list[Unit] = []
        self._table: dict[Any, list[Unit]] = {}

    def call(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called at the top level: call its block, or record it in place."""
        session = self.session
        kind = session.structure.classes.get(id(module))
        if kind not in self.kinds or self._has_changed_buffers(path):
            return modules.inline(session, module, path, args, kwargs)
        with unheard():  # shapes and dtypes are asked for here, not by the model
            tensors, spec, (spec_key, _) = trees.flatten_call(args, kwargs)
            fakes = [session.fake_of(tensor) for tensor in tensors]
            metas = tuple([(fake.shape, fake.stride(), fake.dtype, fake.requires_grad) for fake in fakes])
        ties = tie_pattern(module) if session.structure.tied else ()
        key = (kind, spec_key, metas, torch.is_grad_enabled(), session.autocast(), ties)
        unit = next(
            (unit for unit in self._table.get(key, ()) if unit.reads is not None and unit.reads.same_in(module)), None
        )
        if unit is None:
            assert kind is not None
            unit = self._record(module, kind, path, spec, fakes)
            if unit is None:
                return modules.inline(session, module, path, args, kwargs)
            self._table.setdefault(key, []).append(unit)
        session.recompute.called(path, unit.recompute)
        return self._append(unit, path, fakes)

    def _has_changed_buffers(self, path: str) -> bool:
        frame, session = self.session.frame, self.session
        changed = [m.name for m in frame.memories.values() if m.kind == "buffer" and m.version]
        changed += [session.structure.paths[id(module)] + "." for module, _ in session.assigned]
        return any(name.startswith(f"{path}.") for name in changed)

    def _record(
        self, module: nn.Module, kind: int, path: str, spec: trees.Spec, given: list[torch.Tensor]
    ) -> Unit | None:
        """The block of ``module`` for these inputs; None if it cannot stand alone."""
        session = self.session
        frame = new_frame(session, type(module).__name__, f"{path}.")
        fakes = [session.fakes.like(fake, leaf=False) for fake in given]
        args, kwargs = trees.unflatten(spec, fakes)
        for name, fake in zip(trees.tensor_names(module.forward, args, kwargs), fakes, strict=True):
            frame.add_input("input", name, fake)
        mark, assigned = session.attributes.mark(), len(session.assigned)
        session.frames.append(frame)
        session.attributes.logs.append({})
        try:
            result = modules.run(session, module, path, args, kwargs)
            outputs, out_spec, results = finish_outputs(session, result, assigned)
        except NotFoldableError:
            self.kinds.discard(kind)
            return None
        finally:
            log = session.attributes.logs.pop()
            session.frames.pop()
            wrote = session.attributes.wrote(mark)
            session.attributes.restore(mark)
            del session.assigned[assigned:]
        unit = Unit(
            len(self.units),
            kind,
            type(module).__name__,
            path,
            frame.graph(outputs, session.structure.order(module)),
            spec,
            out_spec,
            [(tuple(fake.shape), fake.stride(), fake.dtype, fake.requires_grad) for fake in results],
            None if wrote else _reads(module, path, log),
            frame.reals,
            _shares(frame, results),
            session.recompute.covers(frame),
        )
        self.units.append(unit)
        return unit

    def _append(self, unit: Unit, path: str, fakes: list[torch.Tensor]) -> Any:
        """A call of ``unit`` by the module at ``path``, and fresh fakes for what it returns."""
        session, frame = self.session, self.session.frame
        numbers = {id(fake): session.read(fake) for fake in fakes}
        results = self._results(unit)
        values = iter([frame.add_fresh(fake) for fake in results])
        outputs = tuple(next(values) if leaf is trees.TENSOR else None for leaf in unit.out_spec.leaves)
        node = session.node(f"block:{unit.number}", fakes, {}, numbers, outputs)
        frame.nodes.append(Node(node.op, node.args, (), outputs, path, node.source, node.grad_enabled, node.autocast))
        unit.calls.append(path)
        if unit.shares:
            for fake in (*fakes, *results):
                alias = frame.alias(fake)
                assert alias is not None
                alias.memory.shared = alias.memory.shared or f"{path} returns memory that it was given"
                alias.memory.keep_apart = unit.kind
        return trees.unflatten(unit.out_spec, results)

    def _results(self, unit: Unit) -> list[torch.Tensor]:
        """Fresh fakes for what a call of ``unit`` returns; after its first call made in batches, which is cheaper."""
        if not unit.spare:
            count, width = BATCH if unit.calls else 1, len(unit.metas)
            made = self.session.fakes.grown(unit.metas * count)
            unit.spare = [made[width * turn : width * (turn + 1)] for turn in range(count)]
        return unit.spare.pop()

    def check_repeats(self) -> None:
        """Modules that are not repeated in the tree but called more than once are worth folding too: start again."""
        session = self.session
        repeated = {}
        for module in session.structure.modules:
            kind, path = session.structure.classes[id(module)], session.structure.paths[id(module)]
            if session.calls.get(id(module), 0) > 1 and kind not in self.settled and is_block(module) and path:
                repeated[path] = kind
        outermost = {
            kind for path, kind in repeated.items() if not any(path.startswith(f"{other}.") for other in repeated)
        }
        if outermost:
            raise RestartError(fold=frozenset(outermost))

    def check_updates(self, top: Graph) -> None:
        """A buffer that a block updates may be read only by that block's own module: else record in place."""
        structure = self.session.structure
        readers: dict[str, set[str]] = {}
        for item in top.inputs:
            readers.setdefault(item.name, set()).add("")
        for unit in self.units:
            held = [item.name for item in unit.graph.inputs if item.kind == "buffer"]
            for path in unit.calls:
                for name in held:
                    readers.setdefault(structure.first_name(f"{path}.{name}"), set()).add(path)
        for unit in self.units:
            for name, _ in unit.graph.updates:
                for path in unit.calls:
                    if readers.get(structure.first_name(f"{path}.{name}"), {path}) != {path}:
                        raise RestartError(keep_apart=frozenset({unit.kind}))

    def merged(self) -> tuple[dict[str, Unit], dict[int, str]]:
        """Blocks by name, and the name for each unit's number.

        A class of modules that is called once in all is in neither. One that is called more often stays callable, also
        where a graph has one caller (a first layer, whose input carries no gradient): users hook and wrap layers alike.
        """
        groups: dict[Any, list[Unit]] = {}
        calls: Counter[int] = Counter()
        for unit in self.units:
            groups.setdefault(unit.signature(), []).append(unit)
            calls[unit.kind] += len(unit.calls)
        blocks: dict[str, Unit] = {}
        names: dict[int, str] = {}
        for group in groups.values():
            if all(calls[unit.kind] < 2 for unit in group):
                continue
            base, count = group[0].name, 1
            name = base
            while name in blocks:
                count += 1
                name = f"{base}.{count}"
            blocks[name] = group[0]
            names.update((unit.number, name) for unit in group)
        return blocks, names


def new_frame(session: Session, name: str, prefix: str) -> Frame:
    """An empty graph that begins here: with the grad mode and autocast of now."""
    return Frame(name, prefix, torch.is_grad_enabled(), session.autocast(), refresh=writes.refresh(session))


def finish_outputs(session: Session, result: Any, assigned: int) -> tuple[list[Any], trees.Spec, list[torch.Tensor]]:
    """The flat outputs of the current frame, how to rebuild the result, and the fakes in it."""
    tensors, spec = trees.flatten(result)
    fakes = [session.fake_of(tensor) for tensor in tensors]
    values = iter([Ref(session.read(fake)) for fake in fakes])
    outputs: list[Any] = []
    for leaf in spec.leaves:
        if leaf is trees.TENSOR:
            outputs.append(next(values))
            continue
        try:
            outputs.append(constant(leaf))
        except TypeError:
            what = f"a {type(leaf).__module__}.{type(leaf).__qualname__}"
            if len(session.frames) > 1:
                raise NotFoldableError(what) from None
            raise CaptureError(
                f"the forward of {type(session.model).__name__} returns {what}, which is no tensor, number, string or "
                "container of them; return tensors (for a cache: use_cache=False)"
            ) from None
    writes.settle_buffers(session, assigned)
    return outputs, spec, fakes


def _reads(module: nn.Module, path: str, log: dict[tuple[str, str], Any]) -> Reads:
    """The attributes read inside ``module``, by relative path. What was read of other modules is the same for all."""
    parts = {id(part): name for name, part in descendants(module)}
    entries = []
    for (owner, name), value in log.items():
        if owner == path or owner.startswith(f"{path}."):
            entries.append((owner.removeprefix(path).removeprefix("."), name, value))
    return Reads(tuple(entries), parts)


def _shares(frame: Frame, results: list[torch.Tensor]) -> bool:
    met: set[int] = set()
    for fake in results:
        memory: Memory = frame.memories[storage_key(fake)]
        if memory.kind != "value" or id(memory) in met:
            return True
        met.add(id(memory))
    return False
