"""Make a module parallel in place: sharded parameters, and forwards that run rewritten graphs.

In: a model, its first :class:`~fxpar.runtime.bodies.Variant`, layouts of parameters, a DeviceMesh. Out: the same object
with the same class, names and ``state_dict`` keys. The root and the folded blocks are still called as modules, so their
hooks, FSDP2 and activation checkpointing work; parameters are read when a graph runs. Nothing is planned here: for
a new way of calling the model, :func:`apply`'s ``recapture`` is asked.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fxpar.errors import CallError
from fxpar.layout import Layout
from fxpar.plans import Plan
from fxpar.runtime import checkpoints, records
from fxpar.runtime.again import made_again
from fxpar.runtime.averaging import averaged
from fxpar.runtime.bodies import Body, Variant, flat_result
from fxpar.runtime.guards import allow_use, refuse_use
from fxpar.runtime.modes import restored_modes
from fxpar.runtime.random import SharedStream
from fxpar.runtime.shards import check_parameters, mesh_device, shard_parameters, share_buffers
from fxpar.runtime.skeleton import mode_key
from fxpar.runtime.unchanged import piece_of
from fxpar.trees import attribute_at, flatten, flatten_call, unflatten

#: Called with the model and a call's arguments that no variant fits yet.
Recapture = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Variant]

MOST_VARIANTS = 16
WARN_VARIANTS = 8


class _Part:
    """What a parallel module knows about itself: where the tensors that its graphs read are found."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules(remove_duplicate=False))

    def value(self, name: str) -> Any:
        """The parameter, buffer or attribute ``name``, as it is now."""
        path, _, attribute = name.rpartition(".")
        return getattr(self.modules[path], attribute)

    def tensor(self, name: str) -> Any:
        """The same; parameters as this rank's piece."""
        value = self.value(name)
        return piece_of(value) if isinstance(value, DTensor) else value

    def held(self, kind: str, name: str, variant: Variant) -> Any:
        """What a graph reads beside its call's tensors; constants belong to the capture, all else to the module."""
        if kind != "constant":
            return self.tensor(name)
        return variant.constants[name] if name in variant.constants else attribute_at(self.modules[""], name)

    def owners(self, body: Body, flat: list[Any]) -> list[tuple[Tensor, DTensor]]:
        """The DTensors that ``body`` reads, each with its piece in ``flat``."""
        pairs = [(piece, self.value(name)) for (kind, name), piece in zip(body.reads, flat, strict=True)
                 if kind == "parameter"]  # fmt: skip
        return [(piece, value) for piece, value in pairs if isinstance(value, DTensor)]

    def update(self, name: str, value: Tensor) -> None:
        self.tensor(name).copy_(value)

    def run(
        self, body: Body, variant: Variant, tensors: list[Tensor], *before: Any, runs_again: bool = False
    ) -> list[Any]:
        """The flat outputs of ``body``; buffers are updated. What ``runs_again`` in backward keeps nothing anyway."""
        given = iter(tensors)
        flat = [next(given) if kind == "input" else self.held(kind, name, variant) for kind, name in body.reads]
        with made_again(body.again and not runs_again, functools.partial(self.owners, body, flat)):
            results = body.graph(*before, *flat)
        count = len(body.tensors)
        for name, value in zip(body.updates, results[count:], strict=True):
            self.update(name, value)
        return list(results[:count])


