"""Hardware descriptions: presets, links per mesh axis, and what is refused."""

import re

import pytest

from fxpar.cluster import PRESETS, Cluster
from fxpar.errors import ClusterError
from fxpar.layout import Mesh

GOOD = """
[mine]
efficiency = 0.5
memory_bytes = 1e9
memory_bytes_per_second = 1e9
launch_seconds = 1e-6
[mine.flops_per_second]
float32 = 1e10
[[mine.levels]]
name = "inner"
devices = 4
alpha_seconds = 1e-6
bytes_per_second = 8e9
[[mine.levels]]
name = "outer"
devices = 0
alpha_seconds = 1e-5
bytes_per_second = 1e9
"""


def load(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return Cluster.load(path)


@pytest.mark.parametrize("name", ["h100", "a100", "cpu-gloo", "toy"])
def test_presets_load(name):
    cluster = Cluster.load(name)
    assert cluster.name == name and cluster.peak("float32") > 0 and hash(cluster) == hash(Cluster.load(name))
    assert Cluster.load(cluster) is cluster


def test_every_preset_number_has_its_source_beside_it():
    lines = [line for line in PRESETS.read_text().splitlines() if re.match(r"\w+ = [\d.]", line)]
    assert len(lines) > 40 and not [line for line in lines if not re.search(r"  # \w", line)]


def test_a_file_of_ones_own(tmp_path):
    cluster = load(tmp_path, GOOD)
    assert cluster.name == "mine" and cluster.peak("float32") == 5e9
    assert cluster.peak("int64") == cluster.peak("float32")
    assert Cluster.load(str(tmp_path / "mine.toml")) == cluster


def test_links_follow_the_mesh():
    cluster = Cluster.load("h100")
    assert [link.name for link in cluster.axis_links(Mesh.of({"dp": 4, "tp": 8}))] == ["network", "nvlink"]
    assert [link.name for link in cluster.axis_links(Mesh.of({"dp": 2, "tp": 4}))] == ["nvlink", "nvlink"]
    assert cluster.axis_links(Mesh.of({"tp": 16}))[0].name == "network"


def test_ranks_in_one_group_share_its_ways_out(tmp_path):
    cluster = load(tmp_path, GOOD)
    assert cluster.link(8, 1).bytes_per_second == 4e9  # four of the eight ranks are in a group: four ways out
    assert cluster.link(8, 2).bytes_per_second == 2e9
    assert cluster.link(2, 4).bytes_per_second == 1e9  # one rank per group
    assert load(tmp_path, GOOD.replace("1e9\n", "9e9\n")).link(8, 1).bytes_per_second == 8e9  # not above the inside


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("efficiency = 0.5", "eficiency = 0.5"), "unknown key 'eficiency'; did you mean 'efficiency'"),
        (("launch_seconds = 1e-6\n", ""), "launch_seconds missing"),
        (("launch_seconds = 1e-6", "launch_seconds = -1"), "launch_seconds is -1; it must be a positive number"),
        (("launch_seconds = 1e-6", 'launch_seconds = "fast"'), "launch_seconds is 'fast'"),
        (("launch_seconds = 1e-6", "launch_seconds = nan"), "launch_seconds is nan"),
        (("efficiency = 0.5", "efficiency = 50"), "at most 1"),
        (("float32 = 1e10", "float16 = 1e10"), "needs float32"),
        (("float32 = 1e10", "float32 = 0"), "flops_per_second.float32 is 0"),
        (("devices = 4", "devices = 0"), "level 0: devices is 0"),
        (("devices = 0", "devices = 8"), "level 1: devices is 8; it must be 0"),
        (("alpha_seconds = 1e-5", "latency = 1e-5"), "level 1: unknown key 'latency'"),
        (("[mine]", "[mine"), "is not TOML"),
        (("[mine]\n", ""), "put efficiency, launch_seconds"),
        (("[mine]\n", "[other]\n[mine]\n"), "describes 2 clusters"),
        (("[[mine.levels]]", "[[mine.level]]"), "unknown key 'level'; did you mean 'levels'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, change, message):
    assert change[0] in GOOD
    with pytest.raises(ClusterError, match=re.escape(message)):
        load(tmp_path, GOOD.replace(*change))


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ClusterError, match="did you mean 'h100'"):
        Cluster.load("h10")
    with pytest.raises(ClusterError, match="cannot read"):
        Cluster.load("/nowhere/c.toml")
