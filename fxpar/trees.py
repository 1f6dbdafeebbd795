"""Nested containers of tensors to flat lists and back, with everything that is not a tensor kept beside them.

In: any pytree (tuples, dicts, dataclasses, ``ModelOutput`` ...). Out: its tensors and a :class:`Spec` that rebuilds it.
Unknown dataclasses are registered as pytree nodes when first met. What the tensors mean is not known here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


class _TensorLeaf:
    """Stands in :attr:`Spec.leaves` for a tensor."""

    def __repr__(self) -> str:
        return "TENSOR"

    def __reduce__(self) -> str:
        return "TENSOR"


TENSOR = _TensorLeaf()


@dataclass(frozen=True)
class Spec:
    """How to rebuild a pytree: its ``tree`` and its ``leaves``, with :data:`TENSOR` where a tensor stands."""

    tree: Any
    leaves: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable value, equal for specs that rebuild equal containers."""
        return (constant_key(self.tree), tuple(constant_key(leaf) for leaf in self.leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def constant_key(leaf: Any) -> Any:
    """A hashable stand-in for a leaf: equal only if the leaves are interchangeable (``1``, ``1.0``, ``True`` differ).

    >>> constant_key(1) == constant_key(True)
    False
    """
    if leaf is None or leaf is TENSOR or isinstance(leaf, (str, bytes)):
        return leaf
    if isinstance(leaf, (bool, int, float, complex)):
        return (type(leaf).__name__, repr(leaf))
    try:
        hash(leaf)
    except TypeError:
        return (type(leaf).__qualname__, id(leaf))
    return (type(leaf).__qualname__, leaf)


def flatten(tree: Any) -> tuple[list[torch.Tensor], Spec]:
    """The tensors of ``tree`` in order, and the :class:`Spec` that puts them back.

    >>> tensors, spec = flatten({"x": torch.zeros(2), "scale": 1.0})
    >>> len(tensors), spec.leaves
    (1, (TENSOR, 1.0))
    >>> sorted(unflatten(spec, tensors))
    ['scale', 'x']
    """
    leaves, tree_spec = pytree.tree_flatten(tree)
    while _register_dataclasses(leaves):
        leaves, tree_spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, Spec(tree_spec, tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))


def unflatten(spec: Spec, tensors: Iterable[Any]) -> Any:
    """The tree of ``spec`` with ``tensors`` in its tensor places."""
    rest = iter(tensors)
    return pytree.tree_unflatten([next(rest) if leaf is TENSOR else leaf for leaf in spec.leaves], spec.tree)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Spec, tuple[Any, ...]]:
    """The tensors and the spec of a call, and a hashable key of all that a captured program depends on.

    The key holds the spec (with all values that are not tensors) and each tensor's shape, dtype, and ``requires_grad``.
    """
    tensors, spec = flatten((args, dict(sorted(kwargs.items()))))
    return tensors, spec, (spec.key, tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))


def named_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], forward: Callable[..., Any] | None = None
) -> list[tuple[str, Any]]:
    """Every leaf of a call in the order of :func:`flatten_call`, by the parameter names of ``forward``.

    >>> named_leaves((1, [2]), {"x": {"y": 3}})
    [('args[0]', 1), ('args[1][0]', 2), ("x['y']", 3)]
    """
    flatten((args, kwargs))
    positional = _positional_names(forward)
    leaves = []
    for path, leaf in pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))[0]:
        head, rest = path[1], path[2:]
        if isinstance(head, pytree.SequenceKey):
            name = positional[head.idx] if head.idx < len(positional) else f"args[{head.idx}]"
        else:
            name = str(getattr(head, "key", head))
        leaves.append((name + pytree.keystr(rest), leaf))
    return leaves


def _positional_names(forward: Callable[..., Any] | None) -> list[str]:
    if forward is None:
        return []
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def tensor_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """A name for each tensor that :func:`flatten_call` yields."""
    named = named_leaves(args, kwargs, forward)
    return tuple(name for name, leaf in named if isinstance(leaf, torch.Tensor))


def named_parts(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Every leaf of any pytree by its path, which starts with a plain key, field or position; ``""`` for a sole leaf.

    >>> named_parts({"loss": 0.5, "states": (1, None)})
    [('loss', 0.5), ('states[0]', 1), ('states[1]', None)]
    """
    flatten(tree)
    found = []
    for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf=is_leaf or (lambda part: part is None))[0]:
        heads = [str(getattr(path[0], part)) for part in ("key", "idx", "name") if path and hasattr(path[0], part)]
        found.append((heads[0] + pytree.keystr(path[1:]) if heads else "", leaf))
    return found


def result_names(result: Any) -> tuple[str, ...]:
    """A name for each tensor of a result: its keys or fields, or its position; ``"output"`` if it is a tensor itself.

    >>> result_names({"loss": torch.zeros(()), "states": (torch.zeros(1), None)}), result_names(torch.zeros(1))
    (('loss', 'states[0]'), ('output',))
    """
    return tuple(name or "output" for name, leaf in named_parts(result) if isinstance(leaf, torch.Tensor))


def attribute_at(root: Any, path: str) -> Any:
    """What stands at a path like ``"layers.0.masks[1]"`` or ``"tables['cos']"``.

    >>> attribute_at(torch.nn.Sequential(torch.nn.ReLU()), "0.inplace")
    False
    """
    found = root
    for attribute, item in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        found = getattr(found, attribute) if attribute else found[ast.literal_eval(item)]
    return found


def _register_dataclasses(leaves: list[Any]) -> bool:
    """Register the dataclasses among ``leaves`` as pytree nodes; whether there were any."""
    found = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    for kind in found:
        _register(kind)
    return bool(found)


def _register(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]

    def take(value: Any) -> tuple[list[Any], Any]:
        return [getattr(value, name) for name in names], None

    def take_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in names], None

    def build(children: Iterable[Any], _context: Any) -> Any:
        # Not through __init__: a field may be excluded from it, and __post_init__ may check or change values.
        value: Any = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(value, name, child)
        return value

    pytree.register_pytree_node(
        kind,
        take,
        build,
        flatten_with_keys_fn=take_with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )
