"""The judgement of rank 0's guard, on made-up beats and a clock of its own: who is named, when, and who is not."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstraffic.bench import failures, supervisor
from crosstraffic.bench.failures import Outcome
from crosstraffic.bench.heartbeat import State
from crosstraffic.bench.messages import Hello
from crosstraffic.bench.supervisor import (
    GATHER_S,
    LEAVE_WITHIN_S,
    LOST_S,
    SETTLE_S,
    STAND_STILL_S,
    START_WITHIN_S,
    STOP_WITHIN_S,
    STOPPED_S,
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


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return made(monkeypatch)


def test_a_run_that_goes_well(world: World) -> None:
    assert world.wait(300) is None
    world.finish(0, 1, 2, 3)
    for rank in range(4):
        world.end(rank)
    assert world.outcome() == Outcome()


def test_a_killed_rank_is_named_once_the_others_have_followed(world: World) -> None:
    world.wait(5)
    world.end(2, None, "SIGKILL")
    assert world.outcome() is None
    world.clock.now_s += 0.2
    for rank in (0, 1, 3):
        world.beat(rank, world.call, State.FAILED)
        world.end(rank, 1)
    assert world.silence(SETTLE_S / 2) is None
    outcome = world.silence(SETTLE_S)
    assert outcome is not None
    where = f"in call {world.call} of tp (point 3)"
    assert outcome.failure == f"rank 2 (pid 202 on n1) was killed by SIGKILL {where}; then ranks 0, 1, 3 ended too"
    assert outcome.exit_code == 1


def test_of_ranks_that_all_caught_an_error_the_first_to_say_so_is_the_cause(world: World) -> None:
    """Its message may come last: what counts is when it was, not when it was heard."""
    world.wait(5)
    for rank, age_s in ((0, 0.1), (3, 0.1), (1, 0.3)):
        world.beat(rank, world.call, State.FAILED, age_s=age_s)
        world.end(rank, 1, last=[f"words of {rank}"])
    world.beat(2, world.call, State.FAILED, age_s=0.1)
    world.end(2, 1)
    outcome = world.settled()
    assert [failure.rank for failure in outcome.failures] == [1]
    assert outcome.followers == (0, 2, 3)
    assert outcome.last_lines == ("words of 1",)


def test_a_guard_that_is_gone_has_vanished(world: World) -> None:
    world.wait(5)
    world.judge.leave(1)
    world.beat(0, world.call, State.FAILED)
    world.end(0, 1)
    outcome = world.settled()
    assert [(failure.rank, failure.what) for failure in outcome.failures] == [(1, "vanished")]
    assert outcome.followers == (0,)


def test_a_rank_that_leaves_early_with_code_0_is_named(world: World) -> None:
    world.wait(5)
    world.end(3, 0)
    outcome = world.settled()
    assert outcome.exit_code == 1
    assert [(failure.rank, failure.what, failure.exit_code) for failure in outcome.failures] == [(3, "exited", 0)]


@pytest.mark.parametrize("code", [2, 3])
def test_what_all_ranks_refuse_is_told_once_with_its_code(world: World, code: int) -> None:
    for rank in range(4):
        world.beat(rank, None, State.STARTING)
        world.end(rank, code, last=["error: no"])
    outcome = world.settled()
    assert outcome.exit_code == code
    assert len(outcome.failures) == 1
    assert outcome.last_lines == ("error: no",)


def test_a_lost_node_is_named_as_a_node(world: World) -> None:
    world.wait(5)
    outcome = world.wait(LOST_S + 2, but=(2, 3))
    assert outcome is not None
    assert outcome.failures == ()
    assert outcome.why == "node n1 (ranks 2, 3) has not been heard for 10 s: it or its link is down"
    assert outcome.exit_code == 1


def test_a_lost_rank_of_a_node_that_is_there_is_named_alone(world: World) -> None:
    world.wait(5)
    outcome = world.wait(LOST_S + 2, but=(3,))
    assert outcome is not None
    assert outcome.why is None
    assert [(failure.rank, failure.what, failure.host) for failure in outcome.failures] == [(3, "lost", "n1")]


def test_a_silence_shorter_than_the_limit_is_nothing(world: World) -> None:
    world.wait(5)
    assert world.wait(LOST_S - 1, but=(2, 3)) is None
    assert world.wait(LOST_S) is None


def test_very_many_ranks_may_beat_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    world = made(monkeypatch, 12_000)
    assert world.silence(LOST_S + 2) is None  # they beat each 12 s
    assert world.silence(60) is not None


def test_who_is_calls_behind_holds_the_others_up(world: World) -> None:
    world.wait(5)
    world.beat_all(but=(1,))
    outcome = None
    while outcome is None:
        world.clock.now_s += 0.5
        world.beat(1, world.call - 1)
        world.beat_all(but=(1,), call=world.call)
        outcome = world.outcome()
    assert [(failure.rank, failure.what) for failure in outcome.failures] == [(1, "stands_still")]
    assert outcome.failures[0].call == world.call - 1


def test_a_stopped_process_is_named_sooner(world: World) -> None:
    world.wait(5)
    begun = world.clock.now_s
    outcome = None
    while outcome is None:
        world.clock.now_s += 0.5
        world.beat(2, world.call, process="T", age_s=world.clock.now_s - begun)
        for rank in (0, 1, 3):
            world.beat(rank, world.call, age_s=world.clock.now_s - begun)
        outcome = world.outcome()
    assert STOPPED_S < world.clock.now_s - begun < STAND_STILL_S
    assert [failure.rank for failure in outcome.failures] == [2]
    assert "SIGSTOP" in (outcome.failure or "")


def test_a_rank_that_has_failed_and_does_not_end_is_to_blame(world: World) -> None:
    world.wait(5)
    world.beat(2, world.call, State.FAILED)
    outcome = None
    while outcome is None:
        world.clock.now_s += 0.5
        world.beat(2, world.call, State.FAILED)
        world.beat_all(but=(2,), call=world.call)
        outcome = world.outcome()
    assert [failure.rank for failure in outcome.failures] == [2]
    assert "has failed, but does not end" in (outcome.failure or "")


def test_a_start_may_take_longer_than_a_call(world: World) -> None:
    for rank in range(4):
        world.beat(rank, None, State.STARTING)
    begun, outcome = world.clock.now_s, None
    while outcome is None:
        world.clock.now_s += 1
        for rank in range(4):
            world.beat(rank, None, State.STARTING)
        outcome = world.outcome()
    assert world.clock.now_s - begun > START_WITHIN_S
    assert {failure.what for failure in outcome.failures} == {"stands_still"}


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = made(monkeypatch, joined=(0, 1, 3))
    assert world.wait(START_WITHIN_S - 1, moves=False) is None
    outcome = world.wait(3, moves=False)
    assert outcome is not None
    assert outcome.exit_code == 3
    assert outcome.why == "ranks 2 of 4 did not come within 120 s; there are ranks on n0, n1"


def test_a_rank_that_never_says_anything_is_named(world: World) -> None:
    begun, outcome = world.clock.now_s, None
    while outcome is None and world.clock.now_s < begun + 2 * START_WITHIN_S:
        world.clock.now_s += 1
        for rank in range(4):
            if rank == 2:
                world.judge.hear(2, {})
            else:
                world.beat(rank, None, State.STARTING)
        outcome = world.outcome()
    assert outcome is not None
    assert [(failure.rank, failure.what) for failure in outcome.failures] == [(2, "never_started")]


def test_when_one_ends_badly_late_ranks_are_waited_for_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes after the end would look for rank 0 in vain for a minute."""
    world = made(monkeypatch, joined=(0, 1))
    world.end(0, 2)
    world.outcome()
    assert world.silence(SETTLE_S + 0.5) is None
    assert world.silence(GATHER_S) is not None


