"""Watch local ranks from outside: name the one that dies or stands still, end the others, in bounded time."""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from crosstraffic.bench.failures import (
    End,
    Outcome,
    RankFailure,
    causes_of,
    ended_badly,
    ending_failure,
    standing_still,
)
from crosstraffic.bench.guard import exit_path
from crosstraffic.bench.heartbeat import Beat, State, read_beats, request_stop
from crosstraffic.bench.launch import LocalRanks
from crosstraffic.bench.processes import running, send_signal

POLL_S = 0.1
SETTLE_S = 0.5  # after the first death: time for its status to be written and for others to follow
LEAVE_S = 10.0  # how long a launcher may take to end after its last rank


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
        if ended_badly(ends, beats):
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


def _ends(local: LocalRanks, beats: Mapping[int, Beat], deaths: _Deaths) -> dict[int, End]:
    found = {}
    for rank in range(local.num_ranks):
        path = exit_path(local.run_dir, rank)
        if path.exists():
            data = json.loads(path.read_text())
            at_ns = deaths.seen_ns.get(rank, path.stat().st_mtime_ns)
            found[rank] = End(exit_code=data["exit_code"], signal=data["signal"], at_ns=at_ns)
        elif rank in beats and running(beats[rank].pid, beats[rank].start_ticks) is None:
            at_ns = deaths.seen_ns.setdefault(rank, time.time_ns())
            found[rank] = End(exit_code=None, signal=None, at_ns=at_ns)
    return found


def _failed(local: LocalRanks, deaths: _Deaths, stream_names: Sequence[str]) -> Outcome:
    """Wait a moment for what follows, then tell causes from followers and end everything."""
    settled_s = time.monotonic() + SETTLE_S
    while (left_s := settled_s - time.monotonic()) > 0:
        deaths.add(read_beats(local.run_dir))
        deaths.wait(min(left_s, 0.02))
    beats = {beat.rank: beat for beat in read_beats(local.run_dir)}
    ends = _ends(local, beats, deaths)
    bad = ended_badly(ends, beats)
    codes = [code for code in local.exit_codes() if code is not None]
    if not bad:
        silent = [RankFailure(rank=rank, what="never_started") for rank in range(local.num_ranks) if rank not in beats]
        last = local.last_lines(None)
        local.stop()
        why = f"the launcher ended with exit code {max(codes, key=abs, default=0)} before the ranks did"
        return Outcome(failures=tuple(silent), last_lines=last, why=why)
    causes = causes_of(bad, ends, beats)
    failures = tuple(ending_failure(rank, ends[rank], beats.get(rank), stream_names) for rank in causes)
    last = local.last_lines(causes[0])
    local.stop()
    followers = tuple(sorted(set(bad) - set(causes)))
    return Outcome(failures=failures, followers=followers, last_lines=last)


def stand_still(local: LocalRanks, beats: Mapping[int, Beat], stream_names: Sequence[str]) -> tuple[RankFailure, ...]:
    """Return the ranks that hold the others up, most likely first."""
    waiting = [beat for beat in beats.values() if beat.state in (State.STARTING, State.MEASURING)]
    processes = {beat.rank: running(beat.pid, beat.start_ticks) for beat in waiting}
    states = {rank: process.state for rank, process in processes.items() if process is not None}
    return standing_still(beats, states, range(local.num_ranks), stream_names)


def ask_where(beats: Mapping[int, Beat]) -> None:
    """Make each rank write the Python call it is in to its log (``worker`` answers SIGUSR1 so; others ignore it)."""
    for beat in beats.values():
        process = running(beat.pid, beat.start_ticks)
        if process is not None:
            send_signal(process, signal.SIGUSR1)
    time.sleep(SETTLE_S)


def _left(local: LocalRanks, *, interrupted: bool) -> Outcome:
    """All ranks have ended well; see the launcher off."""
    end_s = time.monotonic() + LEAVE_S
    while None in local.exit_codes() and time.monotonic() < end_s:
        time.sleep(0.02)
    local.stop()
    return Outcome(interrupted=interrupted)
