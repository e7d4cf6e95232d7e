"""Watch the ranks of a launcher from the guard of rank 0: name who dies, is lost or stands still, and end the rest."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from crosstraffic.bench.failures import (
    End,
    Outcome,
    RankFailure,
    causes_of,
    ended_badly,
    ending_failure,
    standing_still,
)
from crosstraffic.bench.heartbeat import Beat, State
from crosstraffic.bench.messages import Hello, read_beat, read_end, read_lines

BEAT_S = 0.5
RANKS_PER_S = 1000.0  # of which the guard of rank 0 hears a beat: larger worlds beat more slowly
BEATS_MISSED = 4  # before a rank counts as silent
START_WITHIN_S = 120.0  # from the first guard to the last, and until ranks measure
STAND_STILL_S = 20.0
STOPPED_S = 8.0  # a rank that the kernel holds is not waited for as long
LOST_S = 10.0
SETTLE_S = 1.0  # after the first end or refusal: time for others to follow
GATHER_S = 5.0  # the same, where some have not come yet: they should hear that the run is over
STOP_WITHIN_S = 20.0
LEAVE_WITHIN_S = 20.0  # after rank 0 has ended, for ranks that have finished
MAX_NAMED = 16  # ranks, nodes or refusals in one text


def beat_every_s(world_size: int) -> float:
    """Return how often a rank says where it is.

    >>> beat_every_s(8), beat_every_s(4096)
    (0.5, 4.096)
    """
    return max(BEAT_S, world_size / RANKS_PER_S)


class Member(Protocol):
    """The guard of one rank as the supervisor sees it."""

    def say(self, message: Mapping[str, Any]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Rank:
    """What is known of one rank. Times are of ``time.monotonic`` here."""

    member: Member
    hello: Hello
    heard_s: float
    beat: Beat | None = None
    process_state: str = ""
    end: End | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Tell whether it has ended, or has measured and kept all and is on its way out."""
        return self.end is not None or (self.beat is not None and self.beat.state == State.FINISHED)


