"""Processes of a lab: started into sessions of their own, known by number and start time, ended by number."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process that a lab started; the start time tells it from a later one of the same number."""

    name: str
    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where it is gone or a zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def start(name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> Started:
    """Start a daemon that stays in the foreground of its own session; its output goes to ``log``."""
    with log.open("ab") as out:
        process = subprocess.Popen(  # noqa: S603
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env), start_new_session=True
        )
    return Started(name=name, pid=process.pid, start_ticks=start_ticks(process.pid) or 0)


def is_alive(process: Started) -> bool:
    """Tell whether it still runs."""
    return start_ticks(process.pid) == process.start_ticks


def running(names: Iterable[str]) -> dict[int, str]:
    """Return processes of this machine by number whose program has one of these names."""
    wanted = frozenset(names)
    found: dict[int, str] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if name in wanted and start_ticks(int(entry.name)) is not None:
                found[int(entry.name)] = name
    return found


def end(processes: Sequence[Started], within_s: float = 5.0) -> None:
    """End processes: asked first, then made to, after ``within_s``."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if is_alive(process):
                try:
                    os.kill(process.pid, number)
                except ProcessLookupError:
                    continue
        until = time.monotonic() + within_s
        while any(map(is_alive, processes)) and time.monotonic() < until:
            time.sleep(0.05)
