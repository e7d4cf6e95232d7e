"""Clocks found against simulated truth: offsets and drifts lie within the stated error, and the error is not idle."""

import numpy as np
import pytest

from crosstraffic.bench.clocks import MAX_DRIFT, Clocks, model_of_rounds, synchronise
from crosstraffic.bench.simulated import SimulatedTransport, run_simulated
from crosstraffic.bench.simulated_truth import SimulatedTruth, Tier
from crosstraffic.bench.simulated_world import SimulatedWorld
from crosstraffic.results.record import ClockModel

TIER = Tier(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
NUM_RANKS = 5
LATENCY_S = 5e-6


def truth_of(seed: int, **changes: object) -> SimulatedTruth:
    rng = np.random.default_rng(seed)
    values: dict[str, object] = {
        "ranks_per_node": 2,
        "intra": TIER,
        "inter": TIER,
        "seed": seed,
        "control_latency_s": LATENCY_S,
        "clock_offset_s": {rank: float(rng.choice([-5e-3, 5e-3])) for rank in range(NUM_RANKS)},
        "clock_drift": {rank: float(rng.uniform(-5e-5, 5e-5)) for rank in range(NUM_RANKS)},
        **changes,
    }
    return SimulatedTruth(**values)  # type: ignore[arg-type]


def measured(known: SimulatedTruth, num_syncs: int, gap_s: float, num_rounds: int = 20, num_ranks: int = 5) -> Clocks:
    def body(transport: SimulatedTransport) -> Clocks | None:
        clocks = None
        for index in range(num_syncs):
            transport.sleep(gap_s if index else 0.0)
            transport.barrier()
            models = synchronise(transport, num_rounds)
            if models is not None:
                clocks = Clocks(syncs=(tuple(models),)) if clocks is None else clocks.with_sync(models)
        return clocks

    clocks = run_simulated(SimulatedWorld(known, num_ranks), body)[0]
    assert clocks is not None
    return clocks


def shown(known: SimulatedTruth, rank: int, time_s: np.ndarray) -> np.ndarray:
    return time_s * (1 + known.clock_drift.get(rank, 0.0)) + known.clock_offset_s.get(rank, 0.0)


def worst_share(known: SimulatedTruth, clocks: Clocks, times_s: np.ndarray) -> float:
    """Return the largest |error made| / |error stated|."""
    worst = 0.0
    for rank in range(clocks.num_ranks):
        local_s = shown(known, rank, times_s)
        wrong_s = np.abs(clocks.to_reference(rank, local_s) - shown(known, 0, times_s))
        stated_s = np.array([clocks.error_s(rank, float(at_s)) for at_s in local_s])
        if rank == 0:
            assert not wrong_s.any()
            assert not stated_s.any()
            continue
        worst = max(worst, float((wrong_s / stated_s).max()))
    return worst


ROUGH = [
    pytest.param({}, id="quiet"),
    pytest.param({"ping_jitter_s": (5e-6, 5e-6)}, id="jitter"),
    pytest.param({"ping_jitter_s": (2e-5, 1e-6)}, id="jitter one way"),
    pytest.param({"ping_extra_s": (0.0, 2e-5)}, id="asymmetric"),
    pytest.param({"ping_extra_s": (2e-5, 0.0), "ping_jitter_s": (1e-6, 2e-5)}, id="asymmetric with jitter"),
    pytest.param({"straggler_s": {2: 1e-4}}, id="straggler"),
]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("changes", ROUGH)
def test_offset_and_drift_lie_within_the_stated_error(seed: int, changes: dict[str, object]) -> None:
    known = truth_of(seed, **changes)
    clocks = measured(known, num_syncs=6, gap_s=10.0)
    assert worst_share(known, clocks, np.linspace(0.0, 80.0, 33)) <= 1


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("changes", ROUGH)
@pytest.mark.parametrize(("num_syncs", "gap_s"), [(1, 0.0), (2, 1e-3), (4, 1e-2)], ids=["one", "close", "short"])
def test_few_or_close_syncs_are_honest_too(seed: int, changes: dict[str, object], num_syncs: int, gap_s: float) -> None:
    known = truth_of(seed, **changes)
    clocks = measured(known, num_syncs=num_syncs, gap_s=gap_s)
    assert worst_share(known, clocks, np.linspace(0.0, 20.0, 33)) <= 1


@pytest.mark.parametrize("changes", ROUGH)
def test_the_stated_error_is_no_more_than_a_few_round_trips(changes: dict[str, object]) -> None:
    for seed in range(8):
        known = truth_of(seed, **changes)
        smallest_s = 2 * LATENCY_S + sum(known.ping_extra_s) + 2 * max(known.straggler_s.values(), default=0.0)
        clocks = measured(known, num_syncs=6, gap_s=10.0)
        last_s = max(model.at_s for model in clocks.syncs[-1])
        for rank in range(1, NUM_RANKS):
            for at_s in (clocks.syncs[0][rank].at_s, clocks.syncs[3][rank].at_s, last_s):
                assert clocks.error_s(rank, at_s) <= 3 * (smallest_s + sum(known.ping_jitter_s))


def test_drift_is_found() -> None:
    known = truth_of(3)
    clocks = measured(known, num_syncs=4, gap_s=30.0)
    for model in clocks.models()[1:]:
        expected = (1 + known.clock_drift[0]) / (1 + known.clock_drift[model.rank]) - 1
        assert model.drift == pytest.approx(expected, abs=1e-6)
        last_s = clocks.syncs[-1][model.rank].at_s
        later_s = np.array([last_s + 10.0])
        line_s = later_s + model.offset_s + model.drift * (later_s - model.at_s)
        assert clocks.to_reference(model.rank, later_s) == pytest.approx(line_s, abs=1e-9)


def test_the_error_grows_with_the_distance_from_the_last_sync() -> None:
    for clocks in (measured(truth_of(1), 1, 0.0), measured(truth_of(1), 4, 10.0)):
        last_s = clocks.syncs[-1][1].at_s
        errors = [clocks.error_s(1, last_s + ahead_s) for ahead_s in (0, 1, 10, 100, 1000)]
        assert errors == sorted(set(errors))


def test_one_sync_says_how_little_is_known_of_the_drift() -> None:
    clocks = measured(truth_of(1), 1, 0.0)
    at_s = clocks.syncs[0][1].at_s
    assert clocks.error_s(1, at_s + 10) == pytest.approx(clocks.error_s(1, at_s) + 10 * MAX_DRIFT)


def test_a_clock_that_was_set_in_mid_run_widens_the_error() -> None:
    clocks = measured(truth_of(2), num_syncs=4, gap_s=10.0)
    jumped = clocks.syncs[-1][1].model_copy(update={"offset_s": clocks.syncs[-1][1].offset_s + 1e-3})
    spoiled = Clocks(syncs=(*clocks.syncs[:-1], (clocks.syncs[-1][0], jumped, *clocks.syncs[-1][2:])))
    assert spoiled.error_s(1, jumped.at_s) > 1e-4
    assert spoiled.error_s(2, jumped.at_s) < 1e-4


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 8])
def test_few_rounds_suffice_for_many_ranks(num_rounds: int) -> None:
    known = truth_of(0, ping_jitter_s=(5e-6, 1e-5))
    clocks = measured(known, num_syncs=2, gap_s=10.0, num_rounds=num_rounds, num_ranks=200)
    assert worst_share(known, clocks, np.linspace(0.0, 12.0, 7)) <= 1


