"""Program + plan -> :class:`~fxpar.plans.Memory`: what one device needs in a training step, and when it needs most.

In: a captured program with footprints, a plan for it, the optimizer's name. Out: bytes on one rank. The step is
forward, backward and update; gradients are freed before the next forward (``zero_grad``), and what the model returned
is held until the step ends. A model that returns a scalar that carries a gradient is trained on it; one that does not
gets a gradient for every output. What a rank runs is :mod:`fxpar.cost.tapes`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fxpar.cost.lifetimes import walk
from fxpar.cost.tapes import Tapes, place
from fxpar.errors import PlanError
from fxpar.graph import Graph, Program, Ref
from fxpar.plans import Memory, Plan


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``states`` are tensors like the parameter that are kept; ``scratch`` are such tensors in use during the update.

    Updates run parameter by parameter, as torch does for DTensors.
    """

    states: tuple[str, ...]
    scratch: int


#: In ``torch.optim``, with default settings; ``None`` for no optimizer.
OPTIMIZERS: dict[str | None, Optimizer] = {
    "adamw": Optimizer(("exp_avg", "exp_avg_sq"), 2),
    "adam": Optimizer(("exp_avg", "exp_avg_sq"), 2),
    "sgd": Optimizer((), 0),
    "sgd_momentum": Optimizer(("momentum_buffer",), 0),
    None: Optimizer((), 0),
}

_MOST_SHOWN = 8


def memory(program: Program, plan: Plan, optimizer: str | None = "adamw") -> Memory:
    """What each rank needs for one training step of ``program`` under ``plan``.

    Raises :class:`PlanError` for an optimizer that is not in :data:`OPTIMIZERS`, and for a program that was not
    captured (it has no footprints).
    """
    if optimizer not in OPTIMIZERS:
        known = ", ".join(map(repr, OPTIMIZERS))
        raise PlanError(f"optimizer={optimizer!r} is not known here, only {known}")
    if not program.footprints:
        raise PlanError("the program says nothing about memory: it was written by hand; capture a model")
    kind = OPTIMIZERS[optimizer]
    held = _Held.of(program, plan)
    tapes = Tapes(program, plan.mesh, plan.graphs)
    tape = tapes.tape("top", _trained_on(program.top))
    walked, base = walk(tape), tape.bases()
    results = sum(tape.sizes[root] for root in {base[out] for out in tape.outputs} - {base[out] for out in tape.inputs})
    arriving = sum(tape.sizes[tensor] for tensor in tape.differentiated)
    states = len(kind.states) * held.gradient_bytes
    standing = held.parameter_bytes + held.buffer_bytes + states
    phases = {
        "forward": standing + walked.forward_bytes,
        "backward": standing + walked.kept_bytes + results + arriving + walked.backward_bytes,
        "optimizer": standing + held.gradient_bytes + results + kind.scratch * held.largest_bytes,
    }
    phase = max(phases, key=lambda name: phases[name])
    largest = Counter({name: size * (2 + len(kind.states)) for name, size in held.by_module.items()})
    largest.update(walked.kept)
    largest.update(tapes.kept)
    largest.subtract(tapes.calls)
    return Memory(
        optimizer=optimizer,
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=held.gradient_bytes,
        optimizer_bytes=states,
        buffer_bytes=held.buffer_bytes,
        activation_bytes=walked.kept_bytes,
        transient_bytes=walked.transient_bytes,
        peak_bytes=phases[phase],
        peak_phase=phase,
        largest=tuple(largest.most_common(_MOST_SHOWN)),
        phases=phases,
    )


def _trained_on(top: Graph) -> frozenset[int]:
    """The outputs that get a gradient: a loss if there is one, else all that carry one."""
    found = {index: top.values[out.value] for index, out in enumerate(top.outputs)
             if isinstance(out, Ref) and top.values[out.value].grad}  # fmt: skip
    return frozenset(index for index, meta in found.items() if not meta.shape) or frozenset(found)


@dataclass(frozen=True)
class _Held:
    """What stands for the whole step; ``buffer_bytes`` are buffers, constants and the inputs of the call."""

    parameter_bytes: int
    gradient_bytes: int
    largest_bytes: int
    buffer_bytes: int
    by_module: Counter[str]

    @staticmethod
    def of(program: Program, plan: Plan) -> _Held:
        degrees = plan.mesh.degrees
        sizes: dict[str, int] = {}
        trained: dict[str, int] = {}
        others: dict[tuple[str, str], int] = {}
        by_module: Counter[str] = Counter()
        for name, graph in program.graphs().items():
            for path in [""] if graph is program.top else program.instances(name):
                for item, layout in zip(graph.inputs, plan.graphs[name].inputs, strict=True):
                    meta = graph.values[item.value]
                    size, full = meta.local_bytes(layout, degrees), program.name_of(path, item.name)
                    if item.kind != "parameter":
                        if item.kind != "input" or graph is program.top:
                            others[item.kind, full] = size
                    elif full not in sizes:
                        sizes[full] = size
                        trained.update({full: size} if meta.grad else {})
                        by_module[place(program, graph, item.name.rpartition(".")[0])] += size
        unused = sum(program.unused.values())
        return _Held(
            sum(sizes.values()) + unused,
            sum(trained.values()),
            max(trained.values(), default=0),
            sum(others.values()),
            by_module,
        )
