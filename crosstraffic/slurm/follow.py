"""Follow: what Slurm says of a job, what its run folder holds, and whether that is all of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crosstraffic.errors import CrosstrafficError, EnvironmentRefused
from crosstraffic.results.record import Record
from crosstraffic.results.store import read_records, read_run_info
from crosstraffic.slurm.blocked import blocked
from crosstraffic.slurm.submit import Submitted, ask

PENDING, UNKNOWN = "PENDING", "UNKNOWN"
LAST_BYTES = 4096
FORGOTTEN = "Invalid job id"  # what scontrol says of a job that ended some minutes ago
OVER = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
    UNKNOWN,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What Slurm says: state, why (while it waits), exit code of the script; which nodes keep it from ever starting."""

    state: str
    reason: str | None = None
    exit_code: str | None = None
    blocked: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Tell whether it will not run on."""
        return self.state in OVER


def job_state(job_id: int) -> JobState:
    """Ask Slurm for a job: the accounting where there is one, else the controller, which forgets old jobs.

    Raises:
        EnvironmentRefused: it does not answer: then nobody knows whether the job runs.
    """
    said = ask(("sacct", "-X", "-P", "-n", "-j", str(job_id), "-o", "State,Reason,ExitCode"))
    line = said.stdout.splitlines()[0] if said.returncode == 0 and said.stdout.strip() else ""
    if line.count("|") == 2:
        state, reason, code = line.split("|")
        if (state := state.split()[0]) != PENDING:
            return JobState(state=state, reason=_reason(reason), exit_code=code or None)
    said = ask(("scontrol", "show", "job", str(job_id), "-o"))
    fields = dict(re.findall(r"(\w+)=(\S*)", said.stdout)) if said.returncode == 0 else {}
    if "JobState" not in fields:
        why = said.stderr.strip()
        if said.returncode and FORGOTTEN not in why:
            raise EnvironmentRefused(f"Slurm does not tell the state of job {job_id}: {why}")
        return JobState(state=UNKNOWN, reason=why or None)
    state = fields["JobState"]
    return JobState(
        state=state,
        reason=_reason(fields.get("Reason", "")),
        exit_code=fields.get("ExitCode"),
        blocked=blocked(fields) if state == PENDING else {},
    )


def _reason(text: str) -> str | None:
    return None if text in ("", "None") else text


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A job with what Slurm says of it and what it has measured."""

    submitted: Submitted
    state: JobState
    run: Progress

    @property
    def is_settled(self) -> bool:
        """Tell whether waiting changes nothing. A job that has all its points may yet be fitting or reporting."""
        return self.state.is_over or bool(self.state.blocked)

    @property
    def exit_code(self) -> int:
        """0 while it waits or runs or is complete; 1 if it is over without being complete; 3 if it is blocked."""
        if self.run.is_complete:
            return 0
        return 3 if self.state.blocked else int(self.state.is_over)

    @property
    def why(self) -> str | None:
        """What is wrong with the run, or how far it came: its own word, or that it could not say any."""
        if self.run.status != "running" or not self.state.is_over:
            return self.run.why
        last = last_line(self.submitted)
        return "the run ended without a word" + (f"; the last line of the job: {last}" if last else "")


def follow(submitted: Submitted) -> Followed:
    """Ask for a job, then read its folder: what a job that is over has measured is all there."""
    state = job_state(submitted.ids[-1])
    return Followed(submitted=submitted, state=state, run=progress(submitted))


def exit_code(found: Sequence[Followed]) -> int:
    """Return the exit code of several jobs: 3 if one is blocked, else 1 if one is over and not complete."""
    return max(one.exit_code for one in found)


def last_line(submitted: Submitted) -> str | None:
    """Return the last line that a job printed, if there is one."""
    path = submitted.folder / f"slurm-{submitted.ids[-1]}.out"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    except OSError:
        return None
    return next((line for line in reversed(lines) if line), None)
