"""nn.Module + example inputs -> a verified, normalised Program, with repeated modules recorded once.

In: a model (real or on meta, never changed) and the arguments of one call. Out: :class:`Captured`.
How operations are recorded is :mod:`fxpar.capture.session`; which modules fold is :mod:`fxpar.capture.units`.
"""

from __future__ import annotations

import copy
import enum
import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxpar import trees
from fxpar.capture import modules, recorder
from fxpar.capture.footprint import footprints
from fxpar.capture.frame import sorted_inputs
from fxpar.capture.opaque import WholeCall
from fxpar.capture.session import Session
from fxpar.capture.signals import RestartError
from fxpar.capture.structure import Structure, worth_folding
from fxpar.capture.units import Unit, Units, finish_outputs, new_frame
from fxpar.capture.where import is_library, line_of
from fxpar.divide import divided
from fxpar.errors import CaptureError, FxparError
from fxpar.graph import Footprint, Graph, Input, Node, Program, Ref, map_refs
from fxpar.normalise import normalise

#: The keyword argument of a parallel model's call that goes to its loss function, as a tuple.
LOSS_ARGS = "loss_args"


@dataclass(frozen=True)
class Captured:
    """A captured program and what is needed to call it.

    ``in_spec`` rebuilds ``(args, kwargs)`` and ``out_spec`` the result; ``block_specs`` holds both for each block.
    ``callables`` are what ``call:<id>`` and ``whole:<id>`` nodes run. ``constants`` are tensors that are neither
    parameter, buffer nor input, by input name (see :meth:`constant_of`). ``notes`` are for the user.
    ``recompute`` has the blocks to run again in backward, by path: see :class:`~fxpar.capture.recompute.Recompute`.
    ``output_names`` has a name for each tensor of the result (:func:`fxpar.trees.result_names`).
    """

    program: Program
    in_spec: trees.Spec
    out_spec: trees.Spec
    block_specs: dict[str, tuple[trees.Spec, trees.Spec]] = field(default_factory=dict)
    callables: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recompute: dict[str, str] = field(default_factory=dict)
    output_names: tuple[str, ...] = ()

    def constant_of(self, model: nn.Module, module: str, name: str) -> torch.Tensor:
        """The tensor behind the input ``name`` of kind ``"constant"`` of the graph captured from ``module``."""
        if name in self.constants:
            return self.constants[name]
        return trees.attribute_at(model, f"{module}.{name}" if module else name)

    def divided(self, calls: Sequence[tuple[str, str]]) -> Captured:
        """The same with blocks of the kinds that a plan names for every call (:func:`fxpar.divide.divided`)."""
        program = divided(self.program, calls)
        pairs = zip(program.calls, self.program.calls, strict=True)
        return replace(self, program=program, block_specs={new: self.block_specs[old] for (_, new), (_, old) in pairs})


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    whole: Sequence[str] = (),
    fold: bool = True,
    loss_fn: Callable[..., Any] | None = None,
) -> Captured:
    """Record what ``model(*args, **kwargs)`` computes, without computing it and without changing ``model``.

    Modules whose qualified name matches a glob in ``whole`` are kept as one operation. Grad mode, autocast and
    train/eval mode are those of the caller. With ``loss_fn``, what is recorded is ``loss_fn(output, *loss_args)``, if
    ``kwargs`` has ``loss_args``. Raises :class:`CaptureError` when no graph can repeat the forward.

    >>> captured = capture(nn.Linear(3, 2, bias=False), (torch.zeros(4, 3),))
    >>> print(captured.program.top.text(canonical=True))
    %0 = parameter float32[2,3]~
    %1 = input float32[4,3]
    %2 float32[4,2]~ = aten.linear.default(%1, %0)
    return (%2,)
    """
    structure = Structure.of(model)
    kinds = worth_folding(model, structure) if fold else frozenset()
    banned: frozenset[int] = frozenset()
    collecting = gc.isenabled()
    gc.disable()  # many small objects are made, none of them garbage: collecting doubles the time
    try:
        while True:
            session = Session(model, structure, whole)
            units = Units(session, kinds, banned)
            try:
                return _capture_once(session, units, args, kwargs or {}, loss_fn)
            except RestartError as restart:
                kinds, banned = kinds | restart.fold, banned | restart.keep_apart
    finally:
        if collecting:
            gc.enable()


