"""Ranks that are made up, with a clock of their own, before the judgement of rank 0's guard."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from crosstraffic.bench import failures, supervisor
from crosstraffic.bench.failures import Outcome
from crosstraffic.bench.heartbeat import State
from crosstraffic.bench.messages import Hello
from crosstraffic.bench.supervisor import (
    SETTLE_S,
    Supervisor,
)

NAMES = ("tp", "ep")
FACTS = {"crosstraffic": "1", "Python": "3"}


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return round(self.now_s * 1e9)


class Told:
    """A guard that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []

    def say(self, message: Mapping[str, Any]) -> None:
        self.messages.append(message)


class World:
    """Ranks on nodes of two, judged by a supervisor."""

    def __init__(self, clock: Clock, num_ranks: int, joined: Sequence[int] | None = None) -> None:
        self.clock = clock
        self.judge = Supervisor(range(num_ranks), begun_s=clock.now_s, _moved_s=clock.now_s)
        self.members = [Told() for _ in range(num_ranks)]
        self.call = 0
        for rank in range(num_ranks) if joined is None else joined:
            assert self.judge.join(self.members[rank], self.hello(rank))

    def hello(self, rank: int, **changes: Any) -> Hello:
        values: dict[str, Any] = {
            "key": "k", "rank": rank, "world_size": len(self.members), "host": f"n{rank // 2}", "pid": 100 + rank,
            "facts": FACTS,
        }  # fmt: skip
        return Hello(**{**values, **changes})

    def beat(
        self, rank: int, call: int | None, state: State = State.MEASURING, *, process: str = "S", age_s: float = 0.0
    ) -> None:
        point, stream = (None, None) if call is None else (3, 0)
        self.judge.hear(rank, {"beat": [200 + rank, int(state), point, stream, call, age_s, process]})

    def beat_all(self, *, but: Sequence[int] = (), call: int | None = None) -> None:
        self.call = self.call + 1 if call is None else call
        for rank in self.judge.ranks:
            if rank not in but and self.judge.ranks[rank].end is None:
                self.beat(rank, self.call)

    def finish(self, *ranks: int) -> None:
        for rank in ranks:
            self.beat(rank, self.call, State.FINISHED)

    def end(self, rank: int, code: int | None = 0, signal: str | None = None, last: Sequence[str] = ()) -> None:
        self.judge.hear(rank, {"end": [code, signal], "last": list(last)})

    def wait(self, seconds: float, *, but: Sequence[int] = (), moves: bool = True) -> Outcome | None:
        """Let time pass, with beats of all ranks but some each half second; return the first outcome."""
        until = self.clock.now_s + seconds
        while self.clock.now_s < until:
            self.clock.now_s += 0.5
            self.beat_all(but=but, call=None if moves else self.call)
            if (outcome := self.outcome()) is not None:
                return outcome
        return None

    def silence(self, seconds: float) -> Outcome | None:
        """Let time pass without a word."""
        self.clock.now_s += seconds
        return self.outcome()

    def settled(self) -> Outcome:
        """Return the outcome once all had time to follow who ended first."""
        assert self.outcome() is None
        assert self.silence(SETTLE_S / 2) is None
        outcome = self.silence(SETTLE_S)
        assert outcome is not None
        return outcome

    def outcome(self) -> Outcome | None:
        return self.judge.judge(lambda: NAMES)


def made(monkeypatch: pytest.MonkeyPatch, num_ranks: int = 4, joined: Sequence[int] | None = None) -> World:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(failures, "time", clock)
    return World(clock, num_ranks, joined)
