"""How long memory lives in one forward and backward pass over a list of steps, and how much is in use at most.

In: steps (operations, conversions, calls of blocks) that read and write numbered tensors, and the bytes of those. Out:
:class:`Walk`. The rules are those of torch: a result is free after its last reader unless autograd keeps its memory;
backward runs the steps in reverse, frees what each had kept, and adds gradients up where several arrive. What the steps
of a plan are is :mod:`fxpar.cost.memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: How a step makes the gradient of what it reads, if not from the memory of a gradient that it gets.
NEW = -1


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that runs.

    ``reads`` and ``writes`` are tensors. ``views`` says of each write in which read's memory it is, if in any.
    ``kept_reads`` and ``kept_writes`` are positions that autograd keeps, ``kept_bytes`` what it keeps besides.
    ``gradients`` says of each read: ``None`` (it gets no gradient), :data:`NEW`, or the number of the write whose
    gradient is in the same memory. ``forward_bytes`` and ``backward_bytes`` are the most in use meanwhile beyond reads,
    writes and their gradients; ``left_bytes`` are gradients of parameters that its backward leaves behind.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    views: tuple[int | None, ...]
    gradients: tuple[int | None, ...]
    kept_reads: tuple[int, ...] = ()
    kept_writes: tuple[int, ...] = ()
    kept_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    left_bytes: int = 0


@dataclass(frozen=True)
class Walk:
    """What a pass takes beyond what it is given.

    ``forward_bytes`` is the most in use in forward, results included. ``kept_bytes`` is kept between forward and
    backward, results and what is given left out; ``kept`` says by whom, results included. ``kept_inputs`` and
    ``kept_outputs`` are the given and resulting tensors whose memory is kept. ``backward_bytes`` is the most in use in
    backward beyond what is there when it begins. ``left_bytes`` are gradients of parameters. ``transient_bytes`` is the
    most that is neither kept nor left.
    """

    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    left_bytes: int
    transient_bytes: int
    kept_inputs: frozenset[int] = frozenset()
    kept_outputs: frozenset[int] = frozenset()
    kept: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Remaking:
    """A tensor that is not kept but made again of ``source``; ``of`` is a note of the writer.

    Meanwhile ``scratch_bytes`` are in use beside both.
    """

    source: int
    scratch_bytes: int
    of: Any = None


@dataclass(frozen=True)
class Tape:
    """Steps in order, the bytes of their tensors, what is given and what results.

    ``parameters`` are given tensors whose gradients stay; ``differentiated`` are results that get a gradient. What is
    in the memory of a tensor of ``again`` is made again when backward first needs it, for all that do.
    """

    steps: tuple[Step, ...]
    sizes: Sequence[int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: frozenset[int] = frozenset()
    differentiated: frozenset[int] = frozenset()
    again: Mapping[int, Remaking] = field(default_factory=dict)

    def bases(self) -> dict[int, int]:
        """For each tensor the one whose memory it is in."""
        base = {tensor: tensor for tensor in self.inputs}
        for step in self.steps:
            for tensor, view in zip(step.writes, step.views, strict=True):
                base[tensor] = tensor if view is None else base[step.reads[view]]
        return base


def walk(tape: Tape, *, keep: bool = True) -> Walk:
    """Run ``tape`` forward and backward; without ``keep`` only forward, under ``no_grad``.

    >>> square = Step("square", (0,), (1,), (None,), (NEW,), kept_reads=(0,))
    >>> total = Step("sum", (1,), (2,), (None,), (NEW,))
    >>> found = walk(Tape((square, total), [100, 100, 4], (0,), (2,), differentiated=frozenset({2})))
    >>> found.forward_bytes, found.kept_bytes, found.kept_inputs, found.backward_bytes
    (104, 0, frozenset({0}), 196)
    """
    base = tape.bases()
    keeper = _keepers(tape, base) if keep else {}
    given = {base[tensor] for tensor in tape.inputs}
    results = {base[tensor] for tensor in tape.outputs} - given
    forward, kept, transient = _forward(tape, base, keeper, given | results, keep)
    if not keep:
        return Walk(forward, 0, 0, 0, transient)
    backward = _Backward(tape, keeper, given | results, sum(tape.sizes[root] for root in results))
    backward.run()
    return Walk(
        forward,
        backward.peak,
        kept.total() - sum(tape.sizes[root] for root in keeper if root in results),
        backward.left,
        max(transient, backward.transient),
        frozenset(tensor for tensor in tape.inputs if base[tensor] in keeper),
        frozenset(tensor for tensor in tape.outputs if base[tensor] in keeper),
        kept,
    )


def _keepers(tape: Tape, base: dict[int, int]) -> dict[int, int]:
    """For each piece of memory that autograd keeps, the first step that does: the last one to let go of it."""
    keeper: dict[int, int] = {}
    for number, step in enumerate(tape.steps):
        for tensor in _kept(step):
            root = base[tensor]
            while root in tape.again:
                root = base[tape.again[root].source]
            keeper.setdefault(root, number)
    return keeper


def needed_again(tape: Tape) -> frozenset[int]:
    """The tensors of ``tape.again`` that backward makes: what some step that gets a gradient has kept.

    >>> from dataclasses import replace
    >>> gather = Step("gather", (0,), (1,), (None,), (NEW,))
    >>> product = Step("product", (1, 2), (3,), (None,), (NEW, None), kept_reads=(0, 1))
    >>> tape = Tape((gather, product), [10, 40, 8, 8], (0, 2), (3,), again={1: Remaking(0, 0)})
    >>> needed_again(tape), needed_again(replace(tape, differentiated=frozenset({3})))
    (frozenset(), frozenset({1}))
    """
    base, live = tape.bases(), set(tape.differentiated)
    found: set[int] = set()
    for step in reversed(tape.steps):
        if not live.intersection(step.writes):
            continue
        live.update(tensor for tensor, how in zip(step.reads, step.gradients, strict=True) if how is not None)
        for tensor in _kept(step):
            root = base[tensor]
            while root in tape.again:
                found.add(root)
                root = base[tape.again[root].source]
    return frozenset(found)


def _kept(step: Step) -> Iterator[int]:
    yield from (step.reads[position] for position in step.kept_reads)
    yield from (step.writes[position] for position in step.kept_writes)


def _forward(
    tape: Tape, base: dict[int, int], keeper: dict[int, int], pinned: set[int], keep: bool
) -> tuple[int, Counter[str], int]:
    """The most in use, what is kept by the name of the step that made it, and the most that is not kept."""
    last = {base[tensor]: number for number, step in enumerate(tape.steps) for tensor in (*step.reads, *step.writes)}
    ends: dict[int, list[int]] = {}
    for root, number in last.items():
        if root not in pinned and root not in keeper:
            ends.setdefault(number, []).append(root)
    now = most = transient = 0
    kept: Counter[str] = Counter()
    for number, step in enumerate(tape.steps):
        for tensor in step.writes:
            if base[tensor] == tensor:
                now += tape.sizes[tensor]
                kept[step.name] += tape.sizes[tensor] if tensor in keeper else 0
        inside = max(step.forward_bytes, step.kept_bytes)
        most = max(most, now + inside)
        transient = max(transient, now + inside - kept.total())
        if keep:
            now += step.kept_bytes
            kept[step.name] += step.kept_bytes
        now -= sum(tape.sizes[root] for root in ends.get(number, ()))
    return most, kept, transient


class _Backward:
    """One backward pass. ``now`` counts from what is in use when it begins."""

    def __init__(self, tape: Tape, keeper: dict[int, int], pinned: set[int], results: int) -> None:
        self.tape = tape
        self.now = self.peak = self.left = 0
        self.frees: dict[int, int] = {}
        for root, number in keeper.items():
            if root not in pinned:
                self.frees[number] = self.frees.get(number, 0) + tape.sizes[root]
        #: Memory of gradients: its bytes and how many gradients are in it; and the memory of each tensor's gradient.
        self.sizes: list[int] = []
        self.shares: list[int] = []
        self.gradient: dict[int, int] = {}
        self.base = tape.bases()
        #: What is made again: the first step that keeps it, after which it is freed; and what is there now.
        self.last: dict[int, int] = {}
        for number, step in enumerate(tape.steps):
            for root in (self.base[tensor] for tensor in _kept(step)):
                self._used(root, number)
        self.there: set[int] = set()
        self.flying = results
        for tensor in tape.differentiated:
            self.gradient[tensor] = self._memory(tape.sizes[tensor])
            self.flying += tape.sizes[tensor]
        self.transient = self.flying

    def _used(self, root: int, number: int) -> None:
        if root in self.tape.again:
            self.last.setdefault(root, number)
            self._used(self.base[self.tape.again[root].source], number)

    def _make_again(self, root: int) -> None:
        if root in self.tape.again and root not in self.there:
            made = self.tape.again[root]
            self._make_again(self.base[made.source])
            self.there.add(root)
            self._change(self.tape.sizes[root], made.scratch_bytes)

    def _memory(self, size: int) -> int:
        self.sizes.append(size)
        self.shares.append(1)
        return len(self.sizes) - 1

    def _change(self, flying: int, scratch: int = 0) -> None:
        self.now += flying
        self.flying += flying
        self.peak = max(self.peak, self.now + scratch)
        self.transient = max(self.transient, self.flying + scratch)

    def _drop(self, memory: int) -> None:
        self.shares[memory] -= 1
        if not self.shares[memory]:
            self._change(-self.sizes[memory])

    def run(self) -> None:
        for number in range(len(self.tape.steps) - 1, -1, -1):
            step = self.tape.steps[number]
            arrived = {place: self.gradient.pop(tensor) for place, tensor in enumerate(step.writes)
                       if tensor in self.gradient}  # fmt: skip
            if arrived:
                for tensor in _kept(step):
                    self._make_again(self.base[tensor])
                self._step(step, arrived)
            for root in [root for root in self.there if self.last[root] == number]:
                self.there.remove(root)
                self._change(-self.tape.sizes[root])
            self.now -= self.frees.get(number, 0) + step.kept_bytes

    def _step(self, step: Step, arrived: dict[int, int]) -> None:
        sent: list[tuple[int, int]] = []
        new = 0
        for tensor, how in zip(step.reads, step.gradients, strict=True):
            if how is None:
                continue
            if how in arrived:
                self.shares[arrived[how]] += 1
                sent.append((tensor, arrived[how]))
            elif how == NEW:
                new += self.tape.sizes[tensor]
                sent.append((tensor, self._memory(self.tape.sizes[tensor])))
        self._change(new, step.backward_bytes)
        self.left += step.left_bytes
        self.now += step.left_bytes
        self.peak = max(self.peak, self.now)
        for memory in arrived.values():
            self._drop(memory)
        for tensor, memory in sent:
            self._arrive(tensor, memory)

    def _arrive(self, tensor: int, memory: int) -> None:
        old = self.gradient.get(tensor)
        if old is None:
            self.gradient[tensor] = memory
            if tensor in self.tape.parameters:
                self.left += self.sizes[memory]
                self.flying -= self.sizes[memory]
        elif self.shares[old] == 1:  # added in place
            self._drop(memory)
        else:
            self.gradient[tensor] = self._memory(self.sizes[old])
            self._change(self.sizes[old])
            self._drop(old)
            self._drop(memory)
