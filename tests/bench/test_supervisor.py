"""The judgement of rank 0's guard: who is named, when, and who is not."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from made_world import FACTS, Told, World, made

from crosstraffic.bench.failures import Outcome
from crosstraffic.bench.heartbeat import State
from crosstraffic.bench.supervisor import (
    GATHER_S,
    LOST_S,
    SETTLE_S,
    STAND_STILL_S,
    START_WITHIN_S,
    STOPPED_S,
)


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
