"""Plan -> text a person reads: :func:`summary` (``print(plan)``) and :func:`explain`.

In: a :class:`~fxpar.plans.Plan`. Out: plain text. Nothing is computed that the plan does not already say.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from fxpar.errors import PlanError
from fxpar.layout import Layout, Mesh, successive_layout
from fxpar.patterns import joined, spans_of
from fxpar.plans import Choice, Plan

_STEP = 1024.0


def seconds_text(seconds: float) -> str:
    """Seconds with the unit that fits.

    >>> seconds_text(0.00123), seconds_text(2.5), seconds_text(3e-6)
    ('1.23 ms', '2.5 s', '3 us')
    """
    for limit, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if seconds >= limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def bytes_text(size: float) -> str:
    """Bytes with the binary unit that fits.

    >>> bytes_text(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _STEP:
            return f"{size:.4g} {unit}"
        size /= _STEP
    return f"{size:.4g} TiB"


def layout_text(layout: Layout, mesh: Mesh) -> str:
    """A layout with its axes, cut by cut as DTensor reads it: ``"S0@dp S0@tp"``; whole on all is ``"replicated"``."""
    states = successive_layout(layout, mesh.degrees)
    parts = [f"{state}@{axis}" for state, axis in zip(states, mesh.names, strict=True) if state.kind != "I"]
    return " ".join(parts) or "replicated"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Rows as lines of aligned columns."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def summary(plan: Plan) -> str:
    """The whole plan on a page: time, parameters (folded blocks once), collectives, and what is not split and why."""
    mesh = " x ".join(f"{axis}={degree}" for axis, degree in plan.mesh.axes)
    lines = [f"fxpar plan {plan.digest} on {mesh} ({plan.cluster}): {plan.status}, gap {100 * plan.gap:.2g} %"]
    lines += [
        "",
        *_times(plan),
        *_memory(plan),
        "",
        *parts_text(plan),
        *_kinds(plan),
        "",
        *table(("parameter", "state", "x"), _parameter_rows(plan)),
    ]
    if plan.collectives:
        lines += ["", *table(("collective", "axis", "phase", "per step", "wire bytes each"), _collective_rows(plan))]
    else:
        lines += ["", "no collectives"]
    lines += ["", *_unsplit(plan)]
    lines += [
        f"no rule, computed whole: {op} in {module or 'the model'} x{count}" for op, module, count in plan.unruled_ops
    ]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.timings:
        lines.append("planned in " + ", ".join(f"{name} {seconds_text(t)}" for name, t in plan.timings.items()))
    return "\n".join(lines)


def _kinds(plan: Plan) -> list[str]:
    """Which instances are of which kind, where those of one block are of several."""
    kinds: dict[str, list[str]] = {}
    for path, name in plan.calls:
        kinds.setdefault(name, []).append(path)
    several = _of_several_kinds(plan)
    shown = [f"[{name}] {spans_of(paths)}" for name, paths in kinds.items() if name in several]
    return ["", f"not all alike: {'; '.join(shown)}"] if shown else []


def _of_several_kinds(plan: Plan) -> set[str]:
    """The graphs of blocks of which there are several kinds."""
    names = {name for _, name in plan.calls}
    several = {name.partition("/")[0] for name in names if "/" in name}
    return {name for name in names if name.partition("/")[0] in several}


def parts_text(plan: Plan) -> list[str]:
    """What the plan is called, place by place: ``"layers.* (x32): tp: column- and row-parallel; dp: FSDP"``."""
    places: dict[str, dict[str, tuple[str, ...]]] = {}
    for part in plan.parts:
        places.setdefault(part.place, {})[part.axis] = part.styles
    counts = {part.place: part.count for part in plan.parts}
    groups: dict[str, list[str]] = {}
    for place, axes in places.items():
        groups.setdefault(_axes_text(axes), []).append(place)
    lines = []
    for text, own in groups.items():
        names = joined({place: counts[place] for place in own}, [place for place in counts if place not in own])
        shown = [name if count == 1 else f"{name} (x{count})" for name, count in names.items()]
        lines.append(f"{', '.join(name or 'the model' for name in shown)}: {text}")
    return lines


def _axes_text(axes: dict[str, tuple[str, ...]]) -> str:
    """Styles by axis; whole parameters on one axis of the batch and sharded ones on another are HSDP."""
    copies, shards = ([axis for axis, styles in axes.items() if styles == (name,)] for name in ("DDP", "FSDP"))
    named = {axis: _styles_text(styles) for axis, styles in axes.items() if styles}
    if copies and shards:
        named = {" x ".join((*copies, *shards)): "HSDP"} | {
            axis: text for axis, text in named.items() if axis not in (*copies, *shards)
        }
    return "; ".join(f"{axis}: {text}" for axis, text in named.items()) or "the same on every rank"


def _styles_text(styles: Sequence[str]) -> str:
    """Names with what they share said once.

    >>> _styles_text(("column-parallel", "row-parallel", "sequence-parallel"))
    'column- and row-parallel, sequence-parallel'
    """
    cut = [style.removesuffix("parallel") for style in styles if style in ("column-parallel", "row-parallel")]
    rest = [style for style in styles if style not in ("column-parallel", "row-parallel")]
    return ", ".join([*([f"{' and '.join(sorted(cut))}parallel"] if cut else []), *rest])


def _times(plan: Plan) -> list[str]:
    lines = [f"step {seconds_text(plan.objective_seconds)}, without any split {seconds_text(plan.whole_seconds)}"]
    if plan.folding_gap is not None:
        known = "at most" if plan.status in ("optimal", "time limit") else "at least"
        lines.append(f"instances of a block split differently would save {known} {100 * plan.folding_gap:.2g} %")
    if all(state.kind != "S" for layout in plan.parameters.values() for state in layout):
        if plan.split_seconds is None:
            lines.append("nothing is split")
        else:
            lines.append(
                f"nothing is split, because that is faster: the best step that splits a parameter takes "
                f"{seconds_text(plan.split_seconds)}"
            )
    return lines


def _memory(plan: Plan) -> list[str]:
    if plan.memory is None:
        return []
    parts = ("parameter", "gradient", "optimizer", "buffer", "activation", "transient")
    shown = [f"{name} {bytes_text(getattr(plan.memory, f'{name}_bytes'))}" for name in parts]
    return [f"memory of a device {bytes_text(plan.memory.peak_bytes)} at most, in {plan.memory.peak_phase}: "
            + ", ".join(shown)]  # fmt: skip


def _parameter_rows(plan: Plan) -> list[tuple[str, str, int]]:
    rows: Counter[tuple[str, str]] = Counter()
    paths = sorted(plan.instances, key=len, reverse=True)
    for name, layout in plan.parameters.items():
        inside = next((path for path in paths if name.startswith(path + ".")), None)
        shown = name if inside is None else f"[{plan.instances[inside]}]{name[len(inside) :]}"
        rows[shown, layout_text(layout, plan.mesh)] += 1
    return [(name, layout, count) for (name, layout), count in rows.items()]


def _collective_rows(plan: Plan) -> list[tuple[str, str, str, int, str]]:
    rows: Counter[tuple[str, str, str, int]] = Counter()
    for item in plan.collectives:
        rows[item.kind, item.axis, item.phase, item.wire_bytes] += item.count
    return [(kind, axis, phase, count, bytes_text(size)) for (kind, axis, phase, size), count in sorted(rows.items())]


def _unsplit(plan: Plan) -> list[str]:
    share = f"{100 * plan.unsplit_share:.3g} % of the parameter bytes are not split"
    if not plan.unsplit:
        return [share]
    reasons: Counter[str] = Counter()
    for item in plan.unsplit:
        reasons[item.reason] += item.bytes
    return [share + ", because:", *[f"  {bytes_text(size)}: {why}" for why, size in reasons.most_common(6)]]


def explain(plan: Plan, module: str = "") -> str:
    """A line per operation under ``module``: its strategy, its seconds, and its runner-up's extra seconds."""
    found = [choice for choice in plan.choices if _runs_under(plan, choice, module)]
    if not found:
        names = sorted({path for choice in plan.choices for path in _paths(plan, choice)})
        near = difflib.get_close_matches(module, names, n=3, cutoff=0.3)
        raise PlanError(f"no operation runs in {module!r}; nearest: {', '.join(near) or 'none'}")
    rows, several = [], _of_several_kinds(plan)
    for choice in found:
        second, more = choice.runner_up, choice.runner_up_seconds
        if second is None or more is None or math.isinf(more):  # what constraints forbid is no runner-up
            second, extra = "", ""
        else:
            extra = f"+{seconds_text(more)}"
        place = f"[{choice.graph}].{choice.module}" if choice.graph in several else choice.module
        op = choice.op.removeprefix("aten.")
        rows.append((place.removesuffix("."), op, choice.strategy, seconds_text(choice.seconds), second, extra))
    return "\n".join(table(("module", "operation", "strategy", "seconds", "runner-up", "a step with it"), rows))


def _paths(plan: Plan, choice: Choice) -> list[str]:
    if choice.graph == "top":
        return [choice.module]
    instances = [path for path, block in dict.fromkeys(plan.calls) if block == choice.graph]
    return [f"{path}.{choice.module}" if choice.module else path for path in instances]


def _runs_under(plan: Plan, choice: Choice, module: str) -> bool:
    return any(not module or path == module or path.startswith(module + ".") for path in _paths(plan, choice))