class _Root(_Part):
    """The parallel model's own record. A deep copy is independent but shares graphs, mesh and plan."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh, recapture: Recapture, seed: int) -> None:
        super().__init__(model)
        self.plan, self.mesh, self.recapture = plan, mesh, recapture
        self.unique_modules = list(model.modules())
        self.stream = SharedStream(seed, mesh_device(mesh))
        self.variants: OrderedDict[Any, Variant] = OrderedDict()
        self.captures = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Root:
        made = copy.copy(self)
        memo[id(self)] = made
        made.modules = copy.deepcopy(self.modules, memo)
        made.unique_modules = copy.deepcopy(self.unique_modules, memo)
        made.stream = copy.deepcopy(self.stream, memo)
        made.variants = self.variants.copy()
        return made

    def check_modules(self) -> None:
        """Raise :class:`CallError` if a module whose operations are in a graph is not in its place any more."""
        for path, module in self.modules.items():
            parent, _, name = path.rpartition(".")
            if path and self.modules[parent]._modules.get(name) is not module and _is_inlined(module):
                raise CallError(
                    f"{path!r} was replaced or removed, but its operations are part of a parallel graph, which would "
                    "go on with the old ones; change the model before parallelizing it"
                )

    def remember(self, key: Any, variant: Variant) -> None:
        self.variants[key] = variant
        self.captures += 1
        if len(self.variants) > MOST_VARIANTS:
            self.variants.popitem(last=False)
        if self.captures == WARN_VARIANTS + 1:
            warnings.warn(
                f"the model has been captured for {self.captures} different ways of calling it (shapes, dtypes, "
                f"modes); each new one takes time, and the last {MOST_VARIANTS} are kept. Pad inputs to fewer shapes",
                stacklevel=5,
            )

    def variant_for(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Variant:
        found = self.variants.get(key)
        if found is None:
            found = self.recapture(model, args, kwargs)
            self.remember(key, found)
            for path in found.sites:  # another call may fold other modules
                if "_fxpar_part" not in self.modules[path].__dict__:
                    _make_block(self.modules[path], path)
        self.variants.move_to_end(key)
        return found


def _is_inlined(module: nn.Module) -> bool:
    """Whether ``module`` is never called: neither a block nor a mere container, such as a ModuleList."""
    return "_fxpar_part" not in module.__dict__ and type(module).forward is not nn.Module.forward


class _Call:
    """Passed to a block's forward: which variant runs, so that a recompute in backward runs the same one."""

    def __init__(self, variant: Variant, block: str, path: str) -> None:
        self.variant, self.block, self.path = variant, block, path

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Call:
        return self


def apply(
    model: nn.Module,
    variant: Variant,
    *,
    plan: Plan,
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh,
    recapture: Recapture,
    key: Any,
    seed: int,
    kept: tuple[str, ...] = (),
) -> None:
    """Make ``model`` parallel in place.

    ``layouts`` are those of parameters by name; ``key`` is :func:`call_key` of the call ``variant`` was made for;
    ``seed`` is equal on all ranks; ``kept`` are paths of modules that are called as they are. Raises
    :class:`CallError` before anything is changed if ``model`` cannot be.
    """
    check_parameters(model, layouts)
    shard_parameters(model, layouts, mesh)
    share_buffers(model, mesh)
    root = _Root(model, plan, mesh, recapture, seed)
    root.remember(key, variant)
    blocks = {path: model.get_submodule(path) for path in variant.sites}
    for module in model.modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            checkpoints.install(module)
    checkpoints.describe_optimizers()
    _guard(model, blocks, kept)
    for path, block in blocks.items():
        _make_block(block, path)
    model.__dict__["_fxpar_root"] = root
    model.__dict__["forward"] = types.MethodType(_root_forward, model)


def _make_block(block: nn.Module, path: str) -> None:
    allow_use(block)
    block.__dict__["_fxpar_part"], block.__dict__["_fxpar_path"] = _Part(block), path
    kind: Any = type(block)
    derived = _derived(kind)
    if derived.forward is _block_forward:
        block.__dict__["forward"] = types.MethodType(_block_forward, block)
    else:
        block.__class__ = derived


@functools.cache
def _derived(kind: Any) -> Any:
    """A subclass with the block's forward. A class may wrap the forwards of its subclasses (transformers does, for
    activation checkpointing, and looks it up on the class); then, and only then, a block's class is replaced."""
    names = {"forward": _block_forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)


