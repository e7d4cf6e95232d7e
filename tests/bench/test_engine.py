"""A plan carried out: what is kept when, attempts that were disturbed, memory, interruption and resume."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_runs import STREAMS, run_in, scenario_of, truth_of

from crosstraffic.bench.engine import Outcome, run_plan
from crosstraffic.bench.plan import make_plan
from crosstraffic.bench.resolve import Scenario
from crosstraffic.bench.session import begin, end_early, late_ranks, run_rank, take_up
from crosstraffic.bench.simulated import SimulatedTransport, SimulatedWorld, run_simulated
from crosstraffic.errors import UsageError
from crosstraffic.results.record import Place, Record
from crosstraffic.results.store import RunFolder, load_run, read_records, read_run_info

POINTS = 4  # alone: one size, two cadences, twice


def small(**measure: object) -> Scenario:
    return scenario_of(STREAMS[:1], sizes=[2**20], budget_s=0.2, **measure)


class Hearts:
    """Hearts of all ranks: asks to stop once so many points are done."""

    def __init__(self, stop_after: int | None = None) -> None:
        self._stop_after = stop_after
        self.shown: list[tuple[int, int]] = []
        self._stop = threading.Event()

    def call(self, point: int, stream: int, call: int) -> None:
        """Nobody watches."""

    def progress(self, done: int, total: int, seconds_left: float) -> None:
        self.shown.append((done, total))
        if self._stop_after is not None and done >= self._stop_after:
            self._stop.set()

    def should_stop(self) -> bool:
        return self._stop.is_set()


def measure(folder: Path, hearts: Hearts, **world: object) -> None:
    session = take_up(folder)
    known = [Place(rank=r, host="n", pid=r, node=r // 2, cpus=(), device=None, nic=None) for r in range(4)]
    quiet = Hearts()

    def body(transport: SimulatedTransport) -> None:
        run_rank(session, transport, quiet if transport.rank else hearts, known=known)

    run_simulated(SimulatedWorld(truth_of(**world), 4), body)


def begun(folder: Path, scenario: Scenario, *, resume: bool = False) -> None:
    begin(scenario, make_plan(scenario), transport_name="simulated", folder=folder, command=["t"], resume=resume)


def test_an_interrupted_run_keeps_its_points_and_resume_does_the_rest(tmp_path: Path) -> None:
    scenario = scenario_of(STREAMS[:2], sizes=[2**16], budget_s=0.5)
    total = len(make_plan(scenario))
    begun(tmp_path / "run", scenario)
    measure(tmp_path / "run", Hearts(stop_after=5))
    info, first = read_run_info(tmp_path / "run"), read_records(tmp_path / "run")[0]
    done = {record.point for record in first}
    assert info.status == "interrupted"
    assert info.why == f"interrupted after {len(done)} of {total} points"
    assert 5 <= len(done) <= 7
    assert {record.status for record in first} == {"ok"}

    begun(tmp_path / "run", scenario, resume=True)
    hearts = Hearts()
    measure(tmp_path / "run", hearts)
    run, after = load_run(tmp_path / "run"), read_records(tmp_path / "run")[0]
    assert run.info.status == "complete"
    assert after[: len(first)] == first
    assert {record.point for record in after} == {point.key for point in make_plan(scenario)}
    assert done.isdisjoint(record.point for record in after[len(first) :])
    assert hearts.shown[-1] == (total - len(done), total - len(done))


def test_a_resumed_run_names_the_rank_that_was_late_in_all_of_it(tmp_path: Path) -> None:
    scenario = scenario_of(STREAMS[:1], num_sizes=4, budget_s=1.0)
    begun(tmp_path / "run", scenario)
    measure(tmp_path / "run", Hearts(stop_after=7), straggler_s={3: 2e-3})
    (before,) = read_run_info(tmp_path / "run").late_ranks
    begun(tmp_path / "run", scenario, resume=True)
    measure(tmp_path / "run", Hearts(), straggler_s={3: 2e-3})
    (late,) = read_run_info(tmp_path / "run").late_ranks
    assert (before.rank, late.rank) == (3, 3)
    assert late.num_records > before.num_records


def test_one_point_of_many_names_nobody(tmp_path: Path) -> None:
    run_in(SimulatedWorld(truth_of(), 4), small(), tmp_path / "run")
    records = [record for record in read_records(tmp_path / "run")[0] if record.cadence == "isolated"]
    once = [records[0].model_copy(update={"late_rank": 1, "late_s": 1.0, "late_share": 1.0})] * 2 + records * 3
    assert late_ranks(once) == ()
    assert [late.rank for late in late_ranks(once[:2] + records[:1])] == [1]


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What share of the processors the ranks had in each attempt, in order; then all of them."""
    planned: list[float] = []

    def scripted() -> Iterator[float]:
        while True:
            yield planned.pop(0) if planned else 1.0

    source = scripted()

    class Watch:
        def __init__(self, transport: SimulatedTransport) -> None:
            self._is_root = transport.rank == 0

        def share(self, num_processors: int | None) -> float | None:
            return next(source) if self._is_root else None

    monkeypatch.setattr("crosstraffic.bench.engine.Stopwatch", Watch)
    return planned