def test_a_lone_rank_is_the_reference() -> None:
    clocks = measured(truth_of(0), num_syncs=2, gap_s=1.0, num_ranks=1)
    assert clocks.to_reference(0, [1.0, 2.0]).tolist() == [1.0, 2.0]
    assert clocks.models()[0].error_s == 0


def test_shapes_are_kept() -> None:
    for clocks in (measured(truth_of(0), 1, 0.0), measured(truth_of(0), 3, 1e-3), measured(truth_of(0), 3, 10.0)):
        for shape in ((), (3,), (2, 3)):
            assert clocks.to_reference(1, np.ones(shape)).shape == shape


def test_the_smallest_round_trip_decides() -> None:
    model = model_of_rounds(1, [(0.0, 10.9, 1.0), (1.0, 11.1, 1.2), (2.0, 12.5, 2.6)])
    assert (model.offset_s, model.at_s) == pytest.approx((-10.0, 11.1))
    assert model.error_s == pytest.approx(0.1)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_rounds must be at least 1: 0"):
        run_simulated(SimulatedWorld(truth_of(0), 1), lambda transport: synchronise(transport, 0))
    with pytest.raises(ValueError, match="at least one sync"):
        Clocks(syncs=())
    model = ClockModel(rank=0, offset_s=0, drift=0, at_s=0, error_s=0)
    with pytest.raises(ValueError, match=r"all of the same ranks: sizes \[1, 2\]"):
        Clocks(syncs=((model,), (model, model)))
