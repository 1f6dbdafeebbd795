"""Cross-entropy over split classes: the numbers of the unsplit loss, small collectives, torch's own loss unsplit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.assemble import assemble, random_choice, whole_choice
from fxpar.capture import capture
from fxpar.layout import COLLECTIVES
from fxpar.plans import Plan
from fxpar.precision import Float64Casts
from fxpar.rewrite import Place, rewrite
from tests.cases import Case, best, check
from tests.models import BATCH, LENGTH, Built, bert, gpt2, llama, t5

ROWS, CLASSES, WIDTH = 8, 12, 6
TARGET = torch.tensor([1, -100, 3, 0, 11, -100, 2, 7])
SPLIT = {"top::local.class_terms": "P"}


class Losing(nn.Module):
    """A linear from rows to logits of classes, and a loss of them."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Any], classes: int = CLASSES) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(WIDTH, classes), loss
        self.register_buffer("weight", torch.rand(classes) + 0.5)
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.loss(self.head(x), target, self.weight)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "mean": lambda x, y, w: F.cross_entropy(x, y),
    "sum": lambda x, y, w: F.cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y, w: F.cross_entropy(x, y, reduction="none"),
    "weighted mean": lambda x, y, w: F.cross_entropy(x, y, w),
    "weighted none": lambda x, y, w: F.cross_entropy(x, y, w, reduction="none"),
    "smoothed mean": lambda x, y, w: F.cross_entropy(x, y, label_smoothing=0.1),
    "smoothed none": lambda x, y, w: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"),
    "smoothed, weighted mean": lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1),
    "smoothed, weighted sum": lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1, reduction="sum"),
    "another number ignored": lambda x, y, w: F.cross_entropy(x, y.clamp(min=0), ignore_index=0),
    "the classes in the middle": lambda x, y, w: F.cross_entropy(x.view(2, 4, CLASSES).mT, y.view(2, 4)),
    "one row": lambda x, y, w: F.cross_entropy(x[0], y[0]),
    "of log-probabilities": lambda x, y, w: F.nll_loss(F.log_softmax(x, -1), y),
    "of log-probabilities that stay": lambda x, y, w: (F.nll_loss(lp := F.log_softmax(x, -1), y), lp.sum()),
    "everything ignored": lambda x, y, w: F.cross_entropy(x, torch.full_like(y, -100), reduction="sum"),
    "two losses": lambda x, y, w: F.cross_entropy(x, y) + F.cross_entropy(x, y, reduction="sum"),
    "unlikely classes": lambda x, y, w: F.cross_entropy(x.masked_fill(w < 0.8, -torch.inf), y.clamp(min=0)),
    "large logits": lambda x, y, w: F.cross_entropy(x * 1e4, y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_split_classes_give_the_numbers_of_the_unsplit_loss(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    model = Losing(LOSSES[name])
    if name == "unlikely classes":
        with torch.no_grad():
            model.weight[:] = torch.tensor([0.5, 0.5, 0.5] * 2 + [1.0, 0.5, 1.0] * 2)  # a rank with none of them
            model.weight[TARGET.clamp(min=0)] = 1.0
            model.weight[1] = 0.5  # and a target that cannot be: an infinite loss
    check(model, x, TARGET, parameters={"head.weight": "S0"}, seeds=20)


@pytest.mark.parametrize("name", [name for name in LOSSES if "stay" not in name])
@pytest.mark.parametrize("degree", [2, 4])
def test_split_classes_held_by_a_pin(name: str, degree: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    case = Case(Losing(LOSSES[name]), (x, TARGET))
    priced = case.priced(degree)
    plan = best(priced, nodes=SPLIT)
    terms = [node for node in plan.graphs["top"].nodes if "c" in node.name.partition(":")[2]]
    assert terms, "the classes are not split"
    error, where = case.error(plan)
    assert error <= 1e-9, f"{where} is off by {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_split_classes_in_the_precision_of_the_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    case = Case(Losing(LOSSES["mean"]).to(dtype), (x * 100, TARGET))
    error, where = case.error(best(case.priced(4), nodes=SPLIT))
    assert error <= (1e-6 if dtype == torch.float32 else 2e-2), f"{where} is off by {error:.1e}"


def test_under_autocast_the_logits_are_widened_first() -> None:
    model = Losing(LOSSES["mean"]).float()
    with torch.autocast("cpu", torch.bfloat16):
        case = Case(model, (torch.randn(ROWS, WIDTH), TARGET))
    kinds = {node.op: case.program.top.values[node.outputs[0] or 0].dtype for node in case.program.top.nodes}
    assert kinds["aten.linear.default"] == "bfloat16" and kinds["local.class_terms"] == "float32"
    assert case.program.top.values[case.program.top.outputs[0].value].dtype == "float32"


def calls(case: Case, plan: Plan, degree: int) -> list[str]:
    place = Place(plan.mesh, (0,), ("none",), torch.device("cpu"))
    module = rewrite(case.program.top, plan.graphs["top"], place)
    assert degree == plan.mesh.size
    return [str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))
            for node in module.graph.nodes]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("two losses",)])