@pytest.mark.parametrize(
    ("planned", "kept", "num_lines"),
    [
        pytest.param([1.0, 1.0], [1.0] * POINTS, POINTS, id="never"),
        pytest.param([0.5], [1.0] * POINTS, POINTS + 1, id="once"),
        pytest.param([0.5, 1.0, 1.0, 1.0, 0.6, 1.0], [1.0] * POINTS, POINTS + 2, id="twice, the second time less"),
        pytest.param([0.5, 1.0, 1.0, 1.0, 0.4, 0.3], [0.5, 1.0, 1.0, 1.0], POINTS, id="the first attempt was the best"),
    ],
)
def test_disturbed_points_are_measured_again_and_the_best_attempt_is_kept(
    shares: list[float], planned: list[float], kept: list[float], num_lines: int, tmp_path: Path
) -> None:
    shares += planned
    run = run_in(SimulatedWorld(truth_of(), 4), small(), tmp_path / "run")
    records = read_records(tmp_path / "run")[0]
    assert sorted(record.processor_share or 0.0 for record in records) == sorted(kept)
    assert len({record.point for record in records}) == len(records) == POINTS
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert len(lines) == num_lines
    assert run.info.status == "complete"
    assert run.info.measured_s == pytest.approx(sum(record.measured_s for record in records))


def test_a_disturbed_point_is_in_the_folder_before_it_is_measured_again(shares: list[float], tmp_path: Path) -> None:
    """Ranks can die meanwhile: what was measured is not held back for a better attempt."""
    shares += [0.5] * POINTS
    folder, seen = tmp_path / "run", []

    class Reader(Hearts):
        def progress(self, done: int, total: int, seconds_left: float) -> None:
            seen.append(len(read_records(folder)[0]))

    begun(folder, small())
    measure(folder, Reader())
    assert seen[: POINTS + 1] == list(range(POINTS + 1))
    assert seen[-1] == POINTS
    assert len(seen) == 2 * POINTS + 1


def test_points_that_do_not_fit_into_memory_say_so(tmp_path: Path) -> None:
    scenario = scenario_of(STREAMS[:1], sizes=[64, 2**22], cadences=["isolated"], steps=False, budget_s=0.2)
    plan = make_plan(scenario)
    with RunFolder.create(tmp_path / "run", "r") as folder:

        def body(transport: SimulatedTransport) -> Outcome | None:
            return run_plan(
                transport,
                scenario,
                plan,
                nodes=(0, 0, 1, 1),
                heart=Hearts(),
                folder=None if transport.rank else folder,
                available_bytes=2 * 2**22,
            )

        outcome = run_simulated(SimulatedWorld(truth_of(), 4), body)[0]
    assert outcome is not None
    big = [record for record in outcome.records if record.payload_bytes in (2**22, 2**20)]
    assert {record.status for record in big} == {"oom"}
    assert all("bytes of memory are available" in (record.why or "") for record in big)
    assert {record.status for record in outcome.records if record.payload_bytes == 64} == {"ok"}


def test_a_failed_run_keeps_its_records(tmp_path: Path) -> None:
    run_in(SimulatedWorld(truth_of(), 4), small(), tmp_path / "run")
    before: list[Record] = read_records(tmp_path / "run")[0]
    end_early(tmp_path / "run", "failed", "rank 1 was killed")
    info = read_run_info(tmp_path / "run")
    assert (info.status, info.why) == ("failed", "rank 1 was killed")
    assert read_records(tmp_path / "run")[0] == before


def test_a_run_whose_scenario_cannot_be_read_is_not_taken_up(tmp_path: Path) -> None:
    run_in(SimulatedWorld(truth_of(), 4), small(), tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"num_sizes"', '"number_of_sizes"'))
    with pytest.raises(UsageError, match="holds no scenario that this version can read"):
        take_up(tmp_path / "run")
