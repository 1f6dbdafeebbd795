"""The optimum is never worse than a layout that people write by hand, and hand layouts are what they are called."""

from __future__ import annotations

import functools

import pytest

from benchmarks.against_layouts import TRANSFORMERS, Model, compare, load, mesh_of
from benchmarks.layouts import LAYOUTS
from fxpar.cluster import Cluster

MESHES = ("tp=2", "tp=4", "dp=2,tp=2", "dp=2,tp=4")
FAMILIES = ("llama3-8b", "gpt2", "bert-large", "t5-11b", "vit-large", "mixtral-8x7b")

#: What a family has no layout for: 17 patches do not divide, mixtral has no recipe of Megatron's, and four of the
#: families have no plan in transformers.
SEQUENCE, RECIPE = {"TP+SP", "Ulysses", "FSDP x TP+SP", "FSDP x Ulysses"}, {"TP", "TP+SP", "FSDP x TP", "FSDP x TP+SP"}
MISSING: dict[str, set[str]] = {
    "llama3-8b": set(),
    "gpt2": {TRANSFORMERS},
    "bert-large": {TRANSFORMERS},
    "t5-11b": {TRANSFORMERS},
    "vit-large": {TRANSFORMERS, *SEQUENCE},
    "mixtral-8x7b": RECIPE,
}


@functools.cache
def small(name: str) -> Model:
    return load(name, shrink=True, batch=8)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_optimum_is_never_worse_than_a_hand_layout(name: str, mesh: str) -> None:
    for cluster in ("h100", "cpu-gloo"):
        best, found, refused = compare(small(name), mesh_of(mesh), Cluster.load(cluster))
        assert best.status == "optimal"
        two = {which for which in LAYOUTS if " x " in which or which == "HSDP"} if "," not in mesh else set()
        assert set(refused) == MISSING[name] | two
        for which, solution in found.items():
            assert best.cost <= solution.cost * (1 + 1e-9), f"{which} is better than the optimum"