def test_where_classes_are_not_split_torch_computes_the_loss(name: str) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    case = Case(Losing(LOSSES[name]), (x, TARGET))
    priced = case.priced(2)
    ran = calls(case, assemble(priced, whole_choice(priced.space)), 2)
    own = [call for call in ran if "class_" in call or "amax" in call]
    assert not own, own
    assert sum("cross_entropy" in call or "nll_loss" in call for call in ran) == 1


def test_split_positions_use_torchs_loss_too() -> None:
    case = Case(Losing(LOSSES["mean"]), (torch.randn(ROWS, WIDTH, dtype=torch.float64), TARGET))
    plan = best(case.priced(2), nodes={"top::local.class_terms": "S0"})
    ran = calls(case, plan, 2)
    assert "loss_mean_split" in ran and not [call for call in ran if "class_" in call]


def test_a_class_that_is_not_there_is_an_error_split_or_not() -> None:
    case = Case(Losing(LOSSES["sum"]), (torch.randn(ROWS, WIDTH, dtype=torch.float64), TARGET))
    plan = best(case.priced(2), nodes=SPLIT)
    case.tensors = {**case.tensors, ("input", "target"): TARGET.clamp(min=0) + 4}
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)|index"):
        case.error(plan)


class LossOnly(nn.Module):
    """A language model trained on its own input: the loss is all it returns."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.model, args, kwargs = built
        labels = (*args, *kwargs.values())[0].clone()
        labels[:, :3] = -100
        labels[1, 4:] = -100
        self.kwargs = {**kwargs, "labels": labels}

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args, **self.kwargs).loss


def labelled(built: Built) -> Case:
    """A model whose casts are lifted, with its loss."""
    with Float64Casts():
        return Case(LossOnly(built), built[1])


FAMILIES: dict[str, Callable[[], Built]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5}
HEADS = {
    "llama": "*.lm_head.weight",
    "gpt2": "*.wte.weight",
    "bert": "*.word_embeddings.weight",
    "t5": "*.shared.weight",
}


def language(name: str) -> Case:
    return labelled(FAMILIES[name]())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("degree", [2, 4])
def test_language_models_with_a_split_vocabulary(name: str, degree: int) -> None:
    case = language(name)
    plan = best(case.priced(degree), parameters={HEADS[name]: "S0"}, nodes={"top:*:local.class_terms": "P"})
    split_parameters = [layout for layout in plan.parameters.values() if layout[0].kind == "S"]
    assert split_parameters
    with Float64Casts():
        error, where = case.error(plan)
    assert error <= 1e-9, f"{where} is off by {error:.1e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_language_models_under_random_plans(name: str) -> None:
    case = language(name)
    priced = case.priced(4)
    for seed in range(3):
        with Float64Casts():
            error, where = case.error(assemble(priced, random_choice(priced.space, seed)))
        assert error <= 1e-9, f"plan {seed}: {where} is off by {error:.1e}"


def test_no_collective_moves_the_logits() -> None:
    """The optimum keeps the logits of a large vocabulary split; the loss exchanges some numbers per token."""
    vocabulary = 512
    case = labelled(llama(vocabulary=vocabulary))
    priced = case.priced(4)
    plan = best(priced)
    graph, chosen = case.program.top, plan.graphs["top"]
    tokens = BATCH * LENGTH
    logits = {number for number, value in enumerate(graph.values) if value.shape[-1:] == (vocabulary,)}
    kinds = {number: [conversion_of(arc) for arc in chosen.trees.get(number, ())] for number in logits}
    assert logits and not any(kind in COLLECTIVES for found in kinds.values() for pair in found for kind in pair)
    (head,) = [node for node, at in zip(graph.nodes, chosen.nodes, strict=True) if node.op == "local.class_terms"]
    small = {out for out in (*head.outputs, head.operands[1]) if out is not None}
    exchanged = [graph.values[number].bytes for number in small for arc in chosen.trees[number]]
    assert len(exchanged) == 3 and sum(exchanged) == 3 * 8 * tokens
    with Float64Casts():
        error, where = case.error(plan)
    assert error <= 1e-9, f"{where} is off by {error:.1e}"


def conversion_of(arc: Any) -> tuple[str, str]:
    from fxpar.layout import conversion

    ((src,), (dst,)) = arc
    step = conversion(src, dst)
    return step.forward, step.backward


def test_tied_embedding_and_head_are_one_parameter_in_one_state() -> None:
    """The look-up is masked, the loss knows its pieces: a tied matrix is split over the vocabulary, never gathered."""
    case = language("gpt2")
    nodes = {"top:*:local.class_terms": "P", "top:*.wte:aten.embedding.default": "P"}
    plan = best(case.priced(4), parameters={"*.wte.weight": "S0"}, nodes=nodes)
    (name,) = [name for name in plan.parameters if name.endswith("wte.weight")]
    value = next(item.value for item in case.program.top.inputs if item.name.endswith("wte.weight"))
    assert str(plan.parameters[name][0]) == "S0" and not plan.graphs["top"].trees.get(value)
    with Float64Casts():
        error, where = case.error(plan)
    assert error <= 1e-9, f"{where} is off by {error:.1e}"


def test_captured_losses_are_those_of_the_model() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    for loss in LOSSES.values():
        top = capture(Losing(loss), (x, TARGET)).program.top
        assert not any("cross_entropy" in node.op for node in top.nodes)
