"""How long memory lives, by hand; what plans say about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fxpar.cost.footprint import moved
from fxpar.cost.lifetimes import NEW, Step, Tape, walk
from fxpar.graph import Value
from fxpar.layout import I, Mesh, P, R, S
from fxpar.plans import Memory, Plan


def step(reads: tuple[int, ...], write: int, **more: object) -> Step:
    fields = {"views": (None,), "gradients": (NEW,) * len(reads), **more}
    return Step(f"step {write}", reads, (write,), **fields)  # type: ignore[arg-type]


def tape(steps: list[Step], sizes: list[int], output: int) -> Tape:
    return Tape(tuple(steps), sizes, (0,), (output,), differentiated=frozenset({output}))


def test_what_nobody_keeps_is_free_after_its_last_reader() -> None:
    found = walk(tape([step((0,), 1), step((1,), 2), step((2,), 3)], [10, 10, 10, 10], 3))
    assert found.forward_bytes == 20 and found.kept_bytes == 0
    assert found.backward_bytes == 10  # each gradient is free when the next is there; the result's was there before


def test_a_view_keeps_all_of_its_memory_and_is_counted_once() -> None:
    steps = [step((0,), 1), step((1,), 2, views=(0,)), step((2,), 3, kept_reads=(0,)), step((1, 3), 4, kept_reads=(0,))]
    assert walk(tape(steps, [10, 100, 25, 10, 10], 4)).kept_bytes == 100


def test_what_several_steps_keep_is_free_after_the_first_of_them_has_gone_back() -> None:
    steps = [step((0,), 1), step((1,), 2, kept_reads=(0,)), step((2,), 3), step((1, 3), 4, kept_reads=(0,))]
    found = walk(tape(steps, [1, 100, 100, 100, 100], 4))
    # 4 sends two gradients and gives its own back: +100; 3 and 2 hand on; 2's comes beside the one that waits: +100.
    assert found.kept_bytes == 100 and found.backward_bytes == 200


def test_gradients_that_share_memory_are_added_into_new_memory() -> None:
    hand_on = {"gradients": (0, 0)}
    shared = walk(tape([step((0,), 1), step((0, 1), 2, **hand_on)], [50, 50, 50], 2))
    alone = walk(tape([step((0,), 1), step((0, 1), 2)], [50, 50, 50], 2))
    assert shared.backward_bytes == 50 and alone.backward_bytes == 100


def test_scratch_memory_counts_while_a_step_runs() -> None:
    steps = [step((0,), 1, forward_bytes=70, backward_bytes=90), step((1,), 2)]
    found = walk(tape(steps, [10, 10, 10], 2))
    assert found.forward_bytes == 80 and found.backward_bytes == 100


def test_gradients_of_parameters_stay() -> None:
    steps = (step((0, 1), 2, kept_reads=(0, 1)),)
    found = walk(Tape(steps, [10, 40, 10], (0, 1), (2,), frozenset({1}), frozenset({2})))
    assert found.left_bytes == 40 and found.backward_bytes == 50
    assert found.kept_inputs == {0, 1} and found.kept_bytes == 0


def test_without_keeping_nothing_is_left_for_backward() -> None:
    steps = [step((0,), 1, kept_writes=(0,), kept_bytes=5), step((1,), 2), step((2,), 3)]
    assert walk(tape(steps, [10, 10, 10, 10], 3)).kept_bytes == 15
    found = walk(tape(steps, [10, 10, 10, 10], 3), keep=False)
    assert found.kept_bytes == 0 and found.forward_bytes == 20


@pytest.mark.parametrize(
    ("kind", "src", "dst", "view", "scratch", "size"),
    [
        ("none", I, R, True, 0, 512),
        ("slice", I, S(0), False, 0, 128),
        ("slice", I, S(1), False, 0, 128),
        ("all_gather", S(0), I, False, 0, 512),
        ("all_gather", S(1), I, False, 512, 512),
        ("reduce_scatter", P, S(0), False, 0, 128),
        ("reduce_scatter", P, S(1), False, 512, 128),
        ("all_reduce", P, I, False, 0, 512),
        ("all_to_all", S(0), S(1), False, 128, 128),
        ("all_to_all", S(1), S(2), False, 256, 128),
    ],
)
def test_what_conversions_need(kind: str, src: object, dst: object, view: bool, scratch: int, size: int) -> None:
    meta = Value((4, 4, 8), "float32", True)
    found = moved(kind, meta, (src,), (dst,), 0, (4,))  # type: ignore[arg-type]
    assert found[:2] == (view, scratch) and (view or found[2] == size)


MEMORY = Memory("adamw", 100, 100, 200, 10, 50, 30, 480, "backward", (("[Block].mlp", 300), ("head", 90)))


def test_a_plan_keeps_its_memory_through_json_and_reads_texts_without() -> None:
    plan = Plan(Mesh.of({"tp": 2}), "toy", "0" * 16, {}, (), {}, memory=MEMORY)
    assert Plan.from_json(plan.to_json()) == plan
    old = json.loads(plan.to_json())
    del old["memory"]
    assert Plan.from_json(json.dumps(old)) == replace(plan, memory=None)
    assert plan.digest == replace(plan, memory=None).digest


def test_the_summary_says_what_a_device_needs() -> None:
    plan = Plan(Mesh.of({"tp": 2}), "toy", "0" * 16, {}, (), {}, memory=MEMORY)
    (line,) = [line for line in str(plan).splitlines() if "memory" in line]
    assert "480 B" in line and "backward" in line and "optimizer 200 B" in line
