"""``slurm bisect`` against a srun that stands in for a cluster with a bad pair of nodes."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crosstraffic.bench.scenario import read_scenario
from crosstraffic.cli import app
from crosstraffic.errors import UsageError
from crosstraffic.slurm.finding import read_finding, told
from crosstraffic.slurm.job import Job
from crosstraffic.slurm.probe import SCENARIO, step_words, time_left_s

SRUN = """#!{python}
import pathlib, sys, time
from crosstraffic.slurm.nodelist import expand
words = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
nodes = set(expand(words["--nodelist"]))
with open({log!r}, "a") as log:
    log.write(repr((sorted(nodes), time.monotonic())) + "\\n")
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
output.mkdir()
print("rank 0 is here", flush=True)
if nodes >= {{"n1", "n2"}}:
    {fault}
time.sleep(0.3)
"""
FAULTS = {
    "fails": 'print("noise"); print("error: rank 2 did not find the others"); sys.exit(1)',
    "hangs": "time.sleep(60)",
}


class Cluster:
    """A folder with a job that failed, in an allocation of n0 to n3."""

    def __init__(self, tmp_path: Path) -> None:
        self.bin, self.log, self.run = tmp_path / "bin", tmp_path / "log", tmp_path / "run"
        self.bin.mkdir()
        self.write("sbatch", 'echo 41; cat > "$0.in"')
        self.write("squeue", "echo 1:00:00")
        where = ("--nodes", 4, "--ranks-per-node", 2, "--transport", "gloo", "--time", 5)
        self.call("submit", "collectives", *where, "--env", "A=b", "--bisect", "--output", self.run)

    def write(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def call(self, *words: object):
        return CliRunner().invoke(app, ["slurm", *map(str, words)], catch_exceptions=False)

    def srun(self, fault: str) -> None:
        self.write("srun", SRUN.format(python=sys.executable, log=str(self.log), fault=fault))

    def begun(self) -> list[tuple[list[str], float]]:
        return [eval(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-3]")
    return Cluster(tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_pair_is_named_and_every_test_is_kept(fault, cluster):
    cluster.srun(FAULTS[fault])
    said = cluster.call("bisect", cluster.run, "--limit", 5)
    assert said.exit_code == 1, said.output
    assert "the pair n1 and n2 fails; each passes with other nodes" in said.stdout
    data = json.loads((cluster.run / "bisect.json").read_text())
    assert (data["schema_version"], data["job_id"], data["nodes"]) == (1, 41, ["n0", "n1", "n2", "n3"])
    assert data["culprits"] == [{"kind": "pair", "nodes": ["n1", "n2"], "is_sure": True}]
    tests = data["tests"]
    assert [test["number"] for test in tests] == list(range(1, data["num_tests"] + 1))
    assert [test["passed"] for test in tests] == [not {"n1", "n2"} <= {*test["nodes"]} for test in tests]
    expected = "exit code 1: rank 2 did not find the others" if fault == "fails" else "not over after 5 s"
    assert {test["why"] for test in tests if not test["passed"]} == {expected}
    assert "rank 0 is here" in (cluster.run / "bisect" / "001.out").read_text()
    at_once = [start for nodes, start in cluster.begun() if nodes in (["n0", "n1"], ["n2", "n3"])]
    assert abs(at_once[0] - at_once[1]) < min(test["wall_s"] for test in tests[1:3])
    for words in (("status",), ("collect",)):
        cluster.write("scontrol", 'echo "JobId=41 JobState=FAILED Reason=NonZeroExitCode ExitCode=1:0"')
        said = cluster.call(*words, cluster.run)
        assert said.exit_code == 1
        assert "the pair n1 and n2 fails" in said.stdout


def test_nodes_that_pass_together_are_tested_once_and_a_second_search_keeps_the_first(cluster):
    cluster.srun("pass")
    for number in (1, 2):
        cluster.write("srun", (cluster.bin / "srun").read_text().replace('{"n1", "n2"}', '{"n9"}'))
        said = cluster.call("bisect", cluster.run, "--json")
        assert said.exit_code == 0
        data = json.loads(said.stdout)
        assert data == read_finding(cluster.run)
        assert (data["culprits"], [test["number"] for test in data["tests"]]) == ([], [number])
        assert "the failure did not come back" in told(data)


def test_a_test_that_shows_signs_of_life_is_not_cut_off_at_the_limit(cluster):
    cluster.srun('for turn in range(7): time.sleep(1); (output / "records.jsonl").open("a").write("one")')
    said = cluster.call("bisect", cluster.run, "--limit", 5)
    assert said.exit_code == 0, said.output
    (test,) = json.loads((cluster.run / "bisect.json").read_text())["tests"]
    assert test["wall_s"] > 5


def test_complaints_of_ranks_that_wait_are_no_signs_of_life(cluster):
    cluster.srun('for turn in range(60): time.sleep(1); print("retrying", flush=True)')
    cluster.call("bisect", cluster.run, "--limit", 5)
    tests = json.loads((cluster.run / "bisect.json").read_text())["tests"]
    assert all(5 <= test["wall_s"] < 9 for test in tests if not test["passed"])


def test_nothing_is_begun_that_the_end_of_the_job_could_cut_off(cluster):
    cluster.srun(FAULTS["fails"])
    cluster.write("squeue", "echo 2:30")
    said = cluster.call("bisect", cluster.run)
    assert said.exit_code == 1
    assert "nothing was tested" in said.stdout
    assert "150 s are left of the job, a test needs 210 s" in said.stdout
    assert not cluster.log.exists()


@pytest.mark.parametrize(
    ("text", "left_s"), [("0:00", 0), ("9:42", 582), ("1-00:00:00", 86400), ("UNLIMITED", None), ("INVALID", None)]
)
def test_the_time_left_is_what_squeue_says(text, left_s, cluster):
    cluster.write("squeue", f"echo {text}")
    assert time_left_s(41) == left_s


def test_a_srun_that_does_not_end_is_killed_and_its_step_cancelled(cluster, monkeypatch):
    monkeypatch.setattr("crosstraffic.slurm.probe.END_S", 0.5)
    cluster.srun("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    cluster.write("srun", (cluster.bin / "srun").read_text().replace('{"n1", "n2"}', "set()"))
    steps = 'echo "41.5|other"; echo "41.6|crosstraffic-bisect-001"'
    cluster.write("squeue", f'case "$*" in *-s*) {steps};; *) echo 1:00:00;; esac')
    cluster.write("scancel", 'echo "$@" >> "$0.words"')
    begun_s = time.monotonic()
    said = cluster.call("bisect", cluster.run, "--limit", 5)
    assert time.monotonic() - begun_s < 60
    assert said.exit_code == 1
    assert "no test passed: the cause may be no node" in said.stdout
    assert (cluster.bin / "scancel.words").read_text().splitlines()[0] == "--signal=KILL 41.6"
    left = subprocess.run(["pgrep", "-f", str(cluster.bin / "srun")], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_a_step_uses_nodes_as_the_run_did():
    job = Job(
        scenario=None, output="/runs/x", num_nodes=4, ranks_per_node=8, transport="nccl", gpus_per_node=8,
        cpus_per_rank=12, container="a b#image", mounts="/a:/a",
    )  # fmt: skip
    words = step_words(job, ("n1", "n2", "n7"), 3)
    for word in (
        "--nodes=3", "--nodelist=n[1-2,7]", "--ntasks=24", "--ntasks-per-node=8", "--overlap", "--mpi=none",
        "--cpus-per-task=12", "--container-image=a b#image", "--container-mounts=/a:/a",
    ):  # fmt: skip
        assert word in words
    assert words[words.index("crosstraffic") :] == (
        "crosstraffic", "run", "/runs/x/bisect/probe.toml", "--output", "/runs/x/bisect/003", "--no-report",
        "--transport", "nccl",
    )  # fmt: skip
    assert "--transport" not in step_words(replace(job, transport="auto"), ("n1",), 1)


def test_the_probe_is_a_scenario(tmp_path):
    (tmp_path / "probe.toml").write_text(SCENARIO)
    file = read_scenario(str(tmp_path / "probe.toml"))
    assert [stream.op for stream in file.stream] == ["all_reduce", "all_to_all"]
    assert (file.measure.sizes, file.measure.budget_s) == ((8, 256 * 1024), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "bisect runs inside an allocation"),
        ({"SLURM_JOB_NODELIST": ""}, "bisect runs inside an allocation"),
    ],
)
def test_outside_an_allocation_it_is_refused(change, message, cluster, monkeypatch):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        cluster.call("bisect", cluster.run)


@pytest.mark.parametrize("limit", [0, -1, 4, 1e9, "nan"])
def test_a_limit_out_of_bounds_is_refused(limit, cluster):
    with pytest.raises(UsageError, match="--limit must be 5 to 3600 seconds"):
        cluster.call("bisect", cluster.run, "--limit", limit)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 2}', '{"schema_version": 1}'])
def test_a_finding_that_is_none_is_refused(text, cluster):
    (cluster.run / "bisect.json").write_text(text)
    cluster.write("scontrol", 'echo "JobId=41 JobState=FAILED ExitCode=1:0"')
    with pytest.raises(UsageError, match=r"bisect\.json|not a finding"):
        cluster.call("status", cluster.run)
