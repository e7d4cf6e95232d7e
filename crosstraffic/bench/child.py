"""A rank as its guard sees it: the child process, the memory in which its heart beats, and what it printed."""

import mmap
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from crosstraffic.bench.heartbeat import State, ask_to_stop, beat_in
from crosstraffic.bench.messages import MAX_LINES, beat_message
from crosstraffic.bench.processes import SHARED_PREFIX, read_process, shared_segments

KEPT_BYTES = 8192
DUMP_S = 0.5  # for a rank to write down in which Python call it is
KILL_WITHIN_S = 2.0  # a process that hangs in the kernel (a driver, a file server) does not even end when killed

Message = Mapping[str, Any]


class Child:
    """The process of one rank. ``log`` holds its last words, and all that it prints where nobody sees that."""

    def __init__(self, rank: int, pid: int, memory: mmap.mmap, log: IO[bytes]) -> None:
        self.rank, self.pid = rank, pid
        self._memory, self._log = memory, log
        self._is_told = False
        self._segments: frozenset[Path] | None = None
        self.exit_code: int | None = None
        self.signal: str | None = None

    @property
    def is_over(self) -> bool:
        """Tell whether it has ended, as far as ``reap`` has seen."""
        return self.exit_code is not None or self.signal is not None

    def reap(self) -> bool:
        """Take down how it ended, if it has; True the first time that it has. Does not wait."""
        if self.is_over:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self.exit_code = code if code >= 0 else None
        self.signal = _name(-code) if code < 0 else None
        if code:
            self._clean()
        return True

    def kill(self) -> None:
        """End it now, and wait for that, but not for ever."""
        if self.is_over or self.reap():
            return
        self._look_at_segments()
        os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + KILL_WITHIN_S
        while not self.reap() and time.monotonic() < until:
            time.sleep(0.005)

    def ask_to_stop(self) -> None:
        """Ask it to end in order."""
        ask_to_stop(self._memory)

    def ask_where(self) -> Message:
        """Make it write in which Python call it is; return that, or the last that it printed where it cannot."""
        begun = self._size()
        if not self.is_over:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(DUMP_S)
        lines = self._read(begun).splitlines()
        starts = [index for index, line in enumerate(lines) if line.endswith("(most recent call first):")]
        return {"last": lines[starts[-1] :][:MAX_LINES] if starts else self.last_lines()}  # the main thread is the last

    def news(self) -> list[Message]:
        """Return what the guard of rank 0 should know: the last beat, and once how it ended."""
        found: list[Message] = []
        beat = beat_in(self._memory, self.rank)
        if beat is not None:
            process = None if self.is_over else read_process(self.pid)
            if beat.state == State.MEASURING and self._segments is None:
                self._look_at_segments()
            found.append(beat_message(beat, "" if process is None else process.state, time.monotonic()))
        if self.is_over and not self._is_told:
            self._is_told = True
            last = [] if self.exit_code == 0 else self.last_lines()
            found.append({"end": [self.exit_code, self.signal], "last": last})
        return found

    def last_lines(self) -> list[str]:
        """Return what it printed last."""
        return self._read(max(self._size() - KEPT_BYTES, 0)).splitlines()[-MAX_LINES:]

    def _look_at_segments(self) -> None:
        """Take down which shared memory it has mapped: nobody removes that of a rank that is killed."""
        process = read_process(self.pid)
        if process is not None:
            self._segments = (self._segments or frozenset()) | shared_segments(process, SHARED_PREFIX)

    def _clean(self) -> None:
        for path in self._segments or ():
            path.unlink(missing_ok=True)

    def _size(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _read(self, begin: int) -> str:
        """Read from a place on, and leave the place where the child writes: it is the same open file."""
        return os.pread(self._log.fileno(), KEPT_BYTES, begin).decode(errors="replace")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
