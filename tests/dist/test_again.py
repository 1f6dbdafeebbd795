"""What backward makes again rather than keep: the same gradients, the collectives that were predicted, less memory."""

from __future__ import annotations

import copy
import gc
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from training import assert_close, assert_same_gradients, ids, llama, mesh_of, rows, stack

import fxpar
from fxpar.assemble import assemble, random_choice
from fxpar.boundary import BoundaryRule
from fxpar.calls import Calls, capture_call
from fxpar.cluster import Cluster
from fxpar.cost.memory import memory
from fxpar.cost.price import price
from fxpar.errors import CallError
from fxpar.graph import Program
from fxpar.layout import Layout, Mesh
from fxpar.plans import Collective, Plan
from fxpar.precision import Float64Casts
from fxpar.runtime.module import applied_plan
from fxpar.runtime.records import record_collectives
from fxpar.search import search
from fxpar.space import space
from fxpar.traffic import collectives

TOLERANCE = 1e-9
FSDP = {"*.weight": "S0@dp"}


class Memory(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still there, and the most there ever were."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        for p in model.parameters():
            self.seen[(p._local_tensor if isinstance(p, DTensor) else p).untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor and (made := leaf.untyped_storage()) not in self.seen:
                self.seen[made] = None
                self._add(made.nbytes())
                weakref.finalize(made, self._add, -made.nbytes())
        return out

    def settled(self, seconds: float = 0.2) -> int:
        """:attr:`now`, when it has not changed for a while: gloo's threads let go of what they sent when they can, and
        reference cycles of torch's keep a tensor of the first run in a process."""
        before = -1
        while before != self.now:
            gc.collect()
            before = self.now
            time.sleep(seconds)
        return self.now

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def with_again(program: Program, plan: Plan, wanted: Callable[[str, Layout], bool]) -> Plan:
    """``plan``, in which backward makes again whatever is ``wanted``, by the kind of what is converted and layout."""
    graphs = {}
    for name, graph in program.graphs().items():
        kinds = {item.value: item.kind for item in graph.inputs}
        again = {
            value: tuple(dst for _, dst in arcs if wanted(kinds.get(value, "result"), dst))
            for value, arcs in plan.graphs[name].trees.items()
        }
        graphs[name] = replace(plan.graphs[name], again={value: found for value, found in again.items() if found})
    return replace(plan, graphs=graphs, collectives=collectives(program, plan.mesh, graphs))


def examples(mesh: Mesh) -> dict[str, torch.Tensor]:
    mine = ids().chunk(2)[dist.get_rank() * 2 // mesh.size] if "dp" in mesh.names else ids()
    return {"input_ids": mine, "labels": mine}


def plans(model: nn.Module, mesh: dict[str, int], constraints: Any, *kinds: str) -> tuple[Program, Plan, Plan]:
    """The program, its best plan, and that plan with every conversion of ``kinds`` made again."""
    axes = Mesh.of(mesh)
    rule = BoundaryRule(("dp",) if "dp" in mesh else ())
    captured, boundary = capture_call(model, (), examples(axes), Calls(axes, rule))
    plan = search(captured.program, axes, Cluster.load("toy"), boundary=boundary, parameters=constraints)
    return captured.program, plan, with_again(captured.program, plan, lambda kind, _: kind in kinds)


def parallel(model: nn.Module, plan: Plan) -> nn.Module:
    mesh = mesh_of(*plan.mesh.degrees, names=plan.mesh.names)
    return fxpar.parallelize(model, mesh, example_kwargs=examples(plan.mesh), plan=plan)


def loss_of(model: nn.Module, mesh: Mesh | None = None) -> torch.Tensor:
    given = {"input_ids": ids(), "labels": ids()} if mesh is None else examples(mesh)
    return model(**given).loss  # type: ignore[no-any-return]


def counts(found: Sequence[Collective]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for item in found:
        total[item.module, item.phase, item.kind, item.axis, item.wire_bytes] += item.count
    return total


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in model.parameters()]


def measured_step(model: nn.Module, mesh: Mesh) -> tuple[Counter[Any], int, int]:
    """The collectives of a step, the bytes kept after its forward, and the most at once."""
    with record_collectives() as executed, Memory(model) as used:
        loss = loss_of(model, mesh)
        kept = used.settled()
        loss.backward()
    return counts(executed), kept, used.peak


def trained(sizes: dict[str, int], constraints: Any, kinds: tuple[str, ...]) -> bool:
    """Steps with and without: equal gradients, the collectives predicted, and what is kept as predicted."""
    wanted, plain, model = (llama().double() for _ in range(3))
    with Float64Casts():
        loss_of(wanted).backward()
        program, kept_plan, plan = plans(model, sizes, constraints, *kinds)
        parallel(plain, kept_plan)
        parallel(model, plan)
        found = [measured_step(m, plan.mesh) for m in (plain, model)]
        assert_same_gradients(plain, wanted, TOLERANCE)
        assert_same_gradients(model, wanted, TOLERANCE)
        assert found[0][0] == counts(kept_plan.collectives)
        assert found[1][0] == counts(plan.collectives), found[1][0] - counts(plan.collectives)
        extra = counts(plan.collectives) - counts(kept_plan.collectives)
        assert extra and {phase for _, phase, *_ in extra} == {"backward"}
        saved = memory(program, kept_plan).activation_bytes - memory(program, plan).activation_bytes
        less = found[0][1] - found[1][1]
        assert less == saved > 0, (less, saved)
        assert found[1][2] < found[0][2]
        model.zero_grad()
        loss = loss_of(model, plan.mesh)
        with record_collectives() as first:
            loss.backward(retain_graph=True)
        with record_collectives() as second:
            loss.backward()
        assert counts(first) == counts(second)
        for p in wanted.parameters():
            p.grad *= 2
        assert_same_gradients(model, wanted, TOLERANCE)
        assert Plan.from_json(plan.to_json()) == plan and applied_plan(model).digest == plan.digest != kept_plan.digest
    return True


@pytest.mark.parametrize(
    ("sizes", "constraints", "kinds"),
    [
        ({"dp": 2}, FSDP, ("parameter",)),
        ({"tp": 2}, {"*.weight": "S0@tp"}, ("result",)),
        ({"tp": 2}, None, ("parameter", "input", "buffer", "constant", "result")),
        ({"dp": 2, "tp": 2}, {"*proj.weight": "S0@dp"}, ("parameter", "input", "buffer", "constant", "result")),
    ],
)
def test_gradients_collectives_and_memory(sizes: dict[str, int], constraints: Any, kinds: tuple[str, ...]) -> None:
    degree = 1
    for n in sizes.values():
        degree *= n
    assert all(run_ranks(degree, trained, sizes, constraints, kinds, timeout=180))


def planned_pair() -> tuple[nn.Module, nn.Module, Plan]:
    """A model with FSDP parameters that keeps what it gathers, one that gathers it again, and the latter's plan."""
    plain, model = (llama().double() for _ in range(2))
    with Float64Casts():
        _, kept_plan, plan = plans(model, {"dp": 2}, FSDP, "parameter")
        return parallel(plain, kept_plan), parallel(model, plan), plan


def gathers(found: Sequence[Collective], phase: str) -> int:
    return sum(item.count for item in found if item.phase == phase and item.kind == "all_gather")


def surrounded() -> bool:
    """Checkpointing around and inside, other hooks, copies, partial passes: equal gradients, less memory."""
    plain, model, plan = planned_pair()
    inside = llama().double()
    with Float64Casts():
        _, most, _ = measured_step(plain, plan.mesh)
        wanted = gradients(plain)

        def assert_steps(m: nn.Module, run: Callable[[], torch.Tensor]) -> list[Collective]:
            m.zero_grad()
            with record_collectives() as executed, Memory(m) as used:
                loss = run()
                assert used.now < most
                loss.backward()
            for found, p in zip(gradients(m), wanted, strict=True):
                assert_close(found, p, TOLERANCE)
            return executed

        step = partial(loss_of, model, plan.mesh)
        planned = gathers(plan.collectives, "backward")
        assert gathers(assert_steps(model, step), "backward") == planned
        # Run again from outside: what is gathered comes from parameters that the recompute has read.
        executed = assert_steps(model, lambda: checkpoint(step, use_reentrant=False))
        assert gathers(executed, "backward") == planned
        assert gathers(executed, "forward") == 2 * gathers(plan.collectives, "forward")
        with torch.autograd.graph.save_on_cpu():
            assert gathers(assert_steps(model, step), "backward") == planned
        assert (
            gathers(assert_steps(twin := copy.deepcopy(model), partial(loss_of, twin, plan.mesh)), "backward")
            == planned
        )
        # Run again by the model: its blocks gather in the recompute, and not once more.
        inside.gradient_checkpointing_enable({"use_reentrant": False})
        program, _, other = plans(inside, {"dp": 2}, FSDP, "parameter")
        assert program.recompute
        parallel(inside, other)
        executed = assert_steps(inside, partial(loss_of, inside, plan.mesh))
        extra = counts(executed) - counts(other.collectives)
        assert sum((counts(other.collectives) - counts(executed)).values()) == 0 < sum(extra.values())
        assert {phase for _, phase, *_ in extra} == {"forward"} and all(module for module, *_ in extra)
        # Only some gradients are asked for; the next pass makes again what it needs.
        loss = step()
        (some,) = torch.autograd.grad(loss, [model.model.norm.weight], retain_graph=True)
        with record_collectives() as executed:
            rest = torch.autograd.grad(loss, list(model.parameters()))
        assert gathers(executed, "backward") == planned
        names = [name for name, _ in model.named_parameters()]
        assert_close(some, rest[names.index("model.norm.weight")], TOLERANCE)
        with torch.no_grad(), record_collectives() as executed:
            assert_close(step(), loss, TOLERANCE)
        assert gathers(executed, "forward") > 0 == sum(item.phase == "backward" for item in executed)
    return True


def test_surroundings() -> None:
    assert all(run_ranks(2, surrounded, timeout=240))


def changed() -> list[tuple[str, str]]:
    """Parameters and other tensors that are changed between forward and backward."""
    _, model, plan = planned_pair()
    found = []
    with Float64Casts():
        block = model.model.layers[1]
        for target in (block.self_attn.o_proj.weight, model.lm_head.weight, block.mlp.up_proj.weight, block):
            seen: list[torch.Tensor] = []
            hook = None
            if isinstance(target, nn.Module):
                hook = target.register_forward_hook(lambda _module, _args, out, seen=seen: seen.append(out))
            loss = loss_of(model, plan.mesh)
            with torch.no_grad():
                for tensor in seen or [target]:
                    (tensor if isinstance(tensor, torch.Tensor) else tensor[0]).mul_(2)
            if hook is not None:
                hook.remove()
            try:
                loss.backward()
            except (CallError, RuntimeError) as error:
                found.append((type(error).__name__, str(error)))
        loss_of(model, plan.mesh).backward()  # and the model goes on
    return found


def test_changes_between_forward_and_backward_are_noticed() -> None:
    first, second = run_ranks(2, changed)
    assert first == second
    assert [kind for kind, _ in first] == ["CallError", "CallError", "RuntimeError", "RuntimeError"]
    gathered, head, kept, activation = (text for _, text in first)
    assert "'self_attn.o_proj.weight' was changed in place after forward" in gathered and "'lm_head.weight'" in head
    assert "modified by an inplace operation" in kept and "modified by an inplace operation" in activation


def compiled() -> bool:
    captured, boundary = capture_call(stack(), (rows(),), {}, Calls(Mesh.of({"tp": 2}), BoundaryRule()))
    priced = price(space(captured.program, Mesh.of({"tp": 2}), boundary), Cluster.load("toy"))
    plan = with_again(captured.program, assemble(priced, random_choice(priced.space, 0)), lambda *_: True)
    assert all(graph.again for graph in plan.graphs.values())
    model, wanted = stack(), stack()
    fxpar.parallelize(model, mesh_of(), example_args=(rows(),), plan=plan)
    for m in (torch.compile(model, backend="aot_eager"), wanted):
        m(rows()).square().mean().backward()
    assert_same_gradients(model, wanted, TOLERANCE)
    return True


def test_torch_compile() -> None:
    assert all(run_ranks(2, compiled, timeout=240))


def at_random(seeds: range) -> bool:
    """Random plans, of whose conversions random ones are made again."""
    captured, boundary = capture_call(stack(), (rows(),), {}, Calls(Mesh.of({"tp": 2}), BoundaryRule()))
    priced = price(space(captured.program, Mesh.of({"tp": 2}), boundary), Cluster.load("toy"))
    made = 0
    for seed in seeds:
        draw = random.Random(seed)
        plan = assemble(priced, random_choice(priced.space, seed))
        plan = with_again(captured.program, plan, lambda *_: draw.random() < 0.6)  # noqa: B023
        model, wanted = stack(), stack()
        fxpar.parallelize(model, mesh_of(), example_args=(rows(),), plan=plan)
        wanted(rows()).square().mean().backward()
        with record_collectives() as executed:
            model(rows()).square().mean().backward()
        assert_same_gradients(model, wanted, TOLERANCE)
        assert counts(executed) == counts(plan.collectives), (seed, counts(executed) - counts(plan.collectives))
        made += sum(len(graph.again) for graph in plan.graphs.values())
    assert made > 3 * len(seeds)
    return True


def test_random_plans() -> None:
    assert all(run_ranks(2, at_random, range(8), timeout=120))
