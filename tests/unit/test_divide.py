"""Blocks in kinds: which instances are told apart, what kinds are called, and that one division repeats several."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.divide import asked_apart, divided
from fxpar.graph import Graph, Input, Node, Program, Value
from fxpar.mixing import by_share, divisions


def program(layers: int = 4, *, twice: bool = False) -> Program:
    """Equal layers, each with a weight, the first of which is perhaps called twice."""
    inputs = (Input("parameter", "up.weight", 0), Input("parameter", "down.weight", 1))
    values = (Value((4, 4), "float32", True),) * 2
    block = Graph("Layer", values, inputs, (Node("aten.relu.default", (), (), (), module="up"),), ())
    paths = [f"layers.{n}" for n in range(layers)] + ["layers.0"] * twice
    calls = tuple(Node("block:Layer", (), (), (), module=path) for path in paths)
    return Program(Graph("top", (), (), calls, ()), {"Layer": block})


def kinds(some: Program) -> dict[str, str]:
    return {path: name for name in some.blocks for path in some.instances(name)}


@pytest.mark.parametrize(
    ("wishes", "wanted"),
    [
        ({}, "0000"),
        ({"layers.*.up.weight": "S0"}, "0000"),
        ({"*": "S0", "other": "S1"}, "0000"),
        ({"layers.1.up.weight": "S0"}, "0100"),
        ({"layers.[12].up.weight": "S0"}, "0110"),
        ({f"layers.{n}.up.weight": "S0" for n in range(4)}, "0000"),
        ({f"layers.{n}.up.weight": f"S{n % 2}" for n in range(4)}, "0101"),
        ({"layers.1.up.weight": "S0", "layers.3.down.weight": "S0"}, "0102"),
        ({"layers.2": "S1"}, "0010"),
        ({"layers.2.up": "S1"}, "0010"),
    ],
)
def test_instances_of_which_other_things_are_asked_are_of_another_kind(wishes: dict[str, str], wanted: str) -> None:
    found = kinds(asked_apart(program(), wishes))
    names = ("Layer", "Layer/2", "Layer/3")
    assert [names.index(found[f"layers.{n}"]) for n in range(4)] == [int(kind) for kind in wanted]


def test_a_module_that_is_called_twice_is_of_one_kind() -> None:
    for apart in itertools.chain(
        [asked_apart(program(twice=True), {"layers.0.*": "S0"})], divisions(program(4, twice=True))
    ):
        calls = [(node.module, node.op) for node in apart.top.nodes]
        assert calls[0] == calls[-1] and len(apart.blocks) == 2


def test_a_module_that_is_called_as_two_blocks_is_of_kinds_of_each() -> None:
    """As with two shapes of inputs: the same module is an instance of one block, and then of another."""
    one = program(2)
    other = replace(one.blocks["Layer"], name="Layer.2")
    second = tuple(replace(node, op="block:Layer.2") for node in one.top.nodes)
    both = Program(replace(one.top, nodes=(*one.top.nodes, *second)), {**one.blocks, "Layer.2": other})
    assert divided(both, both.calls) is both
    apart = asked_apart(both, {"layers.1.*": "S0"})
    assert [name for _, name in apart.calls] == ["Layer", "Layer/2", "Layer.2", "Layer.2/2"]
    assert divided(both, apart.calls).digest() == apart.digest()
    (half,) = divisions(both)
    assert half.calls == apart.calls
    assert divided(both, both.calls[:-1]) is both


def test_a_module_that_is_called_again_and_again_is_not_divided() -> None:
    assert not list(divisions(program(1, twice=True)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(2, 9))
def test_one_division_by_the_names_in_a_plan_repeats_several(picks: list[int], layers: int) -> None:
    some = program(layers)
    for pick in picks:
        some = next(itertools.islice(divisions(some), pick, None), some)
    again = divided(program(layers), some.calls)
    assert again.digest() == some.digest() and kinds(again) == kinds(some)
    assert divided(some, some.calls) is some
    assert list(some.blocks) == list(dict.fromkeys(node.op.removeprefix("block:") for node in some.top.nodes))


def test_halves_quarters_and_so_on() -> None:
    sizes = [[len(apart.instances(name)) for name in apart.blocks] for apart in divisions(program(8))]
    assert sizes == [[4, 4], [6, 2], [7, 1]]


@pytest.mark.parametrize(("share", "sizes"), [(0.3, [6, 2]), (0.99, [1, 7]), (0.01, [7, 1]), (0.5, [4, 4])])
def test_a_border_where_a_mixture_has_it(share: float, sizes: list[int]) -> None:
    apart = by_share(program(8), share)
    assert [len(apart.instances(name)) for name in apart.blocks] == sizes


def test_names_that_a_plan_got_wrong_are_made_different() -> None:
    other = Graph("Other", (), (), (), ())
    two = program(2)
    calls = (*two.top.nodes, Node("block:Other", (), (), (), module="other"))
    two = Program(Graph("top", (), (), calls, ()), {**two.blocks, "Other": other})
    assert kinds(divided(two, [*program(2).calls, ("other", "Layer")])) == {
        "layers.0": "Layer",
        "layers.1": "Layer",
        "other": "Layer/2",
    }
