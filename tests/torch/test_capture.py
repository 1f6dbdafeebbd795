"""What a forward may do and be captured: modes, arguments, custom Functions, what is refused and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar.capture import capture
from fxpar.errors import CaptureError
from tests.torch.proving import Of, f64, ops, prove

HERE = re.escape("test_capture.py:")


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 10), nn.ReLU(), nn.Linear(10, width)).double()


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes).double()


def test_mlp_is_five_operations_with_its_parameters_in_order() -> None:
    captured = prove(mlp(), f64(2, 6))
    assert [item.name for item in captured.program.top.inputs] == ["0.weight", "0.bias", "2.weight", "2.bias", "input"]
    assert ops(captured).count("aten.linear.default") == 2
    assert len(captured.program.top.nodes) == 5
    assert captured.program.top.nodes[0].module == "0"


# Modes inside the forward


def test_no_grad_region_stops_the_gradient() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            t = m.l(x)
        return m.k(x) * t

    captured = prove(Of(forward, l=linear(4, 4), k=linear(4, 4)), f64(3, 4))
    top = captured.program.top
    grads = {item.name: top.values[item.value].grad for item in top.inputs}
    assert grads["k.weight"] and not grads["l.weight"]


def test_no_grad_decorator_detach_and_enable_grad_inside_no_grad() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = m.l(x)
            with torch.enable_grad():
                b = m.l(x)
        return a * b + x.detach() * x.data

    prove(Of(forward, l=linear(4, 4)), f64(3, 4))


def test_inference_mode_region() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            t = m.l(x).sum()
        return m.l(x) + 0 * x if t is not None else x

    prove(Of(forward, l=linear(4, 4)), f64(3, 4))


def test_set_grad_enabled_call() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        t = m.l(x)
        torch.set_grad_enabled(True)
        return m.l(x) * t

    prove(Of(forward, l=linear(4, 4)), f64(3, 4))
    assert torch.is_grad_enabled()


def test_capture_under_no_grad_has_no_gradient_anywhere() -> None:
    with torch.no_grad():
        captured = prove(mlp(), f64(2, 6))
    assert not any(value.grad for value in captured.program.top.values)


def test_autocast_region() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m.l(x)
            with torch.autocast("cpu", enabled=False):
                z = m.l(x)
        return m.l(y.float() + z)

    captured = prove(Of(forward, l=nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True), tolerance=2e-2)
    casts = {node.autocast for node in captured.program.top.nodes}
    assert (("cpu", "bfloat16", True),) in casts and () in casts


def test_autocast_around_the_capture_decides_dtypes() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        captured = prove(model, x, tolerance=2e-2)
    (out,) = captured.program.top.outputs
    assert captured.program.top.values[out.value].dtype == "bfloat16"
    assert all(node.autocast == () for node in captured.program.top.nodes)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_is_inlined(use_reentrant: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.k(checkpoint(m.l, x, use_reentrant=use_reentrant))

    captured = prove(Of(forward, l=mlp(4), k=linear(4, 4)), f64(3, 4))
    assert ops(captured).count("aten.linear.default") == 3


# Custom autograd Functions


class Doubled(torch.autograd.Function):
    """Its backward is twice the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


