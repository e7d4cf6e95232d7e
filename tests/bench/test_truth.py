"""What a run over the simulated transport says against what is true there, end to end through the command."""

from pathlib import Path

import numpy as np
import pytest
from simulated_runs import INTER, INTRA, STREAMS, run_in, scenario_of, toml_of, truth_of
from typer.testing import CliRunner

from crosstraffic.bench.simulated_world import SimulatedWorld
from crosstraffic.cli import app
from crosstraffic.costmodel.fit import fit_runs
from crosstraffic.costmodel.model import Model
from crosstraffic.costmodel.predict import predict_records
from crosstraffic.patterns.wire import traffic
from crosstraffic.results.store import Run, load_run

OFFSET_S, LATE_S = 5e-3, 2e-3
NODES = (0, 0, 1, 1)


def run_command(path: Path, scenario: str, *options: str) -> tuple[Run, str]:
    (path / "test.toml").write_text(scenario)
    folder = path / "run"
    asked = ["run", str(path / "test.toml"), "--ranks", "4", "--transport", "simulated", "--output", str(folder)]
    result = CliRunner().invoke(app, [*asked, "--no-report", *options])
    assert result.exit_code == 0, result.output
    return load_run(folder), result.stderr


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """No noise: every time follows from the truth alone."""
    scenario = toml_of(num_sizes=12, budget_s=1.0, triples=1)
    return run_command(tmp_path_factory.mktemp("quiet"), scenario)[0]


@pytest.fixture(scope="module")
def model(quiet: Run) -> Model:
    return fit_runs([quiet])


def test_a_quiet_run_measures_everything(quiet: Run) -> None:
    assert quiet.info.status == "complete"
    assert set(quiet.frame["status"]) == {"ok"}
    swept = quiet.frame[(quiet.frame["kind"] == "alone") & quiet.frame["baseline_of"].isna()]
    for _, sizes in swept.groupby(["stream", "cadence"])["payload_bytes"]:
        assert sizes.nunique() >= 12
    mixes = quiet.frame[quiet.frame["kind"] == "together"].groupby("mode")["mix"].unique()
    for mode in ("steady", "one_shot"):
        assert sorted(map(len, mixes[mode])) == [2] * 6 + [3]


@pytest.mark.parametrize("cadence", ["isolated", "streaming"])
def test_the_model_finds_latencies_and_bandwidths(model: Model, cadence: str) -> None:
    solo = model.solo[cadence]
    assert solo.latency_s["intra"] == pytest.approx(INTRA[0], rel=0.05)
    assert solo.latency_s["inter"] == pytest.approx(INTER[0], rel=0.05)
    assert solo.links["port"].bandwidth_bytes_per_s == pytest.approx(INTRA[1], rel=0.01)
    assert solo.links["nic"].bandwidth_bytes_per_s == pytest.approx(INTER[1], rel=0.01)


