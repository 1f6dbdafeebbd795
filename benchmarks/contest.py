"""The strategy graphs of the ASPLOS 2025 contest on intra-operator parallelism, each within its contest time limit.

In: a folder with the graphs (``asplos-2025-iopddl-*.json.gz``) and ``leaderboard.csv``. Out: a Markdown table on
standard output: our cost against the best published one, our bound against the published one. Every answer is checked
by the evaluator, which shares no code with the search.

    python benchmarks/contest.py DIR [--graphs BGV] [--share 1.0] [--threads 2]
"""

from __future__ import annotations

import argparse
import csv
import resource
import time
from pathlib import Path

from fxpar.solver.engine import solve
from fxpar.solver.strategy_graph import evaluate, read_graph

HEADER = ("graph", "cost", "best published", "score", "bound", "bound / published", "status", "seconds", "limit")


def row(path: Path, published: dict[str, str], share: float, threads: int) -> tuple[float, tuple[str, ...]]:
    """The score of one graph and its row; reading counts into the time."""
    limit = float(published["time_limit_s"]) * share
    start = time.perf_counter()
    graph = read_graph(path)
    found = solve(graph, time_limit_seconds=limit - (time.perf_counter() - start), threads=threads)
    seconds = time.perf_counter() - start
    check = evaluate(graph, found.choice)
    if not check.feasible or check.cost != found.cost:
        raise SystemExit(f"{path.name}: the evaluator says {check}, the search {found.cost}")
    best, bound = int(published["best_cost"]), float(published["lower_bound_3_digits"])
    score = min(1.0, best / found.cost)
    cells = (
        published["benchmark"], f"{found.cost:,}", f"{best:,}", f"{score:.5f}", f"{found.bound:.6g}",
        f"{found.bound / bound:.3f}", found.status, f"{seconds:.0f}", f"{limit:g}",
    )  # fmt: skip
    return score, cells


def main() -> None:
    parser = argparse.ArgumentParser(description="Solve the contest's graphs and compare with the published results.")
    parser.add_argument("folder", type=Path, help="with the graphs and leaderboard.csv")
    parser.add_argument("--graphs", help="letters of the graphs (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="of each contest time limit (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args()
    leaderboard = list(csv.DictReader((args.folder / "leaderboard.csv").read_text().splitlines()))
    chosen = [line for line in leaderboard if args.graphs is None or line["benchmark"] in args.graphs]
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER), flush=True)
    total = 0.0
    for line in chosen:
        path = args.folder / f"asplos-2025-iopddl-{line['benchmark']}.json.gz"
        score, cells = row(path, line, args.share, args.threads)
        total += score
        print("| " + " | ".join(cells) + " |", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\nsum of scores {total:.4f} of {len(chosen)}; peak memory of the process {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
