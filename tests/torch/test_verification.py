"""What ``fxpar verify`` is made of: errors per tensor, reports, processes that fail, casts that are lifted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.errors import FxparError, LayoutError, RankError
from fxpar.precision import Float64Casts
from fxpar.processes import run_ranks
from fxpar.training_step import Difference, Step, double, named_tensors, train_step
from fxpar.verification import Report, require_real


def report(*differences: Difference) -> Report:
    return Report("tp=2", 1e-9, differences, plan="abc", planned=3, executed=3)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def step_of(model: nn.Module) -> Step:
    torch.manual_seed(1)
    return train_step(model, double((torch.randn(3, 4),)), {}, seed=0)


def test_equal_models_have_no_difference_and_every_tensor_is_compared() -> None:
    found = step_of(mlp()).compare(step_of(mlp()))
    assert {item.error for item in found} == {0.0}
    assert [item.kind for item in found].count("gradient") == 4
    assert [item.name for item in found if item.kind == "input gradient"] == ["args[0]"]
    assert [item.name for item in found if item.kind == "output"] == ["output"]


def test_one_wrong_weight_is_found_by_name() -> None:
    wrong = mlp()
    with torch.no_grad():
        wrong[2].weight[0, 0] += 0.1
    found = report(*step_of(wrong).compare(step_of(mlp())))
    assert not found.ok
    assert "NOT EQUAL" in found.text()
    assert any(item.name == "2.weight" and item.error > 1e-3 for item in found.worst)


def test_a_gradient_that_is_zero_in_both_is_measured_against_the_largest() -> None:
    noise = {"gradient": {"weight": torch.ones(3), "bias": torch.full((3,), 1e-13)}}
    clean = {"gradient": {"weight": torch.ones(3), "bias": torch.zeros(3)}}
    errors = {item.name: item.error for item in Step(noise).compare(Step(clean))}
    assert errors == {"weight": 0.0, "bias": pytest.approx(1e-10, rel=1e-4)}


def test_a_nan_is_never_equal() -> None:
    nan = Difference("output", "output", math.nan)
    found = report(Difference("gradient", "a", 1e-3), nan)
    assert not found.ok
    assert found.worst[0] is nan
    assert not report(nan).ok


def test_a_missing_gradient_is_an_error() -> None:
    with pytest.raises(FxparError, match="bias"):
        Step({"gradient": {}}).compare(Step({"gradient": {"bias": torch.ones(1)}}))


def test_the_first_layer_is_that_of_the_first_wrong_gradient_in_module_order() -> None:
    found = report(
        Difference("gradient", "embed.weight", 0.0),
        Difference("gradient", "layers.0.mlp.weight", 1.0),
        Difference("gradient", "layers.1.mlp.weight", 2.0),
    )
    assert found.first_layer == "layers.0.mlp"


def test_a_report_without_comparisons_is_not_ok() -> None:
    assert not report().ok


def test_a_model_on_meta_is_refused_by_the_name_of_its_parameter() -> None:
    require_real(mlp())
    with pytest.raises(FxparError, match=r"2\.weight is on the meta device"):
        require_real(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, device="meta")))


def test_layer_outputs_are_made_whole_and_named_by_call() -> None:
    model = mlp()
    step = train_step(model, double((torch.ones(3, 4),)), {}, seed=0, layers={"0": lambda tensors: tensors})
    assert list(step.tensors["layer output"]) == ["0"]
    twice = nn.Sequential(model[1], model[0], model[1])
    step = train_step(twice, double((torch.ones(3, 4),)), {}, seed=0, layers={"0": lambda tensors: tensors})
    assert list(step.tensors["layer output"]) == ["0", "0 (call 2)"]


def test_named_tensors_reach_into_dataclasses_and_mappings() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    out = CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2))
    assert [name for name, _ in named_tensors(out, "output")] == ["output.loss", "output.logits"]


def test_casts_to_float32_are_lifted_and_no_others() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with Float64Casts():
        lifted = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, 0, dtype=torch.float32)]
        assert {tensor.dtype for tensor in lifted} == {torch.float64}
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
        assert x.to(torch.int64).dtype == torch.int64


def _sum_of_ranks(rank: int, job: Any) -> str:
    total = torch.tensor(float(rank))
    torch.distributed.all_reduce(total)
    return f"{total.item()} {job}"


def _fail_on_one(rank: int, job: Any) -> str:
    if rank == 1:
        raise job
    torch.distributed.barrier()
    return ""


def test_ranks_form_a_group_and_rank_0_answers() -> None:
    assert run_ranks(_sum_of_ranks, 2, "job") == "1.0 job"


def test_the_rank_that_failed_is_named_with_its_message() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed: LayoutError: degree 3 divides nothing"):
        run_ranks(_fail_on_one, 2, LayoutError("degree 3 divides nothing"))
    with pytest.raises(RankError, match=r"(?s)rank 1 failed: Traceback.*_fail_on_one.*ZeroDivisionError: by hand"):
        run_ranks(_fail_on_one, 2, ZeroDivisionError("by hand"))
