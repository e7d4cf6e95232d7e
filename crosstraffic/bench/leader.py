"""The guard of rank 0: it hears all guards, lets the supervisor judge, ends the run, and writes down how it ended."""

import contextlib
import json
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstraffic.bench.child import Child
from crosstraffic.bench.control import Line, Meeting, accept, connect, is_here, listen
from crosstraffic.bench.failures import Outcome
from crosstraffic.bench.messages import Hello, hello_to_dict, read_hello
from crosstraffic.bench.supervisor import LOST_S, Supervisor
from crosstraffic.errors import CrosstrafficError, EnvironmentRefused

ANSWER_WITHIN_S = 2.0
HELLO_WITHIN_S = 10.0  # for who connects to say who it is
WHERE_WITHIN_S = 2.0
ALIVE_EVERY_S = 1.0
JUDGE_EVERY_S = 0.1  # with thousands of ranks, one beat or another comes in all the time
SPARE_DESCRIPTORS = 64


class Leader:
    """``code`` is None until this guard may go, then its exit code. Without a place it judges its own rank alone."""

    def __init__(
        self,
        hello: Hello,
        place: Meeting | None,
        child: Child,
        selector: selectors.BaseSelector,
        folder_fd: int,
    ) -> None:
        """Listen for the other guards.

        Raises:
            EnvironmentRefused: another process is rank 0 of this launch already; no port is free; too few files may be
                open.
        """
        self._place, self._child, self._selector, self._folder_fd = place, child, selector, folder_fd
        os.set_blocking(folder_fd, False)
        self._ranks: dict[Line, int] = {}
        self._strangers: dict[Line, float] = {}
        self._listener: socket.socket | None = None
        self._folder: Path | None = None
        self._alive_s = self._judged_s = 0.0
        self.code: int | None = None
        self.is_ready = True
        if place is not None:
            _allow_descriptors(hello.world_size + SPARE_DESCRIPTORS)
            self._listener = _listen_as_first(place, hello)
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._supervisor = Supervisor((child.rank,) if place is None else range(hello.world_size))
        self._supervisor.join(self, hello)

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
        self._told_to_stop(name)
        self._supervisor.ask_to_stop()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now - self._alive_s > ALIVE_EVERY_S:
            self._alive_s = now
            self._tell({"alive": True})
            for line in [line for line, since_s in self._strangers.items() if now - since_s > HELLO_WITHIN_S]:
                self._forget(line)
        self._read_folder()
        if now - self._judged_s < JUDGE_EVERY_S:
            return
        self._judged_s = now
        outcome = self._supervisor.judge(self._stream_names)
        if outcome is None:
            return
        if outcome.failure is None:
            self._tell({"go": True})
            self._leave_well()
        else:
            self._end(self._with_place(outcome))

    def close(self) -> None:
        """Close all lines: the other guards go."""
        for line in (*self._ranks, *self._strangers):
            line.close()
        if self._listener is not None:
            self._listener.close()

    def _told_to_stop(self, name: str) -> None:
        if self._supervisor.stop_s is None:
            print(f"{name}: ending in order, what is measured is kept", file=sys.stderr, flush=True)

    def _tell(self, message: Mapping[str, Any]) -> None:
        for line in self._ranks:
            line.say(message)

    def _accept(self) -> None:
        line = None if self._listener is None else accept(self._listener)
        if line is not None:
            self._strangers[line] = time.monotonic()
            self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(line))

    def _hear(self, line: Line) -> None:
        for message in line.hear():
            rank = self._ranks.get(line)
            if rank is None:
                self._welcome(line, message)
                if not line.is_open:
                    break
            else:
                if "stop" in message:  # its signal may be here before the own one
                    self._told_to_stop(str(message["stop"]))
                with contextlib.suppress(ValueError):  # not what a guard of ours says
                    self._supervisor.hear(rank, message)
        if not line.is_open:
            self._forget(line)

    def _forget(self, line: Line) -> None:
        self._selector.unregister(line)
        line.close()
        self._strangers.pop(line, None)
        rank = self._ranks.pop(line, None)
        if rank is not None:
            self._supervisor.leave(rank)

    def _welcome(self, line: Line, message: Mapping[str, Any]) -> None:
        """Take a guard up, or tell it why not and close the line."""
        try:
            hello = read_hello(message)
            is_ours = self._place is not None and hello.key == self._place.key
        except ValueError:
            is_ours = False
        if not is_ours:
            line.say({"other": True})
            line.is_open = False
        elif not self._supervisor.join(line, hello):
            why = f"another process of this launch is rank {hello.rank} already, or there is no such rank"
            line.say({"refused": why})
            line.is_open = False
        else:
            line.say({"ok": True})
            del self._strangers[line]
            self._ranks[line] = hello.rank

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

    def _leave_well(self) -> None:
        """All is measured and kept; the exit code is rank 0's, which has reported since."""
        self._child.kill()
        self.code = self._child.exit_code
        if self.code is None:
            how = f"killed by {self._child.signal}" if self._child.signal else "still there"
            print(f"error: all is measured, but rank 0 was {how} before it had reported", file=sys.stderr, flush=True)
            self.code = 1

    def _end(self, outcome: Outcome) -> None:
        is_told = self._child.rank == 0 and self._child.exit_code == outcome.exit_code and outcome.exit_code in (2, 3)
        self._tell({"kill": outcome.exit_code})
        self._child.kill()
        self._read_folder()
        why = outcome.failure or ""
        if not is_told:  # rank 0 has not said it itself
            print(f"error: {why}", file=sys.stderr, flush=True)
        self.code = outcome.exit_code
        if self._folder is not None and (self._folder / "run.json").is_file():
            from crosstraffic.bench.session import end_early

            try:
                end_early(self._folder, "interrupted" if outcome.interrupted else "failed", why)
            except CrosstrafficError as error:  # the disk is full, say
                print(f"error: {error}", file=sys.stderr, flush=True)
            print(f"kept: what was measured, in {self._folder}", file=sys.stderr, flush=True)

    def _read_folder(self) -> None:
        """Take in what the child said of its folder, if it did."""
        if self._folder is None:
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


def _allow_descriptors(number: int) -> None:
    """Let this process hold a connection to each rank; many systems allow 1024 files unless asked.

    Raises:
        EnvironmentRefused: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY and hard < number:
        raise EnvironmentRefused(f"rank 0 must hold {number} files open, the limit is {hard}: raise ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def _listen_as_first(place: Meeting, hello: Hello) -> socket.socket:
    """Listen at the meeting point, then look for another rank 0 of this launch: it refuses this one.

    Listening comes first, so that of two that start at one moment one finds the other. A rank 0 that is not on the
    host where all look for it may be a second one: it looks there for a while.
    """
    listener = listen(place)
    if listener is None:
        raise EnvironmentRefused(f"no port of {place.ports[0]} to {place.ports[-1]} is free for the guards of this run")
    here = is_here(place.host)
    own, until = listener.getsockname()[1], time.monotonic() + (0.0 if here else LOST_S)
    try:
        while True:
            for index, port in enumerate(place.ports):
                if not (here and port == own):
                    _look_for_another(place, index, hello)
            if time.monotonic() >= until:
                return listener
            time.sleep(0.5)
    except EnvironmentRefused:
        listener.close()
        raise


def _look_for_another(place: Meeting, index: int, hello: Hello) -> None:
    line = connect(place, index)
    if line is None:
        return
    line.say(hello_to_dict(hello))
    answer = line.next_message(ANSWER_WITHIN_S)
    line.close()
    if "refused" in answer:
        raise EnvironmentRefused(str(answer["refused"]))
