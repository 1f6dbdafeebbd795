"""Every rewrite is exact: the normal form of a recording gives the numbers and gradients of the function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recording import evaluate, gradients, record
from torch import nn
from torch.utils._pytree import tree_flatten

from fxpar.graph import Graph, Torch, refs
from fxpar.normalise import normalise
from fxpar.normalise.call import RANDOM
from fxpar.normalise.canonical import REWRITES, SAME_AS
from fxpar.normalise.dims import DIMS, OVERLOAD_DIMS, PLANES

X = (2, 3, 4)


def tensor(*shape: int, grad: bool = True, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + len(shape)))
    return x.requires_grad_(grad)


def check(function: Callable[..., Any], *args: torch.Tensor, tolerance: float = 1e-12) -> Graph:
    """The normal form of ``function``, proved on ``args`` in outputs, gradients and what it says of itself."""
    graph, inputs = record(function, *args)
    normal = normalise(graph)
    want, got = tree_flatten(function(*args))[0], evaluate(normal, inputs)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    if not args:
        return legal(normal)
    for a, b in zip(gradients(want, list(args)), gradients(got, list(args)), strict=True):
        if b is None:
            assert a is None or not a.nan_to_num().any(), "the gradient is lost"
        else:
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    return legal(normal)


def legal(graph: Graph) -> Graph:
    """The promises of the normal form that hold for any graph."""
    assert normalise(graph) == graph, "the normal form of a normal form is itself"
    used = {value for node in graph.nodes for value in node.operands} | {ref.value for ref in refs(graph.outputs)}
    for node in graph.nodes:
        assert used.intersection(node.outputs), f"{node} is dead"
        if node.op != "aten.detach.default" and not any(graph.values[out].grad for out in node.outputs):
            assert not any(graph.values[value].grad for value in node.operands), f"{node} reads a gradient"
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes]


#: name -> (function of a (2, 3, 4) tensor, the operations of its normal form)
UNARY: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "view": (lambda x: x.view(6, -1), "reshape"),
    "view_noop": (lambda x: x.view(2, -1, 4) * 2, "mul"),
    "flatten": (lambda x: x.flatten(1), "reshape"),
    "unflatten": (lambda x: x.unflatten(-1, (2, 2)), "reshape"),
    "unsqueeze_squeeze": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze() * 2, "mul"),
    "none_index": (lambda x: x[None, :, None], "reshape"),
    "view_as": (lambda x: x.view_as(torch.zeros(6, 4)), "reshape"),
    "reshape_of_permute": (lambda x: x.transpose(0, 1).reshape(3, 8), "permute reshape"),
    "two_transposes": (lambda x: x.transpose(0, 1).transpose(1, 2), "permute"),
    "back_and_forth": (lambda x: x.transpose(0, -1).transpose(0, 2) * 2, "mul"),
    "movedim": (lambda x: x.movedim((0, -1), (1, 0)), "permute"),
    "movedim_int": (lambda x: x.movedim(0, -1), "permute"),
    "swapaxes": (lambda x: x.swapaxes(-1, 0), "permute"),
    "mt": (lambda x: x.mT, "permute"),
    "t": (lambda x: x[0].t(), "select permute"),
    "numpy_t": (lambda x: x[0].T, "select permute"),
    "adjoint": (lambda x: x.adjoint(), "permute"),
    "chunk_uneven": (lambda x: x.chunk(2, -2), "slice slice"),
    "split": (lambda x: x.split(3, -1), "slice slice"),
    "split_sizes": (lambda x: x.split([1, 3], 2), "slice slice"),
    "tensor_split": (lambda x: x.tensor_split(2, 1), "slice slice"),
    "tensor_split_at": (lambda x: x.tensor_split([1, 3], -1), "slice slice slice"),
    "hsplit": (lambda x: x.hsplit(3), "slice slice slice"),
    "vsplit": (lambda x: x.vsplit(2), "slice slice"),
    "dsplit": (lambda x: x.dsplit([1]), "slice slice"),
    "narrow": (lambda x: x.narrow(-1, -3, 2), "slice"),
    "slice": (lambda x: x[:, 1:, :-1], "slice slice"),
    "slice_all": (lambda x: x[:, 0:99] * 2, "mul"),
    "slice_step": (lambda x: x[..., ::2], "slice"),
    "slice_empty": (lambda x: x[:, 3:], "slice"),
    "unbind": (lambda x: x.unbind(-1), "select select select select"),
    "unbind_one_used": (lambda x: x.unbind(1)[2], "select"),
    "select_negative": (lambda x: x[..., -1], "select"),
    "expand": (lambda x: x[:, :1].expand(-1, 3, -1), "slice expand"),
    "expand_more_dims": (lambda x: x.expand(5, -1, -1, -1), "expand"),
    "expand_as": (lambda x: x[:1].expand_as(x), "slice expand"),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (5, 2, 3, 4)), "expand"),
    "broadcast_tensors": (lambda x: torch.broadcast_tensors(x, x[:, :1]), "slice expand"),
    "meshgrid": (
        lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
        "select select select reshape expand reshape expand",
    ),
    "repeat": (lambda x: x.repeat(2, 1, 3), "reshape expand reshape"),
    "repeat_more_dims": (lambda x: x.repeat(2, 1, 1, 2), "reshape expand reshape"),
    "tile": (lambda x: x.tile((2,)), "reshape expand reshape"),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, -2), "reshape expand reshape"),
    "repeat_interleave_flat": (lambda x: x.repeat_interleave(2), "reshape expand reshape"),
    "contiguous_clone": (lambda x: x.contiguous().clone() * 2, "mul"),
    "float_noop": (lambda x: x.double().to(torch.float64).type_as(x).to("cpu") * 2, "mul"),
    "float": (lambda x: x.float().double(), "_to_copy _to_copy"),
    "dropout_off": (lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False), "add"),
    "cat": (lambda x: torch.cat([x, x * 2], -1), "mul cat"),
    "stack": (lambda x: torch.stack([x, x * 2], -1), "mul reshape reshape cat"),
    "hstack": (lambda x: torch.hstack([x, x]), "cat"),
    "hstack_1d": (lambda x: torch.hstack([x[0, 0], x[0, 0]]), "select select cat"),
    "vstack": (lambda x: torch.vstack([x[0, 0], x[0]]), "select select reshape cat"),
    "dstack": (lambda x: torch.dstack([x[0], x[0]]), "select reshape cat"),
    "dstack_1d": (lambda x: torch.dstack([x[0, 0], x[0, 0]]), "select select reshape cat"),
    "select_scatter": (lambda x: torch.select_scatter(x, x[0] * 2, -3, -1), "select mul select_scatter"),
    "slice_scatter": (lambda x: torch.slice_scatter(x, x[:, 1:] * 2, 1, -2), "slice mul slice_scatter"),
    "slice_scatter_all": (lambda x: torch.slice_scatter(x, x * 2, -1), "mul"),
    "diagonal": (lambda x: x.diagonal(0, -1, -2), "diagonal"),
    "diag_embed": (lambda x: x.diag_embed(), "diag_embed"),
    "softmax": (lambda x: x.softmax(-1), "softmax"),
    "softmax_wide": (lambda x: F.softmax(x.float(), -1, dtype=torch.float64), "_to_copy softmax"),
    "log_softmax": (lambda x: F.log_softmax(x, -2), "log_softmax"),
    "mean": (lambda x: x.mean(), "mean"),
    "mean_dims": (lambda x: x.mean((-1, 0), keepdim=True), "mean"),
    "mean_int": (lambda x: x.mean(-1), "mean"),
    "mean_dtype": (lambda x: x.float().mean(-1, dtype=torch.float64), "_to_copy mean"),
    "sum": (lambda x: x.sum(), "sum"),
    "sum_dims": (lambda x: x.sum((-1,), True), "sum"),
    "amax": (lambda x: x.amax(-1) + x.amin((0, -1), True)[0, :, 0], "amax amin select select add"),
    "max_all": (lambda x: (x.max(), x.min()), "amax amin"),
    "max_dim": (lambda x: x.max(-1), "max"),
    "var": (
        lambda x: (x.var(), x.var(-1, unbiased=False), x.std((0, -1), correction=2, keepdim=True)),
        "var var std",
    ),
    "norm": (
        lambda x: (x.norm(), x.norm(1, -1, True), torch.linalg.vector_norm(x, 3, (-1,))),
        "linalg_vector_norm linalg_vector_norm linalg_vector_norm",
    ),
    "logsumexp": (lambda x: x.logsumexp(-1), "logsumexp"),
    "prod": (lambda x: x.prod(-1), "prod"),
    "cumsum": (lambda x: x.cumsum(-1).flip(-1, 0).roll(1, -1), "cumsum flip roll"),
    "sort": (lambda x: (x.sort(), x.topk(2), torch.sort(x, stable=True, dim=-2)), "sort topk sort"),
    "glu": (lambda x: F.glu(x), "glu"),
    "rsub": (lambda x: 1 - x, "sub"),
    "rsub_tensor": (lambda x: torch.rsub(x, x * 3, alpha=2), "mul sub"),
    "div_mode": (
        lambda x: torch.div(x, 3.0, rounding_mode=None) + torch.div(x, 3, rounding_mode="floor"),
        "div div add",
    ),
    "max_other": (lambda x: torch.max(x, x * 2), "mul maximum"),
    "aliases": (
        lambda x: torch.true_divide(torch.multiply(x, 2).negative().absolute(), 3).clip(0, 1),
        "mul neg abs div clamp",
    ),
    "pad": (lambda x: F.pad(x, (1, 2)), "constant_pad_nd"),
    "einsum": (lambda x: torch.einsum("b t d, b s d -> b t s", x, x * 2), "mul einsum"),
    "matmul": (lambda x: x @ x.mT, "permute matmul"),
    "shared": (lambda x: x.unsqueeze(0) + x.unsqueeze(0), "reshape add"),
    "factories": (
        lambda x: x + torch.ones_like(x) + x.new_full((4,), 2.5) + torch.zeros(2, 1, 1) + x.new_ones(()),
        "full add full add full add full add",
    ),
    "arange": (
        lambda x: x + torch.arange(4) + torch.arange(1, 5) + torch.arange(0, 2, 0.5),
        "arange add arange add arange add",
    ),
    "detach": (lambda x: x * x.detach(), "detach mul"),
    "compare": (lambda x: torch.where(x > 0, x, 0.0) + (x == x.argmax(-1, True)), "detach gt where argmax eq add"),
    "bitwise": (lambda x: ((x > 0) & (x < 1) | (x > 2)) * x, "detach gt lt bitwise_and gt bitwise_or mul"),
    "complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 3, 2, 2)).mH.resolve_conj()),
        "reshape view_as_complex permute conj_physical view_as_real",
    ),
    "list_index": (lambda x: x[..., [-1], :], "index"),
    "unused": (lambda x: (x.sin(), x.cos())[0], "sin"),
}


@pytest.mark.parametrize("name", UNARY)
def test_one_input(name: str) -> None:
    function, want = UNARY[name]
    assert ops(check(function, tensor(*X))) == want.split()


def affine(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor(*shape, seed=index) for index, shape in enumerate(shapes))


@pytest.mark.parametrize(
    ("function", "args", "want"),
    [
        (F.linear, affine((2, 3), (4, 3)), ["linear"]),
        (F.linear, affine((2, 3), (4, 3), (4,)), ["linear", "add"]),
        (torch.addmm, affine((4,), (2, 3), (3, 4)), ["mm", "add"]),
        (
            lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=0.5),
            affine((4,), (2, 3), (3, 4)),
            ["mm", "mul", "mul", "add"],
        ),
        (lambda b, x, w: torch.addmm(b / 0, x, w, beta=0), affine((4,), (2, 3), (3, 4)), ["mm"]),
        (torch.baddbmm, affine((5, 2, 4), (5, 2, 3), (5, 3, 4)), ["bmm", "add"]),
        (torch.addmv, affine((2,), (2, 3), (3,)), ["mv", "add"]),
        (lambda x, y: torch.ops.aten.fill(x, y[0]), affine((2, 3), (3,)), ["select", "expand"]),
        (lambda x: torch.ops.aten.fill(x, 2.0), affine((2, 3)), ["full"]),
        (lambda x: torch.ops.aten._softmax(x, -1, False), affine((2, 3)), ["softmax"]),
    ],
)
def test_several_inputs(function: Callable[..., Any], args: tuple[torch.Tensor, ...], want: list[str]) -> None:
    assert ops(check(function, *args)) == want


def test_functional_copy_takes_shape_and_dtype_of_what_it_overwrites() -> None:
    x, y = tensor(2, 3, grad=False).float(), tensor(3, grad=False)
    assert ops(check(torch.ops.aten.copy, x, y)) == ["_to_copy", "expand"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, ()),
        ({"is_causal": True, "scale": 0.5}, ("is_causal", "scale")),
        ({"attn_mask": torch.ones(3, 3, dtype=torch.bool).tril(), "dropout_p": 0.0}, ("attn_mask",)),
        ({"attn_mask": None, "is_causal": False, "scale": None}, ()),
    ],
)
def test_attention_keeps_only_what_is_set(given: dict[str, Any], kept: tuple[str, ...]) -> None:
    q, k, v = affine((2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4))
    graph = check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **given), q, k, v)
    (node,) = graph.nodes
    assert (len(node.args), tuple(name for name, _ in node.kwargs)) == (3, kept)


def test_bias_under_autocast_does_not_widen_the_result() -> None:
    x, w, b = (t.detach().float().requires_grad_() for t in affine((2, 3), (4, 3), (4,)))

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w, b)

    graph, inputs = record(function, x, w, b)
    normal = legal(normalise(graph))
    assert ops(normal) == ["linear", "_to_copy", "add"]
    assert normal.nodes[1].kwargs == (("dtype", Torch("dtype", "bfloat16")),)
    (got,) = evaluate(normal, inputs)  # checks the dtype of every value
    torch.testing.assert_close(got, function(x, w, b), rtol=0.02, atol=0.02)


def no_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(function)


def test_no_grad_region_reads_detached_values_once() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.view(-1).sin()
            z = x.contiguous().view(-1).cos()
        return (x.view(-1) * y * z).sum()

    graph = check(function, tensor(*X))
    assert ops(graph).count("detach") == 1
    assert ops(graph).count("reshape") == 2


def test_no_grad_does_not_leak_through_a_removed_view() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.view(X)  # changes nothing, but carries no gradient
            z = x.view(-1)
        return (x * y).sum() + z.view(X).sum()

    check(function, tensor(*X))


def test_frozen_parameter_and_unused_gradient() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, w), F.linear(x, w).argmax(-1)

    graph = check(function, tensor(2, 3), tensor(4, 3, grad=False))
    assert [graph.values[item.value].grad for item in graph.inputs] == [True, False]
    assert ops(graph) == ["linear", "detach", "argmax"]


def test_gradient_that_no_output_needs_is_not_carried() -> None:
    graph = check(lambda x, y: (x * 2, (y * 3).argmax()), tensor(*X), tensor(*X))
    assert [graph.values[item.value].grad for item in graph.inputs] == [True, False]
    assert "detach" not in ops(graph)


def test_random_operations_are_not_merged() -> None:
    graph, _ = record(
        lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5) + torch.rand_like(x) + torch.rand_like(x), tensor(*X)
    )
    assert ops(normalise(graph)).count("dropout") == 2
    assert ops(normalise(graph)).count("rand_like") == 2


def test_the_list_of_random_operations_is_torchs_own() -> None:
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            if torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, base), overload or "default").tags:
                tagged.add(base)
    backend = ("attention", "cudnn", "_lstm_mps", "miopen", "_fused_sdp", "_nested", "_fill_mem")
    tagged = {name for name in tagged if not name.endswith("_") and not any(word in name for word in backend)}
    assert tagged == RANDOM


def test_every_name_in_the_tables_exists() -> None:
    for name in {*REWRITES, *DIMS, *OVERLOAD_DIMS, *PLANES, *SAME_AS, *SAME_AS.values()}:
        base, _, overload = name.partition(".")
        assert hasattr(torch.ops.aten, base), name
        assert not overload or hasattr(getattr(torch.ops.aten, base), overload), name


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), (2, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()),
        (2, 2, 5, 5),
    ),
    "lstm": (lambda: nn.LSTM(4, 4), (3, 2, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def function(x: torch.Tensor, *values: torch.Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    check(function, tensor(*shape), *parameters)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(-1),
        lambda x: x.view(x.shape),
        lambda x: x[0],
        lambda x: x.contiguous(),
        lambda x: x.mT.contiguous(),
        lambda x: x.double(),
        lambda x: x.reshape(-1),
        lambda x: F.dropout(x, training=False),
    ],
)
def test_views_without_gradient_stop_it_unless_they_are_the_operand(view: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with torch.no_grad():
            z = view(y)
        return (z * z).sum() + y.sum()

    check(function, tensor(*X))