def _capture_once(
    session: Session,
    units: Units,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
) -> Captured:
    model = session.model
    _check_arguments(args, kwargs)
    tensors, in_spec, _ = trees.flatten_call(args, kwargs)
    input_names = trees.tensor_names(model.forward, args, kwargs)
    frame = new_frame(session, "top", "")
    session.frames.append(frame)
    try:
        with recorder.recording(session, session.fakes):
            fakes = [session.fakes.like(tensor) for tensor in tensors]
            for name, fake in zip(input_names, fakes, strict=True):
                frame.add_input("input", name, fake)
            session.call_block = units.call
            new_args, new_kwargs = trees.unflatten(in_spec, fakes)
            loss_args = new_kwargs.pop(LOSS_ARGS, None) if loss_fn else None
            result = modules.run(session, model, "", new_args, modules.without_cache(session, model, new_kwargs))
            if loss_fn and loss_args is not None:
                session.failed_in = "loss_fn"
                result = loss_fn(result, *loss_args)
            names = trees.result_names(result)
            outputs, out_spec, _ = finish_outputs(session, result, 0)
    except FxparError:
        raise
    except Exception as error:
        where = _user_line(error)
        if not where:
            raise
        place = f"in {session.failed_in or 'the root module'} at {where}"
        raise CaptureError(f"the forward raised {type(error).__name__} {place}: {error}") from error
    finally:
        session.attributes.restore()
    if session.attributes.changed:
        changed = ", ".join(dict.fromkeys(session.attributes.changed))
        session.notes.append(
            f"the forward changes {changed}: the program has them as they are now, and changes nothing"
        )
    units.check_repeats()
    modules.check_whole(session)
    top = frame.graph(outputs, session.structure.order(model))
    units.check_updates(top)
    return replace(_assemble(session, units, top, in_spec, out_spec), output_names=names)


_PLAIN = (str, bytes, bool, int, float, complex, enum.Enum, type, slice, range, torch.dtype, torch.device, torch.layout)


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What is not understood may hold tensors, or change from call to call without being seen."""
    for path, leaf in trees.named_leaves(args, kwargs):
        if leaf is None or isinstance(leaf, (torch.Tensor, *_PLAIN)) or callable(leaf):
            continue
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        advice = "pass its contents as a dict or a tuple, or register the class with torch.utils._pytree"
        if "cache" in type(leaf).__name__.lower():
            advice = "a captured program keeps no key/value cache: leave it out"
        raise CaptureError(f"the argument {path} is a {kind}, which cannot be looked into; {advice}")


def _user_line(error: Exception) -> str:
    """The innermost line of the user's code that ``error`` passed through."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return next((line_of(frame.f_code, line) for frame, line in reversed(frames) if not is_library(frame.f_code)), "")


def _assemble(session: Session, units: Units, top: Graph, in_spec: trees.Spec, out_spec: trees.Spec) -> Captured:
    """Blocks met once become part of the top level, equal ones become one, and everything is normalised."""
    blocks, block_of = units.merged()
    nodes: list[Node] = []
    splice = _Splice(session, top)
    for node in top.nodes:
        unit = units.units[int(node.op.removeprefix("block:"))] if node.op.startswith("block:") else None
        if unit is None:
            nodes.append(splice.renumber(node))
        elif unit.number in block_of:
            nodes.append(splice.renumber(_renamed(node, block_of[unit.number])))
        else:
            nodes.extend(splice.inline(node, unit))
    top = splice.graph(nodes)
    program = Program(
        normalise(top),
        {name: unit.normal(name) for name, unit in blocks.items()},
        session.structure.aliases(),
    )
    program = replace(
        program,
        unused=_unused(session, program),
        footprints=_footprints(session, program),
        recompute=tuple(session.recompute.paths),
    ).verify()
    specs = {name: (unit.in_spec, unit.out_spec) for name, unit in blocks.items()}
    notes = tuple(filter(None, (*session.notes, session.recompute.note())))
    return Captured(
        program,
        in_spec,
        out_spec,
        specs,
        dict(session.callables),
        dict(session.constants),
        notes,
        dict(session.recompute.paths),
    )


def _footprints(session: Session, program: Program) -> dict[str, tuple[Footprint, ...]]:
    callables: dict[str, Any] = {}
    for name, call in session.callables.items():
        whole = isinstance(call, WholeCall)
        callables[f"whole:{name}" if whole else f"call:{name}"] = (
            partial(call, _apart(session.model.get_submodule(call.path))) if whole else call
        )
    return {name: footprints(graph, session.fakes, callables) for name, graph in program.graphs().items()}


