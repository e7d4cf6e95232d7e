"""A known world must be found again: bandwidths within 1 %, latencies within 5 %, times together within 3 %."""

import itertools

import numpy as np
import pytest

from crosstraffic.costmodel.calls import alone
from crosstraffic.costmodel.fit import fit_alone, fit_runs
from crosstraffic.costmodel.model import Model, load, save
from crosstraffic.costmodel.predict import CURVE_COLUMNS, RECORD_COLUMNS, curves, predict_records
from crosstraffic.costmodel.validate import validate_runs
from crosstraffic.errors import UsageError


@pytest.fixture(scope="module")
def exact_model(exact_run):
    return fit_runs([exact_run])


def test_links_and_latencies_of_a_world_are_found(exact_model, world):
    for solo in exact_model.solo.values():
        assert set(solo.links) == set(world.bandwidth)
        for name, truth in world.bandwidth.items():
            assert solo.links[name].measured
            assert solo.links[name].bandwidth_bytes_per_s == pytest.approx(truth, rel=0.01)
        assert solo.latency_s["intra"] == pytest.approx(world.latency[0], rel=0.05)
        assert solo.latency_s["inter"] == pytest.approx(world.latency[1], rel=0.05)


def test_every_record_is_predicted(exact_model, exact_run):
    frame = predict_records(exact_model, exact_run)
    assert tuple(frame.columns) == RECORD_COLUMNS
    assert len(frame) == len(exact_run.frame)
    error = np.abs(frame["predicted_s"] / frame["measured_s"] - 1)
    assert error[frame["kind"] == "alone"].max() < 0.01
    assert error[frame["kind"] == "together"].max() < 0.03
    assert error[frame["kind"] == "step"].max() < 0.01
    assert set(frame.loc[frame["mix"].map(len) == 3, "held_out"]) == {True}
    assert not frame.loc[frame["kind"] == "alone", "held_out"].any()


def test_plain_sharing_stays_plain(exact_model):
    factors = exact_model.contention
    assert max(factors.host_intensity.values()) < 0.01
    assert factors.weight.values() == pytest.approx([1.0] * len(factors.weight), abs=0.02)
    assert factors.thread_intensity < 0.01
    assert factors.crowding < 0.01
    assert abs(factors.message_exponent) < 0.01


def test_curves_grow_with_size(exact_model, exact_run):
    frame = curves(exact_model, exact_run)
    assert tuple(frame.columns) == CURVE_COLUMNS
    for _, curve in frame.groupby(["stream", "cadence"]):
        assert curve["payload_bytes"].is_monotonic_increasing
        assert (curve["predicted_s"].diff().dropna() > 0).all()
        assert (curve["low_s"] < curve["predicted_s"]).all()
        assert (curve["predicted_s"] < curve["high_s"]).all()


def test_a_shared_port_is_told_from_one_port_a_tier(lab, tmp_path):
    """The other machine: one port carries what stays and what leaves; then the fit picks port and nic."""

    class SharedPort(lab.World):
        def resources(self, one, size, group):
            found = {}
            for (kind, way, index), value in super().resources(one, size, group).items():
                key = (kind, way, index) if kind == "nic" else ("port", way, index)
                scale = 1.0 if kind == "nic" else self.bandwidth[kind] / self.bandwidth["port"]
                found[key] = found.get(key, 0.0) + value * scale
            return found

    truth = {"intra": 1e9, "inter": 1e9, "port": 8e9, "nic": 9e9}
    world = SharedPort(bandwidth=truth)
    run = lab.write_run(tmp_path / "run", world.nodes, lab.streams(), lab.alone_records(world, lab.streams()))
    solo = fit_alone([run]).solo["isolated"]
    assert set(solo.links) == {"port", "nic"}
    assert solo.links["port"].bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.01)
    assert solo.links["nic"].bandwidth_bytes_per_s == pytest.approx(9e9, rel=0.01)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 7])
def test_prime_group_sizes(lab, tmp_path, num_ranks):
    world = lab.World(nodes=(0,) * num_ranks)
    group = (tuple(range(num_ranks)),)
    streams = (lab.stream("a", "all_reduce", group), lab.stream("b", "all_to_all", group))
    run = lab.write_run(tmp_path / "run", world.nodes, streams, lab.alone_records(world, streams))
    solo = fit_alone([run]).solo["streaming"]
    assert solo.latency_s == pytest.approx({"intra": world.latency[0]}, rel=0.05)
    assert solo.links["port"].bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.01)


def test_model_survives_its_file(exact_model, tmp_path):
    path = save(exact_model, tmp_path / "model.json")
    assert load(path) == exact_model
    assert isinstance(load(path), Model)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no model file"), ("{", "not a model"), ('{"schema_version": 2}', "not a model of schema version 1")],
    ids=["missing", "torn", "version"],
)
def test_a_file_that_is_no_model_is_refused(tmp_path, content, message):
    path = tmp_path / "model.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load(path)


