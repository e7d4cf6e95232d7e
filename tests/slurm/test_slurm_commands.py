"""submit, status, collect and resume against programs that stand in for Slurm's and note what they were given."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.errors import EnvironmentRefused, UsageError
from crosstraffic.slurm.follow import Progress, job_state
from crosstraffic.slurm.submit import find, mpi_plugin

PROGRAMS = {
    "sbatch": 'cat > "$0.in"; printf "%s\\n" "$@" > "$0.words"; n=$(cat "$0.n" 2>/dev/null || echo 40); n=$((n + 1)); '
    'echo $n > "$0.n"; echo "$n;cluster"',
    "srun": 'echo "MPI plugin types are..."; echo none; echo pmi2; echo pmix',
    "sacct": 'echo "slurm accounting storage is disabled" >&2; exit 1',
    "scontrol": 'echo "JobId=$3 JobState=PENDING Reason=Resources NumNodes=1-1 Partition=lab ExitCode=0:0"',
    "sinfo": 'echo "n0|idle|none"',
}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        write(folder, name, text)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def call(*words: object):
    return CliRunner().invoke(app, ["slurm", *map(str, words)], catch_exceptions=False)


def test_submit_hands_over_what_dry_run_prints(programs, tmp_path):
    words = ("submit", "collectives", "--nodes", 2, "--ranks-per-node", 4, "--output", tmp_path / "run")
    printed = call(*words, "--dry-run").stdout
    assert not (tmp_path / "run").exists()
    assert call(*words).stdout.split() == ["41", str(tmp_path / "run")]
    assert (programs / "sbatch.in").read_text() == printed == (tmp_path / "run" / "job.sh").read_text()
    assert (programs / "sbatch.words").read_text().split() == ["--parsable"]
    (submitted,) = find(tmp_path / "run")
    assert (submitted.ids, submitted.job.num_ranks, submitted.job.transport) == ((41,), 8, "mpi")


def test_a_suite_and_no_report_are_passed_on(programs, tmp_path):
    words = ("submit", "--suite", "links", "--nodes", "4", "--transport", "gloo", "--no-report", "--dry-run")
    printed = call(*words, "--output", str(tmp_path / "run")).stdout
    assert f"run --output {tmp_path / 'run'} --transport gloo --suite links --no-report\n" in printed


def test_a_sweep_is_one_job_for_each_size_after_the_one_before(programs, tmp_path):
    said = call("submit", "--sweep-nodes", "4,1,2", "--transport", "gloo", "--output", tmp_path / "sweep", "--json")
    jobs = json.loads(said.stdout)
    assert [job["job_id"] for job in jobs] == [41, 42, 43]
    found = find(tmp_path / "sweep")
    assert [(one.job.num_nodes, one.job.after) for one in found] == [(1, None), (2, 41), (4, 42)]
    assert "--dependency=afterany:42" in (programs / "sbatch.in").read_text()


def test_status_and_collect_tell_what_is_not_there_yet(programs, tmp_path):
    call("submit", "--nodes", 1, "--output", tmp_path / "run")
    assert "PENDING (Resources)  not started: nothing measured yet" in call("status", tmp_path / "run").stdout
    (row,) = json.loads(call("status", tmp_path / "run", "--json").stdout)
    assert (row["job_id"], row["state"], row["is_complete"]) == (41, "PENDING", False)
    said = call("collect", tmp_path / "run")
    assert said.exit_code == 1
    assert said.stdout.startswith("incomplete: ")
    with pytest.raises(UsageError, match="job 41 is PENDING: it can be resumed once it has ended"):
        call("resume", tmp_path / "run")


def test_resume_submits_the_same_job_again(programs, tmp_path):
    call("submit", "--nodes", 3, "--transport", "gloo", "--budget", 20, "--output", tmp_path / "run")
    write(programs, "scontrol", 'echo "JobId=$3 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15"')
    assert call("resume", tmp_path / "run").stdout.split() == ["42", str(tmp_path / "run")]
    assert "--resume" not in (programs / "sbatch.in").read_text()  # nothing was measured: there is no run to resume
    (submitted,) = find(tmp_path / "run")
    assert submitted.ids == (41, 42)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert call("resume", tmp_path / "run").exit_code == 0
    assert "--budget 20 --resume" in (programs / "sbatch.in").read_text()


SIMULATED = """
name = "sim"
[[stream]]
name = "tp"
op = "all_reduce"
payload = "16KiB"
[measure]
sizes = ["4KiB", "16KiB"]
cadences = ["isolated"]
together = "none"
triples = 0
max_calls = 20
budget_s = 20
[simulated]
ranks_per_node = 1
intra = { latency_s = 2e-6, bandwidth_bytes_per_s = 20e9 }
inter = { latency_s = 6e-6, bandwidth_bytes_per_s = 5e9 }
"""


def test_after_resume_each_point_counts_once(programs, tmp_path):
    folder, scenario = tmp_path / "run", tmp_path / "sim.toml"
    scenario.write_text(SIMULATED)
    call("submit", scenario, "--nodes", 2, "--transport", "gloo", "--output", folder)
    where = ("--ranks", "2", "--transport", "simulated", "--no-report", "--output")
    command = ["run", str(scenario), *where, str(tmp_path / "other")]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)
    info = json.loads((folder / "run.json").read_text())
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    num_points = info["plan"]["num_points"]
    assert f"complete: {folder}: {num_points} points, all checked" in call("collect", folder).stdout
    (folder / "run.json").write_text(json.dumps(info | {"status": "interrupted"}))
    (folder / "records.jsonl").write_text("".join(lines[:2]) + lines[2][:20])  # torn by the end of the job
    write(programs, "scontrol", 'echo "JobId=$3 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15"')
    said = call("collect", folder)
    assert said.exit_code == 1
    assert f"2 of {num_points} points; job 41 is TIMEOUT" in said.stdout
    assert call("resume", folder).exit_code == 0
    (submitted,) = find(folder)
    assert submitted.job.arguments == ("--resume",)
    command = ["run", *where, str(folder), "--resume"]  # what job 42 does
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    with (folder / "records.jsonl").open("a") as records:
        records.write(lines[0])  # the same point again
    assert f"complete: {folder}: {num_points} points, all checked" in call("collect", folder).stdout
    assert call("status", folder).exit_code == 0
    assert call("resume", folder).stdout == ""


def test_of_a_sweep_what_is_incomplete_is_submitted_and_nothing_while_one_runs(programs, tmp_path):
    call("submit", "--sweep-nodes", "1,2,3", "--transport", "gloo", "--output", tmp_path / "sweep")
    state = 'case $3 in 42) s=RUNNING;; *) s=CANCELLED;; esac; echo "JobId=$3 JobState=$s ExitCode=0:15"'
    write(programs, "scontrol", state)
    with pytest.raises(UsageError, match="job 42 is RUNNING: it can be resumed once it has ended"):
        call("resume", tmp_path / "sweep")
    assert (programs / "sbatch.n").read_text().strip() == "43"
    write(programs, "scontrol", 'echo "JobId=$3 JobState=CANCELLED ExitCode=0:0"')
    assert [line.split()[0] for line in call("resume", tmp_path / "sweep").stdout.splitlines()] == ["44", "45", "46"]
    found = find(tmp_path / "sweep")
    assert [(one.ids, one.job.after) for one in found] == [((41, 44), None), ((42, 45), 44), ((43, 46), 45)]


def test_a_pending_job_that_was_cancelled_is_submitted_as_it_was(programs, tmp_path):
    call("submit", "collectives", "--nodes", 2, "--transport", "gloo", "--output", tmp_path / "run")
    first = (programs / "sbatch.in").read_text()
    write(programs, "scontrol", 'echo "JobId=$3 JobState=CANCELLED Reason=None ExitCode=0:0"')
    assert call("status", tmp_path / "run").exit_code == 1
    assert call("resume", tmp_path / "run").exit_code == 0
    assert (programs / "sbatch.in").read_text() == first


def test_a_job_that_no_node_can_serve_is_told_with_exit_code_3(programs, tmp_path):
    call("submit", "--nodes", 2, "--transport", "gloo", "--output", tmp_path / "run")
    write(programs, "scontrol", 'echo "JobId=$3 JobState=PENDING Reason=Resources NumNodes=2-2 Partition=lab"')
    write(programs, "sinfo", 'echo "n0|idle|none"; echo "n1|drained|bad cable on port 3"')
    for words in ((), ("--wait",)):
        said = call("status", tmp_path / "run", *words)
        assert said.exit_code == 3
        assert "    n1: drained: bad cable on port 3\n" in said.stdout
    (row,) = json.loads(call("status", tmp_path / "run", "--json").stdout)
    assert row["blocked"] == {"n1": "drained: bad cable on port 3"}


def test_waiting_ends_with_the_job_and_tells_changes(programs, tmp_path):
    call("submit", "--nodes", 1, "--transport", "gloo", "--output", tmp_path / "run")
    count = 'n=$(cat "$0.n" 2>/dev/null || echo 0); echo $((n + 1)) > "$0.n"'
    state = "case $n in 0) s=PENDING;; 1|2) s=RUNNING;; *) s=FAILED;; esac"
    write(programs, "scontrol", f'{count}; {state}; echo "JobId=$3 JobState=$s NumNodes=1 ExitCode=1:0"')
    said = call("status", tmp_path / "run", "--wait", "--every", 0.1)
    assert said.exit_code == 1
    assert [line.split()[3] for line in said.stderr.splitlines()] == ["PENDING", "RUNNING"]
    assert said.stdout.startswith("41  1 nodes  FAILED")


@pytest.mark.parametrize("words", [("--every", 5), ("--wait", "--every", 0), ("--wait", "--every", "nan")])
def test_a_pause_that_cannot_be_is_refused(words, programs, tmp_path):
    call("submit", "--nodes", 1, "--transport", "gloo", "--output", tmp_path / "run")
    with pytest.raises(UsageError, match="--every goes with --wait"):
        call("status", tmp_path / "run", *words)


@pytest.mark.parametrize(
    ("words", "is_warned"),
    [
        (("--time", 1, "--budget", 10), False),
        (("--time", 1, "--budget", 16), True),
        (("--time", 2), True),  # the scenario's own budget
        (("--time", 10), False),
        (("--time", 0, "--budget", 1e6), False),
        ((), False),
    ],
)
def test_a_budget_that_does_not_fit_the_time_limit_is_told_with_both(words, is_warned, programs, tmp_path):
    said = call("submit", "collectives", "--nodes", 1, "--transport", "gloo", "--output", tmp_path / "run", *words)
    assert said.exit_code == 0
    assert said.stderr.startswith("warning: --time ") is is_warned
    if is_warned:
        budget = words[3] if len(words) > 2 else 110
        assert f"is {words[1] * 60} s" in said.stderr
        assert f"measuring may take {budget} s" in said.stderr


def test_accounting_is_asked_first_and_a_forgotten_job_is_unknown(programs):
    write(programs, "sacct", 'echo "CANCELLED by 0|None|0:15"')
    assert job_state(41).state == "CANCELLED"
    assert job_state(41).is_over
    write(programs, "sacct", "exit 1")
    write(programs, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert (job_state(41).state, job_state(41).is_over) == ("UNKNOWN", True)


@pytest.mark.parametrize(
    ("progress", "is_complete"),
    [
        (("complete", 30, 30, 0), True),
        (("complete", 29, 30, 0), False),
        (("complete", 30, 30, 1), False),
        (("running", 30, 30, 0), False),
        (("interrupted", 30, 30, 0), False),
    ],
)
def test_success_is_complete_records_that_passed_their_checks(progress, is_complete):
    status, done, points, bad = progress
    found = Progress(status=status, why=None, num_done=done, num_points=points, num_bad=bad, num_torn=0)
    assert found.is_complete is is_complete


def test_the_plug_in_is_what_the_mpi_here_speaks(programs, monkeypatch):
    monkeypatch.setattr("crosstraffic.slurm.submit.is_installed", lambda name: name == "mpich")
    assert mpi_plugin() == "pmi2"
    monkeypatch.setattr("crosstraffic.slurm.submit.is_installed", lambda name: False)
    assert mpi_plugin() == "pmix"
    write(programs, "srun", "echo none; echo cray_shasta")
    with pytest.raises(EnvironmentRefused, match="no MPI plug-in of pmix, pmi2"):
        mpi_plugin()


def test_what_slurm_refuses_is_told_and_leaves_no_folder(programs, tmp_path):
    write(programs, "sbatch", 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    with pytest.raises(EnvironmentRefused, match="sbatch refused the job: sbatch: error: invalid partition"):
        call("submit", "--nodes", 1, "--partition", "x", "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_machine_without_slurm_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentRefused, match="sbatch is not here"):
        call("submit", "--nodes", 1, "--transport", "gloo", "--output", tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --nodes N, or --sweep-nodes"),
        (("--nodes", 1, "--sweep-nodes", "1,2"), "give --nodes N, or --sweep-nodes"),
        (("--sweep-nodes", "1,1"), "different numbers of nodes"),
        (("--sweep-nodes", "1,x"), "different numbers of nodes"),
        (("--nodes", 0), "num_nodes must be a whole number from 1: 0"),
        (("--nodes", 1, "--env", "A"), "--env takes NAME=VALUE: 'A'"),
        (("--nodes", 1, "--time", "1h"), "a time as Slurm writes it"),
        (("--nodes", 1, "--account", "x; reboot"), "account must be"),
        (("--nodes", 1, "--sbatch=--wrap=reboot",), "--wrap has its own"),
        (("missing.toml", "--nodes", 1), "no such scenario: 'missing.toml'"),
        (("--nodes", 1, "--template", "missing.j2"), "template missing.j2"),
        (("--nodes", 1, "--gpus-per-node", 8), "this version has no transport nccl"),
    ],
)  # fmt: skip
def test_bad_use_is_refused_before_anything_is_submitted(words, message, programs, tmp_path):
    with pytest.raises(UsageError, match=message):
        call("submit", *words, "--output", tmp_path / "run")
    assert not (programs / "sbatch.n").exists()


def test_a_folder_that_holds_something_is_not_overwritten(programs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        call("submit", "--nodes", 1, "--output", tmp_path)
    with pytest.raises(UsageError, match=r"holds no job\.json"):
        call("status", tmp_path)
