"""The judgement of rank 0's guard at the end of a run: stops, reports, garbage, and whatever else may happen."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_world import Told, World, made

from crosstraffic.bench.failures import Outcome
from crosstraffic.bench.heartbeat import State
from crosstraffic.bench.supervisor import (
    LEAVE_WITHIN_S,
    SETTLE_S,
    STOP_WITHIN_S,
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return made(monkeypatch)


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
