"""Probe: test sets of nodes of an allocation, each with a short run of its own as a step of srun."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from crosstraffic.errors import EnvironmentRefused, UsageError
from crosstraffic.slurm.bisect import Finding, Nodes, OutOfTime, bisect
from crosstraffic.slurm.finding import Trial
from crosstraffic.slurm.job import Job
from crosstraffic.slurm.nodelist import compress, expand
from crosstraffic.slurm.submit import ask, find_program
from crosstraffic.slurm.time_limit import EARLY_S, parse_time, warning_s

SCENARIO = """\
# Written by crosstraffic slurm bisect: the least that shows whether nodes reach each other.
name = "bisect"

[[stream]]
name = "all_reduce"
op = "all_reduce"
payload = "256KiB"

[[stream]]
name = "all_to_all"
op = "all_to_all"
payload = "256KiB"

[measure]
sizes = ["8B", "256KiB"]
cadences = ["isolated"]
together = "none"
triples = 0
target = 0.5
max_calls = 20
budget_s = 3
"""
LIMIT_S = 40.0
MOST_LIMITS = 2  # a test that shows signs of life may take this many limits in all
END_S, POLL_S = 10.0, 0.1


def allocation(environment: Mapping[str, str]) -> tuple[int, Nodes]:
    """Return the job that this process is in, and its nodes.

    >>> allocation({"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[0-1]"})
    (12, ('n0', 'n1'))

    Raises:
        UsageError: it is in none.
    """
    number, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not number.isdigit() or not nodes:
        raise UsageError("bisect runs inside an allocation: slurm submit --bisect, or salloc and then slurm bisect DIR")
    return int(number), expand(nodes)


def step_words(job: Job, nodes: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the words of the step that tests some nodes as the run used them: ranks, MPI, container, transport."""
    folder = Path(job.output) / "bisect"
    words = ["srun", f"--job-name={_name(number)}", f"--mpi={job.mpi}", f"--nodes={len(nodes)}"]
    words += [f"--nodelist={compress(nodes)}", f"--ntasks={len(nodes) * job.ranks_per_node}"]
    words += [f"--ntasks-per-node={job.ranks_per_node}", "--overlap", "--kill-on-bad-exit=1", "--wait=10"]
    if job.cpus_per_rank is not None:
        words.append(f"--cpus-per-task={job.cpus_per_rank}")
    if job.container is not None:
        words.append(f"--container-image={job.container}")
    if job.mounts is not None:
        words.append(f"--container-mounts={job.mounts}")
    words += [job.program, "run", str(folder / "probe.toml"), "--output", str(folder / f"{number:03d}"), "--no-report"]
    return (*words, *(() if job.transport == "auto" else ("--transport", job.transport)))


def _name(number: int) -> str:
    return f"crosstraffic-bisect-{number:03d}"


