"""What is said of a job: state, blocked nodes, a run that ended without a word, waiting, exit codes."""

from pathlib import Path

import pytest

from crosstraffic.errors import EnvironmentRefused
from crosstraffic.slurm.blocked import out_of_service, read_nodes
from crosstraffic.slurm.follow import Followed, JobState, Progress, exit_code, job_state, last_line
from crosstraffic.slurm.job import Job
from crosstraffic.slurm.submit import Submitted
from crosstraffic.slurm.wait import LAST_PAUSE_S, wait

NODES = {
    "n0": ("idle", ""),
    "n1": ("drained", "bad cable"),
    "n2": ("down", "Not responding"),
    "n3": ("allocated", ""),
    "n4": ("mixed", ""),
}


def test_nodes_are_read_whatever_their_flags_and_reasons():
    text = "n0|idle*|none\nn1|drained|bad cable | port 3\nn1|drained|bad cable | port 3\nn2|down~|Not responding\nx\n"
    assert read_nodes(text) == {
        "n0": ("idle", ""),
        "n1": ("drained", "bad cable | port 3"),
        "n2": ("down", "Not responding"),
    }


@pytest.mark.parametrize(
    ("job", "names"),
    [
        ({"NumNodes": "3-3"}, []),  # n3 and n4 are taken: it merely waits
        ({"NumNodes": "4-4"}, ["n1", "n2"]),
        ({"NumNodes": "4-8"}, ["n1", "n2"]),
        ({"NumNodes": "2", "ReqNodeList": "n[0-1]"}, ["n1"]),
        ({"NumNodes": "2", "ReqNodeList": "n[0,3]"}, []),
        ({"NumNodes": "3", "ExcNodeList": "n3"}, ["n1", "n2"]),
        ({"NumNodes": "3", "ExcNodeList": "n[1-3]"}, []),  # nothing that is out of service could serve it
        ({"NumNodes": "9", "ReqNodeList": "(null)"}, ["n1", "n2"]),
    ],
)
def test_a_job_is_blocked_only_by_nodes_that_somebody_must_resume(job, names):
    found = out_of_service(job, NODES)
    assert list(found) == names
    assert found.get("n1", "drained: bad cable") == "drained: bad cable"


def job_of(folder: Path) -> Submitted:
    job = Job(scenario=None, output=str(folder), num_nodes=2, ranks_per_node=1)
    return Submitted(job=job, ids=(7, 8), times_s=(0.0, 1.0))


def followed(state, *, status="running", num_done=0, num_bad=0, blocked=None, folder=Path("/none")):
    run = Progress(status=status, why=None, num_done=num_done, num_points=9, num_bad=num_bad, num_torn=0)
    return Followed(submitted=job_of(folder), state=JobState(state=state, blocked=blocked or {}), run=run)


CASES = {
    "pending": (followed("PENDING", status="not started"), 0, False),
    "blocked": (followed("PENDING", status="not started", blocked={"n1": "drained"}), 3, True),
    "running": (followed("RUNNING", num_done=4), 0, False),
    "complete, still leaving": (followed("COMPLETING", status="complete", num_done=9), 0, False),
    "complete, writes its report": (followed("RUNNING", status="complete", num_done=9), 0, False),
    "complete": (followed("COMPLETED", status="complete", num_done=9), 0, True),
    "forgotten, complete": (followed("UNKNOWN", status="complete", num_done=9), 0, True),
    "wrong data": (followed("FAILED", status="complete", num_done=9, num_bad=1), 1, True),
    "time limit": (followed("TIMEOUT", status="interrupted", num_done=8), 1, True),
    "said complete, lacks one": (followed("COMPLETED", status="complete", num_done=8), 1, True),
}


@pytest.mark.parametrize(("one", "code", "is_settled"), CASES.values(), ids=CASES)
def test_the_exit_code_says_how_a_job_is(one, code, is_settled):
    assert (one.exit_code, one.is_settled) == (code, is_settled)


