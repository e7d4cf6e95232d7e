"""The timed loops on the simulated transport: every rank makes the same calls, whatever their lengths."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from simulated_runs import scenario_of, truth_of

from crosstraffic.bench import timing
from crosstraffic.bench.context import RankContext, open_ending
from crosstraffic.bench.simulated import SimulatedTransport, SimulatedWorld, run_simulated
from crosstraffic.bench.transport import Floats, Operation

NUM_RANKS = 4
LONG = {"name": "long", "op": "all_reduce", "payload": 2**24}
SHORT = {"name": "short", "op": "all_gather", "payload": 64}
PAIR = {"name": "pair", "op": "all_to_all", "payload": 2**16, "groups": [[0, 1]]}
AWAY = {"name": "away", "op": "all_gather", "payload": 2**16, "groups": [[2, 3]]}
LAST = {"name": "last", "op": "broadcast", "payload": 2**12, "groups": [[1, 2, 3]]}
IDLE = {"name": "idle", "op": "kv_transfer", "payload": 2**16, "matrix": [[0, 2**16, 0, 0], *[[0] * 4] * 3]}
SILENT = {
    "name": "silent",
    "op": "all_to_all_v",
    "payload": 1,
    "matrix": [[0, 4096, 0, 0], [64, 0, 0, 0], *[[0] * 4] * 2],
}


class Quiet:
    """A heart that nobody listens to."""

    def call(self, point: int, stream: int, call: int) -> None:
        """Nothing to do."""

    def progress(self, done: int, total: int, seconds_left: float) -> None:
        """Nothing to do."""

    def should_stop(self) -> bool:
        return False


def on_ranks(
    streams: Sequence[dict[str, Any]],
    body: Callable[[RankContext, list[Operation | None]], Any],
    num_ranks: int = NUM_RANKS,
    **truth: Any,
) -> list[Any]:
    """Run ``body`` on every rank with one operation a stream, at its own size."""
    scenario = scenario_of(streams, num_ranks)

    def main(transport: SimulatedTransport) -> Any:
        context = RankContext(
            transport=transport,
            scenario=scenario,
            channels={stream.name: transport.open_channel(stream) for stream in scenario.streams},
            clocks=None,
            ending=open_ending(transport),
            heart=Quiet(),
            nodes=tuple(map(truth_of().node, range(num_ranks))),
            started_s=0.0,
        )
        return body(context, [context.operation(stream.name, stream.payload_bytes) for stream in scenario.streams])

    return run_simulated(SimulatedWorld(truth_of(**truth), num_ranks), main)


def loop(
    duration_s: float, most: Sequence[int] | None = None
) -> Callable[[RankContext, list[Operation | None]], timing.Looped]:
    def body(context: RankContext, operations: list[Operation | None]) -> timing.Looped:
        return timing.loops(context.transport, operations, context.ending, duration_s, lambda call: None, most)

    return body


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param([LONG, SHORT], id="lengths 5000 to 20"),
        pytest.param([PAIR, SHORT], id="ranks 2 and 3 in one only"),
        pytest.param([PAIR], id="ranks 2 and 3 in none"),
        pytest.param([AWAY], id="rank 0 in none"),
        pytest.param([LAST, AWAY], id="rank 0 in none, nested groups"),
        pytest.param([PAIR, AWAY], id="nobody in both"),
        pytest.param([IDLE, LONG], id="ranks without a message"),
        pytest.param([IDLE, SILENT], id="ranks without a message in either"),
        pytest.param([LONG, SHORT, PAIR, AWAY, LAST, IDLE], id="six"),
    ],
)
@pytest.mark.parametrize("noise_sigma", [0.0, 0.5])
def test_all_ranks_make_the_same_calls(streams: list[dict[str, Any]], noise_sigma: float) -> None:
    duration_s = 0.02
    rows: list[timing.Looped] = on_ranks(streams, loop(duration_s), noise_sigma=noise_sigma, clock_offset_s={2: 1.0})
    for index, stream in enumerate(streams):
        counts = {len(row.times[index]) for row in rows}
        assert len(counts) == 1
        assert counts.pop() >= 2
        members = {rank for group in stream.get("groups", [range(NUM_RANKS)]) for rank in group}
        if stream is IDLE:
            members = {0, 1}
        for rank, row in enumerate(rows):
            assert np.isnan(row.times[index]).all() == (rank not in members)
            assert not np.isnan(row.times[index]).any() or rank not in members
    mine = rows[0].times[0]
    if np.isfinite(mine).any():
        assert rows[0].free_until_s - np.nanmin(mine) >= duration_s * 0.99


def test_each_stream_is_started_again_the_moment_it_ends() -> None:
    rows: list[timing.Looped] = on_ranks([LONG, SHORT], loop(0.05))
    for row in rows:
        for times in row.times:
            free = times[times[:, 1] <= row.free_until_s]
            assert len(free) >= 5
            assert (np.diff(times[:, 0]) > 0).all()
            assert free[1:, 0] == pytest.approx(free[:-1, 1], abs=1e-9)
    assert len(rows[0].times[1]) > 50 * len(rows[0].times[0])


def test_a_bound_ends_the_calls_but_not_the_others() -> None:
    """Rank 0 has made all its calls long before its time is up: it still says when the others must end."""
    rows: list[timing.Looped] = on_ranks([SHORT, PAIR], loop(0.02, most=[5, 7]))
    assert [{len(row.times[index]) for row in rows} for index in (0, 1)] == [{5}, {7}]


def test_one_shots_start_together_and_in_order() -> None:
    def body(context: RankContext, operations: list[Operation | None]) -> Floats:
        return timing.one_shot(context.transport, operations, lambda call: None, 0)

    rows = np.stack(on_ranks([LONG, SHORT, PAIR], body))
    assert np.isnan(rows[2:, 2]).all()
    begins, ends = np.nanmin(rows[..., 0], axis=0), np.nanmax(rows[..., 1], axis=0)
    assert begins == pytest.approx([begins[0]] * 3)
    assert ends[0] > ends[1] > ends[2]


@pytest.mark.parametrize("loop_of", [timing.isolated, timing.streaming], ids=["isolated", "streaming"])
def test_ranks_outside_a_stream_wait_at_its_barriers(loop_of: Callable[..., Floats]) -> None:
    def body(context: RankContext, operations: list[Operation | None]) -> Floats:
        return loop_of(context.transport, operations[0], 6, lambda call: None)

    rows = np.stack(on_ranks([PAIR], body))
    assert rows.shape == (NUM_RANKS, 6, 2)
    assert np.isnan(rows[2:]).all()
    assert (rows[:2, :, 1] > rows[:2, :, 0]).all()
    gaps = rows[0, 1:, 0] - rows[0, :-1, 1]
    if loop_of is timing.isolated:
        assert (gaps > 1e-6).all()
    else:
        assert gaps == pytest.approx(np.zeros(5), abs=1e-9)


def test_lanes_run_at_once_and_in_order_within() -> None:
    """Two lanes of two long calls on links of their own take as long as one; both in one lane take twice as long."""

    def body(context: RankContext, operations: list[Operation | None]) -> tuple[Floats, Floats]:
        pair, away = operations
        mine = [operation for operation in (pair, away) if operation is not None]
        apart = [[pair] * 2 if pair else [], [away] * 2 if away else []]
        return (
            timing.lanes(context.transport, apart, lambda call: None),
            timing.lanes(context.transport, [mine * 2], lambda call: None),
        )

    rows = on_ranks([PAIR, AWAY], body)
    apart = np.stack([row[0] for row in rows])
    joined = np.stack([row[1] for row in rows])
    assert apart.shape == (NUM_RANKS, 2, 2)
    assert np.isnan(apart[2:, 0]).all()
    assert np.isnan(apart[:2, 1]).all()
    spans = np.nanmax(apart[..., 1], axis=0) - np.nanmin(apart[..., 0], axis=0)
    assert (joined[0, 0, 1] - joined[0, 0, 0]) == pytest.approx(spans[0])


def test_a_beat_comes_before_every_call() -> None:
    def body(context: RankContext, operations: list[Operation | None]) -> list[int]:
        seen: list[int] = []
        timing.isolated(context.transport, operations[0], 4, seen.append)
        return seen

    assert on_ranks([PAIR], body) == [[0, 1, 2, 3]] * 2 + [[]] * 2
