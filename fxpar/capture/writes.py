"""Operations that write: recorded as the functional operation and the new value of the memory they wrote to.

In: an operation of a :class:`~fxpar.capture.session.Session` whose schema declares a write, or batch norm, whose schema
hides it. Out: nodes without writes; buffers that changed end up in ``Graph.updates``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fxpar.capture.frame import Alias, Frame
from fxpar.capture.functional import functional_form, put_back, replay, view_step
from fxpar.capture.signals import NotFoldableError, RestartError
from fxpar.errors import CaptureError

if TYPE_CHECKING:
    from fxpar.capture.session import Info, Session

aten = torch.ops.aten


def write(
    session: Session,
    func: Any,
    info: Info,
    args: Any,
    kwargs: dict[str, Any],
    fake_args: Any,
    fake_kwargs: dict[str, Any],
    numbers: dict[int, int],
    concrete: bool,
) -> Any:
    """Run a writing operation on fakes, record what it computes, and return what the model expects back."""
    target = _target(session, info, fake_args, fake_kwargs)
    alias = session.frame.alias(target)
    assert alias is not None
    if info.name == "aten.detach_.default" and not target.requires_grad:
        return _user_object(info, args, kwargs)
    _check_writable(session, alias, target, info)
    if torch.Tag.inplace_view in func.tags:
        return _rearrange(session, func, info, args, fake_args, fake_kwargs, target, alias)
    values = {key: session.frame.fakes[number] for key, number in numbers.items()}
    result = func(*fake_args, **fake_kwargs)
    new = _computed(session, func, info, fake_args, fake_kwargs, values, values[id(target)])
    if new.dtype != target.dtype:
        new = session.emit(aten.to.dtype, new, target.dtype)
    if new.shape != target.shape:
        new = session.emit(aten.expand.default, new, list(target.shape))
    store(session, alias, new, info.name)
    if concrete:
        session.known.compute(func, fake_args, fake_kwargs)
    else:
        _forget_value(session, alias)
    given = _user_object(info, args, kwargs)
    return given if result is target else result


def store(session: Session, alias: Alias, new: torch.Tensor, what: str) -> None:
    """Make ``new`` the content of the part of memory that ``alias`` shows."""
    frame, memory = session.frame, alias.memory
    bases = [frame.fakes[memory.value]] if alias.path else []
    for view in alias.path[:-1]:
        bases.append(replay(view, bases[-1], session.emit))
    whole: torch.Tensor | None = new
    for view, base in zip(reversed(alias.path), reversed(bases), strict=True):
        whole = put_back(view, base, whole, session.emit) if whole is not None else None
        if whole is None:
            session.refuse(f"{what} writes through the view {view.name}")
    assert whole is not None
    memory.version += 1
    memory.value = frame.numbers[id(whole)]
    alias.value, alias.version = frame.numbers[id(new)], memory.version


def refresh(session: Session) -> Callable[[Frame, torch.Tensor, Alias], int]:
    """What brings a tensor up to date whose memory has been written to through another one."""

    def up_to_date(frame: Frame, _fake: torch.Tensor, alias: Alias) -> int:
        current = frame.fakes[alias.memory.value]
        for view in alias.path:
            current = replay(view, current, session.emit)
        alias.value, alias.version = frame.numbers[id(current)], alias.memory.version
        return alias.value

    return up_to_date


def _target(session: Session, info: Info, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name, _ in info.writes]
    found: list[Any] = [item for item in given if item is not None]
    if len(found) != 1 or not isinstance(found[0], torch.Tensor):
        session.refuse(f"{info.name}, which writes to several tensors, is called")
    target: torch.Tensor = found[0]
    return target


def _user_object(info: Info, args: Any, kwargs: dict[str, Any]) -> Any:
    place, name, _ = info.writes[0]
    return args[place] if place < len(args) else kwargs.get(name)


def _check_writable(session: Session, alias: Alias, target: torch.Tensor, info: Info) -> None:
    memory = alias.memory
    if memory.keep_apart is not None:
        raise RestartError(keep_apart=frozenset({memory.keep_apart}))
    if memory.kind in ("parameter", "constant", "input") or memory.shared:
        if len(session.frames) > 1 and memory.kind in ("input", "value"):
            raise NotFoldableError(f"{info.name} writes to what the block is given")
        advice = {
            "parameter": f"the parameter {memory.name!r} is changed by {info.name}: change it between calls",
            "constant": f"the tensor {memory.name!r} is changed by {info.name}: register it as a buffer",
            "input": f"the input {memory.name!r} is changed by {info.name}: clone it first",
        }
        what = advice.get(memory.kind, f"{info.name} writes to memory that cannot be followed: {memory.shared}")
        raise CaptureError(f"{what} ({session.where()})")
    if not torch.is_grad_enabled() and target.requires_grad:
        raise CaptureError(
            f"{info.name} changes a tensor that requires grad while gradients are off ({session.where()}): autograd "
            "would then report the gradient of the old value; use torch.where or a clone"
        )


def _computed(
    session: Session,
    func: Any,
    info: Info,
    args: Any,
    kwargs: dict[str, Any],
    values: dict[int, torch.Tensor],
    old: torch.Tensor,
) -> torch.Tensor:
    """What the operation computes, as the fake of a recorded value."""
    name = func._schema.name
    if name in ("aten::copy_", "aten::fill_") and isinstance(args[1], torch.Tensor):
        return values[id(args[1])]
    if name == "aten::zero_":
        return session.emit(aten.zeros_like.default, old)
    if name == "aten::fill_":
        return session.emit(aten.full_like.default, old, args[1])
    form = functional_form(func)
    if form is None:
        session.refuse(f"{info.name}, which has no functional form, is called")

    def value(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return values[id(arg)]
        return type(arg)(map(value, arg)) if type(arg) in (list, tuple) else arg

    outs = {name for _, name, is_out in info.writes if is_out}
    kept = {key: value(arg) for key, arg in kwargs.items() if key not in outs}
    for place, argument in enumerate(func._schema.arguments):
        # The functional form may ask for what this one has a default for.
        if place >= len(args) and argument.name not in outs and argument.default_value is not None:
            kept.setdefault(argument.name, argument.default_value)
    return session.emit(form, *map(value, args), **kept)


def _rearrange(
    session: Session,
    func: Any,
    info: Info,
    args: Any,
    fake_args: Any,
    kwargs: dict[str, Any],
    target: Any,
    alias: Alias,
) -> Any:
    """``t_()``, ``unsqueeze_()`` ...: the tensor becomes another view of its memory."""
    form = functional_form(func)
    if form is None:
        session.refuse(f"{info.name}, which changes what a tensor looks at, is called")
    frame = session.frame
    if id(target) in frame.numbers:
        # The tensor is about to change its shape; what it was as a value must not.
        number = frame.numbers.pop(id(target))
        frame.fakes[number] = session.fakes.like(target, leaf=False)
        frame.numbers[id(frame.fakes[number])] = number
        session.known.keep(target)
    before = frame.fakes[frame.read(target, session.where)]
    new = session.emit(form, before, *fake_args[1:], **kwargs)
    step = view_step(form, fake_args, kwargs, None, new, 0)
    func(*fake_args, **kwargs)
    alias.path = (*alias.path, step)
    alias.value = frame.numbers[id(new)]
    _forget_value(session, alias)
    return args[0]


def _forget_value(session: Session, alias: Alias) -> None:
    """What has been mixed with inputs is no longer known, nor is what shares memory with it."""
    if session.known.values:
        for key, other in session.frame.aliases.items():
            if other.memory is alias.memory:
                session.known.values.pop(key, None)


def hides_writes(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is a normalisation that updates its running statistics."""
    if name not in ("aten.batch_norm.default", "aten.instance_norm.default"):
        return False
    running, training = _given(args, kwargs, 3, "running_mean"), _given(args, kwargs, 5, "training")
    return running is not None and bool(training)


