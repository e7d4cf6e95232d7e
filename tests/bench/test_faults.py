"""Wrong bytes and streams on one communicator, put in on purpose: each is caught, wherever the call is made."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import run_in, scenario_of, toml_of, truth_of
from typer.testing import CliRunner

from crosstraffic.bench import timing
from crosstraffic.bench.resolve import Scenario
from crosstraffic.bench.simulated_calls import Delivery
from crosstraffic.bench.simulated_world import SimulatedWorld
from crosstraffic.cli import app
from crosstraffic.patterns.step import Block, Step, Task
from crosstraffic.results.record import Record
from crosstraffic.results.store import load, read_records, read_run_info

BLOCK = 16000
SIZE = 3 * BLOCK
STREAMS = (
    {"name": "exchange", "op": "all_to_all", "payload": SIZE},
    {"name": "other", "op": "all_gather", "payload": SIZE},
)
PLACES = ("isolated", "streaming", "steady", "one_shot", "step")


def swap_blocks(delivery: Delivery) -> None:
    """Rank 1 finds rank 0's block where rank 2's should be, and the other way round."""
    received = delivery.receives[1].reshape(3, BLOCK)
    received[[0, 2]] = received[[2, 0]]


def change_a_byte(delivery: Delivery) -> None:
    delivery.receives[1][2 * BLOCK + 5] ^= 0x10


def fall_short(delivery: Delivery) -> None:
    """The last 100 bytes from rank 2 never come: what lay there before the call still does."""
    delivery.receives[1][-100:] = 0xFF


def order_wrongly(delivery: Delivery) -> None:
    """Blocks lie in the order of another group: 1, 2, 0."""
    received = delivery.receives[1].reshape(3, BLOCK)
    received[:] = received[[1, 2, 0]]


class DeliverStale:
    """Rank 1 gets what the last call but one under another payload brought: a buffer that was not written again."""

    def __init__(self) -> None:
        self._earlier: dict[bytes, bytes] = {}
        self._last: bytes | None = None

    def __call__(self, delivery: Delivery) -> None:
        received = delivery.receives[1]
        now = received.tobytes()
        if self._last is not None and len(self._last) == len(now) and self._last != now:
            received[:] = memoryview(self._last)
        else:
            self._last = now


# fault: (what spoils, peer and offset that the record must name)
FAULTS: dict[str, tuple[Callable[[], Callable[[Delivery], None]], int, int]] = {
    "two blocks swapped": (lambda: swap_blocks, 0, 0),
    "stale buffer": (DeliverStale, 0, 0),
    "one byte changed": (lambda: change_a_byte, 2, 5),
    "short receive": (lambda: fall_short, 2, BLOCK - 100),
    "wrong rank order": (lambda: order_wrongly, 0, 0),
}


def only(stream: str, size: int, spoil: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
    """Spoil calls of one stream at one size."""

    def tamper(delivery: Delivery) -> None:
        if delivery.stream == stream and delivery.exchanges[0].payload_bytes == size:
            spoil(delivery)

    return tamper


def scenario_with_step(**measure: object) -> Scenario:
    """Two streams, alone, together and in a step of two lanes."""
    scenario = scenario_of(STREAMS, num_ranks=3, sizes=[SIZE], budget_s=0.1, **measure)
    lanes = tuple((Block(repeat=2, tasks=(Task(stream=name, payload_bytes=SIZE),)),) for name in ("exchange", "other"))
    return replace(scenario, steps=(Step(name="both", phase="decode", lanes=lanes),))


def place_of(record: Record) -> str:
    return record.mode or record.cadence or record.kind


@pytest.fixture
def with_step(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """A scenario with a step, as if its file said so: streams written by hand have none."""
    scenario = scenario_with_step()
    monkeypatch.setattr("crosstraffic.bench.session.resolve", lambda file, num_ranks: scenario)
    return scenario


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_bytes_are_caught_wherever_the_call_is_made(fault: str, with_step: Scenario, tmp_path: Path) -> None:
    make, peer, offset = FAULTS[fault]
    world = SimulatedWorld(truth_of(), 3, tamper=only("exchange", SIZE, make()))
    run_in(world, with_step, tmp_path / "run")
    records = read_records(tmp_path / "run")[0]
    seen = [record for record in records if "exchange" in record.mix and record.baseline_of is None]
    wrong = [record for record in seen if record.status == "wrong_data"]
    assert {place_of(record) for record in wrong} == set(PLACES)
    for record in seen:
        if record.stream == "other":
            assert record.status == "ok"
            continue
        found = record.mismatch
        assert found is not None, record
        assert (record.status, found.stream) == ("wrong_data", "exchange")
        assert (found.rank, found.peer, found.offset_bytes) == (1, peer, offset)
        assert found.expected != found.found
        assert found.num_wrong_bytes >= 1
        assert record.why is not None
        assert f"rank 1 received wrong bytes from rank {peer} at offset {offset}" in record.why
    assert {record.status for record in records if record.mix == ("other",)} == {"ok"}


def test_nothing_is_wrong_without_a_fault(with_step: Scenario, tmp_path: Path) -> None:
    run_in(SimulatedWorld(truth_of(), 3), with_step, tmp_path / "run")
    records = read_records(tmp_path / "run")[0]
    assert {place_of(record) for record in records} == set(PLACES)
    assert {record.status for record in records} == {"ok"}
    assert all(record.num_verified_calls > 0 for record in records if record.stream != "*")


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "broadcast", "all_gather"])
def test_one_byte_is_caught_in_every_collective(op: str, tmp_path: Path) -> None:
    streams = [{"name": "x", "op": op, "payload": SIZE}]
    scenario = scenario_of(streams, 3, sizes=[SIZE], cadences=["isolated"], budget_s=0.05)

    def spoil(delivery: Delivery) -> None:
        delivery.receives[2][7] ^= 0x40

    run_in(SimulatedWorld(truth_of(), 3, tamper=spoil), scenario, tmp_path / "run")
    records = read_records(tmp_path / "run")[0]
    assert {record.status for record in records} == {"wrong_data"}
    found = records[0].mismatch
    assert found is not None
    assert (found.rank, found.offset_bytes) == (2, 7)
    assert found.peer == (None if op in ("all_reduce", "reduce_scatter") else 0)


def test_a_fault_of_the_first_call_alone_is_kept(tmp_path: Path) -> None:
    """The first call of a stream is made before any point, and only once."""
    scenario = scenario_of(STREAMS[:1], 3, sizes=[SIZE], cadences=["isolated"], budget_s=0.05)

    def spoil(delivery: Delivery) -> None:
        if delivery.call == 0:
            change_a_byte(delivery)

    world = SimulatedWorld(truth_of(), 3, tamper=only("exchange", SIZE, spoil))
    run_in(world, scenario, tmp_path / "run")
    frame = load(tmp_path / "run")
    (row,) = [row for _, row in frame.iterrows() if row["status"] == "wrong_data"]
    assert "rank 1 received wrong bytes from rank 2 at offset 5" in row["why"]
    assert (frame["status"] == "ok").sum() == 2


def test_a_run_without_checks_says_that_it_verified_nothing(tmp_path: Path) -> None:
    scenario = scenario_of(STREAMS[:1], 3, sizes=[SIZE], cadences=["isolated"], budget_s=0.05, verify=False)
    world = SimulatedWorld(truth_of(), 3, tamper=only("exchange", SIZE, change_a_byte))
    run = run_in(world, scenario, tmp_path / "run")
    assert set(run.frame["num_verified_calls"]) == {0}


def test_the_command_fails_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.toml").write_text(toml_of(STREAMS, sizes=[SIZE], budget_s=0.1))
    spoiled = functools.partial(SimulatedWorld, tamper=only("exchange", SIZE, change_a_byte))
    monkeypatch.setattr("crosstraffic.bench.simulated.SimulatedWorld", spoiled)
    folder = tmp_path / "run"
    command = ["run", str(tmp_path / "test.toml"), "--ranks", "3", "--transport", "simulated", "--output", str(folder)]
    result = CliRunner().invoke(app, [*command, "--no-report"])
    assert result.exit_code == 1, result.output
    assert "error: stream exchange: rank 1 received wrong bytes from rank 2 at offset 5" in result.stderr
    assert read_run_info(folder).status == "complete"


def test_streams_on_one_communicator_are_invalid_together(with_step: Scenario, tmp_path: Path) -> None:
    world = SimulatedWorld(truth_of(), 3, one_communicator=True)
    run_in(world, replace(with_step, steps=()), tmp_path / "run")
    records = read_records(tmp_path / "run")[0]
    together = [record for record in records if record.kind == "together"]
    assert {record.mode for record in together} == {"steady", "one_shot"}
    for record in together:
        assert record.status == "invalid"
        assert record.slowdown is None
        assert record.why is not None
        assert "streams exchange and other share one communicator" in record.why
    assert {record.status for record in records if record.kind == "alone"} == {"ok"}


@pytest.mark.parametrize(("mode", "loop"), [("steady", "loops"), ("one_shot", "one_shot")])
def test_a_fault_that_strikes_only_together_is_told_of_each_stream(
    mode: str, loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls alone are right, those together are not: every record of a stream in the mix says so, no baseline does."""
    inside: list[bool] = []
    timed = getattr(timing, loop)

    def watched(*arguments: Any) -> Any:
        inside.append(True)
        try:
            return timed(*arguments)
        finally:
            inside.pop()

    monkeypatch.setattr(timing, loop, watched)

    def tamper(delivery: Delivery) -> None:
        if inside and delivery.stream in ("exchange", "other"):
            delivery.receives[1][7] ^= 0x10

    scenario = scenario_of(STREAMS, num_ranks=3, sizes=[SIZE], modes=[mode], budget_s=0.1)
    run_in(SimulatedWorld(truth_of(), 3, tamper=tamper), scenario, tmp_path / "run")
    records = read_records(tmp_path / "run")[0]
    together = [record for record in records if record.kind == "together"]
    assert {record.stream for record in together} >= {"exchange", "other"}
    assert {record.status for record in together} == {"wrong_data"}
    assert all(record.mismatch is not None and record.mismatch.rank == 1 for record in together)
    assert all(
        record.mismatch.stream == record.stream for record in together if record.mismatch and record.stream != "*"
    )
    assert {record.slowdown for record in together} == {None}
    assert {record.status for record in records if record.kind == "alone"} == {"ok"}


def test_checks_are_counted_for_the_stream_that_made_the_calls(tmp_path: Path) -> None:
    """Alone: probe, pilot and perhaps a rest. One-shot: each kind once, and the last call of each stream."""
    scenario = scenario_of(STREAMS, num_ranks=3, sizes=[SIZE], budget_s=0.1)
    run_in(SimulatedWorld(truth_of(), 3), scenario, tmp_path / "run")
    records = read_records(tmp_path / "run")[0]
    assert {record.num_verified_calls for record in records if record.mode is None} <= {2, 3}
    for name in ("exchange", "other"):
        shots = [record for record in records if record.mode == "one_shot" and record.stream == name]
        assert sorted(record.num_verified_calls for record in shots) == [1, 2]
        loops = [record for record in records if record.mode == "steady" and record.stream == name]
        assert len({record.num_verified_calls for record in loops}) == 1
