"""A launcher for tests: it starts ranks on this machine with what srun, or torchrun, would tell them."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from crosstraffic.bench.processes import Process, descendants, read_process, running
from crosstraffic.results.store import read_run_info

SCENARIO = """
name = "guarded"
[[stream]]
name = "tp"
op = "all_reduce"
payload = "8KiB"
[measure]
sizes = ["1KiB", "8KiB"]
cadences = ["isolated", "streaming"]
together = "none"
steps = false
target = 0.001
max_calls = {calls}
budget_s = 300
"""
WITHIN_S = 60.0


def srun(num_ranks: int, job: int) -> list[dict[str, str]]:
    """Return what srun tells each rank, on one node."""
    size = str(num_ranks)
    return [
        {
            "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NODELIST": "localhost",
        }
        for rank in range(num_ranks)
    ]  # fmt: skip


class Launch:
    """Ranks that were started: their guards are ``processes``."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder, self._logs = folder, logs
        self.processes: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, Process] = {}

    def start(self, command: Sequence[str], environment: Mapping[str, str], place: Path) -> None:
        """Start one rank in a working directory."""
        with (self._logs / f"rank-{len(self.processes)}.txt").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    command, env=dict(environment), cwd=place, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            )

    def look(self) -> None:
        """Take note of all processes that belong to this launch now."""
        pids = [process.pid for process in self.processes]
        for process in (*map(read_process, pids), *descendants(pids)):
            if process is not None:
                self._seen[process.pid] = process

    def wait_for_records(self, count: int = 1) -> None:
        """Return once so many lines are in the folder."""
        path, until = self.folder / "records.jsonl", time.monotonic() + WITHIN_S
        while not (path.exists() and path.read_bytes().count(b"\n") >= count):
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < until, f"nothing was measured: {self.said()}"
            time.sleep(0.05)
        self.look()

    def rank(self, rank: int) -> int:
        """Return the pid of the process that measures as this rank."""
        return next(place.pid for place in read_run_info(self.folder).placement if place.rank == rank)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all guards, as a launcher does."""
        for process in self.processes:
            process.send_signal(number)

    def codes(self, within_s: float = WITHIN_S) -> list[int]:
        """Return the exit codes of all guards, which must end by themselves; negative where a signal ended one."""
        until = time.monotonic() + within_s
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < until, f"still there: {self.said()}"
            self.look()
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def said(self) -> str:
        """Return all that was printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._logs.glob("rank-*.txt")))

    def left(self) -> list[Process]:
        """Return processes of this launch that are still there."""
        return [process for process in self._seen.values() if running(process.pid, process.start_ticks) is not None]

    def end(self) -> None:
        """Leave nothing behind, whatever a test found."""
        self.look()
        for process in self.left():
            os.kill(process.pid, signal.SIGKILL)
        for guard in self.processes:
            guard.wait()


@contextmanager
def launched(
    path: Path,
    *options: str,
    num_ranks: int = 3,
    calls: int = 4000,
    own: Sequence[Mapping[str, str]] = (),
    places: Mapping[int, Path] | None = None,
    scenario: str = SCENARIO,
) -> Iterator[Launch]:
    """Launch a run into ``path/run``.

    ``own``: what ranks are told beside what srun tells them; ``places``: ranks whose working directory is not ``path``,
    where the scenario is.
    """
    file, folder = path / "guarded.toml", path / "run"
    file.write_text(scenario.replace("{calls}", str(calls)))
    logs = path / f"logs-{len(list(path.glob('logs-*')))}"
    logs.mkdir()
    launch = Launch(folder, logs)
    base = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
    base |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = ("run", file.name, "--transport", "gloo", "--output", str(folder), "--no-report", *options)
    try:
        for rank, told in enumerate(srun(num_ranks, random.randrange(10**6, 10**8))):
            extra = own[rank] if rank < len(own) else {}
            command = [sys.executable, "-m", "crosstraffic.cli", *words]
            launch.start(command, base | told | dict(extra), (places or {}).get(rank, path))
        yield launch
    finally:
        launch.end()