def _apart(module: nn.Module) -> nn.Module:
    """A copy of a module that can be run on fakes without a trace: no hook runs, and what it writes is its own."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, memo)
    for part in made.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return made


def _unused(session: Session, program: Program) -> dict[str, int]:
    """The parameters that no graph reads, and their bytes."""
    used = {item.name for item in program.top.inputs if item.kind == "parameter"}
    for name, block in program.blocks.items():
        held = [item.name for item in block.inputs if item.kind == "parameter"]
        used.update(program.name_of(path, item) for path in set(program.instances(name)) for item in held)
    known = [(session.structure.names[id(tensor)], tensor) for tensor in session.structure.tensors]
    return {
        names[0]: tensor.numel() * tensor.element_size()
        for (kind, names), tensor in known
        if kind == "parameter" and names[0] not in used
    }


def _renamed(node: Node, name: str) -> Node:
    return Node(
        f"block:{name}",
        node.args,
        node.kwargs,
        node.outputs,
        node.module,
        node.source,
        node.grad_enabled,
        node.autocast,
    )


class _Splice:
    """The top graph, growing by the values of the blocks that are put into it."""

    def __init__(self, session: Session, top: Graph) -> None:
        self.session, self.top = session, top
        self.values = list(top.values)
        self.inputs = list(top.inputs)
        self.updates = dict(top.updates)
        self.number = {(item.kind, item.name): item.value for item in top.inputs}
        self.moved: dict[int, int] = {}

    def renumber(self, node: Node) -> Node:
        if not self.moved:
            return node
        return Node(
            node.op,
            map_refs(node.args, self._move),
            tuple((name, map_refs(arg, self._move)) for name, arg in node.kwargs),
            node.outputs,
            node.module,
            node.source,
            node.grad_enabled,
            node.autocast,
        )

    def _move(self, ref: Ref) -> Ref:
        return Ref(self.moved.get(ref.value, ref.value))

    def inline(self, call: Node, unit: Unit) -> list[Node]:
        """The nodes of ``unit`` in place of its one call."""
        graph, given = unit.graph, iter(map_refs(call.args, self._move))
        inside: dict[int, Ref] = {}
        for item in graph.inputs:
            inside[item.value] = next(given) if item.kind == "input" else self._lifted(item.kind, item.name, unit)

        def change(ref: Ref) -> Ref:
            if ref.value not in inside:
                self.values.append(graph.values[ref.value])
                inside[ref.value] = Ref(len(self.values) - 1)
            return inside[ref.value]

        nodes = []
        for node in graph.nodes:
            args = map_refs(node.args, change)
            kwargs = tuple((name, map_refs(arg, change)) for name, arg in node.kwargs)
            outputs = tuple(None if out is None else change(Ref(out)).value for out in node.outputs)
            module = ".".join(filter(None, (call.module, node.module)))
            cast = {kind: (kind, dtype, on) for kind, dtype, on in (*call.autocast, *node.autocast)}
            nodes.append(
                Node(node.op, args, kwargs, outputs, module, node.source, node.grad_enabled, tuple(cast.values()))
            )
        for out, result in zip(call.outputs, graph.outputs, strict=True):
            if out is not None:
                self.moved[out] = change(result).value
        for name, value in graph.updates:
            self.updates[self.session.structure.first_name(f"{call.module}.{name}")] = change(Ref(value)).value
        return nodes

    def _lifted(self, kind: str, name: str, unit: Unit) -> Ref:
        real = unit.reals[name]
        _, full = self.session.name("", real)
        if (kind, full) not in self.number:
            place = next(item.value for item in unit.graph.inputs if (item.kind, item.name) == (kind, name))
            self.number[kind, full] = len(self.values)
            self.inputs.append(Input(kind, full, len(self.values)))
            self.values.append(unit.graph.values[place])
        return Ref(self.number[kind, full])

    def graph(self, nodes: list[Node]) -> Graph:
        inputs = sorted_inputs(self.inputs, self.session.structure.order(self.session.model))
        outputs = map_refs(self.top.outputs, self._move)
        updates = tuple((name, self.moved.get(value, value)) for name, value in self.updates.items())
        return Graph("top", tuple(self.values), tuple(inputs), tuple(nodes), outputs, updates)