def _guard(model: nn.Module, blocks: Mapping[str, nn.Module], kept: tuple[str, ...]) -> None:
    """Refuse direct use of modules whose operations are in a graph."""
    callable_ids = {id(model), *(id(block) for block in blocks.values())}
    for path in kept:
        callable_ids |= {id(module) for module in model.get_submodule(path).modules()}
    for path, module in model.named_modules():
        if id(module) not in callable_ids and next(module.parameters(), None) is not None:
            inside = [block for block in blocks if path.startswith(f"{block}.")]
            refuse_use(module, path, f"block {inside[0]!r}" if inside else "the model")


def applied_plan(model: nn.Module) -> Plan:
    """The plan that a parallel model runs; raises :class:`CallError` if ``model`` is not parallel."""
    root = model.__dict__.get("_fxpar_root")
    if root is None:
        raise CallError(f"this {type(model).__name__} is not parallel; it did not come from parallelize()")
    return root.plan  # type: ignore[no-any-return]


def call_key(modules: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hashable value, equal for calls that one captured program serves; ``modules`` are all of the model's."""
    return flatten_call(args, kwargs)[2], mode_key(modules)


def _root_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    root: _Root = model.__dict__["_fxpar_root"]
    variant, tensors = _prepare(model, args, kwargs)

    def call_block(name: str, path: str, *flat: Tensor) -> list[Any]:
        form = variant.forms[name]
        block_args, block_kwargs = unflatten(form.arguments, flat)
        block: Any = model.get_submodule(path)
        if torch.is_grad_enabled() and _runs_again(block, variant.recompute.get(path)):
            block = functools.partial(checkpoint, block, use_reentrant=False)
        result = block(*block_args, **block_kwargs, _fxpar_call=_Call(variant, name, path))
        return flat_result(variant.blocks[name], *flatten(result))

    before = (call_block,) if variant.top.calls_blocks else ()
    with restored_modes():
        if variant.random:
            with root.stream.current():
                outputs = root.run(variant.top, variant, tensors, *before)
        else:
            outputs = root.run(variant.top, variant, tensors, *before)
    results = [out for out in outputs if isinstance(out, torch.Tensor)]
    results = [averaged(out, share) for out, share in zip(results, variant.shares, strict=True)]
    return unflatten(variant.result, results)


def _runs_again(block: nn.Module, how: str | None) -> bool:
    """Whether a block is to be run again in backward, and its class does not see to that (see :func:`_make_block`)."""
    return how == "around" or (how == "within" and "forward" in block.__dict__)


@torch.compiler.disable
def _prepare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, list[Tensor]]:
    """The variant that serves this call, and the call's tensors. It may plan and capture: nothing to compile."""
    root: _Root = model.__dict__["_fxpar_root"]
    root.check_modules()
    tensors, _, call = flatten_call(args, kwargs)
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise CallError(
                "an input is a DTensor; pass plain tensors: on data axes this rank's part (tensor.to_local()), on all "
                "others equal on all ranks (tensor.full_tensor())"
            )
    return root.variant_for(model, args, kwargs, (call, mode_key(root.unique_modules))), tensors


def _block_forward(block: nn.Module, *args: Any, _fxpar_call: _Call | None = None, **kwargs: Any) -> Any:
    if _fxpar_call is None:
        raise CallError(
            f"block {block.__dict__['_fxpar_path']!r} was called by itself, but what it takes and gives are pieces "
            "that only the parallel model knows; call the model"
        )
    call = _fxpar_call
    part: _Part = block.__dict__["_fxpar_part"]
    tensors, _ = flatten((args, dict(sorted(kwargs.items()))))
    with restored_modes(), records.inside(call.path):
        runs_again = call.path in call.variant.recompute
        outputs = part.run(call.variant.blocks[call.block], call.variant, tensors, runs_again=runs_again)
    return unflatten(call.variant.forms[call.block].result, [out for out in outputs if isinstance(out, torch.Tensor)])
