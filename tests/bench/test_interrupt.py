"""Runs of real ranks that are killed, interrupted or stopped: they end, say why, and leave what they measured."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from simulated_runs import toml_of

from crosstraffic.bench.heartbeat import read_beats
from crosstraffic.bench.launch import find_mpiexec
from crosstraffic.bench.processes import running
from crosstraffic.results.store import load, read_records, read_run_info

STREAMS = (
    {"name": "reduce", "op": "all_reduce", "payload": 2**16},
    {"name": "gather", "op": "all_gather", "payload": 2**14},
)
START_S, END_S = 90.0, 30.0

transports = pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]
)


class Command:
    """``crosstraffic run`` as a process of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder

    def wait_for_records(self, count: int) -> None:
        """Return once so many lines are in the folder."""
        path, end_s = self.folder / "records.jsonl", time.monotonic() + START_S
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end_s, "no records in time"
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """Return the exit code and what was said on stderr; the command must end by itself, in time."""
        _, stderr = self.process.communicate(timeout=END_S)
        return self.process.returncode, stderr


@contextmanager
def started(path: Path, transport: str, *options: str, num_ranks: int = 3) -> Iterator[Command]:
    """Start a run that would take minutes; make sure that none of it is left."""
    pytest.importorskip("torch" if transport == "gloo" else "mpi4py")
    file, folder = path / "test.toml", path / "run"
    if not file.exists():
        file.write_text(toml_of(STREAMS, num_sizes=13, triples=0, budget_s=150.0))
    arguments = [sys.executable, "-m", "crosstraffic.cli", "run", str(file), "--transport", transport]
    process = subprocess.Popen(
        [*arguments, "--ranks", str(num_ranks), "--output", str(folder), "--no-report", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Command(process, folder)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    beats = read_beats(folder)
    assert len(beats) == num_ranks
    assert not [beat.rank for beat in beats if running(beat.pid, beat.start_ticks) is not None]


@transports
@pytest.mark.parametrize("victim", [0, 2], ids=["rank 0", "rank 2"])
def test_a_killed_rank_ends_the_run_and_is_named(transport: str, victim: int, tmp_path: Path) -> None:
    with started(tmp_path, transport) as command:
        command.wait_for_records(3)
        (beat,) = [beat for beat in read_beats(command.folder) if beat.rank == victim]
        os.kill(beat.pid, signal.SIGKILL)
        code, stderr = command.ended()
    assert code == 1
    assert f"error: rank {victim} (pid {beat.pid}) was killed by SIGKILL" in stderr
    assert f"in {command.folder}" in stderr
    info, frame = read_run_info(command.folder), load(command.folder)
    assert info.status == "failed"
    assert info.why is not None
    assert info.why.startswith(f"rank {victim} (pid {beat.pid}) was killed by SIGKILL")
    assert len(frame) >= 3
    assert (frame["status"] == "ok").all()
    assert all((command.folder / path).is_file() for path in frame["samples"])


@transports
def test_ctrl_c_ends_in_order_and_resume_does_the_rest(transport: str, tmp_path: Path) -> None:
    with started(tmp_path, transport) as command:
        command.wait_for_records(4)
        command.process.send_signal(signal.SIGINT)
        code, stderr = command.ended()
    assert code == 1, stderr
    assert "stopping: what is measured is kept" in stderr
    assert "interrupted after" in stderr
    assert f"--output {command.folder} --resume" in stderr
    info, first = read_run_info(command.folder), read_records(command.folder)[0]
    assert info.status == "interrupted"
    assert len(first) >= 4
    assert info.measured_share is not None
    done = {record.point for record in first if record.status == "ok"}

    with started(tmp_path, transport, "--resume", "--budget", "5") as command:
        _, stderr = command.process.communicate(timeout=START_S + END_S)
    assert command.process.returncode in (0, 1), stderr
    after = read_records(command.folder)[0]
    assert read_run_info(command.folder).status in ("complete", "incomplete")
    assert len({record.point for record in after}) == info.plan.num_points
    assert [record for record in after if record.point in done] == [record for record in first if record.point in done]


@transports
def test_ctrl_c_twice_ends_at_once(transport: str, tmp_path: Path) -> None:
    with started(tmp_path, transport) as command:
        command.wait_for_records(2)
        for beat in read_beats(command.folder):
            os.kill(beat.pid, signal.SIGSTOP)  # ranks that cannot end in order
        command.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        command.process.send_signal(signal.SIGINT)
        code, stderr = command.ended()
    assert code != 0
    assert "Traceback" not in stderr
    info = read_run_info(command.folder)
    assert info.status == "interrupted", stderr
    assert len(load(command.folder)) >= 2


@pytest.mark.mpi
@pytest.mark.parametrize("broken", [0, 1], ids=["rank 0", "rank 1"])
def test_a_rank_of_a_launcher_that_breaks_takes_the_others_along(broken: int, tmp_path: Path) -> None:
    """Guards of mpiexec do not meet: the broken rank must not wait for the others on its way out."""
    pytest.importorskip("mpi4py")
    (tmp_path / "test.toml").write_text(toml_of(STREAMS, num_sizes=13, triples=0, budget_s=150.0))
    program = Path(__file__).parent / "programs" / "broken_rank.py"
    asked = ["run", str(tmp_path / "test.toml"), "--transport", "mpi", "--output", str(tmp_path / "run"), "--no-report"]
    ended = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, str(program), *asked],
        env={**os.environ, "TEST_BROKEN_RANK": str(broken)},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert ended.returncode not in (0, None)
    told = rf"error: rank {broken} \(pid \d+ on \S+\) exited with code 1 in call \d+ of .*\n(  \| .*\n)+"
    found = re.search(told, ended.stderr)
    assert found, ended.stderr
    assert "  | ValueError: broken on purpose\n" in found[0]
    if broken == 0:
        assert read_run_info(tmp_path / "run").status == "failed"
