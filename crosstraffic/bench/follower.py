"""The guard of a rank that is not the first: it tells rank 0's guard of its child, and obeys it."""

import contextlib
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from crosstraffic.bench.child import Child
from crosstraffic.bench.control import Line, Meeting, connect
from crosstraffic.bench.supervisor import LOST_S, START_WITHIN_S

MEET_WITHIN_S = START_WITHIN_S / 2
ORPHAN_S = 2 * LOST_S  # without a word from the guard of rank 0
LINGER_S = 8.0  # after a failure: rank 0's guard writes down what happened before the launcher ends everything


class Follower:
    """``code`` is None until this guard may go, then its exit code."""

    def __init__(
        self, hello: Mapping[str, Any], place: Meeting, child: Child, selector: selectors.BaseSelector
    ) -> None:
        self._hello, self._place, self._child, self._selector = hello, place, child, selector
        self._line: Line | None = None
        self._is_welcome = False
        self._attempt = 0
        self._begun_s = self._heard_s = time.monotonic()
        self._leave_s: float | None = None
        self._failed_code = 1
        self.code: int | None = None

    @property
    def is_ready(self) -> bool:
        """Tell whether somebody listens."""
        return self._is_welcome

    def say(self, message: Mapping[str, Any]) -> None:
        """Tell rank 0's guard."""
        if self._line is not None:
            self._line.say(message)

    def asked_to_stop(self, name: str) -> None:
        """Pass on that a signal asked for the end: rank 0 decides for all."""
        if self._is_welcome:
            self.say({"stop": name})
        else:
            self._child.ask_to_stop()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._leave_s is not None:
            if now > self._leave_s or self._line is None or not self._line.is_open:
                self.code = self._failed_code
        elif self._line is None:
            self._meet(now)
        elif not self._line.is_open or now - self._heard_s > ORPHAN_S:
            if self._is_welcome or now - self._begun_s > MEET_WITHIN_S:
                self._fail(f"the guard of rank 0 at {self._place.host} is gone or cannot be reached any more", 1)
            else:
                self._line = None  # it was another launch's

    def close(self) -> None:
        """Close the line."""
        if self._line is not None:
            self._line.close()

    def _meet(self, now: float) -> None:
        for _ in self._place.ports:
            line = connect(self._place, self._attempt)
            self._attempt += 1
            if line is not None:
                line.say(self._hello)
                self._line, self._heard_s = line, now
                self._selector.register(line, selectors.EVENT_READ, self._hear)
                return
        if now - self._begun_s > MEET_WITHIN_S:
            ports = f"{self._place.ports[0]}-{self._place.ports[-1]}"
            why = f"nobody of this run answers at {self._place.host}, ports {ports}, within {MEET_WITHIN_S:g} s: is "
            self._fail(f"{why}rank 0 there, and may its ports be reached?", 3)

    def _hear(self) -> None:
        line = self._line
        if line is None:
            return
        for message in line.hear():
            self._heard_s = time.monotonic()
            self._obey(message)
        if not line.is_open:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(line)
            line.close()

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "ok" in message:
            self._is_welcome = True
        if "refused" in message:
            self._fail(str(message["refused"]), 3)
        if "stop" in message:
            self._child.ask_to_stop()
        if "where" in message:
            self.say(self._child.ask_where())
        if "kill" in message:
            self._child.kill()
            self._failed_code = int(message["kill"])
            self._leave_s = time.monotonic() + LINGER_S
        if "go" in message:
            self._child.reap()
            self.code = self._child.exit_code if self._child.exit_code is not None else 1

    def _fail(self, why: str, code: int) -> None:
        self._child.kill()
        self.code = code
        print(f"error: rank {self._child.rank} on {socket.gethostname()}: {why}", file=sys.stderr, flush=True)
