"""Times of calls from clock readings, against intervals drawn by hand."""

import numpy as np
import pytest

from crosstraffic.bench.times import (
    Window,
    inside,
    isolated_times,
    late_rank,
    local_times,
    one_shot_overlap,
    split,
    steady_window,
    streaming_times,
)
from crosstraffic.bench.transport import Floats

NAN = float("nan")


def calls(*intervals: tuple[float, float]) -> tuple[Floats, Floats]:
    """Calls of one stream on one rank: starts and ends, ``[num_calls, 1]``."""
    table = np.array(intervals)
    return table[:, :1], table[:, 1:]


def back_to_back(begin: float, length: float, count: int) -> tuple[Floats, Floats]:
    return calls(*((begin + length * index, begin + length * (index + 1)) for index in range(count)))


def test_split_and_the_three_times() -> None:
    """Two ranks, three calls; rank 1 starts late in the first and ends late in the last; rank 2 takes no part."""
    times = np.array([
        [[0.0, 3.0], [10.0, 12.0], [20.0, 22.0]],
        [[1.0, 3.0], [10.0, 12.0], [20.0, 24.0]],
        [[NAN, NAN], [NAN, NAN], [NAN, NAN]],
    ])  # fmt: skip
    starts, ends = split(times)
    assert starts.shape == ends.shape == (3, 3)
    assert isolated_times(starts, ends).tolist() == [3.0, 2.0, 4.0]
    assert local_times(starts, ends).tolist() == [3.0, 2.0, 4.0]
    assert streaming_times(ends).tolist() == [9.0, 12.0]


def test_isolated_times_see_what_local_times_cannot() -> None:
    """Rank 0 is done before rank 1 begins: each was busy for 1, the call took 3."""
    starts, ends = np.array([[0.0, 2.0]]), np.array([[1.0, 3.0]])
    assert isolated_times(starts, ends).tolist() == [3.0]
    assert local_times(starts, ends).tolist() == [1.0]


@pytest.mark.parametrize(
    ("first", "second", "free_until", "window", "overlap"),
    [
        pytest.param(back_to_back(0, 1, 10), back_to_back(0, 2, 5), 10, (0, 10), 1.0, id="both all the time"),
        pytest.param(back_to_back(0, 1, 10), back_to_back(2, 2, 5), 99, (2, 10), 1.0, id="one begins late"),
        pytest.param(back_to_back(0, 1, 10), back_to_back(0, 2, 5), 6, (0, 6), 1.0, id="held back from 6 on"),
        pytest.param(
            calls(*((2 * i, 2 * i + 1) for i in range(5))),
            calls(*((2 * i + 1, 2 * i + 2) for i in range(5))),
            99,
            (1, 9),
            0.0,
            id="served in turns",
        ),
        pytest.param(calls((0, 4), (6, 10)), back_to_back(0, 1, 10), 99, (0, 10), 0.8, id="a pause of 2 in 10"),
        pytest.param(calls((0, 5)), calls((6, 9)), 99, (6, 6), 0.0, id="never at once"),
        pytest.param(calls((0, 4), (3, 8)), calls((0, 8)), 99, (0, 8), 1.0, id="calls of a stream that overlap"),
    ],
)
def test_the_steady_window(
    first: tuple[Floats, Floats],
    second: tuple[Floats, Floats],
    free_until: float,
    window: tuple[float, float],
    overlap: float,
) -> None:
    for streams in ((first, second), (second, first)):
        starts, ends = zip(*streams, strict=True)
        found = steady_window(starts, ends, free_until)
        assert (found.begin_s, found.end_s) == window
        assert found.overlap_fraction == pytest.approx(overlap)


def test_a_triple_overlaps_only_where_all_three_do() -> None:
    streams = [back_to_back(0, 1, 12), calls((0, 8), (10, 12)), calls((0, 6), (8, 12))]
    starts, ends = zip(*streams, strict=True)
    assert steady_window(starts, ends, 99).overlap_fraction == pytest.approx((6 + 2) / 12)


