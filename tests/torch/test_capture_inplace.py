"""In-place operations, views and buffers: the captured program writes nothing and gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture import capture
from fxpar.errors import CaptureError
from tests.torch.proving import Of, f64, ops, prove

CASES: dict[str, Callable[[Tensor], Any]] = {}


def case(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    CASES[function.__name__] = function
    return function


@case
def clamp_and_mul(x: Tensor) -> Any:
    y = x * 2
    y.clamp_(0).mul_(3)
    y += x
    return y


@case
def slice_assignment(x: Tensor) -> Any:
    y = x * 2
    y[:, 0] = 7.0
    y[1:, 2:4] = x[:2, :2]
    y[..., -1] += x[..., 0]
    return y


@case
def mul_on_a_view_changes_the_base_and_other_views(x: Tensor) -> Any:
    y = x * 2
    row, column, flat = y[1], y.t()[2], y.view(-1)
    row.mul_(x[0])
    column.add_(1)
    flat[3:5].neg_()
    return y, row, column, flat


@case
def chains_of_views(x: Tensor) -> Any:
    y = (x * 2).reshape(3, 2, 2)
    y.transpose(0, 1)[1].unsqueeze(0).squeeze(0).permute(1, 0)[0].mul_(5)
    return y


@case
def chunk_split_unbind(x: Tensor) -> Any:
    y = torch.cat([x.detach(), x.detach() * 2], 1)
    a, b = y.chunk(2, 1)
    a.mul_(b)
    y.split([3, 5], 1)[1].add_(1)
    y.unbind(0)[2].zero_()
    y.unbind(1)[0].fill_(4)
    return y, a, b


@case
def a_chunk_in_one_piece(x: Tensor) -> Any:
    y = x.detach() * 2
    (a,) = y.chunk(1, 1)
    a.add_(1)
    return y


@case
def diagonal_and_narrow(x: Tensor) -> Any:
    y = x * 2
    y.diagonal().mul_(x.diagonal())
    y.narrow(1, 1, 2).sub_(1)
    return y


@case
def complex_parts(x: Tensor) -> Any:
    y = torch.view_as_complex((x * 2).reshape(3, 2, 2))
    y.real.mul_(2)
    y.imag.add_(1)
    y.mul_(1j)
    z = torch.view_as_real(y)
    z[..., 0] += 1
    return z, y


@case
def scatter_into_zeros(x: Tensor) -> Any:
    index = torch.tensor([[1], [0], [3]])
    return torch.zeros_like(x).scatter_(-1, index, 1.0) * x + torch.zeros_like(x).scatter_add_(1, index.expand(3, 4), x)


@case
def index_put_with_lists_and_masks(x: Tensor) -> Any:
    y = x * 2
    y[[0, 2], [1, 3]] = x[0, :2]
    y[x > 0.5] = 0.0
    y.masked_fill_(x < -0.5, 2.0).index_fill_(0, torch.tensor([1]), 1.5).index_add_(0, torch.tensor([2]), x[:1])
    return y, x[..., [-1], :].sum()


@case
def copy_with_cast_and_broadcast(x: Tensor) -> Any:
    y = torch.empty(3, 4, dtype=torch.float32)
    y.copy_(x)
    z = x * 2
    z.copy_(x[0])
    z[1].copy_(torch.arange(4))
    z[2].fill_(x[0, 0])
    return y, z


@case
def integer_results_keep_their_dtype(x: Tensor) -> Any:
    n = torch.zeros(3, dtype=torch.int64)
    n += torch.tensor([1, 2, 3])
    n.mul_(2)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask &= x > 0
    mask.logical_not_()
    return n, mask


@case
def filling_a_buffer_row_by_row(x: Tensor) -> Any:
    out = x.new_empty(3, 4)
    for i in range(3):
        out[i] = x[i] * (i + 1)
    return out


@case
def in_place_rearrangement(x: Tensor) -> Any:
    y = x * 2
    y.t_()
    y.unsqueeze_(0).mul_(2)
    y.transpose_(1, 2).squeeze_(0)
    return y


@case
def results_that_were_returned_before(x: Tensor) -> Any:
    y = x * 2
    before = y + 0
    alias = y.detach()
    y.add_(1)
    return before, alias, y


@case
def out_arguments(x: Tensor) -> Any:
    y = torch.empty(3, 4, dtype=x.dtype)
    torch.mul(x.detach(), 2, out=y)
    return y


@case
def relu_and_dropout_in_place(x: Tensor) -> Any:
    y = torch.nn.functional.relu(x * 2, inplace=True)
    z = torch.nn.functional.dropout(x * 3, 0.5, True, inplace=True)
    return y + z + torch.nn.functional.silu(x + 1, inplace=True)


@case
def random_fillings(x: Tensor) -> Any:
    y = torch.empty(3, 4, dtype=x.dtype).normal_(1.0, 2.0)
    z = torch.empty(3, 4, dtype=x.dtype).uniform_(-1, 1)
    return x * y + z + torch.zeros(3, 4, dtype=x.dtype).bernoulli_(0.5)


@pytest.mark.parametrize("name", CASES)
def test_in_place(name: str) -> None:
    captured = prove(Of(lambda m, x: CASES[name](x)), f64(3, 4))
    assert not [op for op in ops(captured) if op.split(".")[1].endswith("_")]


def test_a_constant_tensor_that_is_filled_in_stays_visible_to_the_model() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(4, dtype=torch.bool)
        mask[2] = True
        return x * 2 if bool(mask.any()) and mask.tolist() == [False, False, True, False] else x

    prove(Of(forward), f64(3, 4))


def test_a_constant_tensor_mixed_with_inputs_is_no_longer_known() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(4, dtype=torch.float64)
        view = mask[:2]
        mask += x[0]
        return x * 2 if view.sum() > 0 else x

    with pytest.raises(CaptureError, match="depends on the numbers"):
        capture(Of(forward), (f64(3, 4),))


# Buffers


def test_batch_norm_updates_its_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    captured = prove(model, f64(5, 4))
    assert sorted(name for name, _ in captured.program.top.updates) == [
        "1.num_batches_tracked",
        "1.running_mean",
        "1.running_var",
    ]
    assert captured.program.top.updates and not prove(model.eval(), f64(5, 4)).program.top.updates


def test_batch_norm_called_twice() -> None:
    prove(Of(lambda m, x: m.n(m.n(x) * 2), n=nn.BatchNorm1d(4).double()), f64(5, 4))


def test_buffers_in_place_and_by_assignment() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.buffer_count.add_(1)
        m.buffer_mean = 0.9 * m.buffer_mean + 0.1 * x.detach().mean(0)
        m.buffer_rows[0] = m.buffer_mean
        return x * m.buffer_mean + m.buffer_rows.sum(0) * m.buffer_count

    model = Of(forward, buffer_count=torch.zeros((), dtype=torch.int64), buffer_mean=f64(4, grad=False))
    model.register_buffer("buffer_rows", torch.zeros(2, 4, dtype=torch.float64))
    captured = prove(model, f64(3, 4))
    assert sorted(name for name, _ in captured.program.top.updates) == ["buffer_count", "buffer_mean", "buffer_rows"]


# What is refused


def refused(match: str, forward: Callable[..., Any], *args: Any, **parts: Any) -> None:
    with pytest.raises(CaptureError, match=match):
        capture(Of(forward, **parts), args or (f64(3, 4),))


def test_changing_parameters_is_refused_by_name() -> None:
    def under_no_grad(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.l.weight.mul_(0.5)
        return m.l(x)

    def through_data(m: Any, x: Tensor) -> Tensor:
        m.l.weight.data.clamp_(-1, 1)
        return m.l(x)

    def replaced(m: Any, x: Tensor) -> Tensor:
        m.l.weight = nn.Parameter(m.l.weight * 2)
        return m.l(x)

    for forward in (under_no_grad, through_data, replaced):
        refused(r"'l\.weight'", forward, l=nn.Linear(4, 4).double())


def test_changing_an_input_or_a_constant_is_refused_by_name() -> None:
    refused(r"input 'args\[0\]' is changed by aten.mul_", lambda m, x: x.mul_(2), f64(3, grad=False))
    refused("'t' is changed .* register it as a buffer", lambda m, x: x + m.t.add_(1), f64(3), t=f64(3, grad=False))


def test_changing_what_requires_grad_while_gradients_are_off_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x * 2
        with torch.no_grad():
            y[0] = 0
        return y

    refused("while gradients are off", forward)


def test_a_view_that_cannot_be_written_back_is_refused() -> None:
    refused("as_strided", lambda m, x: (x * 2).as_strided((2,), (1,)).add_(1))


def test_several_written_tensors_are_refused() -> None:
    refused("_foreach", lambda m, x: torch._foreach_add_([x * 2, x * 3], 1.0))
