"""Reading strategy graphs, and what choices cost and hold."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpar import cli
from fxpar.errors import SolverError
from fxpar.solver.strategy_graph import StrategyGraph, evaluate, read_graph

GOOD: dict[str, Any] = {
    "problem": {
        "name": "small",
        "nodes": {"intervals": [[0, 4], [2, 6]], "costs": [[15, 55], [65]], "usages": [[10, 40], [5]]},
        "edges": {"nodes": [[0, 1], [1, 0]], "costs": [[3, 4], [7, 9]]},
        "usage_limit": 20,
    }
}


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_reading_plain_and_gzipped(tmp_path: Path) -> None:
    plain = read_graph(written(tmp_path, GOOD))
    packed = tmp_path / "graph.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    for graph in (plain, read_graph(packed)):
        assert (graph.nodes, graph.edges, graph.limit) == (2, 2, 20)
        assert evaluate(graph, [0, 0]).cost == 15 + 65 + 3 + 7
        found = evaluate(graph, [1, 0])
        assert (found.cost, found.peak, found.moment, found.feasible) == (55 + 65 + 4 + 9, 45, 2, False)


def test_intervals_are_half_open() -> None:
    graph = StrategyGraph.of([[0], [0], [0]], [[5], [7], [100]], [[0, 3], [3, 4], [2, 2]], limit=7)
    assert evaluate(graph, [0, 0, 0]).peak == 7
    assert evaluate(graph, [0, 0, 0]).feasible


@pytest.mark.parametrize("choice", [[0], [0, 1], [-1, 0], [2, 0]])
def test_choices_that_are_none(tmp_path: Path, choice: list[int]) -> None:
    with pytest.raises(SolverError):
        evaluate(read_graph(written(tmp_path, GOOD)), choice)


def changed(*path: Any, to: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    part: Any = data["problem"]
    for key in path[:-1]:
        part = part[key]
    if to is None:
        del part[path[-1]]
    else:
        part[path[-1]] = to
    return data


WRONG = [
    ("{", "not JSON"),
    ("[]", "problem is missing"),
    ("[" * 100_000, "cannot be read"),
    ({"problem": {}}, "nodes is missing"),
    (changed("nodes", "usages", to=None), "problem.nodes.usages is missing"),
    (changed("edges", "costs", to=None), "problem.edges.costs is missing"),
    (changed("nodes", "costs", to=[]), "empty"),
    (changed("nodes", "costs", to=[[15, 55], []]), "node 1"),
    (changed("nodes", "costs", to=[[15, 55], 65]), r"costs\[1\] is 65"),
    (changed("nodes", "costs", 0, 1, to=-1), r"costs\[0\]\[1\] is -1"),
    (changed("nodes", "costs", 0, 1, to=1.5), r"costs\[0\]\[1\] is 1.5"),
    (changed("nodes", "costs", 0, 1, to=True), r"costs\[0\]\[1\] is True"),
    (changed("nodes", "costs", 0, 1, to=2**62), "integer from 0"),
    (changed("nodes", "usages", 0, 0, to="10"), r"usages\[0\]\[0\] is '10'"),
    (changed("nodes", "usages", to=[[10], [5]]), "node 0 has 2 costs and 1 usages"),
    (changed("nodes", "intervals", 1, to=[2]), r"intervals\[1\]"),
    (changed("nodes", "intervals", 1, to=[-2, 3]), r"intervals\[1\]"),
    (changed("nodes", "intervals", to=[[0, 4]]), "1 entries for 2 nodes"),
    (changed("edges", "nodes", 0, to=[0, 2]), r"only nodes 0 to 1"),
    (changed("edges", "nodes", 0, to=[0, "b"]), "two integers"),
    (changed("edges", "nodes", to=[[0, 1]]), "2 matrices for 1 edges"),
    (changed("edges", "costs", 1, to=[7, 9, 1]), r"costs\[1\] has 3 entries; nodes \[1, 0\] need 1 x 2"),
    (changed("edges", "costs", 1, 0, to=None), r"costs\[1\] has 1 entries"),
    (changed("usage_limit", to=-5), "usage_limit"),
    (changed("usage_limit", to=1e9), "usage_limit"),
]


@pytest.mark.parametrize(("data", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, message: str) -> None:
    path = str(written(tmp_path, data))
    with pytest.raises(SolverError, match=message):
        read_graph(path)
    assert cli.main(["solve", path]) == 2
    assert path in capsys.readouterr().err


def test_damaged_gzip(tmp_path: Path) -> None:
    good = gzip.compress(json.dumps(GOOD).encode())
    middle = len(good) // 2
    damaged = good[:middle] + bytes(byte ^ 255 for byte in good[middle:])
    for number, content in enumerate((b"no gzip", good[:-9], damaged)):
        path = tmp_path / f"{number}.json.gz"
        path.write_bytes(content)
        with pytest.raises(SolverError, match="cannot be read"):
            read_graph(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["nodes", "costs"]), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_is_a_graph_or_one_clear_error(tmp_path: Path, data: st.DataObject) -> None:
    """Somewhere in a good graph a part is replaced by something else."""
    graph = copy.deepcopy(GOOD)
    part: Any = graph
    while True:
        key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
        deeper = isinstance(part[key], (dict, list)) and len(part[key]) > 0
        if not deeper or data.draw(st.booleans()):
            break
        part = part[key]
    part[key] = data.draw(JSON)
    path = written(tmp_path, graph)
    try:
        read = read_graph(path)
    except SolverError as error:
        assert str(path) in str(error)
    else:
        evaluate(read, [0] * read.nodes)


EDITS = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 3), st.sampled_from([*b'0123456789-.,:[]{}"eE', 0, 10, 195, 255])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, packed=st.booleans())
def test_any_bytes_are_solved_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edits: list[tuple[int, int, int]], packed: bool
) -> None:
    """Bytes of a good file are put in, left out and replaced; the command never ends in any other way."""
    content = bytearray(gzip.compress(json.dumps(GOOD).encode(), mtime=0) if packed else json.dumps(GOOD).encode())
    for place, removed, byte in edits:
        place %= len(content)
        content[place : place + removed] = bytes([byte])
    path = tmp_path / ("graph.json.gz" if packed else "graph.json")
    path.write_bytes(content)
    status = cli.main(["solve", str(path), "--method", "exhaustive"])
    out, err = capsys.readouterr()
    if status == 0:
        assert evaluate(read_graph(path), json.loads(out.splitlines()[-1])).feasible
    else:
        assert status == 2 and len(err.splitlines()) == 1
        assert str(path) in err or "no choice of strategies is within" in err or "too many to try" in err


def test_the_command_ends_with_the_strategies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, GOOD))
    assert cli.main(["solve", path, "--method", "exhaustive"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == [0, 0]
    assert cli.main(["solve", path, "--method", "exhaustive", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["cost"], result["status"], result["choice"], result["peak"]) == (90, "optimal", [0, 0], 15)


@pytest.mark.parametrize("flags", [["--limit", "3"], ["--limit", "-3"]])
def test_the_command_says_what_is_infeasible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert cli.main(["solve", str(written(tmp_path, GOOD)), "--method", "exhaustive", *flags]) == 2
    assert "limit of" in capsys.readouterr().err


def test_the_command_refuses_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["solve", str(written(tmp_path, "{"))]) == 2
    assert "not JSON" in capsys.readouterr().err
    assert cli.main(["solve", str(tmp_path / "absent.json")]) == 2
    for text in ("0", "x", "inf"):
        with pytest.raises(SystemExit) as stop:
            cli.main(["solve", "x", "--time-limit", text])
        assert stop.value.code == 2
