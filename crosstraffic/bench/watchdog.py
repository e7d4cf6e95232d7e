"""Watch local ranks from outside: name the one that dies or stands still, end the others, in bounded time."""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from crosstraffic.bench.guard import exit_path
from crosstraffic.bench.heartbeat import Beat, State, read_beats, request_stop
from crosstraffic.bench.launch import LocalRanks
from crosstraffic.bench.processes import running, send_signal

POLL_S = 0.1
SETTLE_S = 0.5  # after the first death: time for its status to be written and for others to follow
SAME_NS, VANISH_NS = 100_000, 50_000_000  # deaths this close together have no order
LEAVE_S = 10.0  # how long a launcher may take to end after its last rank
_STOPPED = {"T": "it is stopped (SIGSTOP)", "t": "a debugger holds it", "D": "it hangs in the kernel (disk or driver)"}

What = Literal["killed", "exited", "vanished", "stands_still", "never_started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One rank that failed, and where it was. ``still_s``: seconds since its last beat."""

    rank: int
    what: What
    pid: int | None = None
    signal: str | None = None
    exit_code: int | None = None
    point: int | None = None
    stream: str | None = None
    call: int | None = None
    still_s: float | None = None
    note: str | None = None

    def describe(self) -> str:
        """Say it in one line.

        >>> RankFailure(rank=2, what="killed", pid=71, signal="SIGKILL", point=0, stream="pd.kv", call=5).describe()
        'rank 2 (pid 71) was killed by SIGKILL in call 5 of pd.kv (point 0)'
        """
        where = "before its first call"
        if self.call is not None:
            where = f"in call {self.call} of {self.stream} (point {self.point})"
        did = {
            "killed": f"was killed by {self.signal}",
            "exited": f"exited with code {self.exit_code}",
            "vanished": "vanished, and nobody saw how it ended,",
            "stands_still": f"has stood still for {self.still_s or 0:.1f} s",
            "never_started": "never said that it started",
        }[self.what]
        if self.what == "never_started":
            return f"rank {self.rank} {did}"
        note = f": {self.note}" if self.note else ""
        return f"rank {self.rank} (pid {self.pid}) {did} {where}{note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the ranks ended. ``failures`` are the causes; ``followers`` are ranks that ended because of them."""

    failures: tuple[RankFailure, ...] = ()
    followers: tuple[int, ...] = ()
    last_lines: tuple[str, ...] = ()  # of the log of the first that failed, or of the launcher
    why: str | None = None  # a failure of no rank in particular
    interrupted: bool = False

    @property
    def failure(self) -> str | None:
        """What went wrong, for a person; None where all ranks finished (also when they were asked to stop)."""
        causes = [self.why] if self.why else []
        causes += [failure.describe() for failure in self.failures]
        if not causes:
            return None
        lines = ["; ".join(causes)]
        if self.followers:
            lines[0] += f"; then ranks {', '.join(map(str, self.followers))} ended too"
        return "\n".join(lines + [f"  | {line}" for line in self.last_lines])

    @property
    def exit_code(self) -> int:
        """0; or what the ranks themselves exited with, where it is 2 or 3 (bad use, environment refused); else 1."""
        if self.failure is None:
            return 0
        codes = {failure.exit_code for failure in self.failures}
        code = codes.pop() if len(codes) == 1 else None
        return code if code in (2, 3) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How the process of a rank ended; both None where it is gone and its status is not known (yet)."""

    exit_code: int | None
    signal: str | None
    at_ns: int

    @property
    def is_bad(self) -> bool:
        return self.exit_code != 0


class _Deaths:
    """When each rank's process ended, in order: a pidfd becomes readable at that moment, whoever the parent is."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._known: set[tuple[int, int]] = set()
        self.seen_ns: dict[int, int] = {}

    def add(self, beats: Sequence[Beat]) -> None:
        for beat in beats:
            key = (beat.pid, beat.start_ticks)
            if key in self._known:
                continue
            self._known.add(key)
            if running(*key) is None:
                self.seen_ns.setdefault(beat.rank, time.time_ns())
                continue
            with contextlib.suppress(OSError):  # no pidfd here or any more: /proc is looked at in every round anyway
                descriptor = os.pidfd_open(beat.pid)
                self._ranks[descriptor] = beat.rank
                self._poll.register(descriptor, select.POLLIN)

    def wait(self, limit_s: float) -> None:
        for descriptor, _ in self._poll.poll(limit_s * 1e3):
            self.seen_ns.setdefault(self._ranks.pop(descriptor), time.time_ns())
            self._poll.unregister(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()


def watch(
    local: LocalRanks,
    *,
    stop: threading.Event | None = None,
    on_progress: Callable[[int, int, float], None] | None = None,
    stream_names: Sequence[str] = (),
    stand_still_s: float = 60.0,
    start_limit_s: float = 120.0,
    stop_limit_s: float = 30.0,
) -> Outcome:
    """Return once every rank has finished, or after the first failure, when all of them are gone.

    ``stop``: once set, ranks are asked to end in order, and get ``stop_limit_s`` for it. ``on_progress`` gets points
    done, points in all, and seconds left, as rank 0 says. No rank may stand still, that is start no call and reach no
    other state, for ``stand_still_s``, or ``start_limit_s`` until the first begins to measure.
    """
    deaths = _Deaths()
    try:
        return _watch(local, deaths, stop, on_progress, stream_names, stand_still_s, start_limit_s, stop_limit_s)
    finally:
        deaths.close()


def _watch(
    local: LocalRanks,
    deaths: _Deaths,
    stop: threading.Event | None,
    on_progress: Callable[[int, int, float], None] | None,
    stream_names: Sequence[str],
    stand_still_s: float,
    start_limit_s: float,
    stop_limit_s: float,
) -> Outcome:
    seen: dict[int, Beat] = {}
    moved_s = time.monotonic()
    stop_s: float | None = None
    while True:
        beats = {beat.rank: beat for beat in read_beats(local.run_dir)}
        deaths.add(list(beats.values()))
        ends = _ends(local, beats, deaths)
        if on_progress is not None and 0 in beats and beats[0].points_total:
            on_progress(beats[0].points_done, beats[0].points_total, beats[0].seconds_left or 0.0)
        if _bad(ends, beats):
            return _failed(local, deaths, stream_names)
        if len(ends) == local.num_ranks:
            return _left(local, interrupted=stop_s is not None)
        if all(code is not None for code in local.exit_codes()):
            return _failed(local, deaths, stream_names)
        now = time.monotonic()
        if stop is not None and stop.is_set() and stop_s is None:
            request_stop(local.run_dir)
            stop_s = now
        if stop_s is not None and now - stop_s > stop_limit_s:
            still = stand_still(local, beats, stream_names)
            local.stop()
            why = f"asked to stop, the ranks did not end within {stop_limit_s:g} s"
            return Outcome(failures=still, why=why, interrupted=True)
        if beats != seen:
            seen, moved_s = beats, now
        measuring = any(beat.state != State.STARTING for beat in beats.values())
        if now - moved_s > (stand_still_s if measuring else max(start_limit_s, stand_still_s)):
            still = stand_still(local, beats, stream_names)
            ask_where(beats)
            last = local.last_lines(still[0].rank if still else None)
            local.stop()
            return Outcome(failures=still, last_lines=last, interrupted=stop_s is not None)
        deaths.wait(POLL_S)


def _ends(local: LocalRanks, beats: Mapping[int, Beat], deaths: _Deaths) -> dict[int, _End]:
    found = {}
    for rank in range(local.num_ranks):
        path = exit_path(local.run_dir, rank)
        if path.exists():
            data = json.loads(path.read_text())
            at_ns = deaths.seen_ns.get(rank, path.stat().st_mtime_ns)
            found[rank] = _End(exit_code=data["exit_code"], signal=data["signal"], at_ns=at_ns)
        elif rank in beats and running(beats[rank].pid, beats[rank].start_ticks) is None:
            at_ns = deaths.seen_ns.setdefault(rank, time.time_ns())
            found[rank] = _End(exit_code=None, signal=None, at_ns=at_ns)
    return found


def _bad(ends: Mapping[int, _End], beats: Mapping[int, Beat]) -> list[int]:
    """Ranks that ended before their work was done. One that finished and dies while taking down has lost nothing."""
    return [
        rank for rank, end in ends.items() if end.is_bad and (rank not in beats or beats[rank].state != State.FINISHED)
    ]


def _failed(local: LocalRanks, deaths: _Deaths, stream_names: Sequence[str]) -> Outcome:
    """Wait a moment for what follows, then tell causes from followers and end everything."""
    settled_s = time.monotonic() + SETTLE_S
    while (left_s := settled_s - time.monotonic()) > 0:
        deaths.add(read_beats(local.run_dir))
        deaths.wait(min(left_s, 0.02))
    beats = {beat.rank: beat for beat in read_beats(local.run_dir)}
    ends = _ends(local, beats, deaths)
    bad = _bad(ends, beats)
    codes = [code for code in local.exit_codes() if code is not None]
    if not bad:
        silent = [RankFailure(rank=rank, what="never_started") for rank in range(local.num_ranks) if rank not in beats]
        last = local.last_lines(None)
        local.stop()
        why = f"the launcher ended with exit code {max(codes, key=abs, default=0)} before the ranks did"
        return Outcome(failures=tuple(silent), last_lines=last, why=why)
    causes = _causes(bad, ends, beats)
    failures = tuple(_failure(rank, ends[rank], beats.get(rank), stream_names) for rank in causes)
    last = local.last_lines(causes[0])
    local.stop()
    followers = tuple(sorted(set(bad) - set(causes)))
    return Outcome(failures=failures, followers=followers, last_lines=last)


def _causes(bad: Sequence[int], ends: Mapping[int, _End], beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks that ended first, of the gravest kind: a signal or a crash before an error that a rank caught.

    A rank that catches an error says ``failed`` before it exits: it may only have lost its peer. Ranks that vanish
    (their guards were killed too, then often all by the launcher) within a moment cannot be told apart: all are named.
    """
    crashed = [rank for rank in bad if rank not in beats or beats[rank].state != State.FAILED]
    ordered = sorted(crashed or bad, key=lambda rank: ends[rank].at_ns)
    first = ends[ordered[0]]
    if first.exit_code in (2, 3):  # all ranks refuse together, for one reason
        return [ordered[0]]
    moment_ns = VANISH_NS if first.exit_code is None and first.signal is None else SAME_NS
    return [rank for rank in ordered if ends[rank].at_ns - first.at_ns < moment_ns]


def _failure(rank: int, end: _End, beat: Beat | None, stream_names: Sequence[str]) -> RankFailure:
    what: What = "killed" if end.signal else "vanished" if end.exit_code is None else "exited"
    return _located(rank, what, beat, stream_names, signal=end.signal, exit_code=end.exit_code)


def _located(
    rank: int,
    what: What,
    beat: Beat | None,
    stream_names: Sequence[str],
    *,
    signal: str | None = None,
    exit_code: int | None = None,
    still_s: float | None = None,
    note: str | None = None,
) -> RankFailure:
    stream = None
    if beat is not None and beat.stream is not None:
        stream = stream_names[beat.stream] if beat.stream < len(stream_names) else f"stream {beat.stream}"
    return RankFailure(
        rank=rank,
        what=what,
        pid=None if beat is None else beat.pid,
        signal=signal,
        exit_code=exit_code,
        point=None if beat is None else beat.point,
        stream=stream,
        call=None if beat is None else beat.call,
        still_s=still_s,
        note=note,
    )


def stand_still(local: LocalRanks, beats: Mapping[int, Beat], stream_names: Sequence[str]) -> tuple[RankFailure, ...]:
    """Return the ranks that hold the others up, most likely first.

    In this order: ranks that never said anything; processes that are stopped or hang in the kernel; among ranks in the
    newest point and its stream those that are calls behind; else the ranks whose beat is oldest in that call.
    """
    silent = [rank for rank in range(local.num_ranks) if rank not in beats]
    if silent:
        return tuple(RankFailure(rank=rank, what="never_started") for rank in silent)
    now = time.monotonic()
    waiting = [beat for beat in beats.values() if beat.state in (State.STARTING, State.MEASURING)]
    states = {beat.rank: running(beat.pid, beat.start_ticks) for beat in waiting}
    notes = {rank: _STOPPED[process.state] for rank, process in states.items() if process and process.state in _STOPPED}
    suspects = [beat for beat in waiting if beat.rank in notes] or _behind(waiting)
    suspects.sort(key=lambda beat: beat.beat_s)
    return tuple(
        _located(
            beat.rank,
            "stands_still",
            beat,
            stream_names,
            still_s=now - beat.beat_s,
            note=notes.get(beat.rank),
        )
        for beat in suspects
    )


def ask_where(beats: Mapping[int, Beat]) -> None:
    """Make each rank write the Python call it is in to its log (``worker`` answers SIGUSR1 so; others ignore it)."""
    for beat in beats.values():
        process = running(beat.pid, beat.start_ticks)
        if process is not None:
            send_signal(process, signal.SIGUSR1)
    time.sleep(SETTLE_S)


def _behind(waiting: Sequence[Beat]) -> list[Beat]:
    called = [beat for beat in waiting if beat.point is not None and beat.call is not None]
    if not called:
        return list(waiting)
    newest = max(called, key=lambda beat: (beat.point or 0, beat.beat_s))
    together = [beat for beat in called if (beat.point, beat.stream) == (newest.point, newest.stream)]
    fewest = min(beat.call or 0 for beat in together)
    return [beat for beat in together if beat.call == fewest]


def _left(local: LocalRanks, *, interrupted: bool) -> Outcome:
    """All ranks have ended well; see the launcher off."""
    end_s = time.monotonic() + LEAVE_S
    while None in local.exit_codes() and time.monotonic() < end_s:
        time.sleep(0.02)
    local.stop()
    return Outcome(interrupted=interrupted)
