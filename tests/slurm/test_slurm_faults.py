"""Faults of a real cluster: a node out of service, a time limit that comes too soon, a pair of nodes cut apart."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosstraffic.slurm.lab import cluster, network
from crosstraffic.slurm.lab.spec import LabSpec

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
SCENARIO = """
name = "faults"
[[stream]]
name = "tp"
op = "all_reduce"
payload = "16KiB"
[measure]
num_sizes = 12
cadences = ["isolated"]
together = "none"
triples = 0
target = {target}
max_calls = {max_calls}
budget_s = {budget}
"""
PROGRAM = Path(sys.executable).with_name("crosstraffic")


@pytest.fixture(scope="module")
def lab() -> Iterator[cluster.Lab]:
    try:
        yield cluster.up(LabSpec(num_nodes=3, rate_bits_per_s=10**9))
    finally:
        cluster.down()


def tool(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, words)], env=cluster.environment(), capture_output=True, text=True, timeout=420, check=False
    )


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return tool(PROGRAM, "slurm", *words)


def submit(folder: Path, *more: object, budget: float = 10, max_calls: int = 20, target: float = 0.5) -> None:
    scenario = folder.with_suffix(".toml")
    scenario.write_text(SCENARIO.format(budget=budget, max_calls=max_calls, target=target))
    where = ("--ranks-per-node", 1, "--transport", "gloo", "--program", PROGRAM, "--output", folder)
    done = call("submit", scenario, *where, *more)
    assert done.returncode == 0, done.stderr


def test_a_job_that_waits_for_a_drained_node_is_told_and_runs_once_it_is_back(lab: cluster.Lab, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tool("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=bad cable on port 3")
    try:
        submit(folder, "--nodes", 3)
        said = call("status", folder, "--wait")
        assert said.returncode == 3, said.stdout
        assert "    n2: drained: bad cable on port 3\n" in said.stdout
        (row,) = json.loads(call("status", folder, "--json").stdout)
        assert (row["state"], list(row["blocked"])) == ("PENDING", ["n2"])
        tool("scancel", row["job_id"])
        said = call("status", folder, "--wait")
        assert said.returncode == 1
        assert "CANCELLED" in said.stdout
    finally:
        tool("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert call("resume", folder).returncode == 0
    said = call("status", folder, "--wait")
    assert said.returncode == 0, said.stdout + "".join(path.read_text() for path in folder.glob("slurm-*.out"))
    assert call("collect", folder).stdout.startswith("complete: ")


def test_a_job_that_is_over_its_time_keeps_what_it_has(lab: cluster.Lab, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    submit(folder, "--nodes", 2, "--time", 2, budget=600, max_calls=1500, target=1e-6)
    said = call("status", folder, "--wait")
    assert said.returncode == 1, said.stdout
    row = json.loads(call("status", folder, "--json").stdout)[0]
    assert row["run"]["status"] == "interrupted", row
    assert row["run"]["why"].startswith("interrupted after ")
    assert 0 < row["run"]["num_done"] < row["run"]["num_points"]


def test_a_pair_that_is_cut_apart_is_named(lab: cluster.Lab, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pairs = (("n1", "n2"), ("n2", "n1"))
    for here, there in pairs:
        tool(*network.inside(here, ("ip", "route", "add", "blackhole", f"{network.address(there)}/32")))
    try:
        submit(folder, "--nodes", 3, "--time", 20, "--bisect")
        said = call("status", folder, "--wait")
    finally:
        for here, there in pairs:
            tool(*network.inside(here, ("ip", "route", "del", "blackhole", f"{network.address(there)}/32")))
    output = "".join(path.read_text() for path in folder.glob("slurm-*.out"))
    assert said.returncode == 1, output
    data = json.loads((folder / "bisect.json").read_text())
    assert [culprit["nodes"] for culprit in data["culprits"]] == [["n1", "n2"]], output
    assert data["culprits"][0]["is_sure"]
    assert "the pair n1 and n2 fails; each passes with other nodes" in said.stdout
    assert "the pair n1 and n2 fails" in call("collect", folder).stdout
