"""Which modules share one graph, and which must not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture import Captured, capture
from tests.torch.proving import Of, f64, ops, prove

WIDTH = 4


class Block(nn.Module):
    """Two linears; ``tweak(block, h)`` runs between them."""

    def __init__(self, tweak: Callable[..., Tensor] | None = None, width: int = 8, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.tweak = tweak
        for name, value in attributes.items():
            setattr(self, name, value)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(h if self.tweak is None else self.tweak(self, h))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest, **kwargs)
        return x


def x() -> Tensor:
    return f64(3, WIDTH)


def calls(captured: Captured) -> list[str]:
    """The blocks called at the top level, in order."""
    return [node.op.removeprefix("block:") for node in captured.program.top.nodes if node.op.startswith("block:")]


def stack(count: int, **attributes: Any) -> Stack:
    return Stack(*(Block(**attributes) for _ in range(count)))


def test_equal_blocks_are_one_graph() -> None:
    captured = prove(stack(4), x())
    assert calls(captured) == ["Block"] * 4
    assert captured.program.instances("Block") == ("layers.0", "layers.1", "layers.2", "layers.3")
    block = captured.program.blocks["Block"]
    assert [item.name for item in block.inputs] == ["up.weight", "up.bias", "down.weight", "down.bias", "x"]
    assert block.nodes[0].module == "up"
    assert not captured.program.top.inputs[1:]


def test_a_block_met_once_is_part_of_the_top_level() -> None:
    captured = prove(stack(1), x())
    assert not captured.program.blocks
    assert captured.program.top.nodes[0].module == "layers.0.up"


def test_folding_can_be_turned_off() -> None:
    assert not prove(stack(3), x(), fold=False).program.blocks


def test_the_order_a_b_a_b_and_one_odd_block() -> None:
    a = lambda m, h: h * 2  # noqa: E731
    b = lambda m, h: h.sin()  # noqa: E731
    captured = prove(Stack(Block(a), Block(b), Block(a), Block(b)), x())
    assert calls(captured) == ["Block", "Block.2", "Block", "Block.2"]
    captured = prove(Stack(Block(), Block(width=6), Block()), x())
    assert calls(captured) == ["Block", "Block"]


def test_a_block_called_twice() -> None:
    captured = prove(Of(lambda m, x: m.a(m.a(x)), a=Block()), x())
    assert calls(captured) == ["Block", "Block"] and captured.program.instances("Block") == ("a", "a")
    captured = prove(Of(lambda m, x: m.b(m.a(m.b(m.a(x)))), a=Block(), b=Block()), x())
    assert calls(captured) == ["Block"] * 4


def test_blocks_that_share_weights() -> None:
    blocks = Block(), Block(), Block()
    blocks[2].up = blocks[0].up
    captured = prove(Stack(*blocks), x())
    assert calls(captured) == ["Block"] * 3
    assert captured.program.aliases == {
        "layers.2.up.weight": "layers.0.up.weight",
        "layers.2.up.bias": "layers.0.up.bias",
    }
    shared = Block()
    assert calls(prove(Stack(shared, Block(), shared), x())) == ["Block"] * 3


def test_ties_inside_a_block_must_be_the_same() -> None:
    free, tied = Block(width=WIDTH), Block(width=WIDTH)
    tied.down.weight = tied.up.weight
    captured = prove(Stack(free, tied, copy.deepcopy(tied)), x())
    assert calls(captured) == ["Block", "Block.2", "Block.2"]


@pytest.mark.parametrize("values", [(2, 3, 4), ((1, 2), (1, 3), (2, 2)), (1, 1.0, True), (None, 0, 0.5)])
def test_an_attribute_that_the_forward_reads_keeps_blocks_apart(values: tuple[Any, ...]) -> None:
    def tweak(m: Any, h: Tensor) -> Tensor:
        value = m.scale[0] + 2 * m.scale[1] if isinstance(m.scale, tuple) else m.scale
        return h if value is None else h * value

    prove(Stack(*(Block(tweak, scale=value) for value in values)), x())


def test_an_attribute_that_the_forward_does_not_read_is_harmless() -> None:
    captured = prove(Stack(*(Block(layer_idx=index) for index in range(3))), x())
    assert calls(captured) == ["Block"] * 3


def test_reading_an_attribute_that_makes_no_difference_is_harmless() -> None:
    def tweak(m: Any, h: Tensor) -> Tensor:
        return h * 2 if m.layer_idx % 4 == 3 else h

    captured = prove(Stack(*(Block(tweak, layer_idx=index) for index in range(8))), x())
    assert calls(captured) == ["Block", "Block", "Block", "Block.2"] * 2


def test_attributes_that_are_missing_in_one_block() -> None:
    tweak = lambda m, h: h * m.scale if hasattr(m, "scale") else h  # noqa: E731
    captured = prove(Stack(Block(tweak), Block(tweak, scale=2.0), Block(tweak), Block(tweak, scale=2.0)), x())
    assert calls(captured) == ["Block", "Block.2", "Block", "Block.2"]


def test_attributes_read_through_vars_and_through_objects() -> None:
    class Config:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    through_vars = lambda m, h: h * vars(m)["scale"]  # noqa: E731
    captured = prove(Stack(*(Block(through_vars, scale=value) for value in (1.5, 2.5, 1.5))), x())
    assert calls(captured) == ["Block", "Block.2", "Block"]
    through_object = lambda m, h: h * m.config.scale  # noqa: E731
    captured = prove(Stack(*(Block(through_object, config=Config(value)) for value in (1.5, 2.5, 1.5))), x())
    assert calls(captured) == ["Block", "Block.2", "Block"]
    shared = Config(0.5)
    captured = prove(Stack(*(Block(through_object, config=shared) for _ in range(3))), x())
    assert calls(captured) == ["Block"] * 3


def test_an_attribute_of_a_module_inside_the_block() -> None:
    def block(eps: float) -> Block:
        return Block(lambda m, h: m.norm(h), norm=nn.LayerNorm(8, eps=eps))

    captured = prove(Stack(block(1e-5), block(1e-2), block(1e-5)), x())
    assert calls(captured) == ["Block", "Block.2", "Block"]


def test_buffers_and_constants_are_each_blocks_own() -> None:
    def block() -> Block:
        made = Block(lambda m, h: h * m.table + m.rows[1] + m.saved, table=f64(8, grad=False))
        made.rows = [None, f64(8, grad=False)]
        made.register_buffer("saved", f64(8, grad=False))
        return made

    captured = prove(Stack(block(), block(), block()), x())
    assert calls(captured) == ["Block"] * 3
    kinds = [(item.kind, item.name) for item in captured.program.blocks["Block"].inputs]
    assert ("constant", "table") in kinds and ("constant", "rows[1]") in kinds and ("buffer", "saved") in kinds


def test_tensors_and_literals_made_in_the_forward_are_common() -> None:
    table = f64(8, grad=False)
    captured = prove(stack(3, tweak=lambda m, h: h * table + torch.tensor([1.0] * 8).double()), x())
    assert calls(captured) == ["Block"] * 3


def test_dtype_of_a_parameter_requires_grad_and_mode() -> None:
    frozen = Block()
    frozen.requires_grad_(False)
    captured = prove(Stack(Block(), frozen, Block()), x())
    assert calls(captured) == ["Block", "Block"]
    noisy = lambda: Block(lambda m, h: torch.dropout(h, 0.5, m.training))  # noqa: E731
    captured = prove(Stack(noisy(), noisy().eval(), noisy()), x())
    assert calls(captured) == ["Block", "Block"]


def test_the_first_block_has_an_input_without_gradient() -> None:
    captured = prove(stack(4), f64(3, WIDTH, grad=False))
    assert calls(captured) == ["Block", *["Block.2"] * 3]


def test_grad_mode_and_autocast_of_the_call() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.s.layers[0](x)
        return m.s.layers[1](x) + m.s.layers[2](x) * y

    assert calls(prove(Of(forward, s=stack(3)), x())) == ["Block", "Block.2", "Block.2"]


def test_inputs_that_are_not_tensors_belong_to_the_block() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor, scale: float, table: dict[str, Any]) -> Any:
            return super().forward(x) * scale + table["t"], None, scale

    def forward(m: Any, x: Tensor, t: Tensor) -> Tensor:
        for index, layer in enumerate(m.layers):
            x, nothing, scale = layer(x, float(index // 2), table={"t": t, "n": None})
            assert nothing is None and scale == index // 2
        return x

    captured = prove(Of(forward, layers=nn.ModuleList([Scaled() for _ in range(4)])), x(), x())
    assert calls(captured) == ["Scaled", "Scaled", "Scaled.2", "Scaled.2"]
    names = [item.name for item in captured.program.blocks["Scaled"].inputs if item.kind == "input"]
    assert names == ["x", "table['t']"]


def test_a_root_buffer_passed_into_every_layer() -> None:
    class Turned(Block):
        def forward(self, x: Tensor, rope: Tensor) -> Tensor:
            return super().forward(x) * rope

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x, m.buffer_rope)
        return x

    model = Of(forward, layers=nn.ModuleList([Turned() for _ in range(3)]), buffer_rope=f64(WIDTH, grad=False))
    assert calls(prove(model, x())) == ["Turned"] * 3


def test_a_block_that_writes_to_its_input_is_recorded_in_place() -> None:
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    prove(Of(lambda m, x: m.s(x * 1), s=Stack(Writing(), Writing())), x())


def test_a_block_that_returns_its_input_or_a_view_of_it() -> None:
    class Passing(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x, x[:1]

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x * 1
        for layer in m.layers:
            x, same, first = layer(x)
        return x * same + first

    def writes(m: Any, x: Tensor) -> Tensor:
        y = x * 1
        for layer in m.layers:
            z, same, first = layer(y)
            same.mul_(2)
            first.add_(1)
        return z * y

    layers = nn.ModuleList([Passing(), Passing()])
    assert calls(prove(Of(forward, layers=layers), x())) == ["Passing"] * 2
    with torch.no_grad():
        prove(Of(writes, layers=layers), x())


def test_a_result_of_a_block_may_be_written_to() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
            x += 1
            x[:, 0] = 0
        return x

    assert calls(prove(Of(forward, layers=nn.ModuleList([Block(), Block()])), x())) == ["Block"] * 2


def test_a_block_that_uses_a_module_outside_of_it() -> None:
    outside = nn.Linear(8, 8).double()
    blocks = [Block(lambda m, h: m.friend[0](h), friend=[outside]) for _ in range(2)]
    model = Of(lambda m, x: m.s(x), s=Stack(*blocks), outside=outside)
    assert captured_without_blocks(prove(model, x()))


def test_a_block_that_uses_a_tensor_it_is_not_given() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        seen.append(x * 2)
        return m.s(x)

    seen: list[Tensor] = []
    model = Of(forward, s=stack(2, tweak=lambda m, h: h * seen[-1].sum()))
    assert captured_without_blocks(prove(model, x()))


def captured_without_blocks(captured: Captured) -> bool:
    return not captured.program.blocks and ops(captured).count("aten.linear.default") >= 4


def test_attributes_written_in_the_forward() -> None:
    def cached(m: Any, h: Tensor) -> Tensor:
        if not hasattr(m, "cos"):
            m.cos = torch.cos(torch.arange(8, dtype=torch.float64)) * m.scale
        return h * m.cos

    model = Stack(*(Block(cached, scale=scale) for scale in (1.0, 2.0, 1.0)))
    captured = capture(model, (x(),))
    assert all(not hasattr(layer, "cos") for layer in model.layers)
    assert calls(captured) == ["Block", "Block.2", "Block"]
    model(x())
    prove(model, x())  # now the tables are there, as plain attributes


def test_batch_norm_in_blocks_updates_each_blocks_own_buffers() -> None:
    def block() -> Block:
        return Block(lambda m, h: m.norm(h), norm=nn.BatchNorm1d(8))

    captured = prove(Stack(block(), block()), x())
    assert calls(captured) == ["Block"] * 2
    assert len(captured.program.blocks["Block"].updates) == 3
    assert prove(Stack(block()), x()).program.top.updates[0][0].startswith("layers.0.norm.")
    shared = block()
    prove(Stack(shared, block(), shared), x())


def test_a_buffer_that_a_block_updates_and_others_read() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        before = m.s.layers[0].norm.running_mean.sum()
        y = m.s(x)
        return y * before + m.s.layers[0].norm.running_mean.sum()

    blocks = [Block(lambda m, h: m.norm(h), norm=nn.BatchNorm1d(8)) for _ in range(2)]
    prove(Of(forward, s=Stack(*blocks)), x())


def test_hooks_and_own_forwards_of_instances() -> None:
    model = stack(3)
    seen: list[str] = []
    model.layers[1].register_forward_hook(lambda *_: seen.append("hook"))
    assert calls(capture(model, (x(),))) == ["Block"] * 3 and not seen
    model = stack(3)
    model.layers[1].forward = lambda x: x * 3
    captured = prove(model, x())
    assert calls(captured) == ["Block", "Block"]


def test_a_hook_inside_one_of_the_blocks_is_refused() -> None:
    from fxpar.errors import CaptureError

    model = stack(3)
    model.layers[2].up.register_forward_hook(print)
    with pytest.raises(CaptureError, match=r"layers\.2\.up"):
        capture(model, (x(),))


def test_repeated_layers_inside_repeated_stacks_fold_at_the_layers() -> None:
    model = Stack(stack(3), stack(3))
    captured = prove(model, x())
    assert calls(captured) == ["Block"] * 6


def test_sequentials_fold_and_plain_layers_do_not() -> None:
    captured = prove(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double(), x())
    assert not captured.program.blocks
    parts = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]
    assert calls(prove(nn.Sequential(*parts).double(), x())) == ["Sequential"] * 4


def test_custom_functions_in_blocks() -> None:
    from tests.torch.test_capture import Doubled

    captured = prove(stack(3, tweak=lambda m, h: Doubled.apply(h, 2.0)), x())
    assert calls(captured) == ["Block"] * 3 and "call:Doubled" in ops(captured)


def test_random_operations_in_blocks_draw_anew_in_every_block() -> None:
    captured = prove(stack(3, tweak=lambda m, h: torch.dropout(h, 0.5, m.training)), x())
    assert calls(captured) == ["Block"] * 3


def test_folding_does_not_depend_on_depth() -> None:
    digests = {depth: capture(stack(depth), (x(),)).program.blocks["Block"].digest() for depth in (2, 5)}
    assert digests[2] == digests[5]
