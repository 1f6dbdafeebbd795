"""What a parallel module runs: rewritten graphs with the names of what they read, for one way of calling the model.

In: :mod:`fxpar.rewrite`. Out: records that hold graphs and names but no module, so copies of a model share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fxpar.trees import TENSOR, Spec


@dataclass(frozen=True, eq=False)
class Body:
    """One rewritten graph.

    ``reads`` lists its flat inputs as ``(kind, name)``: names are relative to the module that runs it, and those of
    kind ``"input"`` are the tensors of the call, in order. ``tensors`` says which flat outputs are tensors; ``updates``
    are the buffers whose new values follow the outputs. ``again`` says whether the graph marks tensors that backward
    is to make again (:mod:`fxpar.runtime.again`).
    """

    graph: fx.GraphModule
    reads: tuple[tuple[str, str], ...]
    tensors: tuple[bool, ...]
    updates: tuple[str, ...]
    calls_blocks: bool
    again: bool = False


@dataclass(frozen=True, eq=False)
class CallForm:
    """How flat tensors become the arguments of a block's call, and its flat output tensors the block's result."""

    arguments: Spec
    result: Spec


@dataclass(frozen=True, eq=False)
class Variant:
    """Everything needed to run the model when it is called in one particular way.

    ``blocks`` and ``forms`` map a block graph's name to its body and to the form of its call; ``sites`` are the paths
    of the modules that are called as blocks. ``constants`` are tensors that the graphs read and that are nobody's
    attribute. ``random`` says whether anything in it draws random numbers. ``recompute`` maps the path of a block that
    the model's forward runs under activation checkpointing to ``"around"``, or to ``"within"`` if it is the block's own
    forward that does. ``shares`` has a number per output tensor of the model: the gradient that comes in at it is
    divided by that, because each of so many ranks has a loss of its own, and their mean is meant.
    """

    top: Body
    result: Spec
    blocks: Mapping[str, Body] = field(default_factory=dict)
    forms: Mapping[str, CallForm] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    random: bool = True
    recompute: Mapping[str, str] = field(default_factory=dict)
    shares: tuple[int, ...] = ()


def flat_result(body: Body, tensors: list[Tensor], spec: Spec) -> list[Any]:
    """The outputs of ``body`` as its graph lists them, from the tensors of a call's result and that result's spec."""
    constants = iter([leaf for leaf in spec.leaves if leaf is not TENSOR])
    rest = iter(tensors)
    return [next(rest) if tensor else next(constants, None) for tensor in body.tensors]
