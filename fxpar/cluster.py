"""Hardware facts: what a device computes, remembers and moves, and what each level of the network carries.

In: a preset's name, a TOML file, or a :class:`Cluster`. Out: :class:`Cluster`, and a :class:`Link` per mesh axis.
All units stand in the names. What an operation or a collective then costs is :mod:`fxpar.cost`.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fxpar.errors import ClusterError
from fxpar.layout import Mesh

PRESETS = Path(__file__).parent / "data" / "clusters.toml"


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the ranks of one mesh axis: seconds per step, and bytes per second that each rank sends."""

    name: str
    alpha_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network: groups of ``devices`` joined by a link. The outermost level has no limit (0)."""

    name: str
    devices: int
    alpha_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """A machine, device by device.

    ``peaks`` are flop/s per dtype, of which a large product reaches the share ``efficiency``. ``launch_seconds`` is
    the least time any operation takes. ``levels`` go from the innermost to the outermost.
    """

    name: str
    peaks: tuple[tuple[str, float], ...]
    efficiency: float
    memory_bytes: float
    memory_bytes_per_second: float
    launch_seconds: float
    levels: tuple[Level, ...]

    @staticmethod
    def load(source: str | Path | Cluster) -> Cluster:
        """A preset by name, or the one cluster in a TOML file; raises :class:`ClusterError`.

        >>> Cluster.load("h100").levels[0].name
        'nvlink'
        """
        if isinstance(source, Cluster):
            return source
        known = _tables(PRESETS)
        if isinstance(source, str) and source in known:
            return _cluster(source, known[source], f"preset {source!r}")
        path = Path(source)
        if path.suffix != ".toml" and not path.is_file():
            names = sorted(known)
            near = get_close_matches(str(source), names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ClusterError(
                f"there is no cluster {str(source)!r}; {hint}Presets: {', '.join(names)}; or a .toml file"
            )
        tables = _tables(path)
        if len(tables) != 1:
            raise ClusterError(f"{path} describes {len(tables)} clusters ({', '.join(tables)}); keep one [name] table")
        ((name, table),) = tables.items()
        return _cluster(name, table, f"[{name}] in {path}")

    def peak(self, dtype: str) -> float:
        """The flop/s that a large product in ``dtype`` reaches; a dtype without an entry counts as float32."""
        peaks = dict(self.peaks)
        return self.efficiency * peaks.get(dtype, peaks["float32"])

    def link(self, degree: int, inner_size: int = 1) -> Link:
        """What joins ``degree`` ranks that stand ``inner_size`` devices apart.

        That is the first level that holds all of them. Between groups of that level, all the ranks of an axis that
        share a group also share the group's way out, so they have the sum of their own ways.

        >>> [Cluster.load("h100").link(8, inner).name for inner in (1, 8)]
        ['nvlink', 'network']
        """
        span, inside = degree * inner_size, 1
        fastest = math.inf
        for level in self.levels:
            together = max(1, inside // inner_size)
            rate = min(fastest, level.bytes_per_second * together)
            if level.devices == 0 or span <= level.devices:
                break
            fastest, inside = rate, level.devices
        return Link(level.name, level.alpha_seconds, rate)

    def axis_links(self, mesh: Mesh) -> tuple[Link, ...]:
        """The link of each mesh axis; neighbours on the innermost (last) axis are neighbouring devices."""
        return tuple(self.link(degree, math.prod(mesh.degrees[at + 1 :])) for at, degree in enumerate(mesh.degrees))


def presets() -> tuple[str, ...]:
    """The names that :meth:`Cluster.load` knows.

    >>> presets()
    ('h100', 'a100', 'cpu-gloo', 'toy')
    """
    return tuple(_tables(PRESETS))


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot read {path}: {error.strerror or error}; give a preset's name or a file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} is not TOML: {error}") from None
    loose = sorted(key for key, value in found.items() if not isinstance(value, dict))
    if loose or not found:
        raise ClusterError(f"{path}: put {', '.join(loose) or 'the numbers'} under a [name] table, as the presets are")
    return found


_PLAIN = ("efficiency", "memory_bytes", "memory_bytes_per_second", "launch_seconds")
_LEVEL = ("name", "devices", "alpha_seconds", "bytes_per_second")


def _cluster(name: str, table: dict[str, Any], where: str) -> Cluster:
    _keys(table, (*_PLAIN, "flops_per_second", "levels"), where)
    plain = {key: _positive(table[key], key, where) for key in _PLAIN}
    if plain["efficiency"] > 1:
        raise ClusterError(f"{where}: efficiency is {plain['efficiency']}; it is a share of the peak, at most 1")
    peaks = table["flops_per_second"]
    if not isinstance(peaks, dict) or "float32" not in peaks:
        raise ClusterError(f"{where}: flops_per_second is a table with a number per dtype, and needs float32")
    levels = table["levels"]
    if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
        raise ClusterError(f"{where}: levels is a list of [[{name}.levels]] tables, the innermost first")
    return Cluster(
        name=name,
        peaks=tuple((dtype, _positive(peak, f"flops_per_second.{dtype}", where)) for dtype, peak in peaks.items()),
        levels=_levels(levels, where),
        **plain,
    )


def _levels(tables: list[dict[str, Any]], where: str) -> tuple[Level, ...]:
    levels: list[Level] = []
    for number, table in enumerate(tables):
        here, last = f"{where}, level {number}", number == len(tables) - 1
        _keys(table, _LEVEL, here)
        devices, least = table["devices"], levels[-1].devices + 1 if levels else 1
        if type(devices) is not int or (devices != 0 if last else devices < least):
            wanted = "0 (no limit), being the outermost" if last else f"a whole number from {least}"
            raise ClusterError(f"{here}: devices is {devices!r}; it must be {wanted}")
        alpha = _positive(table["alpha_seconds"], "alpha_seconds", here)
        rate = _positive(table["bytes_per_second"], "bytes_per_second", here)
        levels.append(Level(str(table["name"]), devices, alpha, rate))
    return tuple(levels)


def _keys(table: dict[str, Any], wanted: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in wanted:
            near = get_close_matches(key, wanted, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(wanted)}"
            raise ClusterError(f"{where}: unknown key {key!r}; {hint}")
    missing = [key for key in wanted if key not in table]
    if missing:
        raise ClusterError(f"{where}: {', '.join(missing)} missing")


def _positive(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ClusterError(f"{where}: {key} is {value!r}; it must be a positive number")
    return float(value)
