"""``fxpar plan``: find a plan for a model that need not fit on this machine, and show it.

In: parsed flags. Out: the plan on standard output, as text or as JSON.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fxpar.commands import options
from fxpar.progress import progress


def add(commands: Any) -> None:
    """Declare the command's flags."""
    parser = commands.add_parser(
        "plan", help="find the best way to shard a model over a mesh", description="Find the best plan and show it."
    )
    options.add_model(parser, cluster="h100")
    parser.add_argument(
        "--data-axes", type=options.axis_names, metavar="NAMES",
        help="axes that carry the batch, such as dp,fsdp, or none (default: by name); inputs are those of one rank",
    )  # fmt: skip
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--memory-limit", type=options.byte_count, metavar="BYTES",
        help="of one device, for example 70GiB, or none (default: what the cluster's devices have)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for the solver (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="write the plan as JSON, which fxpar.Plan.from_json reads")
    parser.add_argument("--explain", metavar="MODULE", help="also show each choice under MODULE with its runner-up")
    parser.add_argument("--dump", metavar="DIR", help="write the text of every stage into DIR, numbered")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print; returns the exit status."""
    from fxpar import api, zoo

    with progress(f"build {args.model}"):
        model = zoo.load(args.model) if ":" in args.model else zoo.build(args.model)
    plan = api.plan(
        model.model,
        args.mesh,
        example_args=model.args,
        example_kwargs=model.kwargs,
        data_axes=args.data_axes,
        cluster=args.cluster,
        optimizer=args.optimizer,
        memory_limit_bytes=args.memory_limit,
        strict=args.strict,
        whole=model.whole,
        time_limit_seconds=args.time_limit,
        dump=args.dump,
    )
    if args.json:
        print(plan.to_json(indent=1))
        return 0
    print(f"model    {args.model} ({model.source})" if model.source else f"model    {args.model}")
    print(plan)
    if args.explain is not None:
        print()
        print(plan.explain(args.explain))
    if args.dump:
        print(f"stages written to {args.dump}", file=sys.stderr)
    return 0
