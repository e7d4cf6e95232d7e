"""The residual follows data, fades away from them, and knows how sure it is."""

import numpy as np
import pytest

from crosstraffic.costmodel.residual import (
    Process,
    calibrate,
    conformal_quantile,
    fit_process,
    gather,
    leave_one_out,
    predict,
    repeat_noise,
)

PROCESS = Process(amplitude=0.3, length_octaves=3.0, noise=0.01)


def curve(y, x=None, visits=1, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    at = np.arange(len(y), dtype=float) if x is None else np.asarray(x, dtype=float)
    xs, ys = np.tile(at, visits), np.tile(np.asarray(y, dtype=float), visits)
    return gather(xs, ys + noise * random.standard_normal(len(xs)), np.zeros(len(xs)))


def test_visits_of_a_size_are_merged_to_their_median():
    merged = gather(np.array([1.0, 2.0, 1.0, 1.0]), np.array([0.1, 0.5, 0.2, 9.0]), np.zeros(4))
    assert merged.x.tolist() == [1.0, 2.0]
    assert merged.y.tolist() == [0.2, 0.5]
    assert merged.count.tolist() == [3.0, 1.0]


def test_a_step_is_followed_between_its_points():
    mean, _ = predict(PROCESS, curve([0, 0, 0, 0.5, 0.5, 0.5]), np.array([1.5, 4.5]))
    assert mean == pytest.approx([0.0, 0.5], abs=0.03)


def test_it_fades_to_nothing_away_from_data_and_grows_unsure():
    mean, spread = predict(PROCESS, curve([0.4, 0.4, 0.4]), np.array([2.0, 5.0, 60.0]))
    assert mean[0] == pytest.approx(0.4, abs=0.02)
    assert abs(mean[2]) < 1e-6
    assert spread[0] < spread[1] < spread[2] == pytest.approx(0.3, rel=0.01)


def test_leave_one_out_is_that_of_refitting():
    whole = curve([0.1, -0.2, 0.3, 0.0, 0.2])
    errors, spreads = leave_one_out(PROCESS, whole)
    for place in range(5):
        others = [index for index in range(5) if index != place]
        mean, spread = predict(PROCESS, curve(whole.y[others], others), np.array([float(place)]))
        assert errors[place] == pytest.approx(whole.y[place] - mean[0])
        assert spreads[place] == pytest.approx(spread[0])


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.3])
def test_noise_between_visits_is_found(noise):
    curves = [curve(np.zeros(20), visits=3, noise=noise, seed=seed) for seed in range(5)]
    assert repeat_noise(curves) == pytest.approx(noise, rel=0.2)
    assert fit_process(curves)[0].amplitude <= noise


def test_without_repeats_nothing_is_said_of_noise():
    assert repeat_noise([curve([0.1, 0.2, 0.3])]) is None


def test_one_wild_point_does_not_bend_the_curve():
    values = np.zeros(15)
    values[7] = 3.0
    calm = [curve(np.zeros(15), visits=2, noise=0.02, seed=seed) for seed in range(4)]
    process, doubted = fit_process([*calm, curve(values, visits=2, noise=0.02)])
    mean, _ = predict(process, doubted[-1], np.array([7.0]))
    assert abs(mean[0]) < 0.3


def test_calibrated_deviations_hold_nine_of_ten():
    curves = [curve(np.zeros(25), noise=0.1, seed=seed) for seed in range(8)]
    process, doubted = fit_process(curves)
    factor = calibrate(process, doubted)
    errors = [leave_one_out(process, one) for one in doubted]
    held = np.concatenate([np.abs(error) <= factor * spread for error, spread in errors])
    assert 0.88 <= held.mean() <= 0.94


def test_few_scores_give_no_false_confidence():
    assert conformal_quantile(np.array([])) == pytest.approx(1.645)
    assert conformal_quantile(np.array([0.1, 0.2])) == pytest.approx(1.645)
