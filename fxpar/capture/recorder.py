"""The border to torch's private tracing machinery: nothing else in :mod:`fxpar.capture` touches it.

In: a listener (:class:`Listener`). Out: :func:`recording`, a context in which every operation of Python code arrives at
the listener *before autograd* (``linear``, ``scaled_dot_product_attention``, ``layer_norm`` whole), and fake tensors.
What is done with an operation is :mod:`fxpar.capture.session`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: What fake execution raises when an answer depends on the data.
DATA_DEPENDENT = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
UNSUPPORTED = (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)


#: In this context our own code may ask tensors for their shape and dtype without the listener hearing of it.
unheard = torch._C.DisableTorchFunction


class Listener(Protocol):
    """What :func:`recording` calls. Each method stands in for the thing it is named after."""

    device: torch.device

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def call_function(self, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any: ...
    def checkpoint(self) -> contextlib.AbstractContextManager[None]: ...
    def data_of(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def read_data(self, tensor: torch.Tensor, how: str) -> None: ...
    def requires_grad_changed(self, tensor: torch.Tensor) -> None: ...
    def refuse(self, what: str) -> None: ...
    def attribute_read(self, module: nn.Module, name: str, value: Any) -> None: ...
    def attribute_set(self, module: nn.Module, name: str, value: Any) -> None: ...


#: Marks an attribute that is not there.
MISSING = type("_Missing", (), {"__repr__": lambda self: "MISSING"})()


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """``module.__dict__``, without anybody being told that it was read."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def is_fake(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory (for as long as one of them lives)."""
    return tensor.untyped_storage()._cdata


class Fakes:
    """Makes fake tensors: shape, stride, dtype and autograd state, on ``device``, with no memory."""

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self.off = False
        self._seed = torch.zeros((), requires_grad=True)

    def like(self, tensor: torch.Tensor, *, leaf: bool | None = None) -> torch.Tensor:
        """A fresh fake with the metadata of ``tensor``; a leaf of autograd if ``tensor`` is one (or as told)."""
        grad = tensor.requires_grad
        grown = grad and not (tensor.is_leaf if leaf is None else leaf)
        fake = self.grown([(tuple(tensor.shape), tensor.stride(), tensor.dtype, grown)])[0]
        return fake.requires_grad_(True) if grad and not grown else fake

    def grown(self, metas: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]]) -> list[torch.Tensor]:
        """Fresh fakes that some operation might have produced: those that require grad are no leaves."""
        # Never an inference tensor: what is first met in such a region may be used again outside of it.
        with self.outside(), torch.inference_mode(False):
            fakes: list[torch.Tensor] = [
                FakeTensor(self.mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), self.device)
                for size, stride, dtype, _ in metas
            ]
            if not any(meta[3] for meta in metas):
                return fakes
            with torch.enable_grad():
                made = _Grow.apply(self._seed, [fake for fake, meta in zip(fakes, metas, strict=True) if meta[3]])
        grown = iter(made)
        return [next(grown) if meta[3] else fake for fake, meta in zip(fakes, metas, strict=True)]

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Run for real: no fake tensors, no recording."""
        was, self.off = self.off, True
        try:
            # Without the Python dispatcher no mode is even asked, which makes a new tensor twice as fast.
            quiet = torch._C._DisablePythonDispatcher()
            with unheard(), quiet, fake_tensor.unset_fake_temporarily():
                yield
        finally:
            self.off = was


class Allocations(TorchDispatchMode):
    """Counts the bytes of the memory that operations make, for as long as it is in use: ``now_bytes``, ``peak_bytes``.

    It sees backward operations of the same thread too, and what DTensors do underneath; not the scratch memory inside
    of an operation.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()
        for tensor in known:
            self._note(tensor, count=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.Tensor) and is_wrapper(kind) for kind in types):
            return NotImplemented  # it comes again as operations on what is inside
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor, *, count: bool = True) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes() if count else 0
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now_bytes -= size


def is_wrapper(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class have other tensors inside, and no memory of their own."""
    return hasattr(kind, "__tensor_flatten__")


class _Grow(torch.autograd.Function):
    """Gives fakes a place in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, _seed: torch.Tensor, fakes: list[torch.Tensor]) -> Any:
        return tuple(fakes)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        raise NotImplementedError


class _OperationMode(ProxyTorchDispatchMode):
    """Hands every operation, above autograd and autocast, to the listener.

    It derives from ``ProxyTorchDispatchMode`` only because the pre-dispatch slot takes no other type.
    """

    def __init__(self, listener: Listener, fakes: Fakes) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._listener, self._fakes = listener, fakes

    def __enter__(self) -> Any:
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *exc: Any) -> Any:
        return TorchDispatchMode.__exit__(self, *exc)

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._fakes.off:
            return func(*args, **(kwargs or {}))
        return self._listener.operation(func, args, kwargs or {})


