"""Who is to blame: from what ranks said last and how they ended, tell causes from followers. Pure."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from crosstraffic.bench.heartbeat import Beat, State

SAME_NS, VANISH_NS = 100_000, 50_000_000  # deaths this close together have no order
MAX_NAMED = 8  # ranks in one text
STOPPED: Mapping[str, str] = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "D": "it hangs in the kernel (disk or driver)",
}
HELD = "it has failed, but does not end"

What = Literal["killed", "exited", "vanished", "lost", "stands_still", "never_started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One rank that failed, and where it was. ``still_s``: seconds since its last beat."""

    rank: int
    what: What
    pid: int | None = None
    host: str | None = None
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
        >>> RankFailure(rank=1, what="lost", host="n2", still_s=10.2).describe()
        'rank 1 (n2) has not been heard for 10.2 s: its node or its link is down'
        """
        where = "before its first call"
        if self.call is not None:
            where = f"in call {self.call} of {self.stream} (point {self.point})"
        did = {
            "killed": f"was killed by {self.signal}",
            "exited": f"exited with code {self.exit_code}",
            "vanished": "vanished, and nobody saw how it ended,",
            "lost": f"has not been heard for {self.still_s or 0:.1f} s: its node or its link is down",
            "stands_still": f"has stood still for {self.still_s or 0:.1f} s",
            "never_started": "never said that it started",
        }[self.what]
        who = " on ".join([*([] if self.pid is None else [f"pid {self.pid}"]), *([self.host] if self.host else [])])
        named = f"rank {self.rank} ({who})" if who else f"rank {self.rank}"
        if self.what in ("never_started", "lost"):
            return f"{named} {did}"
        note = f": {self.note}" if self.note else ""
        return f"{named} {did} {where}{note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the ranks ended. ``failures`` are the causes; ``followers`` are ranks that ended because of them."""

    failures: tuple[RankFailure, ...] = ()
    followers: tuple[int, ...] = ()
    last_lines: tuple[str, ...] = ()  # of the log of the first that failed, or of the launcher
    why: str | None = None  # a failure of no rank in particular
    code: int | None = None  # the exit code of that failure, where it is known
    interrupted: bool = False

    def with_lines(self, last_lines: Sequence[str]) -> "Outcome":
        """Return the same with what a rank printed last."""
        return replace(self, last_lines=tuple(last_lines))

    @property
    def failure(self) -> str | None:
        """What went wrong, for a person; None where all ranks finished (also when they were asked to stop)."""
        causes = [self.why] if self.why else []
        causes += [failure.describe() for failure in self.failures[:MAX_NAMED]]
        if len(self.failures) > MAX_NAMED:
            causes.append(f"and {len(self.failures) - MAX_NAMED} ranks more")
        if not causes:
            return None
        lines = ["; ".join(causes)]
        if self.followers:
            more = len(self.followers) - MAX_NAMED
            shown = ", ".join(map(str, self.followers[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")
            lines[0] += f"; then ranks {shown} ended too"
        return "\n".join(lines + [f"  | {line}" for line in self.last_lines])

    @property
    def exit_code(self) -> int:
        """0; or what the ranks themselves exited with, where it is 2 or 3 (bad use, environment refused); else 1."""
        if self.failure is None:
            return 0
        if self.code is not None:
            return self.code
        codes = {failure.exit_code for failure in self.failures}
        code = codes.pop() if len(codes) == 1 else None
        return code if code in (2, 3) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the process of a rank ended; both None where it is gone and its status is not known (yet)."""

    exit_code: int | None
    signal: str | None
    at_ns: int

    @property
    def is_bad(self) -> bool:
        """Tell whether it did not end with exit code 0."""
        return self.exit_code != 0


def ended_badly(ends: Mapping[int, End], beats: Mapping[int, Beat]) -> list[int]:
    """Ranks that ended before their work was done. One that finished and dies while taking down has lost nothing."""
    return [
        rank for rank, end in ends.items() if end.is_bad and (rank not in beats or beats[rank].state != State.FINISHED)
    ]


def causes_of(bad: Sequence[int], ends: Mapping[int, End], beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks that ended first, of the gravest kind: a signal or a crash before an error that a rank caught.

    A rank that catches an error says ``failed`` before it exits: it may only have lost its peer. Where all did, the
    first to say so, while its connections were still open, is the one. Ranks that vanish (their guards were killed
    too, then often all by the launcher) within a moment cannot be told apart: all are named.
    """
    crashed = [rank for rank in bad if rank not in beats or beats[rank].state != State.FAILED]
    at_ns = {rank: ends[rank].at_ns if crashed else round(beats[rank].beat_s * 1e9) for rank in crashed or bad}
    ordered = sorted(at_ns, key=lambda rank: at_ns[rank])
    first = ends[ordered[0]]
    if first.exit_code in (2, 3):  # all ranks refuse together, for one reason
        return [ordered[0]]
    moment_ns = VANISH_NS if first.exit_code is None and first.signal is None else SAME_NS
    return [rank for rank in ordered if at_ns[rank] - at_ns[ordered[0]] < moment_ns]


def ending_failure(
    rank: int, end: End, beat: Beat | None, stream_names: Sequence[str], host: str | None = None
) -> RankFailure:
    """Say how a rank ended, and where it was."""
    what: What = "killed" if end.signal else "vanished" if end.exit_code is None else "exited"
    return located(rank, what, beat, stream_names, host=host, signal=end.signal, exit_code=end.exit_code)


def located(
    rank: int,
    what: What,
    beat: Beat | None,
    stream_names: Sequence[str],
    *,
    host: str | None = None,
    signal: str | None = None,
    exit_code: int | None = None,
    still_s: float | None = None,
    note: str | None = None,
) -> RankFailure:
    """Make a failure at the call that a rank's last beat names."""
    stream = None
    if beat is not None and beat.stream is not None:
        stream = stream_names[beat.stream] if beat.stream < len(stream_names) else f"stream {beat.stream}"
    return RankFailure(
        rank=rank,
        what=what,
        pid=None if beat is None else beat.pid,
        host=host,
        signal=signal,
        exit_code=exit_code,
        point=None if beat is None else beat.point,
        stream=stream,
        call=None if beat is None else beat.call,
        still_s=still_s,
        note=note,
    )


def standing_still(
    beats: Mapping[int, Beat],
    states: Mapping[int, str],
    ranks: Sequence[int],
    stream_names: Sequence[str],
    hosts: Mapping[int, str] | None = None,
) -> tuple[RankFailure, ...]:
    """Return the ranks that hold the others up, most likely first; ``states`` are the letters of ps, by rank.

    In this order: ranks that never said anything; processes that are stopped or hang in the kernel; ranks that have
    failed and do not end; among ranks in the newest point and its stream those that are calls behind; else the ranks
    whose beat is oldest in that call. Ranks that have ended are left out of ``ranks`` and ``beats``.
    """
    hosts = hosts or {}
    silent = [rank for rank in ranks if rank not in beats]
    if silent:
        return tuple(RankFailure(rank=rank, what="never_started", host=hosts.get(rank)) for rank in silent)
    now = time.monotonic()
    waiting = [beat for beat in beats.values() if beat.state != State.FINISHED]
    notes = {beat.rank: STOPPED[state] for beat in waiting if (state := states.get(beat.rank, "")) in STOPPED}
    if not notes:
        notes = {beat.rank: HELD for beat in waiting if beat.state == State.FAILED}
    suspects = [beat for beat in waiting if beat.rank in notes] or _behind(waiting)
    suspects.sort(key=lambda beat: beat.beat_s)
    return tuple(
        located(
            beat.rank,
            "stands_still",
            beat,
            stream_names,
            host=hosts.get(beat.rank),
            still_s=now - beat.beat_s,
            note=notes.get(beat.rank),
        )
        for beat in suspects
    )


def _behind(waiting: Sequence[Beat]) -> list[Beat]:
    called = [beat for beat in waiting if beat.point is not None and beat.call is not None]
    if not called:
        return list(waiting)
    newest = max(called, key=lambda beat: (beat.point or 0, beat.beat_s))
    together = [beat for beat in called if (beat.point, beat.stream) == (newest.point, newest.stream)]
    fewest = min(beat.call or 0 for beat in together)
    return [beat for beat in together if beat.call == fewest]