def test_a_second_rank_0_is_refused_and_both_are_named(world: World) -> None:
    assert not world.judge.join(Told(), world.hello(0, pid=77, host="n9"))
    outcome = world.settled()
    assert outcome.exit_code == 3
    assert "2 processes say that they are rank 0: pid 100 on n0, pid 77 on n9" in (outcome.failure or "")


def test_a_rank_outside_the_launch_is_refused(world: World) -> None:
    assert not world.judge.join(Told(), world.hello(9))
    outcome = world.settled()
    assert "rank 9 (pid 109 on n4) is outside the 4 ranks" in (outcome.failure or "")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"facts": {**FACTS, "crosstraffic": "2"}}, r"crosstraffic is 2 on rank 3 \(n1\) and 1 on rank 0 \(n0\)"),
        ({"facts": {"crosstraffic": "1"}}, r"Python is None on rank 3"),
        ({"world_size": 8}, r"rank 3 \(n1\) believes in a world of 8, rank 0 \(n0\) in one of 4"),
    ],
    ids=["another version", "a fact left out", "another world"],
)
def test_ranks_that_do_not_belong_together(
    monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Any], told: str
) -> None:
    world = made(monkeypatch, joined=(0, 1, 2))
    assert world.judge.join(world.members[3], world.hello(3, **changes))
    world.beat_all()
    outcome = world.settled()
    assert outcome.exit_code == 3
    assert re.search(told, outcome.failure or "")


