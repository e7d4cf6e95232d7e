"""Processes of this machine as /proc shows them. A process is its pid and its start time: pids are used again."""

import ctypes
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
SHARED_PREFIX = "mpich_shm_"  # memory that ranks of MPICH share, a file of their own in /dev/shm
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where Linux keeps POSIX shared memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. ``start_ticks`` counts clock ticks since boot; ``state`` is ps' letter (R, S, T, Z, ...)."""

    pid: int
    start_ticks: int
    parent_pid: int
    state: str


def read_process(pid: int) -> Process | None:
    """Return what runs under a pid now; None where nothing does.

    Source: proc_pid_stat(5): state, ppid and starttime are fields 3, 4 and 22; the name in field 2 may hold blanks.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid=pid, start_ticks=int(fields[19]), parent_pid=int(fields[1]), state=fields[0])


def running(pid: int, start_ticks: int) -> Process | None:
    """Return the process if it is the same one and has not ended (a zombie has)."""
    process = read_process(pid)
    return None if process is None or process.start_ticks != start_ticks or process.state in "ZX" else process


def descendants(pids: Iterable[int]) -> list[Process]:
    """Return the processes below some, parents before children."""
    everything = [read_process(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found: list[Process] = []
    level = set(pids)
    while level:
        children = [process for process in everything if process is not None and process.parent_pid in level]
        found += children
        level = {process.pid for process in children}
    return found


def shared_segments(process: Process, prefix: str) -> set[Path]:
    """Return the files of /dev/shm whose name begins with ``prefix`` that a process has mapped.

    MPI libraries remove theirs when ranks end in order; after a kill nobody does.
    """
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if f"{SHARED_MEMORY}/" in line}
    return {path for path in paths if path.parent == SHARED_MEMORY and path.name.startswith(prefix)}


def send_signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to this very process, if it still runs."""
    if running(process.pid, process.start_ticks) is not None:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
