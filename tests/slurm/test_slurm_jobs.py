"""Real jobs on a real Slurm: submitted, followed, cut off by their limit, resumed, collected."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from crosstraffic.slurm.lab import cluster
from crosstraffic.slurm.lab.processes import running
from crosstraffic.slurm.lab.spec import LabSpec

MISSING = [program for program in cluster.PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.lab,
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"a lab needs {', '.join(MISSING)}"),
    pytest.mark.skipif(bool(running(cluster.DAEMONS)), reason="a Slurm runs on this machine already"),
]
SCENARIO = """
name = "lab"
[[stream]]
name = "tp"
op = "all_reduce"
payload = "16KiB"
[[stream]]
name = "ep"
op = "all_to_all"
payload = "16KiB"
[measure]
sizes = ["4KiB", "16KiB"]
cadences = ["isolated"]
triples = 0
modes = ["steady"]
target = 0.3
max_calls = 40
budget_s = {budget}
"""
PROGRAM = Path(sys.executable).with_name("crosstraffic")


@pytest.fixture(scope="module")
def lab() -> Iterator[cluster.Lab]:
    try:
        yield cluster.up(LabSpec(num_nodes=2, rate_bits_per_s=10**9))
    finally:
        cluster.down()


def call(*words: object) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), "slurm", *map(str, words)]
    return subprocess.run(command, env=cluster.environment(), capture_output=True, text=True, timeout=120, check=False)


def submit(folder: Path, transport: str, *more: object, budget: float = 30) -> None:
    scenario = folder.with_suffix(".toml")
    scenario.write_text(SCENARIO.format(budget=budget))
    where = ("--nodes", 2, "--ranks-per-node", 2, "--transport", transport, "--program", PROGRAM, "--output", folder)
    done = call("submit", scenario, *where, *more)
    assert done.returncode == 0, done.stderr


def wait(folder: Path, within_s: float = 120) -> dict:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        (row,) = json.loads(call("status", folder, "--json").stdout)
        if row["state"] not in ("PENDING", "RUNNING", "COMPLETING"):
            return row
        time.sleep(0.5)
    raise AssertionError(f"job still {row['state']} after {within_s} s")


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_job_measures_across_nodes_and_is_collected(transport: str, lab: cluster.Lab, tmp_path: Path) -> None:
    folder = tmp_path / transport
    submit(folder, transport)
    row = wait(folder)
    output = (folder / f"slurm-{row['job_id']}.out").read_text()
    assert (row["state"], row["is_complete"]) == ("COMPLETED", True), output
    done = call("collect", folder, "--table", tmp_path / "all.csv")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("complete: ")
    assert set(pd.read_csv(tmp_path / "all.csv")["num_nodes"]) == {2}
    run = json.loads((folder / "run.json").read_text())
    assert [place["host"] for place in run["placement"]] == ["n0", "n0", "n1", "n1"]


def test_a_job_that_is_cancelled_keeps_what_it_has_and_is_resumed(lab: cluster.Lab, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    submit(folder, "gloo", budget=300)
    records = folder / "records.jsonl"
    until = time.monotonic() + 90
    while not (records.exists() and records.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < until, "nothing was measured"
        time.sleep(0.1)
    (row,) = json.loads(call("status", folder, "--json").stdout)
    subprocess.run(["scancel", str(row["job_id"])], env=cluster.environment(), check=True, timeout=30)
    assert wait(folder)["state"] == "CANCELLED"
    kept = records.read_bytes().splitlines()
    said = call("collect", folder)
    assert said.returncode == 1
    assert "incomplete: " in said.stdout
    assert call("resume", folder).returncode == 0
    row = wait(folder)
    output = (folder / f"slurm-{row['job_id']}.out").read_text()
    assert row["is_complete"], output
    assert records.read_bytes().splitlines()[: len(kept)] == kept
    assert call("collect", folder).returncode == 0
