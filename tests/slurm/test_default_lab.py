"""The default scenario as a job over four nodes of two ranks: submitted, collected, fitted, reported."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from crosstraffic.bench.scenario import BUILT_IN
from crosstraffic.results.store import load_run
from crosstraffic.slurm.lab import cluster
from crosstraffic.slurm.lab.spec import LabSpec

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slurm,
    pytest.mark.slow,
]
PROGRAM = Path(sys.executable).with_name("crosstraffic")
NUM_NODES, RANKS_PER_NODE = 4, 2
# Streams, groups and steps as they are, with fewer tokens, sizes and calls: eight ranks share two processors.
LESS = {
    "tokens = 512": "tokens = 32",
    "batch = 64": "batch = 8",
    "context = 512": "context = 32",
    "[measure]": """[measure]
num_sizes = 3
max_size = "64KiB"
max_calls = 12
cadences = ["isolated"]
together = [["sp.all_gather", "cp.kv_ring"], ["tp.attention_output", "pd.kv"], ["ep.dispatch", "pp.activation"]]
modes = ["steady"]
budget_s = 120""",
}


@pytest.fixture(scope="module")
def lab() -> Iterator[cluster.Lab]:
    try:
        yield cluster.up(LabSpec(num_nodes=NUM_NODES, rate_bits_per_s=10**10, ranks_per_node=RANKS_PER_NODE))
    finally:
        cluster.down()


def call(*words: object, within_s: float = 400) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), *map(str, words)]
    return subprocess.run(
        command, env=cluster.environment(), capture_output=True, text=True, timeout=within_s, check=False
    )


def default_scenario(path: Path) -> Path:
    text = (BUILT_IN / "default-8.toml").read_text(encoding="utf-8")
    for whole, less in LESS.items():
        assert whole in text
        text = text.replace(whole, less)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_the_default_scenario_over_four_nodes(transport: str, lab: cluster.Lab, tmp_path: Path) -> None:
    folder, scenario = tmp_path / transport, default_scenario(tmp_path / "default.toml")
    where = ("--nodes", NUM_NODES, "--ranks-per-node", RANKS_PER_NODE, "--transport", transport)
    done = call("slurm", "submit", scenario, *where, "--program", PROGRAM, "--output", folder)
    assert done.returncode == 0, done.stderr
    done = call("slurm", "status", folder, "--wait")
    output = "\n".join(path.read_text(errors="replace") for path in folder.glob("slurm-*.out"))
    assert done.returncode == 0, f"{done.stdout}\n{output}"
    done = call("slurm", "collect", folder, "--table", tmp_path / "all.csv")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "complete"), done.stdout
    run = load_run(folder)
    assert [place.host for place in run.placement] == [f"n{rank // RANKS_PER_NODE}" for rank in range(8)]
    assert {place.nic for place in run.placement} == {"eth0"}
    assert set(pd.read_csv(tmp_path / "all.csv")["num_nodes"]) == {NUM_NODES}
    measured = run.frame[run.frame["status"] == "ok"]
    assert set(measured["kind"]) == {"alone", "together", "step"}
    assert set(measured.loc[measured["kind"] == "step", "stream"]) == {"prefill", "decode", "handoff"}
    model = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    assert model["schema_version"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(stream.name in page for stream in run.streams)
    done = call("validate", folder, "--json")
    assert json.loads(done.stdout)["models"]["ours"]["num_points"] > 0, done.stderr
