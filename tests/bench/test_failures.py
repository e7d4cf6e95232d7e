"""Who is to blame, from what ranks said last and how they ended: no process is started here."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

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

MS = 10**6  # in ns


def beat_of(rank: int, call: int | None, age_s: float, point: int = 4, stream: int = 0) -> Beat:
    return Beat(
        rank=rank,
        pid=os.getpid(),
        start_ticks=0,
        state=State.MEASURING,
        point=None if call is None else point,
        stream=None if call is None else stream,
        call=call,
        beat_s=time.monotonic() - age_s,
        points_done=0,
        points_total=9,
        seconds_left=None,
    )


def state_of(rank: int, state: State, age_s: float = 0.0) -> Beat:
    return replace(beat_of(rank, 1, age_s), state=state)


STILL = {
    "behind the others": ([beat_of(0, 8, 60), beat_of(1, 7, 60.1), beat_of(2, 8, 60)], [1]),
    "all in one call, oldest first": ([beat_of(0, 8, 60), beat_of(1, 8, 61), beat_of(2, 8, 60.5)], [1, 2, 0]),
    "a rank of an earlier point takes no part": (
        [beat_of(0, 2, 90, point=3), beat_of(1, 8, 60), beat_of(2, 7, 61)],
        [2],
    ),
    "a finished rank is no suspect": (
        [state_of(0, State.FINISHED, 99), beat_of(1, 8, 60), beat_of(2, 8, 61)],
        [2, 1],
    ),
    "before any call": ([beat_of(0, None, 60), beat_of(1, None, 62), beat_of(2, None, 61)], [1, 2, 0]),
    "one said nothing": ([beat_of(0, 8, 60), beat_of(1, 8, 60)], [2]),
    "one has failed and hangs": ([beat_of(0, 8, 60), state_of(1, State.FAILED, 30), beat_of(2, 7, 61)], [1]),
    "two streams: the newest counts": (
        [beat_of(0, 8, 60, stream=1), beat_of(1, 2, 61, stream=0), beat_of(2, 9, 60.5, stream=1)],
        [0],
    ),
}


@pytest.mark.parametrize(("beats", "named"), STILL.values(), ids=STILL.keys())
def test_who_holds_the_others_up(beats: list[Beat], named: list[int]) -> None:
    found = standing_still({beat.rank: beat for beat in beats}, {}, range(3), ("tp", "ep"))
    assert [failure.rank for failure in found] == named


@pytest.mark.parametrize(("state", "note"), [("T", "SIGSTOP"), ("t", "debugger"), ("D", "kernel")])
def test_a_process_that_is_held_comes_first(state: str, note: str) -> None:
    beats = {rank: beat_of(rank, 8 - (rank == 1), 60) for rank in range(3)}
    (failure,) = standing_still(beats, {0: "S", 1: "R", 2: state}, range(3), ("tp",), {2: "n7"})
    assert (failure.rank, failure.host, failure.stream) == (2, "n7", "tp")
    assert note in (failure.note or "")


KILLED, FAILED = End(exit_code=None, signal="SIGKILL", at_ns=0), End(exit_code=1, signal=None, at_ns=0)
GONE, REFUSED = End(exit_code=None, signal=None, at_ns=0), End(exit_code=3, signal=None, at_ns=0)


def at(end: End, at_ns: int) -> End:
    return replace(end, at_ns=at_ns)


CAUSES = {
    "a signal before an error that was caught, though it is seen later": (
        {0: at(FAILED, 0), 1: at(KILLED, 5 * MS)},
        {0: state_of(0, State.FAILED), 1: beat_of(1, 4, 0)},
        [1],
    ),
    "the first of two that were killed": ({0: at(KILLED, 9 * MS), 2: at(KILLED, 0)}, {}, [2]),
    "two that were killed in one moment": ({0: at(KILLED, 50_000), 2: at(KILLED, 0)}, {}, [2, 0]),
    "guards killed together": ({0: at(GONE, 0), 1: at(GONE, 30 * MS), 2: at(GONE, 90 * MS)}, {}, [0, 1]),
    "all caught an error: the first to say so": (
        {0: at(FAILED, 0), 1: at(FAILED, 9 * MS)},
        {0: state_of(0, State.FAILED, 0.1), 1: state_of(1, State.FAILED, 0.3)},
        [1],
    ),
    "all refuse: one is enough": (
        {rank: at(REFUSED, rank) for rank in range(3)},
        {rank: state_of(rank, State.STARTING) for rank in range(3)},
        [0],
    ),
}


@pytest.mark.parametrize(("ends", "beats", "named"), CAUSES.values(), ids=CAUSES.keys())
def test_causes_are_told_from_followers(ends: Mapping[int, End], beats: Mapping[int, Beat], named: list[int]) -> None:
    assert causes_of(ended_badly(ends, beats), ends, beats) == named


def test_who_has_finished_has_not_ended_badly() -> None:
    beats = {0: state_of(0, State.FINISHED), 1: state_of(1, State.MEASURING), 2: state_of(2, State.FINISHED)}
    ends = {0: KILLED, 1: KILLED, 2: End(exit_code=0, signal=None, at_ns=0)}
    assert ended_badly(ends, beats) == [1]
    assert ended_badly(ends, {}) == [0, 1]


ENDINGS = {
    "killed": (KILLED, "rank 3 (pid {pid} on n1) was killed by SIGKILL in call 7 of tp (point 4)"),
    "exited": (FAILED, "rank 3 (pid {pid} on n1) exited with code 1 in call 7 of tp (point 4)"),
    "vanished": (GONE, "rank 3 (pid {pid} on n1) vanished, and nobody saw how it ended, in call 7 of tp (point 4)"),
}


@pytest.mark.parametrize(("end", "told"), ENDINGS.values(), ids=ENDINGS.keys())
def test_an_end_is_told_with_its_place(end: End, told: str) -> None:
    assert ending_failure(3, end, beat_of(3, 7, 0), ("tp",), "n1").describe() == told.format(pid=os.getpid())


def test_a_stream_without_a_name_has_its_number() -> None:
    assert ending_failure(3, KILLED, beat_of(3, 7, 0, stream=2), ("tp",)).stream == "stream 2"


def test_before_the_first_call_no_stream_is_named() -> None:
    assert ending_failure(3, KILLED, None, ("tp",)).describe() == "rank 3 was killed by SIGKILL before its first call"


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(), 0),
        (Outcome(interrupted=True), 0),
        (Outcome(why="no"), 1),
        (Outcome(why="no", code=3), 3),
        (Outcome(failures=(RankFailure(rank=0, what="exited", exit_code=2),)), 2),
        (Outcome(failures=(RankFailure(rank=0, what="exited", exit_code=5),)), 1),
        (Outcome(failures=(RankFailure(rank=0, what="exited", exit_code=0),)), 1),
        (Outcome(failures=tuple(RankFailure(rank=rank, what="exited", exit_code=rank) for rank in (2, 3))), 1),
    ],
)
def test_exit_codes(outcome: Outcome, code: int) -> None:
    assert outcome.exit_code == code


def test_thousands_of_ranks_make_a_text_that_can_be_read() -> None:
    failures = tuple(RankFailure(rank=rank, what="lost", host="n1", still_s=9.0) for rank in range(3000))
    outcome = Outcome(failures=failures, followers=tuple(range(3000, 4096)), last_lines=("x", "y"))
    assert outcome.failure is not None
    assert "rank 0 (n1)" in outcome.failure
    assert "and 2992 ranks more; then ranks 3000" in outcome.failure
    assert "and 1088 more ended too\n  | x\n  | y" in outcome.failure
    assert len(outcome.failure) < 2000
