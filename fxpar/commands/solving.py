"""``fxpar solve``: find strategies for a strategy graph in the contest's format.

In: parsed flags. Out: progress and the result on standard output, the last line the list of strategies (or everything
as JSON). Ctrl-C gives the best so far.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpar.commands import options

if TYPE_CHECKING:
    from fxpar.solver.engine import Progress, Solution

#: The least time between two lines of progress.
SHOW_SECONDS = 1.0


def add(commands: Any) -> None:
    """Declare the command's flags."""
    parser = commands.add_parser(
        "solve",
        help="find strategies of least cost for a strategy graph, within its memory limit",
        description="Read a strategy graph in the JSON format of the ASPLOS 2025 contest on intra-operator parallelism "
        "and find the strategies of least cost within its memory limit. The last line is the list of strategies. "
        "Ctrl-C gives the best so far, also with exit status 0; where there is none yet it is 2, as for bad input.",
    )
    parser.add_argument("graph", type=Path, metavar="FILE", help="the graph, .json or .json.gz")
    parser.add_argument(
        "--time-limit", type=seconds, default=60.0, metavar="SECONDS", help="from reading on (default: %(default)s)"
    )
    parser.add_argument("--method", choices=("auto", "milp", "reduce", "local", "exhaustive"), default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    parser.add_argument("--threads", type=options.positive, default=2, help="of the search (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="BYTES", help="replaces the graph's own memory limit")
    parser.add_argument("--json", action="store_true", help="write the result as JSON, without progress")
    parser.set_defaults(run=run)


def seconds(text: str) -> float:
    """Read a positive time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def run(args: argparse.Namespace) -> int:
    """Solve and print; returns the exit status."""
    import time

    from fxpar.solver.engine import solve
    from fxpar.solver.strategy_graph import evaluate, read_graph

    start = time.perf_counter()
    graph = read_graph(args.graph)
    reading = time.perf_counter() - start
    if not args.json:
        print(f"{args.graph}: {graph.nodes} nodes, {graph.edges} edges, read in {reading:.1f} s", flush=True)
    solution = solve(
        graph,
        args.limit,
        time_limit_seconds=max(args.time_limit - reading, 0.1),
        method=args.method,
        seed=args.seed,
        threads=args.threads,
        report=None if args.json else _Printer(),
    )
    peak = evaluate(graph, solution.choice).peak
    if args.json:
        result = {
            name: getattr(solution, name) for name in ("cost", "bound", "gap", "status", "seconds", "log", "choice")
        }
        print(json.dumps({**result, "peak": peak, "limit": graph.limit if args.limit is None else args.limit}))
        return 0
    _print(solution, peak)
    return 0


class _Printer:
    """Prints progress: the first of each stage, and then at most once in a while."""

    def __init__(self) -> None:
        self.last = -math.inf
        self.seen: set[str] = set()

    def __call__(self, progress: Progress) -> None:
        if progress.seconds - self.last < SHOW_SECONDS and progress.stage in self.seen:
            return
        self.seen.add(progress.stage)
        self.last = progress.seconds
        found = math.isfinite(progress.cost)
        gap = f"{(progress.cost - progress.bound) / progress.cost:.2%}" if found and progress.cost else "-"
        print(
            f"{progress.seconds:7.1f} s  best {f'{progress.cost:.0f}' if found else '-':>16}  "
            f"bound {progress.bound:>16.0f}  gap {gap:>7}  {'feasible' if found else 'not feasible yet'}  "
            f"({progress.stage})",
            flush=True,
        )


def _print(solution: Solution, peak: int) -> None:
    for line in solution.log:
        print(line)
    print(
        f"{solution.status}: cost {solution.cost}, bound {solution.bound:.0f}, gap {solution.gap:.3%}, "
        f"peak usage {peak}, {solution.seconds:.1f} s"
    )
    print(json.dumps(solution.choice))
