"""Flags that several commands share, and how their text is read.

In: text from the command line. Out: mesh axes, and models as specs that ``fxpar.zoo`` can build. Building them is not
done here, so that ``--help`` and wrong flags answer without importing torch.
"""

from __future__ import annotations

import argparse
import math

from fxpar.errors import LayoutError
from fxpar.layout import Mesh

MODEL_HELP = "a zoo name (llama3-8b, gpt2, ...) or package.module:function, which returns (model, args, kwargs)"


def mesh_axes(text: str) -> dict[str, int]:
    """Read ``"dp=2,tp=4"``.

    Raises :class:`argparse.ArgumentTypeError`, which argparse turns into its own message.

    >>> mesh_axes("dp=2,tp=4")
    {'dp': 2, 'tp': 4}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, degree = part.strip().partition("=")
        if not (name.isidentifier() and equals and degree.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is not an axis; write name=degree, such as tp=8 or dp=2,tp=4")
        if name in axes:
            raise argparse.ArgumentTypeError(f"axis {name!r} is given twice")
        axes[name] = int(degree)
    try:
        Mesh.of(axes)
    except LayoutError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return axes


def positive(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def byte_count(text: str) -> float:
    """Read ``"70GiB"``, ``"80e9"`` or ``"512MiB"`` as bytes, ``"none"`` as infinitely many.

    >>> byte_count("1.5KiB"), byte_count("2GB")
    (1536, 2000000000)
    """
    if text.strip() == "none":
        return math.inf
    units = {f"{prefix}{kind}": base**power for kind, base in (("iB", 1024), ("B", 1000))
             for power, prefix in enumerate("KMGT", 1)} | {"B": 1, "": 1}  # fmt: skip
    number = text.strip().rstrip("KMGTiB")
    try:
        count = int(float(number) * units[text.strip()[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; write for example 70GiB, 512MiB, 80e9 or none"
        )
    return count


def axis_names(text: str) -> list[str]:
    """Read ``"dp,fsdp"``; ``"none"`` is no axis.

    >>> axis_names("dp,fsdp"), axis_names("none")
    (['dp', 'fsdp'], [])
    """
    return [] if text == "none" else [name.strip() for name in text.split(",")]


def add_model(parser: argparse.ArgumentParser, cluster: str) -> None:
    """Add ``--model``, ``--mesh``, ``--cluster`` (with its default) and ``--strict``."""
    parser.add_argument("--model", required=True, metavar="NAME", help=MODEL_HELP)
    parser.add_argument("--mesh", required=True, type=mesh_axes, metavar="AXIS=N", help="mesh axes, for example tp=8")
    parser.add_argument(
        "--cluster", default=cluster, metavar="NAME", help="a preset's name or a TOML file (default: %(default)s)"
    )
    parser.add_argument("--strict", action="store_true", help="an operation without a rule is an error")
