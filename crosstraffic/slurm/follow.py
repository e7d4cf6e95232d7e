"""Follow: what Slurm says of a job, what its run folder holds, and whether that is all of it."""

import re
from dataclasses import dataclass

from crosstraffic.errors import CrosstrafficError
from crosstraffic.results.record import Record
from crosstraffic.results.store import read_records, read_run_info
from crosstraffic.slurm.submit import Submitted, ask

UNKNOWN = "UNKNOWN"
OVER = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
    UNKNOWN,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What Slurm says: state, why (while it waits), and the exit code of the script."""

    state: str
    reason: str | None = None
    exit_code: str | None = None

    @property
    def is_over(self) -> bool:
        """Tell whether it will not run on."""
        return self.state in OVER


def job_state(job_id: int) -> JobState:
    """Ask Slurm for a job: the accounting where there is one, else the controller, which forgets old jobs."""
    said = ask(("sacct", "-X", "-P", "-n", "-j", str(job_id), "-o", "State,Reason,ExitCode"))
    line = said.stdout.splitlines()[0] if said.returncode == 0 and said.stdout.strip() else ""
    if line.count("|") == 2:
        state, reason, code = line.split("|")
        return JobState(state=state.split()[0], reason=reason or None, exit_code=code or None)
    said = ask(("scontrol", "show", "job", str(job_id), "-o"))
    fields = dict(re.findall(r"(\w+)=(\S*)", said.stdout)) if said.returncode == 0 else {}
    if "JobState" not in fields:
        return JobState(state=UNKNOWN, reason=said.stderr.strip() or None)
    why = fields.get("Reason", "None")
    return JobState(state=fields["JobState"], reason=None if why == "None" else why, exit_code=fields.get("ExitCode"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a run folder holds: the run's own word, points done of those planned, records that failed a check."""

    status: str
    why: str | None
    num_done: int
    num_points: int
    num_bad: int
    num_torn: int

    @property
    def is_complete(self) -> bool:
        """Tell whether every planned point was measured and passed its checks. Nothing else is success."""
        return self.status == "complete" and self.num_done >= self.num_points and not self.num_bad


def _is_measured(record: Record) -> bool:
    """Tell whether a record stands for a point of the plan: not a baseline beside a mix, and not one left for later."""
    return record.baseline_of is None and record.status not in ("skipped", "timeout", "oom")


def progress(submitted: Submitted) -> Progress:
    """Read what a job has measured so far."""
    folder = submitted.folder
    if not (folder / "run.json").is_file():
        return Progress(status="not started", why=None, num_done=0, num_points=0, num_bad=0, num_torn=0)
    try:
        info = read_run_info(folder)
        records, torn = read_records(folder)
    except CrosstrafficError as error:
        return Progress(status="unreadable", why=str(error), num_done=0, num_points=0, num_bad=0, num_torn=0)
    return Progress(
        status=info.status,
        why=info.why,
        num_done=len({(record.point, record.repeat) for record in records if _is_measured(record)}),
        num_points=info.plan.num_points,
        num_bad=sum(record.status == "wrong_data" for record in records),
        num_torn=torn,
    )
