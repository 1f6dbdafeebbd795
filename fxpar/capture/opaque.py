"""What is not looked into: custom autograd Functions, and modules the user wants kept whole.

In: the call as the model makes it. Out: one node, and a record with which the runtime makes the same call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpar import trees
from fxpar.capture import recorder
from fxpar.capture.recorder import plain_attributes
from fxpar.capture.structure import descendants
from fxpar.errors import CaptureError

if TYPE_CHECKING:
    from fxpar.capture.session import Session


@dataclass(frozen=True)
class FunctionCall:
    """A custom autograd Function with its constant arguments: takes the tensors, gives the flat outputs."""

    function: type[torch.autograd.Function]
    in_spec: trees.Spec

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        return flat(self.function.apply(*trees.unflatten(self.in_spec, tensors)))


@dataclass(frozen=True)
class WholeCall:
    """A module kept whole: takes its parameters and buffers (``names``) and its inputs, gives the flat outputs.

    ``path`` is where the module was met; others that are called by the same node of a block are built like it.
    """

    path: str
    names: tuple[str, ...]
    in_spec: trees.Spec

    def __call__(self, module: nn.Module, *tensors: torch.Tensor) -> tuple[Any, ...]:
        held = dict(zip(self.names, tensors[: len(self.names)], strict=True))
        args, kwargs = trees.unflatten(self.in_spec, tensors[len(self.names) :])
        return flat(torch.func.functional_call(module, held, args, kwargs))


def flat(result: Any) -> tuple[Any, ...]:
    """Every leaf of a result, tensors and others."""
    tensors, spec = trees.flatten(result)
    rest = iter(tensors)
    return tuple(next(rest) if leaf is trees.TENSOR else leaf for leaf in spec.leaves)


def call_function(session: Session, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """Record ``cls.apply(*args)`` as one node that keeps its own backward."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    tensors, spec = trees.flatten(args)
    if any(isinstance(leaf, nn.Module) for leaf in spec.leaves):
        session.refuse(f"the autograd.Function {name}, which is given a module, is called")
    fakes = [session.fake_of(tensor) for tensor in tensors]
    numbers = {id(fake): session.read(fake) for fake in fakes}
    call = FunctionCall(cls, spec)
    with session.pause():
        result = _attempt(
            session, f"the autograd.Function {name}", lambda: recorder.apply_function(cls, trees.unflatten(spec, fakes))
        )
    if any(item is fake for item in flat(result) for fake in fakes):
        session.refuse(f"the autograd.Function {name}, which changes its input in place, is called")
    identity = _register(session, cls.__qualname__, call)
    return _record(session, f"call:{identity}", fakes, numbers, result)


def _register(session: Session, name: str, call: FunctionCall | WholeCall) -> str:
    """The id of ``call``: the same for the same callable with the same constants."""
    count = 0
    while True:
        identity = f"{name}.{count}" if count else name
        if session.callables.setdefault(identity, call) == call:
            return identity
        count += 1


def call_whole(session: Session, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call of ``module`` as one node that reads its parameters and buffers, then its inputs."""
    held = {name: tensor for table in (module.named_parameters(), module.named_buffers()) for name, tensor in table}
    tensors, spec, _ = trees.flatten_call(args, kwargs)
    fakes = [session.fake_of(tensor) for tensor in (*held.values(), *tensors)]
    numbers = {id(fake): session.read(fake) for fake in fakes}
    identity = _register(session, path, WholeCall(path, tuple(held), spec))
    for _, part in descendants(module):
        # When it runs for real it may read anything.
        for name, value in plain_attributes(part).items():
            session.attribute_read(part, name, value)
    mark = session.attributes.mark()
    inputs = fakes[len(held) :]
    new_args, new_kwargs = trees.unflatten(spec, inputs)

    def run() -> Any:
        return module.forward(*new_args, **new_kwargs)

    try:
        with session.pause():
            result = run()
    except Exception:
        # It depends on data, or has an operation that knows no fakes: only running it can tell.
        result = _learn(session, module, path, spec, inputs)
    finally:
        session.attributes.restore(mark)
    known = {id(fake) for fake in fakes}
    if any(id(item) in known for item in flat(result)):
        result = trees.unflatten(*_fresh(session, result, known))
    return _record(session, f"whole:{identity}", fakes, numbers, result)


def _fresh(session: Session, result: Any, known: set[int]) -> tuple[trees.Spec, list[torch.Tensor]]:
    tensors, spec = trees.flatten(result)
    return spec, [session.fakes.like(tensor, leaf=False) if id(tensor) in known else tensor for tensor in tensors]


def _learn(session: Session, module: nn.Module, path: str, spec: trees.Spec, inputs: list[torch.Tensor]) -> Any:
    """What a data-dependent module gives: run a copy of it, twice, on real tensors of the right shapes."""
    kinds = []
    with session.fakes.outside(), torch.random.fork_rng(devices=[]):
        for make in (torch.zeros, torch.ones):
            twin = _real_copy(module, session.device)
            values = [make(t.shape, dtype=t.dtype, device=session.device) for t in inputs]
            args, kwargs = trees.unflatten(spec, values)
            with torch.no_grad():
                result = _attempt(session, f"module {path!r} kept whole", lambda: twin.forward(*args, **kwargs))  # noqa: B023
            found, out_spec = trees.flatten(result)
            kinds.append((out_spec, [(tuple(t.shape), t.stride(), t.dtype) for t in found]))
    (out_spec, metas), other = kinds
    if (out_spec, metas) != other:
        raise CaptureError(f"module {path!r} gives results whose shapes depend on the data; a captured graph is static")
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*module.parameters(), *inputs))
    grown = [(*meta, grad and (meta[2].is_floating_point or meta[2].is_complex)) for meta in metas]
    return trees.unflatten(out_spec, session.fakes.grown(grown))


def _real_copy(module: nn.Module, device: torch.device) -> nn.Module:
    if all(tensor.device.type != "meta" for tensor in (*module.parameters(), *module.buffers())):
        return copy.deepcopy(module)
    twin = copy.deepcopy(module).to_empty(device=device)
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.detach().zero_()
    return twin


def _attempt(session: Session, what: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{what} cannot be run without data ({type(error).__name__}: {error}) {session.where()}"
        ) from error


def _record(session: Session, op: str, fakes: list[torch.Tensor], numbers: dict[int, int], result: Any) -> Any:
    session.record(op, None, fakes, {}, numbers, flat(result), False)
    return result