def test_a_stop_goes_to_rank_0_once(world: World) -> None:
    world.wait(5)
    world.judge.hear(3, {"stop": "SIGTERM"})
    world.judge.hear(2, {"stop": "SIGTERM"})
    assert world.members[0].messages == [{"stop": True}]
    assert all(member.messages == [] for member in world.members[1:])
    world.finish(0, 1, 2, 3)
    for rank in range(4):
        world.end(rank, 1 if rank == 0 else 0)
    assert world.outcome() == Outcome(interrupted=True)


def test_a_stop_that_is_not_obeyed_is_bounded(world: World) -> None:
    world.wait(5)
    world.judge.ask_to_stop()
    assert world.wait(STOP_WITHIN_S - 1) is None
    outcome = world.wait(2)
    assert outcome is not None
    assert outcome.interrupted
    assert outcome.exit_code == 1
    assert "asked to stop, the ranks did not end within 20 s" in (outcome.failure or "")


def test_a_stop_while_ranks_are_missing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = made(monkeypatch, joined=(0, 1))
    world.judge.ask_to_stop()
    outcome = world.wait(STOP_WITHIN_S + 2)
    assert outcome is not None
    assert outcome.interrupted
    assert {(failure.rank, failure.what) for failure in outcome.failures} == {
        (2, "never_started"),
        (3, "never_started"),
    }


def test_rank_0_may_report_for_long(world: World) -> None:
    world.wait(5)
    world.finish(0, 1, 2, 3)
    for rank in (1, 2, 3):
        world.end(rank)
    for _ in range(3600):
        world.clock.now_s += 1
        world.finish(0)
        assert world.outcome() is None
    world.end(0, 1)  # it says that the run is incomplete: no failure of a rank
    assert world.outcome() == Outcome()


FINISHED_ENDS = {
    "killed": {"end": [None, "SIGSEGV"]},
    "code": {"end": [120, None]},
}


@pytest.mark.parametrize("message", FINISHED_ENDS.values(), ids=FINISHED_ENDS)
def test_a_finished_rank_that_dies_on_its_way_out_is_not_blamed(world: World, message: Mapping[str, Any]) -> None:
    world.wait(5)
    world.finish(0, 1, 2, 3)
    world.judge.hear(1, message)
    world.judge.leave(2)
    world.end(3)
    assert world.silence(SETTLE_S + 1) is None
    world.end(0)
    assert world.outcome() == Outcome()


def test_a_finished_rank_whose_node_is_lost_is_not_blamed(world: World) -> None:
    world.wait(5)
    world.finish(0, 1, 2, 3)
    for _ in range(100):
        world.clock.now_s += 1
        world.finish(0, 1)
        assert world.outcome() is None


