"""What happens during a capture: operations become nodes, module calls become blocks, attribute accesses are noted.

In: the calls of :func:`fxpar.capture.recorder.recording`. Out: :class:`~fxpar.capture.frame.Frame` s, filled.
Putting the pieces together is :mod:`fxpar.capture.program`; what writes mean is :mod:`fxpar.capture.writes`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxpar.capture import modules, opaque, recorder, writes
from fxpar.capture.attributes import Attributes
from fxpar.capture.frame import Alias, Frame, constant, dtype_name
from fxpar.capture.functional import is_known_view, view_step, written_arguments
from fxpar.capture.known import MOST_ELEMENTS, Known
from fxpar.capture.recompute import Recompute
from fxpar.capture.recorder import Fakes, is_fake, storage_key
from fxpar.capture.signals import NotFoldableError
from fxpar.capture.structure import STRUCTURAL, Structure
from fxpar.capture.where import Where, source_line
from fxpar.errors import CaptureError
from fxpar.graph import Node, Ref
from fxpar.normalise.call import RANDOM

_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")


class Info:
    """What has to be known about an operation, once."""

    __slots__ = ("concrete", "factory", "name", "view", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        self.name = f"{namespace}.{name}.{schema.overload_name or 'default'}"
        self.writes = written_arguments(func) if schema.is_mutable else ()
        self.view = is_known_view(func)
        self.factory = name.endswith("_like")
        random = torch.Tag.nondeterministic_seeded in func.tags
        random = random or name in RANDOM or "scaled_dot_product" in name
        self.concrete = namespace == "aten" and not random and name not in _EMPTY


class Session:
    """One capture of ``model``. ``frames`` and ``modules`` are the units and modules being run, innermost last."""

    def __init__(self, model: nn.Module, structure: Structure, whole: Sequence[str]) -> None:
        self.model, self.structure, self.whole = model, structure, tuple(whole)
        self.device = _device_of(structure.tensors)
        self.fakes = Fakes(self.device)
        self.frames: list[Frame] = []
        self.modules: list[str] = []
        self.known = Known(self.fakes)
        self.constants: dict[str, torch.Tensor] = {}
        self.callables: dict[str, Any] = {}
        self.notes: list[str] = []
        self.recompute = Recompute()
        self.calls: dict[int, int] = {}
        self.assigned: list[tuple[nn.Module, str]] = []
        self.failed_in = ""
        self.paused = False
        self.attributes = Attributes(structure)
        self.call_block: Callable[[nn.Module, str, Any, Any], Any] | None = None
        self._info: dict[Any, Info] = {}
        self._constant_names: dict[int, str] = {}
        self.kept_whole: set[str] = set()
        self.devices = tuple(dict.fromkeys(("cpu", self.device.type)))

    # Where things are -------------------------------------------------------------------------------------------

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def path(self) -> str:
        return self.modules[-1] if self.modules else ""

    @property
    def full_path(self) -> str:
        """The running module's path from the root."""
        return (self.frame.prefix + self.path if self.frames else self.path).rstrip(".")

    def where(self) -> Where:
        return Where(self.full_path, source_line(sys._getframe(1)))

    def _advice(self) -> str:
        path = self.full_path
        return f"keep that module as it is with whole=({path!r},), or " if path else ""

    def refuse(self, what: str) -> None:
        raise CaptureError(
            f"{what} {self.where()}, which a captured graph cannot repeat; {self._advice()}change the forward"
        )

    def autocast(self) -> tuple[tuple[str, str, bool], ...]:
        """What autocast does now, per device type; the dtype is left out where it is off."""
        state = []
        for kind in self.devices:
            on = torch.is_autocast_enabled(kind)
            state.append((kind, dtype_name(torch.get_autocast_dtype(kind)) if on else "", on))
        return tuple(state)

    def _autocast_beyond(self) -> tuple[tuple[str, str, bool], ...]:
        now, outside = self.autocast(), self.frame.autocast
        if now == outside:
            return ()
        return tuple(
            (kind, dtype or dtype_name(torch.get_autocast_dtype(kind)), on)
            for (kind, dtype, on), before in zip(now, outside, strict=True)
            if (kind, dtype, on) != before
        )

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run operations on fakes without recording them."""
        was, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = was

    # Tensors ----------------------------------------------------------------------------------------------------

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake that stands for ``tensor`` everywhere in this capture."""
        fake = self.known.fakes.get(id(tensor))
        if fake is None:
            if is_fake(tensor):
                return tensor
            if hasattr(tensor, "placements"):
                self.refuse("a DTensor is used: the model has been sharded already")
            fake = self.fakes.like(tensor)
            self.known.stand_in(tensor, fake)
        return fake

    def read(self, fake: torch.Tensor) -> int:
        """The value number of ``fake`` in the current frame; parameters and the like become inputs when first read."""
        frame = self.frame
        if id(fake) not in frame.aliases:
            tensor = self.known.behind.get(id(fake))
            if tensor is not None and id(fake) not in self.known.values:
                self.lift(frame, tensor)
            elif len(self.frames) > 1:
                raise NotFoldableError(f"{self.path} uses a tensor of the surrounding modules that it is not given")
        return frame.read(fake, self.where)

    def lift(self, frame: Frame, tensor: torch.Tensor) -> int:
        """Make a real tensor (parameter, buffer, or any other) an input of ``frame``."""
        kind, name = self.name(frame.prefix, tensor)
        frame.reals[name] = tensor
        return frame.add_input(kind, name, self.fake_of(tensor))

    def name(self, prefix: str, tensor: torch.Tensor) -> tuple[str, str]:
        """The kind of a real tensor, and its name in the graph of the module with this path and a dot."""
        kind, names = self.structure.names.get(id(tensor), ("constant", []))
        if names:
            for name in names:
                if name.startswith(prefix):
                    return kind, name.removeprefix(prefix)
            raise NotFoldableError(f"{self.path} uses {names[0]}, which lies outside it")
        if tensor.requires_grad:
            self.refuse("a tensor that requires grad and is neither a parameter nor an input is used")
        path = self.attributes.tensor_path(tensor)
        if path is not None and path.startswith(prefix):
            name = path.removeprefix(prefix)
        else:
            name = self._constant_names.setdefault(id(tensor), f"constant.{len(self._constant_names)}")
        if path is None or not prefix:
            self.constants[name] = tensor
        return kind, name

    def data_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor.data``: a detached view, recorded as such."""
        return tensor.detach()

    def read_data(self, tensor: torch.Tensor, how: str) -> None:
        if not self.known.has_value(tensor):
            self.data_dependent(f"the data of a tensor is read ({how})")

    def requires_grad_changed(self, tensor: torch.Tensor) -> None:
        alias = self.frame.alias(tensor)
        if alias is not None:
            value = self.frame.values[alias.value]
            self.frame.values[alias.value] = type(value)(value.shape, value.dtype, tensor.requires_grad)

    def data_dependent(self, what: str, cause: BaseException | None = None) -> None:
        raise CaptureError(
            f"{what} {self.where()}: what the model does next depends on the numbers in its inputs or parameters, so "
            f"no one graph can hold it; {self._advice()}make the forward independent of the data (torch.where instead "
            "of if)"
        ) from cause

    # Operations -------------------------------------------------------------------------------------------------

    def info(self, func: Any) -> Info:
        info = self._info.get(func)
        if info is None:
            if not hasattr(func, "_schema"):
                self.refuse(f"the higher-order operation {func} is called")
            info = self._info[func] = Info(func)
        return info

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fakes and record it."""
        info = self.info(func)
        operands: list[torch.Tensor] = []
        fake_args = self._fake(args, operands)
        fake_kwargs = {name: self._fake(arg, operands) for name, arg in kwargs.items()}
        if self.paused:
            return func(*fake_args, **fake_kwargs)
        if recorder.inside_function_transform():
            self.refuse("a torch.func transform (vmap, grad, ...) runs")
        if info.name == "aten.lift_fresh.default" and not is_fake(args[0]):
            return self._literal(args[0])
        if writes.hides_writes(info.name, fake_args, fake_kwargs):
            return writes.normalise_batch(self, func, fake_args, fake_kwargs)
        numbers = {id(fake): self.read(fake) for fake in operands}
        concrete = info.concrete and self.known.have_values(operands)
        if info.writes:
            return writes.write(self, func, info, args, kwargs, fake_args, fake_kwargs, numbers, concrete)
        try:
            with self.pause():  # an operation may be implemented by a custom Function: that is its own affair
                out = func(*fake_args, **fake_kwargs)
        except recorder.DATA_DEPENDENT as error:
            if not concrete:
                self.data_dependent(f"{info.name} is called", error)
            out = self.known.imitate(self.known.compute(func, fake_args, fake_kwargs))
        except recorder.UNSUPPORTED as error:
            self.refuse(f"{info.name}, which cannot run without data ({type(error).__name__}), is called")
        if isinstance(out, torch.Tensor) and (not operands or info.factory):
            return self._factory(func, info, fake_args, fake_kwargs, numbers, out, concrete)
        self.record(info.name, func, fake_args, fake_kwargs, numbers, out, info.view)
        return self.known.result(func, fake_args, fake_kwargs, out) if concrete else out

    def _factory(
        self, func: Any, info: Info, args: Any, kwargs: Any, numbers: dict[int, int], out: torch.Tensor, concrete: bool
    ) -> torch.Tensor:
        """The result of ``torch.zeros``, ``torch.rand_like`` and the like.

        Torch copies such a result, and with it loses sight of it, if anybody else holds it: so only a twin is kept.
        """
        twin = self.fakes.like(out)
        self.record(info.name, func, args, kwargs, numbers, twin, False)
        if concrete and out.numel() <= MOST_ELEMENTS:
            out = self.known.compute(func, args, kwargs)
            with self.fakes.outside():
                self.known.set_value(twin, out.detach())
        self.known.stand_in_while_alive(out, twin)
        return out

    def _literal(self, tensor: torch.Tensor) -> torch.Tensor:
        """``torch.tensor(...)`` in a forward: a number becomes an operation, an array a constant of the program."""
        if tensor.dim() == 0:
            fake = self.fakes.like(tensor)
            value = self.frame.add_fresh(fake)
            with self.fakes.outside():
                args = ((), tensor.item())
            self.frame.nodes.append(self.node("aten.full.default", args, {"dtype": tensor.dtype}, {}, (value,)))
        else:
            self.lift(self.frame, tensor)
            fake = self.known.fakes[id(tensor)]
        self.known.set_value(fake, tensor)
        return tensor

    def _fake(self, arg: Any, operands: list[torch.Tensor]) -> Any:
        """``arg`` with fakes for tensors and the run's device for meta; the fakes are added to ``operands``."""
        if isinstance(arg, torch.Tensor):
            fake = self.fake_of(arg)
            operands.append(fake)
            return fake
        if isinstance(arg, (list, tuple)):
            return type(arg)([self._fake(item, operands) for item in arg]) if type(arg) in (list, tuple) else arg
        if isinstance(arg, torch.device) and arg.type == "meta":
            return self.device
        return arg

    def encode(self, arg: Any, numbers: dict[int, int], what: str) -> Any:
        """``arg`` as a node holds it: fakes become :class:`Ref` s by ``numbers``."""
        if isinstance(arg, torch.Tensor):
            return Ref(numbers[id(arg)])
        if isinstance(arg, (list, tuple)):
            return tuple(self.encode(item, numbers, what) for item in arg)
        try:
            return constant(arg)
        except TypeError:
            self.refuse(f"{what} is given a {type(arg).__qualname__}")

    def record(
        self, op: str, func: Any, args: Any, kwargs: dict[str, Any], numbers: dict[int, int], out: Any, view: bool
    ) -> None:
        """Append the node that made ``out``, unless everything in ``out`` was there before."""
        frame = self.frame
        items = out if isinstance(out, (tuple, list)) else (out,)
        tensors = [item for item in items if isinstance(item, torch.Tensor)]
        if not tensors or all(id(item) in frame.aliases for item in tensors):
            return
        values: list[int | None] = []
        offset = 0
        for index, item in enumerate(items):
            if not isinstance(item, torch.Tensor):
                values.append(None)
                continue
            memory = frame.memories.get(storage_key(item))
            if memory is None:
                values.append(frame.add_fresh(item))
                continue
            value = frame.new_value(item)
            values.append(value)
            base = frame.alias(args[0]) if view and args and isinstance(args[0], torch.Tensor) else None
            path: tuple[Any, ...] = ()
            if base is not None and base.memory is memory:
                view_of_it = view_step(func, args, kwargs, None if item is out else index, item, offset)
                path = (*base.path, view_of_it)
                offset += view_of_it.size
            else:
                memory.shared = memory.shared or f"{op} gave another view of it"
            frame.aliases[id(item)] = Alias(memory, path, value)
        frame.nodes.append(self.node(op, args, kwargs, numbers, tuple(values)))

    def node(
        self, op: str, args: Any, kwargs: dict[str, Any], numbers: dict[int, int], outputs: tuple[int | None, ...]
    ) -> Node:
        """A node for here and now."""
        return Node(
            op,
            self.encode(tuple(args), numbers, op),
            tuple((name, self.encode(arg, numbers, op)) for name, arg in kwargs.items()),
            outputs,
            self.path,
            source_line(sys._getframe(2)),
            torch.is_grad_enabled(),
            self._autocast_beyond(),
        )

    def emit(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run and record an operation on fakes that stand for values (not for the model's own tensors)."""
        with self.pause():
            out = func(*args, **kwargs)
        numbers = {id(arg): self.frame.numbers[id(arg)] for arg in args if isinstance(arg, torch.Tensor)}
        for arg in args:
            if isinstance(arg, (list, tuple)):
                numbers.update(
                    (id(item), self.frame.numbers[id(item)]) for item in arg if isinstance(item, torch.Tensor)
                )
        if id(out) not in self.frame.numbers:
            value = self.frame.new_value(out)
            self.frame.nodes.append(self.node(self.info(func).name, args, kwargs, numbers, (value,)))
        return out

    # Modules and attributes -------------------------------------------------------------------------------------

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return modules.call(self, module, args, kwargs)

    def checkpoint(self) -> contextlib.AbstractContextManager[None]:
        return self.recompute.region(self.frame)

    def call_function(self, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
        if self.paused:
            return recorder.apply_function(cls, args)
        return opaque.call_function(self, cls, args)

    def attribute_read(self, module: nn.Module, name: str, value: Any) -> None:
        if name not in STRUCTURAL:
            self.attributes.read(module, name, value)

    def attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        if self.attributes.write(module, name, value):
            self.assigned.append((module, name))


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    """Where the program would run: the device of the parameters; the CPU if they have none."""
    for tensor in tensors:
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