class _PythonMode(TorchFunctionMode):
    """Sees the few Python-level accesses that never become operations."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._special = _special_accesses(listener)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = self._special.get(func)
        if special is not None:
            return special(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _special_accesses(listener: Listener) -> dict[Any, Callable[..., Any]]:
    tensor = torch.Tensor

    def data(_func: Any, x: torch.Tensor) -> Any:
        return listener.data_of(x)

    def reads(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        listener.read_data(x, getattr(func, "__name__", "read"))
        return func(x, *args, **kwargs)

    def changes(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if inside_function_transform():
            listener.refuse("a torch.func transform (grad, vjp, ...) runs")
        if not is_fake(x):
            listener.refuse("requires_grad of a parameter, buffer or constant is changed")
        result = func(x, *args, **kwargs)
        listener.requires_grad_changed(x)
        return result

    def device(func: Any, x: torch.Tensor) -> Any:
        found = func(x)
        return listener.device if found.type == "meta" else found

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*_args: Any, **_kwargs: Any) -> Any:
            listener.refuse(what)

        return refused

    def never(_func: Any, _x: torch.Tensor) -> bool:
        return False

    return {
        tensor.data.__get__: data,  # type: ignore[attr-defined]
        tensor.data.__set__: refuse("`.data` of a tensor is replaced"),  # type: ignore[attr-defined]
        tensor.device.__get__: device,  # type: ignore[attr-defined]
        tensor.is_meta.__get__: never,  # type: ignore[attr-defined]
        tensor.requires_grad_: changes,
        tensor.requires_grad.__set__: changes,  # type: ignore[attr-defined]
        tensor.tolist: reads,
        tensor.numpy: reads,
        tensor.__array__: reads,
        tensor.data_ptr: reads,
        tensor.register_hook: refuse("a gradient hook is registered on a tensor"),
        tensor.register_post_accumulate_grad_hook: refuse("a gradient hook is registered on a tensor"),
        tensor.retain_grad: refuse("retain_grad() is called on an intermediate tensor"),
        tensor.backward: refuse("backward() is called"),
        torch.autograd.grad: refuse("torch.autograd.grad is called"),
    }


def inside_function_transform() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def recording(listener: Listener, fakes: Fakes) -> Iterator[None]:
    """Everything that runs in this thread and context is told to ``listener``; nothing is changed afterwards."""
    torch_fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fused inference kernel of nn.TransformerEncoderLayer hides its parts: no rule could split it.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            _patched(listener),
            _eager_compile(),
            fakes.mode,
            enable_python_dispatcher(),
            _PythonMode(listener),
            _OperationMode(listener, fakes),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(torch_fast_path)


@contextlib.contextmanager
def _eager_compile() -> Iterator[None]:
    """Functions under ``torch.compile`` run as written (only when that machinery has been loaded at all)."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def _patched(listener: Listener) -> Iterator[None]:
    """Module calls, attribute accesses, custom Functions and checkpointing go to the listener in this thread."""
    thread = threading.get_ident()
    patches = _module_patches(listener, thread) + _function_patches(listener, thread)
    undo = []
    try:
        for owner, name, value in patches:
            undo.append((owner, name, owner.__dict__.get(name, MISSING)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(undo):
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_TABLES = ("_parameters", "_buffers", "_modules")


def _module_patches(listener: Listener, thread: int) -> list[tuple[Any, str, Any]]:
    call, set_attribute, delete_attribute = nn.Module.__call__, nn.Module.__setattr__, nn.Module.__delattr__
    get_attribute = nn.Module.__getattribute__
    read, current = listener.attribute_read, threading.get_ident
    getattr_code = nn.Module.__getattr__.__code__

    @functools.wraps(call)
    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if current() != thread:
            return call(self, *args, **kwargs)
        return listener.call_module(self, args, kwargs)

    def getattribute(self: nn.Module, name: str) -> Any:
        table = plain_attributes(self)
        if current() == thread:
            if name in table:
                read(self, name, table[name])
            elif name == "__dict__" and sys._getframe(1).f_code is not getattr_code:
                # Not nn.Module.__getattr__ looking its own tables up: anything may be read now.
                for key, value in table.items():
                    read(self, key, value)
        try:
            return get_attribute(self, name)
        except AttributeError:
            if current() == thread and not any(name in table.get(kind, ()) for kind in _TABLES):
                read(self, name, MISSING)
            raise

    def setattribute(self: nn.Module, name: str, value: Any) -> None:
        if current() == thread:
            listener.attribute_set(self, name, value)
        set_attribute(self, name, value)

    def delattribute(self: nn.Module, name: str) -> None:
        if current() == thread:
            listener.attribute_set(self, name, MISSING)
        delete_attribute(self, name)

    return [
        (nn.Module, "__call__", call_module),
        (nn.Module, "__getattribute__", getattribute),
        (nn.Module, "__setattr__", setattribute),
        (nn.Module, "__delattr__", delattribute),
    ]


def _function_patches(listener: Listener, thread: int) -> list[tuple[Any, str, Any]]:
    """User code may hold ``MyFunction.apply`` or ``checkpoint`` itself: patch what these look up when they run."""
    checkpoint = torch.utils.checkpoint

    def apply(cls: Any, *args: Any) -> Any:
        if cls is _Grow or threading.get_ident() != thread:
            return apply_function(cls, args)
        if cls is checkpoint.CheckpointFunction:
            with listener.checkpoint():
                return args[0](*args[2:])
        return listener.call_function(cls, args)

    def inline(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        with listener.checkpoint():
            yield

    return [
        (_SingleLevelFunction, "apply", classmethod(apply)),
        (checkpoint, "_checkpoint_without_reentrant_generator", inline),
    ]


def apply_function(cls: Any, args: tuple[Any, ...]) -> Any:
    """Run a custom Function as torch does outside a capture."""
    return super(_SingleLevelFunction, cls).apply(*args)