def _given(args: Any, kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def normalise_batch(session: Session, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Batch norm in training, as one functional operation and the running statistics computed beside it."""
    if func is not aten.batch_norm.default or kwargs:
        session.refuse("an instance norm that updates running statistics is called")
    x, weight, bias, mean, var, _, momentum, eps, cudnn = args
    frame = session.frame
    numbers = {id(t): session.read(t) for t in (x, weight, bias, mean, var) if t is not None}
    plain = (x, weight, bias, None, None, True, momentum, eps, cudnn)
    out = func(*plain)
    session.record("aten.batch_norm.default", func, plain, {}, numbers, out, False)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    with torch.no_grad():
        data = session.emit(aten.detach.default, frame.fakes[numbers[id(x)]])
        if data.dtype != mean.dtype:
            data = session.emit(aten.to.dtype, data, mean.dtype)
        for running, statistic in (
            (mean, session.emit(aten.mean.dim, data, dims)),
            (var, session.emit(aten.var.correction, data, dims, correction=1)),
        ):
            old = frame.fakes[numbers[id(running)]]
            kept = session.emit(aten.mul.Tensor, old, 1.0 - momentum)
            new = session.emit(aten.add.Tensor, kept, session.emit(aten.mul.Tensor, statistic, momentum))
            alias = frame.alias(running)
            assert alias is not None
            _check_writable(session, alias, running, session.info(func))
            store(session, alias, new, "aten.batch_norm.default")
            _forget_value(session, alias)
    return out


def settle_buffers(session: Session, first_assigned: int) -> None:
    """Put the buffers that the unit changed, in place or by assignment, into the frame's updates."""
    frame = session.frame
    for memory in frame.memories.values():
        if memory.kind == "buffer" and memory.version > 0:
            frame.updates[memory.name] = memory.value
    for module, name in session.assigned[first_assigned:]:
        path = session.structure.paths[id(module)]
        full = f"{path}.{name}" if path else name
        tensor = module._buffers[name]
        before = session.attributes.original_buffer(module, name)
        if tensor is None or before is None or (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise CaptureError(f"the forward sets the buffer {full!r} to something of another shape or dtype")
        if tensor is not before:
            frame.updates[full.removeprefix(frame.prefix)] = session.read(session.fake_of(tensor))
    del session.assigned[first_assigned:]
