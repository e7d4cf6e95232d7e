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

START_WITHIN_S = 120.0  # from the first guard to the last, and until ranks measure
STAND_STILL_S = 20.0
STOPPED_S = 8.0  # a rank that the kernel holds is not waited for as long
LOST_S = 10.0
SETTLE_S = 1.0  # after the first end or refusal: time for others to follow
STOP_WITHIN_S = 20.0


class Member(Protocol):
    """The guard of one rank as the supervisor sees it."""

    def say(self, message: Mapping[str, Any]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Rank:
    """What is known of one rank. Times are of ``time.monotonic`` here."""

    member: Member
    host: str
    guard_pid: int
    facts: Mapping[str, str]  # versions that must agree before anything is tried
    world_size: int
    heard_s: float
    beat: Beat | None = None
    process_state: str = ""
    end: End | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(slots=True)
class Supervisor:
    """Knows all ranks; ``judge`` is called now and then and returns the outcome once there is one."""

    expected: Sequence[int]  # ranks, the first of them decides when to stop
    begun_s: float = field(default_factory=time.monotonic)
    ranks: dict[int, Rank] = field(default_factory=dict)
    stop_s: float | None = None
    _refusals: list[str] = field(default_factory=list)
    _twice: dict[int, list[str]] = field(default_factory=dict)
    _bad_s: float | None = None  # when the first refusal or bad end was seen
    _moved_s: float = field(default_factory=time.monotonic)

    def join(self, rank: int, found: Rank) -> bool:
        """Take up a rank; False where one of this number is there already, or the number cannot be."""
        who = f"pid {found.guard_pid} on {found.host}"
        if rank in self.ranks or rank not in self.expected:
            self._twice.setdefault(rank, []).append(who)
            self._bad_s = self._bad_s or time.monotonic()
            return False
        self.ranks[rank] = found
        self._moved_s = time.monotonic()
        zero = self.ranks.get(self.expected[0])
        if zero is not None and found.facts != zero.facts:
            told = [
                f"{name} is {found.facts.get(name)} on rank {rank} ({found.host}) and {value} on rank 0 ({zero.host})"
                for name, value in zero.facts.items()
                if found.facts.get(name) != value
            ]
            self._refusals.append(f"{', '.join(told)}: use one environment or container on all nodes")
            self._bad_s = self._bad_s or time.monotonic()
        return True

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take in what a guard says of its rank."""
        found, now = self.ranks[rank], time.monotonic()
        found.heard_s = now
        if "beat" in message:
            pid, state, point, stream, call, age_s, process_state = message["beat"]
            new = (State(state), point, stream, call)
            old = found.beat
            if old is None or new != (old.state, old.point, old.stream, old.call):
                self._moved_s = now
            found.process_state = process_state
            found.beat = Beat(
                rank=rank, pid=pid, start_ticks=0, state=new[0], point=point, stream=stream, call=call,
                beat_s=now - age_s, points_done=0, points_total=0, seconds_left=None,
            )  # fmt: skip
        if "last" in message:
            found.last_lines = tuple(map(str, message["last"]))
        if "end" in message:
            code, signal = message["end"]
            found.end = End(exit_code=code, signal=signal, at_ns=time.time_ns())
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
        bad = ended_badly(self._ends(), self._beats())
        if self._bad_s is None and bad:
            self._bad_s = now
        if self._bad_s is not None:
            if now - self._bad_s < SETTLE_S:
                return None
            return self._refused() or self._ended(bad, stream_names())
        if len(self._ends()) == len(self.expected):
            return Outcome(interrupted=self.stop_s is not None)
        if len(self.ranks) < len(self.expected):
            return self._missing() if now - self.begun_s > START_WITHIN_S else None
        return self._lost(now) or self._late_stop(now, stream_names) or self._still(now, stream_names)

    @property
    def _world_size(self) -> int:
        first = self.ranks.get(self.expected[0])
        return len(self.expected) if first is None else first.world_size

    def _beats(self) -> dict[int, Beat]:
        return {rank: found.beat for rank, found in self.ranks.items() if found.beat is not None}

    def _ends(self) -> dict[int, End]:
        return {rank: found.end for rank, found in self.ranks.items() if found.end is not None}

    def _hosts(self) -> dict[int, str]:
        return {rank: found.host for rank, found in self.ranks.items()}

    def _refused(self) -> Outcome | None:
        found = list(self._refusals)
        sizes = sorted({rank.world_size for rank in self.ranks.values()} - {self._world_size})
        if sizes:
            found.append(f"some ranks believe in a world of {sizes[0]}, rank 0 in one of {self._world_size}")
        for rank, others in sorted(self._twice.items()):
            first = self.ranks.get(rank)
            if first is None:
                found.append(f"rank {rank} ({others[0]}) is outside the {self._world_size} ranks of the launch")
                continue
            all_of_them = [f"pid {first.guard_pid} on {first.host}", *others]
            found.append(
                f"{len(all_of_them)} processes say that they are rank {rank}: {', '.join(all_of_them[:8])}. They are "
                f"independent jobs: give every task its own rank (srun does; RANK and WORLD_SIZE must not be exported)"
            )
        return Outcome(why="; ".join(found), code=3) if found else None

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
        shown = ", ".join(map(str, missing[:16])) + (" ..." if len(missing) > 16 else "")
        hosts = ", ".join(sorted(set(self._hosts().values()))[:16])
        why = (
            f"ranks {shown} of {self._world_size} did not come within {START_WITHIN_S:g} s; there are ranks on {hosts}"
        )
        return Outcome(why=why, code=3)

    def _lost(self, now: float) -> Outcome | None:
        """Name nodes from which nothing comes any more; a rank that has ended well need not say more."""
        lost = [rank for rank, found in self.ranks.items() if found.end is None and now - found.heard_s > LOST_S]
        if not lost:
            return None
        silent_s = max(now - self.ranks[rank].heard_s for rank in lost)
        hosts = {host: [rank for rank in lost if self.ranks[rank].host == host] for host in self._hosts().values()}
        whole = {host: ranks for host, ranks in hosts.items() if ranks == self._of(host)}
        told = [
            f"node {host} (ranks {', '.join(map(str, ranks))}) has not been heard for {silent_s:.0f} s: "
            f"it or its link is down"
            for host, ranks in sorted(whole.items())
        ]
        single = tuple(
            RankFailure(rank=rank, what="lost", host=host, still_s=now - self.ranks[rank].heard_s)
            for rank in lost
            if (host := self.ranks[rank].host) not in whole
        )
        return Outcome(why="; ".join(told) or None, failures=single)

    def _of(self, host: str) -> list[int]:
        return [rank for rank, found in self.ranks.items() if found.host == host and found.end is None]

    def _late_stop(self, now: float, stream_names: Callable[[], Sequence[str]]) -> Outcome | None:
        if self.stop_s is None or now - self.stop_s < STOP_WITHIN_S or self._is_done(self.expected[0]):
            return None
        why = f"asked to stop, the ranks did not end within {STOP_WITHIN_S:g} s"
        return Outcome(failures=self._standing(stream_names()), why=why, interrupted=True)

    def _still(self, now: float, stream_names: Callable[[], Sequence[str]]) -> Outcome | None:
        if all(self._is_done(rank) for rank in self.ranks):  # rank 0 may fit and report for as long as it likes
            return None
        measuring = any(beat.state != State.STARTING for beat in self._beats().values())
        held = any(found.process_state in "Tt" and found.process_state for found in self.ranks.values())
        limit_s = STOPPED_S if held else STAND_STILL_S if measuring else START_WITHIN_S
        if now - self._moved_s <= limit_s:
            return None
        return Outcome(failures=self._standing(stream_names()))

    def _standing(self, stream_names: Sequence[str]) -> tuple[RankFailure, ...]:
        states = {rank: found.process_state for rank, found in self.ranks.items()}
        return standing_still(self._beats(), states, self.expected, stream_names, self._hosts())

    def _is_done(self, rank: int) -> bool:
        found = self.ranks.get(rank)
        if found is None:
            return False
        return found.end is not None or (found.beat is not None and found.beat.state == State.FINISHED)
