"""``fxpar verify``: run a model sharded on CPU processes and compare it with the unsharded model.

In: parsed flags. Out: a report on standard output; exit status 1 when a number differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxpar.commands import options


def add(commands: Any) -> None:
    """Declare the command's flags."""
    parser = commands.add_parser(
        "verify",
        help="compare the sharded model with the unsharded one, on CPU processes",
        description="Run the sharded model on CPU processes in float64 and compare outputs, every gradient and one "
        "AdamW step with the unsharded model. A zoo name is shrunk to a few layers first.",
    )
    options.add_model(parser, cluster="toy")
    parser.add_argument("--full", action="store_true", help="the model's own size, not a shrunk one")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="verify this plan (JSON), not one found now")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=1e-9, metavar="X", help="default: %(default)s")
    parser.add_argument("--worst", type=options.positive, default=10, metavar="N", help="show the N worst differences")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and print; returns the exit status."""
    from fxpar import verification
    from fxpar.plans import Plan

    plan = Plan.from_json(args.plan.read_text()) if args.plan else None
    report = verification.verify(
        verification.ModelSpec(args.model, full=args.full),
        args.mesh,
        plan=plan,
        cluster=args.cluster,
        strict=args.strict,
        seed=args.seed,
        tolerance=args.tolerance,
    )
    print(report.text(worst=args.worst))
    return 0 if report.ok else 1
