"""The guard of a rank that is not the first: it tells rank 0's guard of its child, and obeys it."""

import contextlib
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from crosstraffic.bench.child import Child
from crosstraffic.bench.control import Line, Meeting, addresses, connect
from crosstraffic.bench.messages import Hello, hello_to_dict
from crosstraffic.bench.supervisor import LOST_S, START_WITHIN_S

MEET_WITHIN_S = START_WITHIN_S / 2
ALONE_S = 10.0  # for a guard whose rank has ended already: the run may be over
LOOK_EVERY_S = 0.5
ORPHAN_S = 2 * LOST_S  # without a word from the guard of rank 0
LINGER_S = 8.0  # after a failure: rank 0's guard writes down what happened before the launcher ends everything


class Follower:
    """``code`` is None until this guard may go, then its exit code."""

    def __init__(self, hello: Hello, place: Meeting, child: Child, selector: selectors.BaseSelector) -> None:
        self._hello, self._place, self._child, self._selector = hello, place, child, selector
        self._line: Line | None = None
        self._is_welcome = False
        self._stop: str | None = None
        self._attempt = 0
        self._looked_s = 0.0
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
        """Pass on that a signal asked for the end, now or once rank 0's guard is found: rank 0 decides for all."""
        self._stop = name
        if self._is_welcome:
            self.say({"stop": name})

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._leave_s is not None:
            if now > self._leave_s or self._line is None or not self._line.is_open:
                self.code = self._failed_code
        elif self._is_welcome:
            if self._line is None or not self._line.is_open or now - self._heard_s > ORPHAN_S:
                self._fail(f"the guard of rank 0 at {self._place.host} is gone or cannot be reached any more", 1)
        else:
            if self._line is not None and (not self._line.is_open or now - self._heard_s > ORPHAN_S):
                self._drop()  # another launch's, or no guard at all
            if self._line is None:
                self._meet(now)

    def close(self) -> None:
        """Close the line."""
        if self._line is not None:
            self._line.close()

    def _meet(self, now: float) -> None:
        """Try the ports in turn, for a moment: the rank and signals want to be looked at too."""
        if now - self._looked_s >= LOOK_EVERY_S:
            until = now + LOOK_EVERY_S
            for _ in self._place.ports:
                line = connect(self._place, self._attempt)
                self._attempt += 1
                if line is not None:
                    line.say(hello_to_dict(self._hello))
                    self._line, self._heard_s = line, time.monotonic()
                    self._selector.register(line, selectors.EVENT_READ, self._hear)
                    return
                if time.monotonic() > until:
                    break
            self._looked_s = time.monotonic()
        alone_s = now - self._begun_s
        if self._child.is_over and alone_s > ALONE_S:
            how = self._child.signal or f"exit code {self._child.exit_code}"
            last = "".join(f"\n  | {line}" for line in self._child.last_lines())
            code = self._child.exit_code
            self._fail(f"ended ({how}), and {self._nobody(alone_s)}{last}", code if code in (2, 3) else 1)
        elif alone_s > MEET_WITHIN_S:
            self._fail(f"{self._nobody(alone_s)}: is rank 0 there, and may its ports be reached?", 3)

    def _nobody(self, within_s: float) -> str:
        host, ports = self._place.host, self._place.ports
        if not addresses(host):
            return f"the name {host}, where rank 0 should be, does not resolve on this node"
        return f"nobody of this run answers at {host}, ports {ports[0]}-{ports[-1]}, within {within_s:.0f} s"

    def _hear(self) -> None:
        line = self._line
        if line is None:
            return
        for message in line.hear():
            self._heard_s = time.monotonic()
            self._obey(message)
        if not line.is_open:
            self._unregister(line)

    def _drop(self) -> None:
        if self._line is not None:
            self._unregister(self._line)
            self._line = None

    def _unregister(self, line: Line) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is out already
            self._selector.unregister(line)
        line.close()

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "refused" in message:
            self._fail(str(message["refused"]), 3)
        elif "ok" in message and not self._is_welcome:
            self._is_welcome = True
            if self._stop is not None:
                self.say({"stop": self._stop})
        if not self._is_welcome:
            return
        if "stop" in message:
            self._child.ask_to_stop()
        if "where" in message:
            self.say(self._child.ask_where())
        if "kill" in message:
            self._child.kill()
            self._failed_code = message["kill"] if message["kill"] in (2, 3) else 1
            self._leave_s = time.monotonic() + LINGER_S
        if "go" in message:  # all is measured and kept; a rank that hangs or dies on its way out has lost nothing
            self._child.kill()
            self.code = 0

    def _fail(self, why: str, code: int) -> None:
        self._child.kill()
        self.code = code
        print(f"error: rank {self._child.rank} on {socket.gethostname()}: {why}", file=sys.stderr, flush=True)
