"""Folding loses nothing: a program without blocks is the same model, and its optimum is the folded one's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxpar
from benchmarks.against_layouts import load, mesh_of, priced
from fxpar.assemble import assemble, random_choice
from fxpar.cluster import Cluster
from fxpar.cost.memory import memory
from fxpar.cost.price import price
from fxpar.layout import Mesh
from fxpar.limits import search_within
from fxpar.mixing import WORTHWHILE, plan_mixed
from fxpar.plans import Plan
from fxpar.precision import Float64Casts
from fxpar.solver import solve
from fxpar.space import space
from fxpar.unfold import unfolded
from fxpar.zoo.sizes import ENTRIES
from tests.cases import TOLERANCE, Case
from tests.models import MODELS
from tests.simulated import Simulation, largest_error

#: How far the optima may be apart, relative.
MOST = 1e-3
LAYERS = {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4}


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_an_unfolded_program_is_the_same_model(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    with Float64Casts():
        case = Case(model, args, kwargs, name=name)
        program = unfolded(case.program)
        assert not program.blocks and case.program.blocks
        assert len(program.top.nodes) == sum(
            len(graph.nodes) * (len(case.program.instances(block)) if block != "top" else 1)
            for block, graph in case.program.graphs().items()
        ) - sum(len(case.program.instances(block)) for block in case.program.blocks)
        found = price(space(program, Mesh.of({"tp": 2})), Cluster.load("toy"))
        for choice in (solve(found.problem).choice, random_choice(found.space, 0)):
            plan = assemble(found, choice)
            assert set(plan.parameters) == {named for named, _ in model.named_parameters()} - set(program.aliases)
            numbers = Simulation(program, plan, case.callables).run(case.tensors)
            error, where = largest_error(numbers, case.wanted)
            assert error <= TOLERANCE, f"{where} is off by {error:.1e}"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gpt2", "tp=2"), ("gpt2", "tp=4"), ("llama3-8b", "tp=4"), ("bert-large", "tp=4"), ("gpt2", "dp=2,tp=2"),
     ("bert-large", "dp=2,tp=4")],
)  # fmt: skip
def test_the_optimum_of_four_layers_is_that_of_the_unfolded_model(
    name: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ENTRIES[name]
    layers = {key: value for key, value in LAYERS.items() if key in entry.small}
    monkeypatch.setitem(ENTRIES, name, replace(entry, small={**entry.small, **layers}))
    model = load(name, shrink=True, batch=8)
    assert any(len(model.captured.program.instances(block)) == 4 for block in model.captured.program.blocks)
    alone = replace(model, captured=replace(model.captured, program=unfolded(model.captured.program)))
    for cluster in ("h100", "cpu-gloo"):
        folded, free = (solve(priced(some, mesh_of(mesh), Cluster.load(cluster)).problem) for some in (model, alone))
        assert (folded.status, free.status) == ("optimal", "optimal")
        assert free.cost <= folded.cost * (1 + 1e-9), "what folded blocks may do, free ones may do as well"
        assert folded.cost <= free.cost * (1 + MOST)


@pytest.mark.parametrize(
    ("name", "mesh", "share", "cluster"),
    [
        ("gpt2", "tp=4", 0.95, "toy"),
        ("gpt2", "dp=2,tp=2", 0.9, "toy"),
        ("llama3-8b", "dp=2,tp=2", 0.9, "toy"),
        ("gpt2", "tp=2", 0.95, "cpu-gloo"),
        ("gpt2", "tp=2", 0.85, "cpu-gloo"),
        ("gpt2", "dp=2,tp=2", 0.9, "cpu-gloo"),
        ("llama3-8b", "dp=2,tp=2", 0.9, "cpu-gloo"),
    ],
)
def test_no_worse_within_a_memory_limit(
    name: str, mesh: str, share: float, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the layers of an unfolded model may differ. So may those of a folded one, where it pays: in kinds."""
    entry = ENTRIES[name]
    layers = {key: value for key, value in LAYERS.items() if key in entry.small}
    monkeypatch.setitem(ENTRIES, name, replace(entry, small={**entry.small, **layers}))
    model = load(name, shrink=True, batch=8)
    alone = replace(model, captured=replace(model.captured, program=unfolded(model.captured.program)))
    folded, free = (priced(some, mesh_of(mesh), Cluster.load(cluster)) for some in (model, alone))
    peak = memory(model.captured.program, assemble(folded, solve(folded.problem).choice)).peak_bytes
    plan = plan_mixed(folded, share * peak, optimizer="adamw")
    loose = search_within(free, share * peak, optimizer="adamw", prove=False)
    assert loose is not None
    assert all(each.memory is not None and each.memory.peak_bytes <= share * peak for each in (plan, loose.plan))
    assert plan.objective_seconds <= loose.plan.objective_seconds * (1 + MOST)
    assert plan.objective_seconds > solve(folded.problem).cost, "the limit binds"
    alike = search_within(folded, share * peak, optimizer="adamw", prove=False)
    kinds = len(set(plan.instances.values()))
    assert alike is not None
    assert kinds == 1 or plan.objective_seconds < alike.plan.objective_seconds * (1 - WORTHWHILE)
    assert kinds > 1 or cluster == "toy", "where splitting is dear, only some of the layers should be split"


@pytest.mark.parametrize(("blocks", "share"), [(5, 0.6), (8, 0.7), (12, 0.75)])
def test_deeper_models_are_no_worse_either(blocks: int, share: float) -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(blocks))
        )
        x = torch.zeros(64, 64)
    options = {"example_args": (x,), "cluster": "cpu-gloo"}
    free = fxpar.plan(model, {"tp": 2}, **options)
    assert free.memory is not None
    limit = share * free.memory.peak_bytes
    tight = fxpar.plan(model, {"tp": 2}, check_folding=True, memory_limit_bytes=limit, **options)
    assert tight.memory is not None and tight.memory.peak_bytes <= limit
    assert tight.folding_gap is not None and tight.folding_gap <= MOST


def test_a_plan_says_what_folding_costs_when_asked() -> None:
    model, args, kwargs = MODELS["gpt2"]()
    options = {"example_args": args, "example_kwargs": kwargs, "cluster": "cpu-gloo"}
    constraints = {"transformer.h.*.mlp.c_fc.weight": "S1"}
    plan = fxpar.plan(model, {"tp": 2}, check_folding=True, constraints=constraints, **options)
    assert plan.folding_gap is not None and 0 <= plan.folding_gap <= MOST
    assert "instances of a block split differently would save at most 0 %" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert fxpar.plan(model, {"tp": 2}, **options).folding_gap is None
    assert plan.memory is not None
    limit = 0.95 * plan.memory.peak_bytes
    tight = fxpar.plan(model, {"tp": 2}, check_folding=True, memory_limit_bytes=limit, **options)
    assert len(set(tight.instances.values())) == 2, "only one of the layers has to be split"
    assert tight.folding_gap is not None and tight.folding_gap <= MOST
    assert "instances of a block split differently would save at least 0 %" in str(tight)
    assert Plan.from_json(tight.to_json()) == tight
