"""Heartbeats: what a rank writes is what another process reads."""

import os
import time
from pathlib import Path

import pytest

from crosstraffic.bench.heartbeat import Heart, State, ranks_folder, read_beats, request_stop
from crosstraffic.bench.processes import running


def test_what_is_written_is_read(tmp_path: Path) -> None:
    before = time.monotonic()
    with Heart.in_folder(tmp_path, 3) as heart:
        (beat,) = read_beats(tmp_path)
        assert (beat.rank, beat.pid, beat.state) == (3, os.getpid(), State.STARTING)
        assert (beat.point, beat.stream, beat.call, beat.seconds_left) == (None, None, None, None)
        assert running(beat.pid, beat.start_ticks) is not None
        heart.call(7, 2, 41)
        (beat,) = read_beats(tmp_path)
        assert (beat.point, beat.stream, beat.call, beat.state) == (7, 2, 41, State.MEASURING)
        assert before <= beat.beat_s <= time.monotonic()
        heart.progress(8, 90, 12.5)
        (beat,) = read_beats(tmp_path)
        assert (beat.points_done, beat.points_total, beat.seconds_left) == (8, 90, 12.5)
        heart.state(State.FINISHED)
    assert read_beats(tmp_path)[0].state == State.FINISHED


def test_an_error_leaves_the_state_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Heart.in_folder(tmp_path, 0):
        raise ZeroDivisionError
    assert read_beats(tmp_path)[0].state == State.FAILED


def test_beats_come_in_order_of_rank(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        Heart.in_folder(tmp_path, rank).close()
    assert [beat.rank for beat in read_beats(tmp_path)] == [0, 2, 10]


def test_no_ranks_no_beats(tmp_path: Path) -> None:
    assert read_beats(tmp_path) == []


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    Heart.in_folder(tmp_path, 0).close()
    path = ranks_folder(tmp_path) / "rank-0.beat"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ValueError, match="not a heartbeat"):
        read_beats(tmp_path)


def test_stop_is_seen(tmp_path: Path) -> None:
    with Heart.in_folder(tmp_path, 0) as heart:
        assert not heart.should_stop()
        request_stop(tmp_path)
        assert heart.should_stop()


def test_a_rank_that_comes_late_sees_the_stop_too(tmp_path: Path) -> None:
    request_stop(tmp_path)
    with Heart.in_folder(tmp_path, 1) as heart:
        assert heart.should_stop()
    assert [beat.rank for beat in read_beats(tmp_path)] == [1]