def test_a_stream_is_in_flight_while_any_of_its_groups_is() -> None:
    """Two ranks in two groups, whose calls alternate: between them the stream never rests."""
    starts = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    ends = starts + 1.0
    other = back_to_back(0, 1, 6)
    assert steady_window([starts, other[0]], [ends, other[1]], 99).overlap_fraction == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_overlap_is_that_of_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    streams = []
    for _ in range(3):
        edges = np.cumsum(random.integers(1, 5, 40)).astype(float)
        streams.append((edges[0::2][:, None], edges[1::2][:, None]))
    starts, ends = zip(*streams, strict=True)
    found = steady_window(starts, ends, 60.0)
    ticks = np.arange(found.begin_s, found.end_s, 0.25) + 0.125
    busy = [((start <= ticks) & (ticks < end)).any(axis=0) for start, end in streams]
    assert found.overlap_fraction == pytest.approx(np.logical_and.reduce(busy).mean())


def test_only_calls_wholly_inside_the_window_are_kept() -> None:
    starts, ends = back_to_back(0, 2, 6)
    assert inside(starts, ends, Window(begin_s=1, end_s=9, overlap_fraction=1)) == slice(1, 4)
    assert inside(starts, ends, Window(begin_s=3, end_s=3.5, overlap_fraction=1)) == slice(0, 0)


@pytest.mark.parametrize(
    ("intervals", "overlap"),
    [
        pytest.param([(0, 10), (0, 10)], 1.0, id="alike"),
        pytest.param([(0, 10), (0, 2)], 1.0, id="the short one inside"),
        pytest.param([(0, 4), (2, 6)], 0.5, id="half"),
        pytest.param([(0, 4), (4, 8)], 0.0, id="one after the other"),
        pytest.param([(0, 4), (5, 8)], 0.0, id="with a gap"),
        pytest.param([(0, 10), (0, 4), (2, 10)], 0.5, id="three"),
    ],
)
def test_the_overlap_of_one_shots(intervals: list[tuple[float, float]], overlap: float) -> None:
    table = np.array(intervals, dtype=float)
    assert one_shot_overlap(table[:, :1], table[:, 1:]) == pytest.approx(overlap)


def lateness(rank: int, late_s: float, *, num_calls: int = 20, jitter_s: float = 1e-6, num_ranks: int = 4) -> Floats:
    random = np.random.default_rng(rank)
    starts = np.arange(num_calls)[:, None] + random.uniform(0, jitter_s, (num_calls, num_ranks))
    starts[:, rank] += late_s
    return starts


def test_a_late_rank_is_named_with_its_lateness() -> None:
    late = late_rank(lateness(2, 1e-3), clock_error_s=1e-5)
    assert late is not None
    assert (late.rank, late.share) == (2, 1.0)
    assert late.late_s == pytest.approx(1e-3, rel=0.01)


def test_a_late_rank_is_named_by_its_number_in_the_run() -> None:
    """Rank 0 takes no part in the stream; rank 3 is late."""
    starts = lateness(3, 1e-3)
    starts[:, 0] = NAN
    late = late_rank(starts, clock_error_s=1e-5)
    assert late is not None
    assert late.rank == 3


@pytest.mark.parametrize(
    ("starts", "clock_error_s"),
    [
        pytest.param(lateness(2, 0.0), 1e-9, id="nobody"),
        pytest.param(lateness(2, 1e-3), 6e-4, id="within the clocks' error"),
        pytest.param(lateness(2, 1e-3, num_calls=5), 1e-6, id="too few calls"),
        pytest.param(lateness(0, 1e-3, num_ranks=1), 1e-6, id="one rank"),
        pytest.param(lateness(2, 2e-6, jitter_s=5e-6), 1e-9, id="no more than the others scatter"),
        pytest.param(
            np.where(np.arange(20)[:, None] % 2 == 0, lateness(1, 1e-3), lateness(2, 1e-3)), 1e-6, id="two in turns"
        ),
    ],
)
def test_no_rank_is_named_without_need(starts: Floats, clock_error_s: float) -> None:
    assert late_rank(starts, clock_error_s) is None