def test_intervals_hold_nine_of_ten_new_measurements(lab, tmp_path):
    held = total = 0
    for seed in range(6):
        world = lab.World(noise=0.05, seed=seed)
        streams = lab.streams()[:4]
        run = lab.write_run(
            tmp_path / f"run{seed}",
            world.nodes,
            streams,
            lab.alone_records(world, streams, repeats=2),
            run_id=f"r{seed}",
        )
        model = fit_alone([run])
        for one, size in itertools.product(streams, lab.SIZES[1:-1]):
            payload = 3 * size  # between the measured sizes
            guess = alone(model, one.name, payload, "isolated")
            fresh = world.seen(world.alone(one, payload))
            held += guess.low_s <= fresh <= guess.high_s
            total += 1
    assert 0.84 <= held / total <= 0.96


def test_knees_are_followed_and_the_error_is_reported(lab, tmp_path, capsys):
    """Times of a machine that changes protocol: x1.6 from 8 KiB on, x0.8 from 1 MiB on, with noise."""

    def knee(name, size):
        return (1.6 if size >= 8192 else 1.0) * (0.8 if size >= 2**20 else 1.0)

    world = lab.World(nodes=(0, 0, 0, 0), knee=knee, noise=0.02)
    streams = lab.streams()
    sizes = tuple(2**power for power in range(6, 25))
    run = lab.write_run(
        tmp_path / "run", world.nodes, streams, lab.alone_records(world, streams, sizes=sizes, repeats=2)
    )
    found = validate_runs([run], "sizes")
    with capsys.disabled():
        print()
        for name, row in found["models"].items():
            print(f"  every other size, {name}: median {row['median_ape']:.1%}, P90 {row['p90_ape']:.1%}")
    ours = found["models"]["ours"]
    assert ours["median_ape"] < found["models"]["alpha_beta"]["median_ape"]
    assert ours["median_ape"] < 0.05
    assert 0.8 <= ours["coverage_90"] <= 1.0


def test_a_stream_with_few_sizes_is_left_out_and_named(lab, tmp_path, world):
    streams = lab.streams()[:2]
    records = lab.alone_records(world, streams[:1])
    records += lab.alone_records(world, streams[1:], sizes=(64, 4096))
    model = fit_runs([lab.write_run(tmp_path / "run", world.nodes, streams, records)])
    assert any("dp.all_reduce" in note and "2 distinct sizes" in note for note in model.notes)
    with pytest.raises(ValueError, match=r"no times for stream dp.all_reduce: 2 distinct sizes"):
        alone(model, "dp.all_reduce", 64, "isolated")


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([(64, 1e-5)], "1 distinct sizes"),
        ([(64, 1e-5), (4096, 2e-5)], "2 distinct sizes"),
        ([(64, 1e-5), (4096, -2e-5), (65536, 1e-4)], "must be positive: -2e-05"),
        ([(64, 1e-5), (4096, 0.0), (65536, 1e-4)], "must be positive: 0.0"),
        ([(64, 1e-5), (4096, 2e-5), (65536, 1e-4), (65536, 1e-2)], "contradictory times at 65536 bytes"),
        ([(64, 1e-3), (4096, 1e-4), (65536, 1e-5)], "contradictory times: 1e-05 s at 65536 bytes"),
        ([], "no usable records"),
    ],
    ids=["one size", "too few points", "negative", "zero", "contradictory repeats", "faster when larger", "nothing"],
)
def test_what_cannot_be_fitted_is_refused(lab, tmp_path, times, message):
    one = lab.streams()[0]
    records = [
        lab.timed(
            abs(time_s) or 1.0, stream=one.name, payload_bytes=size, cadence="isolated", point=f"p{index}"
        ).model_copy(update={"time_median_s": time_s})
        for index, (size, time_s) in enumerate(times)
    ]
    run = lab.write_run(tmp_path / "run", (0, 0, 1, 1), (one,), records)
    with pytest.raises(ValueError, match=message):
        fit_runs([run])


def test_records_that_failed_do_not_count(lab, tmp_path, world):
    one = lab.streams()[0]
    good = lab.alone_records(world, (one,))
    bad = [
        record.model_copy(update={"status": "invalid", "time_median_s": 9.0, "point": f"bad{record.point}"})
        for record in good
    ]
    clean = fit_alone([lab.write_run(tmp_path / "a", world.nodes, (one,), good)])
    mixed = fit_alone([lab.write_run(tmp_path / "b", world.nodes, (one,), good + bad)])
    assert mixed.solo == clean.solo


def test_runs_of_other_places_are_not_mixed(lab, tmp_path, world):
    one = lab.streams()[0]
    here = lab.write_run(tmp_path / "a", (0, 0, 1, 1), (one,), lab.alone_records(world, (one,)))
    there = lab.write_run(tmp_path / "b", (0, 0, 0, 0), (one,), lab.alone_records(world, (one,)), run_id="r2")
    with pytest.raises(ValueError, match="same ranks on the same nodes"):
        fit_runs([here, there])


def test_outside_the_measured_sizes_is_flagged_and_wider(exact_model):
    inside = alone(exact_model, "dp.all_reduce", 65536, "isolated")
    outside = alone(exact_model, "dp.all_reduce", 2**28, "isolated")
    assert inside.valid
    assert inside.why is None
    assert not outside.valid
    assert "outside the measured" in str(outside.why)
    assert outside.high_s / outside.time_s >= inside.high_s / inside.time_s
