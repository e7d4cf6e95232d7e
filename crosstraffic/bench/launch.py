"""Start the ranks of a run on this machine, and leave none behind."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from crosstraffic.bench.guard import MODULE_VARIABLE, RUN_VARIABLE, log_path
from crosstraffic.bench.heartbeat import ranks_folder, read_beats, request_stop
from crosstraffic.bench.processes import (
    SHARED_PREFIX,
    Process,
    descendants,
    read_process,
    running,
    send_signal,
    shared_segments,
)
from crosstraffic.bench.ranks import STORE_VARIABLE
from crosstraffic.errors import EnvironmentRefused, UsageError

WORKER = "crosstraffic.bench.worker"
DEFAULT_RANKS, MAX_LOCAL_RANKS = 4, 256
_TERMINATE_S, _KILL_S = 3.0, 5.0  # how long a launcher may take to end after SIGTERM, and after SIGKILL
_PASSED = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV")
_PASSED_PREFIXES = ("LC_", "MPICH_", "MPIR_CVAR_", "UCX_", "FI_", "OMPI_MCA_", "GLOO_", "NCCL_", "CUDA_", "PYTHONHASH")


class LocalRanks:
    """The ranks that were started, until they are stopped."""

    def __init__(self, transport_name: str, num_ranks: int, run_dir: Path, launchers: list[subprocess.Popen[bytes]]):
        self.transport_name, self.num_ranks, self.run_dir = transport_name, num_ranks, run_dir
        self._launchers = launchers

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of what was started directly: mpiexec, or a guard for each rank."""
        return tuple(launcher.pid for launcher in self._launchers)

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each process that was started directly; None while it runs."""
        return [launcher.poll() for launcher in self._launchers]

    def processes(self) -> list[Process]:
        """Return every process of this launch that runs now: what was started, all below it, and every rank."""
        started = [read_process(launcher.pid) for launcher in self._launchers if launcher.poll() is None]
        found = {process.pid: process for process in started if process is not None}
        found |= {process.pid: process for process in descendants(found)}
        for beat in read_beats(self.run_dir):
            process = running(beat.pid, beat.start_ticks)
            if process is not None:
                found[process.pid] = process
        return [process for process in found.values() if process.state not in "ZX"]

    def stop(self) -> None:
        """End every process of this launch: SIGTERM first, SIGKILL 3 s later; return when none is left.

        Raises:
            EnvironmentRefused: a process outlives SIGKILL by 5 s (it hangs in the kernel); its pid is named.
        """
        everyone = self.processes()
        segments = {path for process in everyone for path in shared_segments(process, SHARED_PREFIX)}
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.terminate()
        _wait_until(lambda: not _alive(everyone), _TERMINATE_S)
        for process in _alive(everyone) + self.processes():
            send_signal(process, signal.SIGKILL)
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.kill()
        if not _wait_until(lambda: not _alive(everyone) and None not in self.exit_codes(), _KILL_S):
            left = ", ".join(str(process.pid) for process in _alive(everyone))
            raise EnvironmentRefused(f"processes of this run outlive SIGKILL (they hang in the kernel): {left}")
        for path in segments:
            path.unlink(missing_ok=True)

    def last_lines(self, rank: int | None, num_lines: int = 12) -> tuple[str, ...]:
        """Return the last lines that a rank, or the launcher (None), wrote."""
        path = self.run_dir / "logs" / "launcher.log" if rank is None else log_path(self.run_dir, rank)
        if not path.exists():
            return ()
        return tuple(path.read_text(errors="replace").splitlines()[-num_lines:])


def _alive(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if running(process.pid, process.start_ticks) is not None]


def _wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def launch_local(
    transport_name: str,
    num_ranks: int,
    run_dir: Path,
    *,
    module: str = WORKER,
    environment: Mapping[str, str] | None = None,
) -> Iterator[LocalRanks]:
    """Start ``python -m module run_dir`` as ``num_ranks`` ranks; when the context ends, however, none of them is left.

    Ranks get the environment by an allow-list, plus ``environment``; they ignore SIGINT and end when this process does.
    What they print goes to ``run_dir/logs/rank-N.log``.

    Raises:
        UsageError: a transport whose ranks are not started here, or not a number of ranks.
        EnvironmentRefused: there is no mpiexec.
    """
    if transport_name not in _STARTERS:
        raise UsageError(f"transport {transport_name} starts no local ranks; those that do: {', '.join(_STARTERS)}")
    if not 1 <= num_ranks <= MAX_LOCAL_RANKS:
        raise UsageError(f"ranks on one machine must be 1 to {MAX_LOCAL_RANKS}: {num_ranks}")
    run_dir = run_dir.resolve()
    _clear(ranks_folder(run_dir))
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    passed = passed_environment(os.environ) | {RUN_VARIABLE: str(run_dir), MODULE_VARIABLE: module}
    passed |= dict(environment or {})
    previous = _unwind_on_signals()
    launchers: list[subprocess.Popen[bytes]] = []
    ranks = LocalRanks(transport_name, num_ranks, run_dir, launchers)
    try:
        with (run_dir / "logs" / "launcher.log").open("wb") as log:
            for command, extra in _STARTERS[transport_name](num_ranks, run_dir):
                launchers.append(
                    subprocess.Popen(  # noqa: S603
                        command,
                        env=passed | extra,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield ranks
    finally:
        request_stop(run_dir)
        ranks.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def passed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks may see of the environment. Slurm's variables are not among it: mpiexec would follow them.

    >>> passed_environment({"PATH": "/bin", "UCX_TLS": "tcp", "API_TOKEN": "x", "SLURM_JOB_ID": "7"})
    {'PATH': '/bin', 'UCX_TLS': 'tcp', 'OMP_NUM_THREADS': '1'}
    """
    passed = {
        name: value for name, value in environment.items() if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    return passed | {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}


def find_mpiexec() -> Path:
    """Return the mpiexec beside this Python, or else the first one on PATH.

    Raises:
        EnvironmentRefused: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return beside
    found = shutil.which("mpiexec")
    if found is None:
        raise EnvironmentRefused(
            "no mpiexec, neither beside this Python nor on PATH: pip install 'crosstraffic[local]' (brings MPICH), "
            "load the site's MPI, or choose --transport gloo"
        )
    return Path(found)


_GUARD = (sys.executable, "-m", "crosstraffic.bench.guard")
_Commands = list[tuple[list[str], dict[str, str]]]


def _start_mpi(num_ranks: int, run_dir: Path) -> _Commands:
    """One mpiexec. Hydra (MPICH, Intel) forks here, and lets the others go on when one exits with an error code."""
    mpiexec = find_mpiexec()
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    is_open_mpi = "Open MPI" in version.stdout or "OpenRTE" in version.stdout
    options = ["--oversubscribe"] if is_open_mpi else ["-launcher", "fork", "-disable-auto-cleanup"]
    return [([*_GUARD, str(mpiexec), *options, "-n", str(num_ranks), *_GUARD], {})]  # the first ties mpiexec to us


def _start_gloo(num_ranks: int, run_dir: Path) -> _Commands:
    """One guard a rank. They meet in a file, so that no port can be taken by another, and talk over the loopback."""
    store = ranks_folder(run_dir) / f"store-{os.getpid()}-{time.monotonic_ns()}"
    shared = {"WORLD_SIZE": str(num_ranks), STORE_VARIABLE: str(store)}
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    return [([*_GUARD], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)]


_STARTERS: Mapping[str, Callable[[int, Path], _Commands]] = {"mpi": _start_mpi, "gloo": _start_gloo}


def _clear(folder: Path) -> None:
    """Remove what the ranks of an earlier launch left: only names that this package gives."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("rank-*.beat*", "rank-*.exit*", "store-*", "stop"):
        for path in folder.glob(pattern):
            path.unlink()


def _unwind_on_signals() -> dict[
    signal.Signals, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
]:
    """Make SIGTERM and SIGHUP unwind this process, so that ranks are stopped; return the handlers to put back."""

    def unwind(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        return {}
    return {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
