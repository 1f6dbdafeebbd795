"""Bytes on the wire and modelled seconds: fxpar's optimum against Megatron-LM's layouts of the same model.

In: names of zoo models and of clusters. Out: a Markdown table on standard output. Bytes are what each rank sends in one
block in one step, forward and backward, gradients of norms included: all-reduce 2(n-1)/n B, all-gather and
reduce-scatter (n-1)/n B, all-to-all (n-1)/n^2 B for a tensor of B bytes. Nothing is run.

    python benchmarks/wire_bytes.py [--models llama3-8b gpt2] [--clusters h100 a100] [--degree 4]
"""

from __future__ import annotations

import argparse

from megatron import megatron_plan
from search_time import show

from fxpar import zoo
from fxpar.assemble import assemble
from fxpar.capture import capture
from fxpar.cluster import Cluster
from fxpar.cost.price import Priced, price
from fxpar.graph import Program
from fxpar.layout import Mesh
from fxpar.plans import Plan
from fxpar.solver import solve
from fxpar.space import space

#: The layout that Megatron-LM has for each model.
FAMILIES = {"llama3": "llama", "gpt2": "gpt2", "gpt3": "gpt2"}

OPTIMUM, TP, TP_SP = "fxpar's optimum", "Megatron TP", "Megatron TP+SP"


def plans(priced: Priced, family: str) -> dict[str, Plan]:
    """The three plans that are compared, for one priced model."""
    return {
        OPTIMUM: assemble(priced, solve(priced.problem).choice),
        TP: megatron_plan(priced, family, sequence_parallel=False),
        TP_SP: megatron_plan(priced, family, sequence_parallel=True),
    }


def block_bytes(plan: Plan) -> float:
    """Bytes that a rank sends inside one block in one step, the mean over all blocks."""
    inside = [item.count * item.wire_bytes for item in plan.collectives if item.module in plan.instances]
    return sum(inside) / len(plan.instances)


def step_bytes(plan: Plan) -> int:
    """Bytes that a rank sends in one step, what lies between and around the blocks included."""
    return sum(item.count * item.wire_bytes for item in plan.collectives)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare wire bytes and modelled seconds with Megatron-LM's layouts.")
    parser.add_argument("--models", nargs="*", default=["llama3-8b", "gpt2", "gpt3-175b"])
    parser.add_argument("--clusters", nargs="*", default=["h100", "a100"])
    parser.add_argument("--degree", type=int, default=4)
    args = parser.parse_args()
    rows = []
    for name in args.models:
        program = _program(name)
        for cluster in args.clusters:
            priced = price(space(program, Mesh.of({"tp": args.degree})), Cluster.load(cluster))
            rows += _rows(name, cluster, plans(priced, FAMILIES[name.partition("-")[0]]))
    header = ("model", "cluster", "plan", "MB per rank per block", "MB per rank per step", "modelled step, ms", "split")
    show(f"Wire bytes on tp={args.degree}, one training step", header, rows)


def _program(name: str) -> Program:
    model = zoo.build(name)
    return capture(model.model, model.args, model.kwargs, whole=model.whole).program


def _rows(name: str, cluster: str, found: dict[str, Plan]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            cluster,
            which,
            f"{block_bytes(plan) / 1e6:.3f}",
            f"{step_bytes(plan) / 1e6:.1f}",
            f"{1e3 * plan.objective_seconds:.3f}",
            f"{100 * (1 - plan.unsplit_share):.1f} %",
        )
        for which, plan in found.items()
    ]


if __name__ == "__main__":
    main()
