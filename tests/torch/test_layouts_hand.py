"""The optimum is never worse than a layout that people write by hand, and hand layouts are what they are called."""

from __future__ import annotations

import functools

import pytest

from benchmarks.against_layouts import TRANSFORMERS, Model, compare, hand_pins, load, mesh_of, priced
from benchmarks.layouts import LAYOUTS
from fxpar.assemble import assemble
from fxpar.cluster import Cluster
from fxpar.precision import Float64Casts
from fxpar.solver import solve
from tests.cases import TOLERANCE, Case
from tests.models import MODELS

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


#: What the summary says of each layout on its own axes; the batch on further axes is named beside it.
TENSOR = {"column- and row-parallel", "vocabulary-parallel"}
NAMES: dict[str, set[str]] = {
    "DDP": {"DDP"},
    "FSDP": {"FSDP"},
    "HSDP": {"HSDP"},
    "TP": TENSOR,
    "TP+SP": {*TENSOR, "sequence-parallel"},
    "Ulysses": {"Ulysses"},
    "FSDP x TP": {"FSDP", *TENSOR},
    "FSDP x TP+SP": {"FSDP", *TENSOR, "sequence-parallel"},
    "FSDP x Ulysses": {"FSDP", "Ulysses"},
}
WORDS = {*(name for names in NAMES.values() for name in names), "expert-parallel"}


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "dp=2,tp=4"])
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "bert-large", "t5-11b", "vit-large"])
def test_the_summary_calls_hand_layouts_by_their_names_and_by_no_others(name: str, mesh: str) -> None:
    problem = priced(small(name), mesh_of(mesh), Cluster.load("h100"))
    pins, _ = hand_pins(small(name), problem.space)
    for which, wanted in NAMES.items():
        if which not in pins:
            continue
        if "," in mesh and wanted & {*TENSOR, "Ulysses"} and "FSDP" not in wanted:
            wanted = wanted | {"DDP"}
        if name == "vit-large":
            wanted = wanted - {"vocabulary-parallel"}
        text = str(assemble(problem, solve(problem.problem, pins=pins[which]).choice))
        assert {word for word in WORDS if word in text} == wanted, f"{which}:\n{text}"


def test_axes_and_places_are_named() -> None:
    problem = priced(small("llama3-8b"), mesh_of("dp=2,tp=2"), Cluster.load("h100"))
    pins = LAYOUTS["FSDP x TP+SP"](problem.space)
    lines = str(assemble(problem, solve(problem.problem, pins=pins).choice)).splitlines()
    assert "model.layers.* (x3): dp: FSDP; tp: column- and row-parallel, sequence-parallel" in lines
    assert "model.embed_tokens, lm_head: dp: FSDP; tp: vocabulary-parallel" in lines
    pins = LAYOUTS["HSDP"](problem.space)
    lines = str(assemble(problem, solve(problem.problem, pins=pins).choice)).splitlines()
    assert "model.embed_tokens, lm_head, model.layers.* (x3): dp x tp: HSDP" in lines


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit"])
def test_hand_layouts_on_two_axes_have_the_models_numbers(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    with Float64Casts():
        case = Case(model, args, kwargs, name=name)
        problem = case.priced((2, 2))
        for which in ("HSDP", "FSDP x TP+SP", "FSDP x Ulysses"):
            plan = assemble(problem, solve(problem.problem, pins=LAYOUTS[which](problem.space)).choice)
            error, where = case.error(plan)
            assert error <= TOLERANCE, f"{which}: {where} is off by {error:.1e}"
