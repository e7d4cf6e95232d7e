"""A rank as its guard sees it: the child process, the memory in which its heart beats, and what it printed."""

import mmap
import os
import signal
import time
from collections.abc import Mapping
from typing import IO, Any

from crosstraffic.bench.heartbeat import ask_to_stop, beat_in
from crosstraffic.bench.processes import read_process

KEPT_LINES, KEPT_BYTES = 12, 8192
DUMP_S = 0.5  # for a rank to write down in which Python call it is

Message = Mapping[str, Any]


class Child:
    """The process of one rank. ``log`` holds what it prints; None where that goes straight to this one's output."""

    def __init__(self, rank: int, pid: int, memory: mmap.mmap, log: IO[bytes] | None) -> None:
        self.rank, self.pid = rank, pid
        self._memory, self._log = memory, log
        self._descriptor = os.pidfd_open(pid)
        self._is_told = False
        self.exit_code: int | None = None
        self.signal: str | None = None

    @property
    def is_over(self) -> bool:
        """Tell whether it has ended."""
        return self.exit_code is not None or self.signal is not None

    def fileno(self) -> int:
        """Return what becomes readable once the process ends."""
        return self._descriptor

    def reap(self) -> None:
        """Take down how it ended; waits for it."""
        if not self.is_over:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.exit_code = code if code >= 0 else None
            self.signal = signal.Signals(-code).name if code < 0 else None

    def kill(self) -> None:
        """End it now."""
        if not self.is_over:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def ask_to_stop(self) -> None:
        """Ask it to end in order."""
        ask_to_stop(self._memory)

    def ask_where(self) -> Message:
        """Make it write in which Python call it is, and return the last that it printed."""
        if not self.is_over:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(DUMP_S)
        return {"last": self._last_lines()}

    def news(self) -> list[Message]:
        """Return what the guard of rank 0 should know: the last beat, and once how it ended."""
        found: list[Message] = []
        beat = beat_in(self._memory, self.rank)
        if beat is not None:
            process = None if self.is_over else read_process(self.pid)
            age_s = round(time.monotonic() - beat.beat_s, 3)
            state = "" if process is None else process.state
            found.append({"beat": [beat.pid, int(beat.state), beat.point, beat.stream, beat.call, age_s, state]})
        if self.is_over and not self._is_told:
            self._is_told = True
            found.append({"end": [self.exit_code, self.signal], "last": self._last_lines() if self.exit_code else []})
        return found

    def _last_lines(self) -> list[str]:
        if self._log is None:
            return []
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - KEPT_BYTES, 0))
        return self._log.read().decode(errors="replace").splitlines()[-KEPT_LINES:]
