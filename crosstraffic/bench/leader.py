"""The guard of rank 0: it hears all guards, lets the supervisor judge, ends the run, and writes down how it ended."""

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstraffic.bench.child import Child
from crosstraffic.bench.control import Line, Meeting, connect, is_here, listen
from crosstraffic.bench.failures import Outcome
from crosstraffic.bench.supervisor import LOST_S, Rank, Supervisor
from crosstraffic.errors import EnvironmentRefused

ANSWER_WITHIN_S = 2.0
WHERE_WITHIN_S = 2.0
ALIVE_EVERY_S = 1.0


class Leader:
    """``code`` is None until this guard may go, then its exit code. Without a place it judges its own rank alone."""

    def __init__(
        self,
        hello: Mapping[str, Any],
        place: Meeting | None,
        child: Child,
        selector: selectors.BaseSelector,
        folder_fd: int,
    ) -> None:
        """Listen for the other guards.

        Raises:
            EnvironmentRefused: another process is rank 0 of this launch already; no port is free.
        """
        self._place, self._child, self._selector, self._folder_fd = place, child, selector, folder_fd
        self._lines: dict[int, Line] = {}
        self._listener: socket.socket | None = None
        self._folder: Path | None = None
        self._alive_s = 0.0
        self.code: int | None = None
        self.is_ready = True
        if place is not None:
            self._listener = _listen_as_first(place, hello)
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
        expected = (child.rank,) if place is None else tuple(range(hello["world_size"]))
        self._supervisor = Supervisor(expected)
        self._supervisor.join(child.rank, _rank_of(hello, self))

    def say(self, message: Mapping[str, Any]) -> None:
        """Take in what the own child does, and (as a guard among guards) what the supervisor asks of it."""
        if "stop" in message:
            self._child.ask_to_stop()
        elif "where" in message:
            self._supervisor.hear(self._child.rank, self._child.ask_where())
        else:
            self._supervisor.hear(self._child.rank, message)

    def asked_to_stop(self, name: str) -> None:
        """End the run in order: a signal asks for it."""
        print(f"{name}: ending in order, what is measured is kept", file=sys.stderr, flush=True)
        self._supervisor.ask_to_stop()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now - self._alive_s > ALIVE_EVERY_S:
            self._alive_s = now
            for line in self._lines.values():
                line.say({"alive": True})
        self._read_folder()
        outcome = self._supervisor.judge(self._stream_names)
        if outcome is None:
            return
        if outcome.failure is None:
            for line in self._lines.values():
                line.say({"go": True})
            self._child.reap()
            self.code = self._child.exit_code if self._child.exit_code is not None else 1
        else:
            self._end(self._with_place(outcome))

    def close(self) -> None:
        """Close all lines: the other guards go."""
        for line in self._lines.values():
            line.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        if self._listener is not None:
            line = Line(self._listener.accept()[0])
            self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(line))

    def _hear(self, line: Line) -> None:
        rank = next((rank for rank, known in self._lines.items() if known is line), None)
        for message in line.hear():
            if rank is None:
                rank = self._welcome(line, message)
                if rank is None:
                    break
            else:
                with contextlib.suppress(KeyError, TypeError, ValueError):  # not what a guard of ours says
                    self._supervisor.hear(rank, message)
        if not line.is_open:
            self._selector.unregister(line)
            line.close()
            if rank is not None:
                self._supervisor.leave(rank)

    def _welcome(self, line: Line, hello: Mapping[str, Any]) -> int | None:
        try:
            is_ours = self._place is not None and hello["key"] == self._place.key
            rank, found = int(hello["rank"]), _rank_of(hello, line)
        except (KeyError, TypeError, ValueError):
            is_ours = False
        if not is_ours:
            line.say({"other": True})
            line.is_open = False
            return None
        if not self._supervisor.join(rank, found):
            line.say({"refused": f"another process of this launch is rank {rank} already, or there is no such rank"})
            line.is_open = False
            return None
        line.say({"ok": True})
        self._lines[rank] = line
        return rank

    def _with_place(self, outcome: Outcome) -> Outcome:
        """Ask the first rank that stands still in which Python call it is."""
        still = next((failure.rank for failure in outcome.failures if failure.what == "stands_still"), None)
        found = None if still is None else self._supervisor.ranks.get(still)
        if found is None:
            return outcome
        found.last_lines = ()
        found.member.say({"where": True})
        until = time.monotonic() + WHERE_WITHIN_S
        while not found.last_lines and time.monotonic() < until and found.member is not self:
            for key, _ in self._selector.select(0.1):
                key.data()
        return outcome.with_lines(found.last_lines)

    def _end(self, outcome: Outcome) -> None:
        told = self._child.exit_code == outcome.exit_code and outcome.exit_code in (2, 3)  # rank 0 has said why
        for line in self._lines.values():
            line.say({"kill": outcome.exit_code})
        self._child.kill()
        self._read_folder()
        why = outcome.failure or ""
        if not told:
            print(f"error: {why}", file=sys.stderr, flush=True)
        self.code = outcome.exit_code
        if self._folder is not None and (self._folder / "run.json").is_file():
            from crosstraffic.bench.session import end_early

            end_early(self._folder, "interrupted" if outcome.interrupted else "failed", why)
            print(f"kept: what was measured, in {self._folder}", file=sys.stderr, flush=True)

    def _read_folder(self) -> None:
        """Take in what the child said of its folder, if it did."""
        if self._folder is None:
            os.set_blocking(self._folder_fd, False)
            with contextlib.suppress(BlockingIOError):
                if said := os.read(self._folder_fd, 65536):
                    self._folder = Path(json.loads(said))

    def _stream_names(self) -> list[str]:
        """Return the names of the streams, which beats number, from run.json."""
        if self._folder is None:
            return []
        try:
            run = json.loads((self._folder / "run.json").read_text(encoding="utf-8"))
            return [str(stream["name"]) for stream in run["streams"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []


def _rank_of(hello: Mapping[str, Any], member: Line | Leader) -> Rank:
    return Rank(
        member=member,
        host=str(hello["host"]),
        guard_pid=int(hello["pid"]),
        facts={str(name): str(value) for name, value in dict(hello["facts"]).items()},
        world_size=int(hello["world_size"]),
        heard_s=time.monotonic(),
    )


def _listen_as_first(place: Meeting, hello: Mapping[str, Any]) -> socket.socket:
    """Listen at the meeting point, unless another rank 0 of this launch is there: it refuses this one.

    A rank 0 that is not on the host where all look for it may be a second one: it looks there first, for a while.
    """
    until = time.monotonic() + (0.0 if is_here(place.host) else LOST_S)
    while True:
        for index in range(len(place.ports)):
            line = connect(place, index)
            if line is None:
                continue
            line.say(hello)
            answer = line.next_message(ANSWER_WITHIN_S)
            line.close()
            if "refused" in answer:
                raise EnvironmentRefused(str(answer["refused"]))
        if time.monotonic() >= until:
            break
        time.sleep(0.5)
    listener = listen(place)
    if listener is None:
        raise EnvironmentRefused(f"no port of {place.ports[0]} to {place.ports[-1]} is free for the guards of this run")
    return listener