def search(
    job: Job,
    job_id: int,
    nodes: Nodes,
    *,
    limit_s: float = LIMIT_S,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> tuple[Finding, list[Trial]]:
    """Search the nodes of an allocation for those that make a run fail; return the finding and every test.

    A test is a run of about 3 s. It has failed if it ends badly, or if nothing comes from it for ``limit_s``. Nothing
    is begun that could still run when Slurm warns of the job's end: that signal would end it, and look like a failure.

    Raises:
        EnvironmentRefused: Slurm's programs are not here.
        UsageError: the folder cannot be written.
    """
    folder = Path(job.output) / "bisect"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "probe.toml").write_text(SCENARIO, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from error
    before = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
    trials: list[Trial] = []
    rounds = 0

    def fails(groups: Sequence[Nodes]) -> list[bool]:
        nonlocal rounds
        needed_s = MOST_LIMITS * limit_s + END_S + warning_s(job.time) + EARLY_S
        left_s = time_left_s(job_id)
        if left_s is not None and left_s < needed_s:
            raise OutOfTime(
                f"{left_s} s are left of the job, a test needs {needed_s:.0f} s with the warning at its end"
            )
        rounds += 1
        done = _run(job, job_id, groups, before + len(trials) + 1, rounds, limit_s)
        trials.extend(done)
        for trial in done:
            on_trial(trial)
        return [not trial.passed for trial in done]

    finding = bisect(nodes, fails, alone=job.ranks_per_node > 1)
    return finding, trials


def time_left_s(job_id: int) -> int | None:
    """Return how many seconds Slurm leaves a job; None where it has no limit or none is told."""
    said = ask(("squeue", "-h", "-j", str(job_id), "-o", "%L"))
    try:
        return parse_time(said.stdout.strip()) or 0
    except ValueError:
        return None


def _run(job: Job, job_id: int, groups: Sequence[Nodes], first: int, round_number: int, limit_s: float) -> list[Trial]:
    """Test groups at once, each by a step."""
    srun = find_program("srun")
    environment = {**os.environ, **dict(job.variables)}
    begun_s = time.monotonic()
    steps: list[subprocess.Popen[bytes]] = []
    late: dict[int, float] = {}
    ended_s: dict[int, float] = {}
    try:
        for number, nodes in enumerate(groups, start=first):
            words = step_words(job, nodes, number)[1:]
            with _output(job, number).open("wb") as output:
                steps.append(
                    subprocess.Popen(  # noqa: S603
                        [srun, *words], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
                )
        alive = [_Life(_output(job, first + place)) for place in range(len(steps))]
        while len(ended_s) + len(late) < len(steps):
            now_s = time.monotonic()
            for place, step in enumerate(steps):
                if step.poll() is not None:
                    ended_s.setdefault(place, now_s - begun_s)
                elif place not in late and (
                    now_s - alive[place].last_s(now_s) > limit_s or now_s - begun_s > MOST_LIMITS * limit_s
                ):
                    late[place] = now_s - begun_s
            time.sleep(POLL_S)
    finally:
        left = [place for place, step in enumerate(steps) if step.poll() is None]
        for place in left:
            steps[place].terminate()  # srun then kills its tasks
        for place in left:
            _end(steps[place], job_id, first + place)
    return [
        Trial(
            number=first + place,
            round=round_number,
            nodes=nodes,
            exit_code=None if place in late else steps[place].returncode,
            wall_s=round(late.get(place) or ended_s[place], 3),
            why=f"not over after {late[place]:.0f} s" if place in late else _why(job, first + place, steps[place]),
        )
        for place, nodes in enumerate(groups)
    ]


class _Life:
    """Signs of life of a test: that it prints, and the records that it writes.

    Not how much it prints: ranks that do not find each other say so again and again.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._results = (output.with_suffix("") / "run.json", output.with_suffix("") / "records.jsonl")
        self._seen: list[int] = []
        self._last_s = 0.0

    def last_s(self, now_s: float) -> float:
        """Return when the last sign was seen; a new one is seen now."""
        found = [path.stat().st_size if path.exists() else 0 for path in (self._output, *self._results)]
        found[0] = min(found[0], 1)
        if found != self._seen:
            self._seen, self._last_s = found, now_s
        return self._last_s


def _end(step: "subprocess.Popen[bytes]", job_id: int, number: int) -> None:
    """Make sure that a step is gone: a node that does not answer may keep srun, and the step would keep its nodes."""
    try:
        step.wait(END_S)
    except subprocess.TimeoutExpired:
        step.kill()
        step.wait()
        with contextlib.suppress(EnvironmentRefused):
            said = ask(("squeue", "-h", "-s", "-j", str(job_id), "-o", "%i|%j"))
            for line in said.stdout.splitlines():
                identity, _, name = line.partition("|")
                if name.strip() == _name(number):
                    ask(("scancel", "--signal=KILL", identity.strip()))


def _output(job: Job, number: int) -> Path:
    return Path(job.output) / "bisect" / f"{number:03d}.out"


def _why(job: Job, number: int, step: "subprocess.Popen[bytes]") -> str | None:
    """Return what a step that failed says: its first error, else its last line."""
    code = step.returncode
    if code == 0:
        return None
    lines = [line.strip() for line in _output(job, number).read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line]
    error = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")
    return f"exit code {code}: {error.removeprefix('error: ')[:200]}" if error else f"exit code {code}"