@pytest.mark.parametrize(
    ("names", "code"),
    [(("complete", "running"), 0), (("complete", "time limit"), 1), (("time limit", "blocked"), 3)],
    ids=["goes on", "one is incomplete", "one is blocked"],
)
def test_a_sweep_is_as_its_worst_job(names, code):
    assert exit_code([CASES[name][0] for name in names]) == code


def test_a_run_that_ended_without_a_word_is_told_with_the_last_line_of_its_job(tmp_path):
    (tmp_path / "slurm-7.out").write_text("an earlier job\n")
    (tmp_path / "slurm-8.out").write_text("one\n" * 5000 + "slurmstepd: error: out of memory\n\n  \n")
    one = followed("OUT_OF_MEMORY", folder=tmp_path)
    assert one.why == "the run ended without a word; the last line of the job: slurmstepd: error: out of memory"
    assert followed("RUNNING", folder=tmp_path).why is None
    assert followed("FAILED", folder=tmp_path / "gone").why == "the run ended without a word"
    assert last_line(job_of(tmp_path)) == "slurmstepd: error: out of memory"


def write(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_controller_that_does_not_answer_is_no_job_that_ended(tmp_path, monkeypatch):
    write(tmp_path, "sacct", "exit 1")
    write(tmp_path, "scontrol", 'echo "Unable to contact slurm controller (connect failure)" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EnvironmentRefused, match="does not tell the state of job 7: Unable to contact"):
        job_state(7)


def test_a_pending_job_is_told_with_the_nodes_that_block_it(tmp_path, monkeypatch):
    write(tmp_path, "sacct", 'echo "PENDING|None|0:0"')
    write(tmp_path, "scontrol", 'echo "JobId=7 JobState=PENDING Reason=Resources NumNodes=2-2 Partition=lab,x"')
    write(tmp_path, "sinfo", 'echo "$@" > "$0.words"; echo "n0|idle|none"; echo "n1|drained|bad cable"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert job_state(7) == JobState(state="PENDING", reason="Resources", blocked={"n1": "drained: bad cable"})
    assert (tmp_path / "sinfo.words").read_text().split()[:4] == ["-h", "-N", "-p", "lab,x"]


class Looks:
    """What is seen, look by look; a refusal is raised."""

    def __init__(self, *seen):
        self.seen, self.pauses = list(seen), []

    def __call__(self):
        found = self.seen.pop(0)
        if isinstance(found, Exception):
            raise found
        return [CASES[name][0] for name in found]


@pytest.mark.parametrize("last", [("complete", "time limit"), ("running", "blocked")])
def test_waiting_ends_when_nothing_changes_any_more(last):
    looks = Looks(("pending", "pending"), ("running", "pending"), ("complete", "running"), last)
    shown = []
    found = wait(looks, sleep=looks.pauses.append, on_look=lambda found: shown.append(found))
    assert [one.exit_code for one in found] == [CASES[name][1] for name in last]
    assert len(shown) == 4
    assert looks.pauses == [1.0, 1.5, 2.25]


def test_pauses_grow_to_a_bound_or_are_what_was_asked():
    looks = Looks(*[("running",)] * 30, ("complete",))
    wait(looks, sleep=looks.pauses.append)
    assert looks.pauses == sorted(looks.pauses)
    assert looks.pauses[-1] == LAST_PAUSE_S
    looks = Looks(*[("running",)] * 3, ("complete",))
    wait(looks, every_s=4.0, sleep=looks.pauses.append)
    assert looks.pauses == [4.0, 4.0, 4.0]


def test_a_slurm_that_does_not_answer_for_a_while_is_asked_again_but_not_the_first_time():
    refusals = []
    looks = Looks(("running",), EnvironmentRefused("down"), EnvironmentRefused("down"), ("complete",))
    found = wait(looks, sleep=looks.pauses.append, on_refusal=refusals.append)
    assert found[0].run.is_complete
    assert len(refusals) == 2
    with pytest.raises(EnvironmentRefused):
        wait(Looks(EnvironmentRefused("no Slurm here")), sleep=looks.pauses.append)
