"""Dims that the degree does not divide: pieces as ``torch.chunk`` makes them, the last of them smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.assemble import assemble, random_choice
from fxpar.errors import PlanError
from fxpar.layout import CONVERSIONS, I, S, can_be, fits, local_sizes
from fxpar.legality import check_graph
from fxpar.plans import NodePlan, Plan
from fxpar.precision import Float64Casts
from fxpar.runtime.collectives import uneven_size
from fxpar.runtime.pieces import held, piece
from tests.cases import Case, best, check
from tests.models import gpt2, llama
from tests.torch.test_class_loss import labelled

DEGREES = (4, (2, 2), (4, 2))


def error_of(case: Case, plan: Plan) -> tuple[float, str]:
    with Float64Casts():
        return case.error(plan)


@pytest.mark.parametrize("size", [5, 7, 10, 13, 53])
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_pieces_are_those_of_chunk(size: int, degree: int) -> None:
    x = torch.arange(size)
    chunks = x.chunk(degree)
    assert can_be((size,), S(0), degree) == (len(chunks) == degree)
    if len(chunks) == degree:
        for rank, chunk in enumerate(chunks):
            cuts = ((1, degree, rank),)
            assert torch.equal(piece(x, 0, cuts), chunk)
            assert local_sizes((size,), (S(0),), (degree,), (rank,)) == (len(chunk),)
            mine, local = held(x, size, cuts)
            assert torch.equal(x[mine], chunk) and torch.equal(chunk[local[mine]], chunk)


def test_an_uneven_dim_is_cut_by_one_axis_only() -> None:
    assert fits((53, 8), (S(0), S(1)), (4, 2))
    assert not fits((54, 8), (S(0), S(0, 4)), (4, 2))
    assert not fits((54, 8), (S(0), S(0, 2)), (2, 4))
    assert fits((53, 8), (I, S(0)), (4, 2))


VOCABULARY = {"*.wte.weight": "S0@tp"}
SPLIT_LOSS = {"top:*:local.class_terms": "P@tp"}


@pytest.mark.parametrize("degrees", [2, 4, 8, (4, 2)], ids=str)
def test_gpt2_with_a_vocabulary_that_no_degree_divides(degrees: int | tuple[int, ...]) -> None:
    """53 rows, tied: looked up, multiplied and summed over in pieces of which the last is smaller."""
    case = labelled(gpt2(vocabulary=53))
    nodes = {**SPLIT_LOSS, "top:*.wte:aten.embedding.default": "P@tp"}
    plan = best(case.priced(degrees), parameters=VOCABULARY, nodes=nodes)
    (layout,) = [layout for name, layout in plan.parameters.items() if name.endswith("wte.weight")]
    assert layout[0] == S(0)
    error, where = error_of(case, plan)
    assert error <= 1e-9, f"{where} is off by {error:.1e}"


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_models_with_uneven_dims_under_random_plans(degrees: int | tuple[int, ...]) -> None:
    case = labelled(llama(heads=6, kv_heads=2, vocabulary=53))
    priced = case.priced(degrees)
    for seed in range(3):
        error, where = error_of(case, assemble(priced, random_choice(priced.space, seed)))
        assert error <= 1e-9, f"plan {seed}: {where} is off by {error:.1e}"


class Odd(nn.Module):
    """Features and a vocabulary that no degree divides, read in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 11)
        self.up, self.down, self.head = nn.Linear(11, 15), nn.Linear(15, 11), nn.Linear(11, 13)
        self.double()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.table(ids)
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(x)[:, 1:] * 0.5
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), logits, logits.detach().amax(-1)


@pytest.mark.parametrize("degrees", [2, 3, 4, (2, 2), (3, 2)], ids=str)
def test_odd_features_under_random_plans(degrees: int | tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check(Odd(), torch.randint(13, (4, 6)), degrees=(degrees,), seeds=20)


def test_all_conversions_of_uneven_states_are_met_and_right() -> None:
    """Random plans of the test above run every pair of kinds that there is."""
    torch.manual_seed(0)
    case = Case(Odd(), (torch.randint(13, (4, 6)),))
    priced = case.priced(4)
    met: set[tuple[str, str]] = set()

    def meet(kind: str, src: str, dst: str, phase: str) -> None:
        if kind != "none" and (uneven_size(src) or uneven_size(dst)):
            met.add((src[0], dst[0]))

    from tests.simulated import Simulation

    for seed in range(60):
        Simulation(case.program, assemble(priced, random_choice(priced.space, seed))).run(case.tensors, watch=meet)
    assert met >= {pair for pair in CONVERSIONS if "S" in pair}


def test_predicted_bytes_are_those_of_pieces_as_large_as_the_largest() -> None:
    case = Case(nn.Linear(11, 13).double(), (torch.randn(6, 11, dtype=torch.float64),))
    plan = best(
        case.priced(4), parameters={"*": "S0"}, nodes={"*:aten.linear.default": "S1", "*:aten.add.Tensor": "S1"}
    )
    (gather,) = plan.collectives
    assert (gather.kind, gather.wire_bytes) == ("all_gather", 6 * 16 * 8 * 3 // 4)  # 13 in pieces of 4
    assert case.error(plan)[0] <= 1e-12


def test_heads_that_the_degree_does_not_divide() -> None:
    """12 heads on 8 ranks: something else is split, and the numbers are right."""
    case = labelled(gpt2(heads=12, width=48))
    plan = best(case.priced(8))
    assert plan.status == "optimal" and any(layout[0].kind == "S" for layout in plan.parameters.values())
    error, where = error_of(case, plan)
    assert error <= 1e-9, f"{where} is off by {error:.1e}"


def test_a_plan_with_uneven_pieces_where_an_operation_needs_equal_ones_is_refused() -> None:
    case = Case(nn.Linear(11, 13).double(), (torch.randn(6, 11, dtype=torch.float64),))
    nodes = {"*:aten.linear.default": "S1", "*:aten.add.Tensor": "S1"}
    plan = best(case.priced(4), nodes=nodes)
    top, graph = case.program.top, plan.graphs["top"]
    check_graph(top, graph, plan.mesh)
    index = next(number for number, node in enumerate(top.nodes) if node.op == "aten.linear.default")
    odd = replace(graph.nodes[index].strategies[0], name="split:none")
    spoilt = replace(graph, nodes=(*graph.nodes[:index], NodePlan((odd,)), *graph.nodes[index + 1 :]))
    with pytest.raises(PlanError, match="degree 4 does not divide it evenly, and this operation needs equal pieces"):
        check_graph(top, spoilt, plan.mesh)
