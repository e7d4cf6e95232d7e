from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from crosstraffic.results.statistics import (
    block_median_interval,
    median_interval,
    num_warmup,
    ratio_interval,
    relative_half_width,
    samples_needed,
    summarise,
)

Draw = Callable[[np.random.Generator, int], np.ndarray]


def bimodal(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.3, rng.lognormal(0.7, 0.1, n), rng.lognormal(0, 0.1, n))


def bimodal_median() -> float:
    grid = np.linspace(0.8, 1.4, 200_001)
    share = 0.3 * stats.lognorm(0.1, scale=np.exp(0.7)).cdf(grid) + 0.7 * stats.lognorm(0.1).cdf(grid)
    return float(grid[np.searchsorted(share, 0.5)])


DRAWS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, n: rng.normal(10, 1, n), 10.0),
    "lognormal": (lambda rng, n: rng.lognormal(0, 0.5, n), 1.0),
    "bimodal": (bimodal, bimodal_median()),
}


@pytest.mark.parametrize("n", [6, 10, 17, 30, 100, 400])
@pytest.mark.parametrize("name", DRAWS)
def test_the_interval_of_the_median_covers_95_in_100(name: str, n: int) -> None:
    draw, truth = DRAWS[name]
    rng = np.random.default_rng(n)
    found = [median_interval(draw(rng, n)) for _ in range(4000)]
    assert 0.93 <= np.mean([low <= truth <= high for low, high in found if low <= high]) <= 0.97


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.99])
def test_other_levels_are_kept_too(level: float) -> None:
    rng = np.random.default_rng(7)
    found = [median_interval(rng.lognormal(0, 0.3, 40), level) for _ in range(8000)]
    assert np.mean([low <= 1 <= high for low, high in found]) == pytest.approx(level, abs=0.02)


@pytest.mark.parametrize(("first", "target"), [(10, 0.03), (20, 0.03), (20, 0.05), (30, 0.02)])
@pytest.mark.parametrize("name", DRAWS)
def test_a_two_stage_stop_keeps_the_coverage(name: str, first: int, target: float) -> None:
    draw, truth = DRAWS[name]
    rng = np.random.default_rng(first)
    hits = []
    for _ in range(4000):
        samples = draw(rng, first)
        more = min(samples_needed(samples, target) or first, 400) - first
        low, high = median_interval(np.concatenate([samples, draw(rng, more)]))
        hits.append(low <= truth <= high)
    assert 0.93 <= np.mean(hits) <= 0.97


@pytest.mark.parametrize("n", [60, 100, 200, 400])
@pytest.mark.parametrize("memory", [-0.4, 0.0, 0.5])
def test_the_block_interval_covers_when_calls_depend_on_each_other(memory: float, n: int) -> None:
    rng = np.random.default_rng(n)
    hits = []
    for _ in range(2000):
        noise = rng.normal(0, 1, n + 50)
        for index in range(1, n + 50):
            noise[index] += memory * noise[index - 1]
        low, high = block_median_interval(np.exp(0.3 * noise[50:]))
        hits.append(low <= 1 <= high)
    assert 0.93 <= np.mean(hits) <= 0.97


def test_blocks_are_wider_than_independence_where_calls_depend_and_no_wider_where_they_do_not() -> None:
    rng = np.random.default_rng(1)
    walk = np.exp(np.cumsum(rng.normal(0, 0.02, 300)))
    assert relative_half_width(walk, dependent=True) > 2 * relative_half_width(walk)


@pytest.mark.parametrize(("together", "alone"), [(10, 10), (10, 40), (50, 50)])
@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_the_interval_of_a_ratio_covers_95_in_100(together: int, alone: int, spread: float) -> None:
    rng = np.random.default_rng(together)
    hits = []
    for _ in range(1200):
        found = ratio_interval(2 * rng.lognormal(0, spread, together), rng.lognormal(0, spread, alone))
        hits.append(found.low <= 2 <= found.high)
    assert 0.925 <= np.mean(hits) <= 0.975


def test_ratios_of_too_few_or_constant_samples() -> None:
    assert ratio_interval([2.0], [1.0, 1.0]).low is None
    assert ratio_interval([2.0] * 5, [1.0] * 5).high == pytest.approx(2.0)
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([0.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="alone"):
        ratio_interval([1.0], [])


@pytest.mark.parametrize(
    ("n", "absent"),
    [
        pytest.param(0, {"median_s", "low_s", "mean_s", "p05_s", "p99_s"}, id="none"),
        pytest.param(5, {"low_s", "high_s", "p05_s", "p95_s", "p99_s"}, id="5"),
        pytest.param(19, {"p05_s", "p95_s", "p99_s"}, id="19"),
        pytest.param(99, {"p99_s"}, id="99"),
        pytest.param(100, set(), id="100"),
    ],
)
def test_a_summary_says_only_what_so_many_samples_can_tell(n: int, absent: set[str]) -> None:
    found = summarise(np.arange(n, dtype=float) + 1)
    fields = ("median_s", "low_s", "high_s", "mean_s", "p05_s", "p95_s", "p99_s")
    missing = {name for name in fields if getattr(found, name) is None}
    assert absent <= missing
    assert bool(missing) == bool(absent)
    assert found.num_samples == n


def test_intervals_do_not_depend_on_order_and_scale_with_the_unit() -> None:
    rng = np.random.default_rng(3)
    samples = rng.lognormal(0, 1, 50)
    low, high = median_interval(samples)
    assert median_interval(rng.permutation(samples)) == (low, high)
    assert median_interval(samples * 1e-6) == pytest.approx((low * 1e-6, high * 1e-6))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_times_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        summarise([1.0, value])


@pytest.mark.parametrize("slow", [1, 3, 10])
def test_a_slow_head_is_found(slow: int) -> None:
    rng = np.random.default_rng(slow)
    found = [num_warmup(np.concatenate([rng.lognormal(0.8, 0.1, slow), rng.lognormal(0, 0.1, 80)])) for _ in range(200)]
    assert np.mean([slow <= count <= slow + 4 for count in found]) > 0.95


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("n", [10, 20, 100, 400])
def test_no_warm_up_is_seen_where_there_is_none(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    found = np.array([num_warmup(DRAWS[name][0](rng, n)) for _ in range(500)])
    assert (found == 0).mean() > 0.9
    assert found.max() <= min(n // 4, 50)


def test_a_run_that_only_gets_slower_loses_nothing() -> None:
    assert num_warmup(np.linspace(1, 5, 100)) == 0
    assert num_warmup(np.linspace(5, 1, 100)) <= 25
