"""``fxpar demo``: train a small Llama on one process and on two, and compare.

In: parsed flags. Out: tables on standard output; exit status 1 when the losses differ.
"""

from __future__ import annotations

import argparse
from typing import Any

from fxpar.commands import options


def add(commands: Any) -> None:
    """Declare the command's flags."""
    parser = commands.add_parser(
        "demo",
        help="train a small Llama on one and on two processes and compare the losses",
        description="Train a small byte-level Llama on the text of Python's own help, on one process and through "
        "fxpar.parallelize on several, and compare the loss curves. Fails if they differ by more than 1e-4 relative.",
    )
    parser.add_argument("--steps", type=options.positive, default=30, help="training steps (default: %(default)s)")
    parser.add_argument("--processes", type=options.positive, default=2, help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, compare and print; returns the exit status."""
    from fxpar.demo import demo

    return demo(steps=args.steps, processes=args.processes)