def test_a_finished_rank_that_does_not_end_is_not_waited_for(world: World) -> None:
    world.wait(5)
    world.finish(0, 1, 2, 3)
    for rank in (0, 1, 2):
        world.end(rank)
    assert world.outcome() is None
    assert world.silence(LEAVE_WITHIN_S - 1) is None
    assert world.silence(2) == Outcome()


@pytest.mark.parametrize(
    "message",
    [
        {"beat": 5},
        {"beat": []},
        {"beat": [1, 9, 0, 0, 0, 0.0, "S"]},
        {"beat": [1, 1, "x", 0, 0, 0.0, "S"]},
        {"beat": [1, 1, 0, -1, 0, 0.0, "S"]},
        {"beat": [1, 1, 0, 0, 0, float("nan"), "S"]},
        {"beat": [1, 1, 0, 0, 0, True, "S"]},
        {"beat": [1, 1, 0, 0, 0, 0.0, ["S"]]},
        {"beat": [1.5, 1, 0, 0, 0, 0.0, "S"]},
        {"beat": [1, 1, 0, 0, 2**70, 0.0, "S"]},
        {"end": None},
        {"end": ["0", None]},
        {"end": [0, 9]},
        {"last": "text"},
        {"last": [1]},
        {"beat": [1, 1, 0, 0, 99, 0.0, "S"], "end": [None]},
    ],
    ids=str,
)
def test_garbage_changes_nothing(world: World, message: Mapping[str, Any]) -> None:
    world.wait(5)
    before = (world.judge.ranks[1].beat, world.judge.ranks[1].end, world.judge.ranks[1].last_lines)
    with pytest.raises(ValueError, match=r"."):
        world.judge.hear(1, message)
    assert (world.judge.ranks[1].beat, world.judge.ranks[1].end, world.judge.ranks[1].last_lines) == before
    assert world.outcome() is None


ranks = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just("join"), ranks, st.booleans()),
    st.tuples(
        st.just("beat"),
        ranks,
        st.sampled_from(State),
        st.none() | st.integers(0, 9),
        st.sampled_from(["", "S", "T", "D"]),
    ),
    st.tuples(st.just("end"), ranks, st.none() | st.integers(0, 3), st.none() | st.just("SIGKILL")),
    st.tuples(st.just("leave"), ranks),
    st.tuples(st.just("stop"), ranks),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.5, 9.0, 25.0, 130.0])),
)


@given(st.lists(steps, max_size=30))
def test_whatever_happens_there_is_a_judgement_that_can_be_told(happened: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = made(monkeypatch, 3, joined=(0,))
        ended: set[int] = set()
        for what, *words in happened:
            rank = words[0]
            if what == "join":
                world.judge.join(Told(), world.hello(rank, world_size=3 if words[1] else 4))
            elif what == "wait":
                world.clock.now_s += words[0]
            elif rank not in world.judge.ranks:
                continue
            elif what == "beat":
                world.beat(rank, words[2], words[1], process=words[3])
            elif what == "end":
                world.end(rank, words[1], words[2], last=["x"])
                ended.add(rank)
            elif what == "leave":
                world.judge.leave(rank)
                ended.add(rank)
            else:
                world.judge.hear(rank, {"stop": "SIGTERM"})
            outcome = world.outcome()
            if outcome is not None:
                assert (outcome.failure is None) == (outcome.exit_code == 0)
                done = {rank for rank, found in world.judge.ranks.items() if found.is_done}
                still = {failure.rank for failure in outcome.failures if failure.what == "stands_still"}
                assert not still & done
                if outcome.failure is None:
                    assert done == {0, 1, 2}
                    assert 0 in ended
        world.clock.now_s += 1000
        assert world.outcome() is not None or world.outcome() is not None or waits_for_rank_0(world)


def waits_for_rank_0(world: World) -> bool:
    """Only a rank 0 that has finished, and reports, may take as long as it likes; or an end was seen just now."""
    zero = world.judge.ranks[0]
    just_now = world.judge._bad_s == world.clock.now_s or world.judge._left_s == world.clock.now_s
    return just_now or (zero.end is None and zero.is_done)