@pytest.mark.parametrize(("stream", "cadence"), [("pairs", "isolated"), ("ring", "isolated"), ("pairs", "streaming")])
def test_records_hold_the_true_time(quiet: Run, stream: str, cadence: str) -> None:
    """By hand: one dependent step, then the bytes of the busiest port (pairs) or network card (ring)."""
    rows = quiet.frame[(quiet.frame["stream"] == stream) & (quiet.frame["kind"] == "alone")]
    rows = rows[(rows["cadence"] == cadence) & rows["baseline_of"].isna()]
    for _, row in rows.iterrows():
        moved = traffic(quiet.stream(stream), NODES, int(row["payload_bytes"]))
        if stream == "pairs":
            expected = INTRA[0] + max(moved.egress_bytes.values()) / INTRA[1]
        else:
            expected = INTER[0] + max(moved.node_egress_bytes.values()) / INTER[1]
        assert row["time_median_s"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", ["steady", "one_shot"])
def test_times_together_are_predicted(quiet: Run, model: Model, mode: str) -> None:
    """Pairs were fitted, the triple was not; the record of the whole one-shot is one of them."""
    rows = predict_records(model, quiet)
    rows = rows[(rows["kind"] == "together") & (rows["mode"] == mode)]
    assert sorted(set(rows["mix"].map(len))) == [2, 3]
    error = (rows["predicted_s"] / rows["measured_s"] - 1).abs()
    assert error.max() < 0.03


def test_streams_that_share_a_link_are_slowed_and_the_rest_are_not(quiet: Run) -> None:
    rows = quiet.frame[quiet.frame["kind"] == "together"]
    slow = rows[(rows["mix"] == ("reduce", "ring")) & (rows["stream"] == "ring")]
    assert (slow["slowdown"] > 1.5).all()
    own = rows[(rows["mix"] == ("exchange", "pairs")) & (rows["mode"] == "one_shot") & (rows["stream"] == "pairs")]
    assert own["slowdown"].iloc[0] == pytest.approx(1, abs=0.01)


def test_the_share_of_measured_time_is_that_of_the_records(quiet: Run) -> None:
    info, frame = quiet.info, quiet.frame
    assert info.measured_s is not None
    assert info.wall_s is not None
    assert 0 < info.measured_s <= info.wall_s
    assert info.measured_share == pytest.approx(info.measured_s / info.wall_s)
    assert 0.5 <= info.measured_share <= 1
    one_at_a_time = frame[frame["kind"] != "together"]["measured_s"].sum()
    assert one_at_a_time < info.measured_s <= frame["elapsed_s"].sum() * 1.01
    alone = frame[(frame["kind"] == "alone") & frame["baseline_of"].isna()]
    assert (alone["measured_s"] >= alone["num_samples"] * alone["time_median_s"] * 0.99).all()
    assert (alone["measured_s"] <= alone["elapsed_s"]).all()


def test_an_offset_clock_is_found_within_its_stated_error(tmp_path: Path) -> None:
    scenario = toml_of(
        STREAMS[:1], f"clock_offset_s = {{ 1 = {OFFSET_S} }}\nping_jitter_s = [2e-6, 1e-6]", num_sizes=3, budget_s=0.3
    )
    run, _ = run_command(tmp_path, scenario)
    found = {clock.rank: clock for clock in run.info.clocks}
    assert sorted(found) == [0, 1, 2, 3]
    for rank, offset_s in ((1, -OFFSET_S), (2, 0.0), (3, 0.0)):
        assert abs(found[rank].offset_s - offset_s) <= found[rank].error_s
        assert 0 < found[rank].error_s < 1e-4
    assert not run.info.late_ranks
    rows = run.frame[(run.frame["cadence"] == "isolated") & run.frame["baseline_of"].isna()]
    assert rows.loc[rows["payload_bytes"] == 64, "time_median_s"].max() < OFFSET_S / 50


def test_a_straggler_is_named(tmp_path: Path) -> None:
    scenario = toml_of(STREAMS[:2], f"straggler_s = {{ 2 = {LATE_S} }}", num_sizes=3, budget_s=3.0)
    run, stderr = run_command(tmp_path, scenario)
    (late,) = run.info.late_ranks
    assert late.rank == 2
    assert late.late_s == pytest.approx(LATE_S, rel=0.05)
    assert late.share > 0.9
    assert "rank 2 comes 2 ms late in 100% of the points" in stderr


@pytest.mark.slow
def test_the_interval_covers_the_true_median(tmp_path: Path) -> None:
    """95 times in 100: 300 runs, each with noise of its own; warm-up removal and the stop rule are part of it."""
    streams = [{"name": "reduce", "op": "all_reduce", "payload": 2**18}]
    scenario = scenario_of(
        streams,
        num_ranks=2,
        sizes=[2**18],
        cadences=["isolated"],
        together="none",
        steps=False,
        verify=False,
        budget_s=0.04,
    )
    moved = traffic(scenario.streams[0], (0, 0), 2**18)
    true_s = 2 * INTRA[0] + max(moved.egress_bytes.values()) / INTRA[1]
    covered, lengths = [], []
    for seed in range(300):
        world = SimulatedWorld(truth_of(noise_sigma=0.15, seed=seed), 2, move_bytes=False)
        run = run_in(world, scenario, tmp_path / str(seed))
        for _, row in run.frame.iterrows():
            covered.append(row["time_low_s"] <= true_s <= row["time_high_s"])
            lengths.append(row["num_samples"])
    assert len(covered) == 600  # each run visits the point twice
    assert 0.93 <= np.mean(covered) <= 0.97, f"{np.mean(covered):.3f} with {np.mean(lengths):.0f} calls"
