"""Launching local ranks: the environment they get, the order of refusals, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crosstraffic.bench import launch
from crosstraffic.bench.heartbeat import ranks_folder, read_beats
from crosstraffic.bench.launch import find_mpiexec, launch_local, passed_environment
from crosstraffic.bench.processes import Process, running
from crosstraffic.bench.watchdog import watch
from crosstraffic.errors import EnvironmentRefused, UsageError

EnvironmentOf = Callable[..., dict[str, str]]
TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]


def wait_for_ranks(run_dir: Path, num_ranks: int, at_least_calls: int = 5) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        beats = read_beats(run_dir)
        if len(beats) == num_ranks and all((beat.call or 0) >= at_least_calls for beat in beats):
            return
        time.sleep(0.02)
    raise AssertionError(f"ranks did not start: {beats}")


def left(processes: list[Process]) -> list[Process]:
    return [process for process in processes if running(process.pid, process.start_ticks) is not None]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_in_the_context_leaves_no_process(
    tmp_path: Path, environment_of: EnvironmentOf, transport: str
) -> None:
    processes: list[Process] = []

    def fail_midway() -> None:
        with launch_local(
            transport, 3, tmp_path, module="program_loop", environment=environment_of(transport)
        ) as ranks:
            wait_for_ranks(tmp_path, 3)
            processes.extend(ranks.processes())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_midway()
    assert len(processes) >= 6
    assert left(processes) == []


PARENT = """
import sys, time
from pathlib import Path
from crosstraffic.bench.launch import launch_local
folder, transport, programs = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
environment = {"PYTHONPATH": programs, "TEST_TRANSPORT": transport}
with launch_local(transport, 2, folder, module="program_loop", environment=environment) as ranks:
    time.sleep(1.5)
    (folder / "pids").write_text("\\n".join(f"{p.pid} {p.start_ticks}" for p in ranks.processes()))
    (folder / "ready").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_ranks_end_when_the_command_is_killed(
    tmp_path: Path, environment_of: EnvironmentOf, transport: str, number: signal.Signals
) -> None:
    programs = environment_of(transport)["PYTHONPATH"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), transport, programs])
    end_s = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    wait_for_ranks(tmp_path, 2)
    known = [tuple(map(int, line.split())) for line in (tmp_path / "pids").read_text().splitlines()]
    known += [(beat.pid, beat.start_ticks) for beat in read_beats(tmp_path)]
    parent.send_signal(number)
    parent.wait(30)
    end_s = time.monotonic() + 10
    while any(running(*key) is not None for key in known) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [key for key in known if running(*key) is not None] == []


@pytest.mark.mpi
def test_a_second_launch_forgets_the_first(tmp_path: Path, environment_of: EnvironmentOf) -> None:
    for num_ranks in (3, 2):
        environment = environment_of("mpi")
        with launch_local("mpi", num_ranks, tmp_path, module="program_loop", environment=environment):
            wait_for_ranks(tmp_path, num_ranks)
    assert len(read_beats(tmp_path)) == 2
    assert not list(ranks_folder(tmp_path).glob("*.new"))


@pytest.mark.mpi
def test_ranks_ignore_ctrl_c_and_see_only_the_allowed_environment(
    tmp_path: Path, environment_of: EnvironmentOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "do not leak")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")
    with launch_local("mpi", 2, tmp_path, module="program_loop", environment=environment_of("mpi")):
        wait_for_ranks(tmp_path, 2)
        for beat in read_beats(tmp_path):
            seen = Path(f"/proc/{beat.pid}/environ").read_bytes()
            assert b"MY_API_TOKEN" not in seen
            assert b"SLURM_JOB_ID" not in seen
            assert b"UCX_LOG_LEVEL=error" in seen
            assert b"OMP_NUM_THREADS=1" in seen
            os.kill(beat.pid, signal.SIGINT)
        before = [beat.call or 0 for beat in read_beats(tmp_path)]
        wait_for_ranks(tmp_path, 2, max(before) + 10)


@pytest.mark.mpi
def test_the_launchers_sigusr1_ends_no_rank(tmp_path: Path, environment_of: EnvironmentOf) -> None:
    """MPICH's proxy sends SIGUSR1 to ranks that still leave when others have left; guards died of it, now and then."""
    with launch_local("mpi", 2, tmp_path, module="program_loop", environment=environment_of("mpi")) as ranks:
        wait_for_ranks(tmp_path, 2)
        beats = read_beats(tmp_path)
        for beat in beats:
            rank = running(beat.pid, beat.start_ticks)
            assert rank is not None
            os.kill(rank.parent_pid, signal.SIGUSR1)
            os.kill(rank.pid, signal.SIGUSR1)
        wait_for_ranks(tmp_path, 2, max(beat.call or 0 for beat in beats) + 10)
        stop = threading.Event()
        stop.set()
        assert watch(ranks, stop=stop).failure is None


@pytest.mark.parametrize(
    ("transport", "num_ranks", "message"),
    [
        ("simulated", 2, "starts no local ranks; those that do: mpi, gloo"),
        ("mpi", 0, "must be 1 to 256: 0"),
        ("gloo", 257, "must be 1 to 256: 257"),
    ],
)
def test_bad_use_is_refused_before_anything_starts(
    tmp_path: Path, transport: str, num_ranks: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message), launch_local(transport, num_ranks, tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_no_mpiexec_gives_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentRefused, match=r"no mpiexec.*crosstraffic\[local\].*--transport gloo"):
        find_mpiexec()


def test_the_environment_is_an_allow_list() -> None:
    given = {"PATH": "/bin", "LC_ALL": "C", "NCCL_DEBUG": "INFO", "GITHUB_TOKEN": "x", "PMI_RANK": "0", "RANK": "1"}
    assert passed_environment(given) == {"PATH": "/bin", "LC_ALL": "C", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