class TwoResults(torch.autograd.Function):
    """New style, two outputs of which one is not differentiable."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, torch.arange(x.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return 3 * grad * y, grad * x


doubled = Doubled.apply


def test_custom_function_keeps_its_backward() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return doubled(m.l(x), 3.0) + Doubled.apply(x, 0.5)

    captured = prove(Of(forward, l=linear(4, 4)), f64(3, 4))
    assert ops(captured).count("call:Doubled") == 1 and ops(captured).count("call:Doubled.1") == 1


def test_custom_function_with_two_results() -> None:
    prove(Of(lambda m, x, y: TwoResults.apply(x, y)), f64(3), f64(3))


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_custom_function_in_place_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="InPlace"):
        capture(Of(lambda m, x: InPlace.apply(x * 2)), (f64(3),))


# Arguments and results


@dataclass
class Out:
    logits: Tensor
    loss: Tensor | None = None


def test_an_unregistered_dataclass_is_returned() -> None:
    captured = prove(Of(lambda m, x: Out(m.l(x)), l=linear(4, 4)), f64(3, 4))
    assert captured.program.top.outputs[1] is None


@dataclass
class Batch:
    x: Tensor
    scale: float = 1.0


class Arguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = linear(4, 4)

    def forward(
        self, batch: dict[str, Any], *, mask: Tensor | None = None, scale: float = 1.0, flag: bool = True
    ) -> Any:
        y = self.l(batch["x"][0]) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return {"y": y, "flag": flag, "none": None, "n": (1, "a", 2.5)} if flag else y


def test_nested_and_keyword_arguments() -> None:
    batch = {"x": (f64(3, 4), None), "label": "text"}
    captured = prove(Arguments(), batch, mask=torch.rand(3, 4) > 0.5, scale=0.5)
    assert [i.name for i in captured.program.top.inputs if i.kind == "input"] == ["batch['x'][0]", "mask"]
    prove(Arguments(), batch, flag=False)
    prove(Arguments(), batch=batch)


def test_a_dataclass_argument() -> None:
    captured = prove(Of(lambda m, batch: batch.x * batch.scale), Batch(f64(3), 2.0))
    assert captured.in_spec.leaves[1] == 2.0


def test_parameters_and_inputs_may_be_returned_unchanged() -> None:
    prove(Of(lambda m, x: (x, m.l.weight, m.l(x)), l=linear(4, 4)), f64(3, 4))


def test_unused_parameters_are_named() -> None:
    captured = prove(Of(lambda m, x: m.a(x), a=linear(4, 4), b=linear(4, 4)), f64(3, 4))
    assert list(captured.program.unused) == ["b.weight", "b.bias"]


def test_tied_parameters_have_one_name() -> None:
    model = Of(lambda m, x: m.b(m.a(x)), a=linear(4, 4), b=linear(4, 4))
    model.b.weight = model.a.weight
    captured = prove(model, f64(3, 4))
    assert captured.program.aliases == {"b.weight": "a.weight"}
    assert [i.name for i in captured.program.top.inputs if i.kind == "parameter"] == ["a.weight", "a.bias", "b.bias"]


def test_a_shared_module_with_a_buffer_that_is_not_saved() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("s", torch.tensor(2.0, dtype=torch.float64), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.s

    shared = Scale()
    captured = prove(Of(lambda m, x: m.b(m.a(x)), a=shared, b=shared), f64(3))
    assert captured.program.aliases == {"b.s": "a.s"}


# Plain attributes and constants


def test_tensors_that_are_plain_attributes_are_constants() -> None:
    model = Of(lambda m, x: x * m.t + m.parts[1] * m.table["k"], t=f64(4, grad=False))
    model.parts = [None, f64(4, grad=False)]
    model.table = {"k": f64(4, grad=False)}
    captured = prove(model, f64(3, 4))
    names = [i.name for i in captured.program.top.inputs if i.kind == "constant"]
    assert names == ["t", "parts[1]", "table['k']"]


def test_closures_and_literals() -> None:
    outer = f64(4, grad=False)

    def forward(m: Any, x: Tensor) -> Tensor:
        return x * outer + torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    prove(Of(forward), f64(3, 4))


def test_an_attribute_set_on_first_use_is_gone_after_the_capture() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if not hasattr(m, "cos"):
            m.cos = torch.cos(torch.arange(4, dtype=torch.float64))
        return x * m.cos

    prove_twice = Of(forward)
    capture(prove_twice, (f64(3, 4),))
    assert not hasattr(prove_twice, "cos")


def test_a_cache_in_a_dict_is_emptied_again() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if "cos" not in m.cache:
            m.cache["cos"] = m.l(x)
        return x * m.cache["cos"]

    model = Of(forward, cache={}, l=linear(4, 4))
    capture(model, (f64(3, 4),))
    assert model.cache == {}


def test_python_state_that_the_forward_changes_is_told_of() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        m.log.append(x)
        return x * m.count

    captured = capture(Of(forward, count=0, log=[]), (f64(3),))
    assert captured.notes == (
        "the forward changes count, log: the program has them as they are now, and changes nothing",
    )


def test_factories_and_what_a_model_may_look_at() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        steps = positions[1:] - positions[:-1]
        if (steps == 1).all() and int(positions[-1]) == x.shape[1] - 1:
            x = x + torch.ones(x.shape[1], dtype=x.dtype)
        mask = torch.zeros(4, 4, dtype=torch.bool)
        mask[0, 1] = True
        return x[:, positions.flip(0)] @ x.new_ones(4, 4).masked_fill(mask, 0.0)

    prove(Of(forward), f64(3, 4))


def test_random_operations_draw_the_same_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
    captured = prove(model, f64(3, 4))
    assert "aten.dropout.default" in ops(captured)
    prove(Of(lambda m, x: x + torch.rand_like(x) * torch.randn(4, dtype=x.dtype)), f64(3, 4))
    assert "aten.dropout.default" not in ops(prove(model.eval(), f64(3, 4)))


def test_logging_in_the_forward_is_harmless() -> None:
    import logging

    def forward(m: Any, x: Tensor) -> Tensor:
        logging.getLogger("model").warning("shape %s", tuple(x.shape))
        return x * 2

    prove(Of(forward), f64(3))


def test_requires_grad_turned_on_inside() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        return (m.l(y) * x).sum()

    prove(Of(forward, l=linear(4, 4)), f64(3, 4))


# Modules of torch


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer(training: bool) -> None:
    model = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True), 3).double().train(training)
    )
    captured = prove(model, f64(2, 5, 16))
    assert list(captured.program.blocks) == ["TransformerEncoderLayer"]
    assert "aten.scaled_dot_product_attention.default" in ops(captured)


def test_inference_without_gradients_does_not_use_the_fused_kernel() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).double().eval()
    with torch.no_grad():
        captured = prove(model, f64(2, 5, 16))
    assert not any("_transformer_encoder_layer_fwd" in op or "_native_multi_head" in op for op in ops(captured))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(training: bool) -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True).double().train(training)
    x = f64(2, 5, 16)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    prove(model, x, x, x, attn_mask=mask, need_weights=False)
    prove(model, x, x, x, average_attn_weights=False)


def test_lstm_and_gru() -> None:
    for kind in (nn.LSTM, nn.GRU):
        captured = prove(kind(4, 6, 2, batch_first=True).double(), f64(3, 5, 4))
        assert len([i for i in captured.program.top.inputs if i.kind == "parameter"]) == 8


def test_convolutions_pooling_and_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    prove(model.double(), f64(2, 3, 8, 8))


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("training", [True, False])
def test_parametrized_modules(name: str, training: bool) -> None:
    made = getattr(nn.utils.parametrizations, name)(linear(4, 4))
    captured = prove(nn.Sequential(made, nn.ReLU(), linear(4, 4)).train(training), f64(3, 4))
    assert bool(captured.program.top.updates) == (name == "spectral_norm" and training)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    y = x * 0.5
    return y * (1.0 + torch.erf(x / 1.41421))


def test_scripted_functions_are_seen_through() -> None:
    prove(Of(lambda m, x: scripted(m.l(x)), l=linear(4, 4)), f64(3, 4))


def test_complex_rotary_embedding() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), 1.0 / 10 ** torch.arange(0, 4, 2)).double()
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

    prove(Of(forward), f64(2, 3, 4))


def test_losses() -> None:
    target = torch.tensor([0, 2, -100])
    prove(Of(lambda m, x, t: F.cross_entropy(m.l(x), t), l=linear(4, 5)), f64(3, 4), target)


# What is refused


class Data(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.l = linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        if self.how == "if" and y.sum() > 0:
            return y
        if self.how == "item":
            return y * y.sum().item()
        if self.how == "nonzero":
            return y[y > 0]
        return -y


@pytest.mark.parametrize("how", ["if", "item", "nonzero"])
def test_data_dependence_names_the_line_and_the_module_and_what_to_do(how: str) -> None:
    model = nn.Sequential(linear(4, 4), Data(how))
    with pytest.raises(CaptureError, match=rf"in 1 at .*{HERE}\d+.*whole=\('1',\)"):
        capture(model, (f64(3, 4),))


def test_a_data_dependent_module_may_be_kept_whole() -> None:
    model = nn.Sequential(linear(4, 4), Data("if"), linear(4, 4))
    captured = prove(model, f64(3, 4), whole=("1",))
    assert "whole:1" in ops(captured)
    assert captured.program.unused == {}


def test_a_plain_module_may_be_kept_whole_by_glob() -> None:
    captured = prove(nn.Sequential(mlp(), nn.BatchNorm1d(6).double()), f64(3, 6), whole=("*1",))
    assert "whole:1" in ops(captured)


def test_a_module_kept_whole_is_called_with_different_constants_and_in_blocks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = linear(4, 4)

        def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
            return self.l(x) * scale

    captured = prove(Of(lambda m, x: m.s(x, 1.0) + m.s(x, 3.0), s=Scaled()), f64(3, 4), whole=("s",))
    assert {"whole:s", "whole:s.1"} <= set(ops(captured))
    stack = nn.Sequential(*(nn.Sequential(Scaled(), nn.ReLU()) for _ in range(3)))
    captured = prove(stack, f64(3, 4), whole=("*.0",))
    assert ops(captured).count("whole:0.0") == 1 and len(captured.program.instances("Sequential")) == 3


def test_a_whole_pattern_that_matches_nothing_is_an_error_with_near_names() -> None:
    with pytest.raises(CaptureError, match=r"whole='o'.*0"):
        capture(mlp(), (f64(2, 6),), whole=("o",))


def test_an_error_of_the_model_itself_names_the_place() -> None:
    with pytest.raises(CaptureError, match=rf"RuntimeError in .*0 at .*{HERE}\d+"):
        capture(Of(lambda m, x: m.l(x), l=nn.Sequential(linear(5, 4))), (f64(3, 4),))


def test_hooks_on_inlined_modules_are_refused_by_name() -> None:
    model, seen = mlp(), []
    for register in ("forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(model[0], f"register_{register}")(lambda *_: seen.append(1))
        with pytest.raises(CaptureError, match=r"'0' has hooks \(.*lambda"):
            capture(model, (f64(2, 6),))
        handle.remove()
    handle = model[0].register_forward_hook(lambda *_, **__: None, with_kwargs=True)
    with pytest.raises(CaptureError, match="'0' has hooks"):
        capture(model, (f64(2, 6),))
    handle.remove()
    model.register_forward_hook(lambda *_: None)
    prove(model, f64(2, 6))


def test_hooks_that_only_compute_are_recorded() -> None:
    model = mlp()
    model[0].register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda _module, args, out: out + args[0].sum())
    model[0].register_forward_hook(lambda _module, _args, out: out.requires_grad_(True))
    captured = prove(model, f64(2, 6))
    assert ops(captured)[:3] == ["aten.mul.Tensor", "aten.linear.default", "aten.add.Tensor"]


def test_tensor_hooks_and_backward_inside_are_refused() -> None:
    def hooked(m: Any, x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 2)
        return y

    def differentiated(m: Any, x: Tensor) -> Tensor:
        return torch.autograd.grad((x * x).sum(), x, create_graph=True)[0]

    with pytest.raises(CaptureError, match="hook"):
        capture(Of(hooked), (f64(3),))
    with pytest.raises(CaptureError, match=r"autograd\.grad"):
        capture(Of(differentiated), (f64(3),))


def test_function_transforms_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"torch\.func"):
        capture(Of(lambda m, x: torch.func.grad(lambda y: (y * y).sum())(x)), (f64(3),))
    with pytest.raises(CaptureError, match=r"torch\.func"):
        capture(Of(lambda m, x: torch.vmap(torch.sin)(x)), (f64(3),))


def test_what_cannot_be_returned_is_named() -> None:
    with pytest.raises(CaptureError, match="object"):
        capture(Of(lambda m, x: (x, object())), (f64(3),))


def test_trainable_tensors_that_are_no_parameters_are_refused() -> None:
    free = f64(3)
    with pytest.raises(CaptureError, match="neither a parameter nor an input"):
        capture(Of(lambda m, x: x * free), (f64(3),))


def test_arguments_that_cannot_be_looked_into_are_refused_by_name() -> None:
    class Holder:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    with pytest.raises(CaptureError, match=r"the argument batch\['h'\] is a .*Holder"):
        capture(Arguments(), (), {"batch": {"x": (f64(3, 4),), "h": Holder(f64(3))}})


def test_models_that_are_sharded_already_or_lazy_are_refused() -> None:
    class Placed(Tensor):
        placements = ()

    model = mlp()
    model[0].weight = nn.Parameter(torch.Tensor._make_subclass(Placed, model[0].weight.detach()))
    with pytest.raises(CaptureError, match=r"'0\.weight' is a DTensor"):
        capture(model, (f64(2, 6),))
    with pytest.raises(CaptureError, match="lazy"):
        capture(nn.LazyLinear(3), (f64(2, 6),))


def test_nothing_stays_patched_after_an_error() -> None:
    before = (nn.Module.__call__, nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__)
    with pytest.raises(CaptureError):
        capture(Data("if"), (f64(3, 4),))
    assert before == (nn.Module.__call__, nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__)
    assert isinstance(torch.zeros(3) + 1, Tensor) and float((torch.zeros(3) + 1).sum()) == 3.0


def test_meta_models_need_no_memory_and_give_the_same_program() -> None:
    def build() -> nn.Module:
        return Of(lambda m, x: m.l(x) + torch.arange(4, device=m.l.weight.device), l=nn.Linear(4, 4))

    real = capture(build(), (torch.zeros(3, 4),))
    with torch.device("meta"):
        model, x = build(), torch.zeros(3, 4)
    assert capture(model, (x,)).program.digest() == real.program.digest()


def test_digests_are_the_same_every_time() -> None:
    digests = {
        capture(nn.TransformerEncoderLayer(16, 4, 32), (torch.zeros(2, 5, 16),)).program.digest() for _ in range(3)
    }
    assert len(digests) == 1
