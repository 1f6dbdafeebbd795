"""The ``fxpar`` command: ``fxpar plan | verify | solve | demo``.

In: the command line. Out: an exit status: 0 done, 1 a comparison failed, 2 a mistake in what was asked (its message on
standard error). What the commands do is in :mod:`fxpar.commands`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import fxpar
from fxpar.commands import checking, demonstration, planning, solving
from fxpar.errors import FxparError


class _Version(argparse.Action):
    """``--version``: imports the kernels only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version())
        parser.exit()


def version() -> str:
    """The version, and whether the native core or its numpy reference computes."""
    from fxpar import kernels

    core = "native core" if kernels.DEFAULT == "native" else "numpy core: the native one was not built"
    return f"fxpar {fxpar.__version__} ({core})"


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="fxpar", description="Automatic parallelism for PyTorch: plan, verify and demonstrate sharded training."
    )
    root.add_argument("--version", action=_Version, nargs=0, help="show the version and the core in use")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (planning, checking, solving, demonstration):
        command.add(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; mistakes of the caller are one message on standard error, never a traceback."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except FxparError as error:
        print(f"fxpar: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fxpar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxpar: interrupted", file=sys.stderr)
        return 130