@dataclass(slots=True)
class Supervisor:
    """Knows all ranks; ``judge`` is called now and then and returns the outcome once there is one."""

    expected: Sequence[int]  # ranks, the first of them decides when to stop, and joins first
    begun_s: float = field(default_factory=time.monotonic)
    ranks: dict[int, Rank] = field(default_factory=dict)
    stop_s: float | None = None
    _refusals: list[str] = field(default_factory=list)
    _twice: dict[int, list[str]] = field(default_factory=dict)
    _bad_s: float | None = None  # when the first refusal or bad end was seen
    _left_s: float | None = None  # when rank 0 was seen to have ended well
    _moved_s: float = field(default_factory=time.monotonic)

    def join(self, member: Member, hello: Hello) -> bool:
        """Take up a rank; False where one of this number is there already, or the number cannot be."""
        now, rank = time.monotonic(), hello.rank
        if rank in self.ranks or rank not in self.expected:
            self._twice.setdefault(rank, []).append(_who(hello))
            self._bad_s = self._bad_s or now
            return False
        self.ranks[rank] = Rank(member=member, hello=hello, heard_s=now)
        self._moved_s = now
        zero = self.ranks.get(self.expected[0])
        if zero is not None and (told := _differences(hello, zero.hello)):
            self._refusals.append(told)
            self._bad_s = self._bad_s or now
        return True

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take in what a guard says of its rank.

        Raises:
            ValueError: it is not what a guard says; the rank is as it was.
        """
        found, now = self.ranks[rank], time.monotonic()
        beat, process_state = (
            read_beat(rank, message["beat"], now) if "beat" in message else (found.beat, found.process_state)
        )
        lines = read_lines(message["last"]) if "last" in message else found.last_lines
        end = read_end(message["end"], time.time_ns()) if "end" in message else found.end
        if beat is not None and (found.beat is None or _progress(beat) != _progress(found.beat)):
            self._moved_s = now
        found.heard_s, found.beat, found.process_state, found.last_lines = now, beat, process_state, lines
        found.end = found.end or end
        if "stop" in message:
            self.ask_to_stop()

    def leave(self, rank: int) -> None:
        """Take note that the connection of a guard is closed."""
        found = self.ranks[rank]
        if found.end is None:
            found.end = End(exit_code=None, signal=None, at_ns=time.time_ns())

    def ask_to_stop(self) -> None:
        """Ask the ranks to end in order: rank 0 decides for all when it looks."""
        if self.stop_s is None:
            self.stop_s = time.monotonic()
            if self.expected[0] in self.ranks:
                self.ranks[self.expected[0]].member.say({"stop": True})

    def judge(self, stream_names: Callable[[], Sequence[str]]) -> Outcome | None:
        """Return how the run ended, or None while it goes on well."""
        now = time.monotonic()
        bad = ended_badly(self._ends(), self._beats()) + self._ended_early()
        is_refused = bool(self._refusals or self._twice)
        if not bad and not is_refused:
            self._bad_s = None
        elif self._bad_s is None:
            self._bad_s = now
        is_complete = len(self.ranks) == len(self.expected)
        if self._bad_s is not None:
            if now - self._bad_s < (SETTLE_S if is_complete or is_refused else GATHER_S):
                return None
            return self._refused() if is_refused else self._ended(bad, stream_names())
        if is_complete and self._has_left(now):
            return Outcome(interrupted=self.stop_s is not None)
        if is_complete and (lost := self._lost(now)):
            return lost
        if late := self._late_stop(now, stream_names):
            return late
        if not is_complete:
            return self._missing() if now - self.begun_s > START_WITHIN_S else None
        return self._still(now, stream_names)

    def _has_left(self, now: float) -> bool:
        """Tell whether all have ended; rank 0 is waited for, ranks that hang after they finished are not."""
        zero = self.ranks[self.expected[0]]
        if zero.end is None or not all(found.is_done for found in self.ranks.values()):
            return False
        self._left_s = self._left_s or now
        return now - self._left_s > LEAVE_WITHIN_S or all(found.end is not None for found in self.ranks.values())

    def _ended_early(self) -> list[int]:
        """Return ranks that ended with exit code 0, but before their work was done: the others wait for them."""
        return [
            rank
            for rank, found in self.ranks.items()
            if found.end is not None and not found.end.is_bad and found.beat is not None
            if found.beat.state != State.FINISHED
        ]

    def _beats(self) -> dict[int, Beat]:
        return {rank: found.beat for rank, found in self.ranks.items() if found.beat is not None}

    def _ends(self) -> dict[int, End]:
        return {rank: found.end for rank, found in self.ranks.items() if found.end is not None}

    def _hosts(self) -> dict[int, str]:
        return {rank: found.hello.host for rank, found in self.ranks.items()}

    def _refused(self) -> Outcome:
        found = self._refusals[:MAX_NAMED]
        if len(self._refusals) > MAX_NAMED:
            found.append(f"and {len(self._refusals) - MAX_NAMED} ranks more")
        for rank, others in sorted(self._twice.items())[:MAX_NAMED]:
            first = self.ranks.get(rank)
            if first is None:
                found.append(f"rank {rank} ({others[0]}) is outside the {len(self.expected)} ranks of the launch")
                continue
            all_of_them = [_who(first.hello), *others]
            found.append(
                f"{len(all_of_them)} processes say that they are rank {rank}: {_some(all_of_them)}. They are "
                f"independent jobs: give every task its own rank (srun does; RANK and WORLD_SIZE must not be exported)"
            )
        return Outcome(why="; ".join(found), code=3)

    def _ended(self, bad: Sequence[int], stream_names: Sequence[str]) -> Outcome:
        ends, beats, hosts = self._ends(), self._beats(), self._hosts()
        causes = causes_of(bad, ends, beats)
        failures = tuple(
            ending_failure(rank, ends[rank], beats.get(rank), stream_names, hosts[rank]) for rank in causes
        )
        return Outcome(
            failures=failures,
            followers=tuple(sorted(set(bad) - set(causes))),
            last_lines=self.ranks[causes[0]].last_lines,
        )

    def _missing(self) -> Outcome:
        missing = [rank for rank in self.expected if rank not in self.ranks]
        why = (
            f"ranks {_some(missing)} of {len(self.expected)} did not come within {START_WITHIN_S:g} s; there are ranks "
            f"on {_some(sorted(set(self._hosts().values())))}"
        )
        return Outcome(why=why, code=3)

    def _lost(self, now: float) -> Outcome | None:
        """Name nodes from which nothing comes any more; a rank that has finished need not say more."""
        limit_s = max(LOST_S, BEATS_MISSED * beat_every_s(len(self.expected)))
        silent = {
            rank: found for rank, found in self.ranks.items() if found.end is None and now - found.heard_s > limit_s
        }
        lost = {rank: found for rank, found in silent.items() if not found.is_done}
        if not lost:
            return None
        silent_s = max(now - found.heard_s for found in lost.values())
        alive = {found.hello.host for rank, found in self.ranks.items() if found.end is None and rank not in silent}
        nodes: dict[str, list[int]] = {}
        for rank, found in sorted(lost.items()):
            if found.hello.host not in alive:
                nodes.setdefault(found.hello.host, []).append(rank)
        told = [
            f"node {host} (ranks {_some(ranks)}) has not been heard for {silent_s:.0f} s: it or its link is down"
            for host, ranks in sorted(nodes.items())
        ]
        if len(told) > MAX_NAMED:
            told[MAX_NAMED:] = [f"and {len(told) - MAX_NAMED} nodes more"]
        single = tuple(
            RankFailure(rank=rank, what="lost", host=found.hello.host, still_s=now - found.heard_s)
            for rank, found in lost.items()
            if found.hello.host in alive
        )
        return Outcome(why="; ".join(told) or None, failures=single)

    def _late_stop(self, now: float, stream_names: Callable[[], Sequence[str]]) -> Outcome | None:
        if self.stop_s is None or now - self.stop_s < STOP_WITHIN_S:
            return None
        if all(found.is_done for found in self.ranks.values()) and len(self.ranks) == len(self.expected):
            return None  # rank 0 writes down what was found
        why = f"asked to stop, the ranks did not end within {STOP_WITHIN_S:g} s"
        return Outcome(failures=self._standing(stream_names()), why=why, interrupted=True)

    def _still(self, now: float, stream_names: Callable[[], Sequence[str]]) -> Outcome | None:
        if all(found.is_done for found in self.ranks.values()):  # rank 0 may fit and report for as long as it likes
            return None
        measuring = any(beat.state != State.STARTING for beat in self._beats().values())
        held = any(found.process_state in ("T", "t") for found in self.ranks.values() if not found.is_done)
        limit_s = STOPPED_S if held else STAND_STILL_S if measuring else START_WITHIN_S
        if now - self._moved_s <= max(limit_s, BEATS_MISSED * beat_every_s(len(self.expected))):
            return None
        return Outcome(failures=self._standing(stream_names()))

    def _standing(self, stream_names: Sequence[str]) -> tuple[RankFailure, ...]:
        there = [rank for rank in self.expected if rank not in self.ranks or self.ranks[rank].end is None]
        beats = {rank: beat for rank, beat in self._beats().items() if self.ranks[rank].end is None}
        states = {rank: found.process_state for rank, found in self.ranks.items()}
        return standing_still(beats, states, there, stream_names, self._hosts())


def _who(hello: Hello) -> str:
    return f"pid {hello.pid} on {hello.host}"


def _progress(beat: Beat) -> tuple[object, ...]:
    return beat.state, beat.point, beat.stream, beat.call


def _some(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:MAX_NAMED]))
    return shown if len(items) <= MAX_NAMED else f"{shown} and {len(items) - MAX_NAMED} more"


def _differences(hello: Hello, zero: Hello) -> str:
    """Say in what a rank differs from rank 0 that must be the same on all; nothing where they agree."""
    told = [
        f"{name} is {hello.facts.get(name)} on rank {hello.rank} ({hello.host}) and {value} on rank 0 ({zero.host})"
        for name, value in zero.facts.items()
        if hello.facts.get(name) != value
    ]
    found = [f"{', '.join(told)}: use one environment or container on all nodes"] if told else []
    if hello.world_size != zero.world_size:
        found.append(
            f"rank {hello.rank} ({hello.host}) believes in a world of {hello.world_size}, rank 0 ({zero.host}) in one "
            f"of {zero.world_size}: start all in one launch"
        )
    return "; ".join(found)
