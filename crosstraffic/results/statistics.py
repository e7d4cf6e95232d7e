"""Statistics of repeated times, with no distribution assumed. Samples are seconds, in the order of the calls."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]

MIN_FOR_INTERVAL = 6  # 1 - 2 * 0.5**6 = 0.969: the fewest samples whose extremes enclose the median 95 times in 100
MIN_FOR_TAILS = 20  # one sample in 20 lies beyond p05 and beyond p95
MIN_FOR_P99 = 100
_MIN_FOR_BLOCKS = 40
_MAX_WARMUP = 50
_WARMUP_Z = 4.0
_SECOND_STAGE_MARGIN = 1.2  # a first stage that looks narrow by chance would stop too early


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Samples in short; what too few samples cannot tell is None."""

    num_samples: int
    median_s: float | None
    low_s: float | None
    high_s: float | None
    mean_s: float | None
    p05_s: float | None
    p95_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of times and its interval; the interval is None where one side has under two samples."""

    ratio: float
    low: float | None
    high: float | None


def _checked(samples: npt.ArrayLike) -> Floats:
    values = np.asarray(samples, dtype=np.float64).ravel()
    if not np.isfinite(values).all():
        raise ValueError(f"samples must be finite: {int((~np.isfinite(values)).sum())} of {values.size} are not")
    return values


def median_interval(samples: npt.ArrayLike, level: float = 0.95) -> tuple[float, float] | None:
    """Return an interval of the median from order statistics, interpolated so that its coverage is close to ``level``.

    None where even the extremes cover less than ``level`` (under 6 samples at 95 %).

    Source: T. P. Hettmansperger and S. J. Sheather, "Confidence intervals based on interpolated order statistics",
    Statistics & Probability Letters 4 (1986), 75-79.

    >>> median_interval([1, 2, 3, 4, 5])
    >>> low, high = median_interval(range(1, 22))
    >>> round(low, 2), round(high, 2)
    (6.67, 15.33)

    Raises:
        ValueError: ``level`` is not between 0 and 1, or a sample is not finite.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1: {level}")
    values = np.sort(_checked(samples))
    n = values.size
    place = _order_place(n, level)
    if place is None:
        return None
    depth, weight = place
    low = (1 - weight) * values[depth - 1] + weight * values[depth]
    high = (1 - weight) * values[n - depth] + weight * values[n - depth - 1]
    return float(low), float(high)


@lru_cache(maxsize=4096)
def _order_place(n: int, level: float) -> tuple[int, float] | None:
    """Return which order statistic bounds the median of n samples, and how far towards the next inner one to go."""
    if n < 2 or 1 - 2 * 0.5**n < level:
        return None
    depth = max(1, int(stats.binom.ppf((1 - level) / 2, n, 0.5)))
    coverage, inner = (1 - 2 * float(stats.binom.cdf(count, n, 0.5)) for count in (depth - 1, depth))
    share = min(max((coverage - level) / (coverage - inner), 0.0), 1.0)
    return depth, (n - depth) * share / (depth + (n - 2 * depth) * share)


def block_median_interval(samples: npt.ArrayLike, level: float = 0.95) -> tuple[float, float] | None:
    """Return an interval of the median of samples that depend on those before them (back-to-back calls).

    The share of samples under the median is averaged over blocks of successive samples; how much the blocks differ
    gives the true variance of that share, and quantiles that far from one half bound the median. Under 40 samples
    there are no blocks worth the name and the samples count as independent.

    Source: batch means of the indicator process; P. Heidelberger and P. A. W. Lewis, "Quantile estimation in
    dependent sequences", Operations Research 32 (1984), 185-209.
    """
    values = _checked(samples)
    n = values.size
    if n < _MIN_FOR_BLOCKS:
        return median_interval(values, level)
    num_blocks = min(20, max(10, n // 20))
    length = n // num_blocks
    under = (values < np.median(values)) + 0.5 * (values == np.median(values))
    means = under[n - num_blocks * length :].reshape(num_blocks, length).mean(axis=1)
    deviation = sqrt(float(means.var(ddof=1)) / num_blocks)
    reach = min(0.5, float(stats.t.ppf(0.5 + level / 2, num_blocks - 1)) * deviation)
    low, high = np.quantile(values, [0.5 - reach, 0.5 + reach], method="hazen")
    return float(low), float(high)


def summarise(samples: npt.ArrayLike, *, dependent: bool = False, level: float = 0.95) -> Summary:
    """Return median, its interval, mean and the quantiles that so many samples can tell.

    ``dependent`` asks for the block interval: streaming and steady samples.

    >>> summarise([3.0, 1.0, 2.0]).median_s, summarise([3.0, 1.0, 2.0]).low_s
    (2.0, None)
    """
    values = _checked(samples)
    n = values.size
    interval = (block_median_interval if dependent else median_interval)(values, level)
    tails = np.quantile(values, [0.05, 0.95]).tolist() if n >= MIN_FOR_TAILS else [None, None]
    return Summary(
        num_samples=n,
        median_s=float(np.median(values)) if n else None,
        low_s=interval[0] if interval else None,
        high_s=interval[1] if interval else None,
        mean_s=float(values.mean()) if n else None,
        p05_s=tails[0],
        p95_s=tails[1],
        p99_s=float(np.quantile(values, 0.99)) if n >= MIN_FOR_P99 else None,
    )


def relative_half_width(samples: npt.ArrayLike, *, dependent: bool = False, level: float = 0.95) -> float | None:
    """Return half the width of the median's interval over the median; None where there is no interval.

    >>> relative_half_width([1.0] * 10)
    0.0
    """
    values = _checked(samples)
    interval = (block_median_interval if dependent else median_interval)(values, level)
    if interval is None:
        return None
    median = float(np.median(values))
    return (interval[1] - interval[0]) / (2 * median) if median > 0 else None


def samples_needed(
    samples: npt.ArrayLike, target: float, *, dependent: bool = False, level: float = 0.95
) -> int | None:
    """Return how many samples in all bring the relative half-width down to ``target``, judged from a first stage.

    The second stage takes what is missing and then stops whatever it finds: looking again after each sample would
    stop at lucky moments and the interval would cover too rarely (Stein's two-stage rule). None where the first
    stage is too short to judge.

    >>> import numpy as np
    >>> first = np.random.default_rng(1).normal(100, 10, 20)
    >>> samples_needed(first, 0.01) > 100, samples_needed(first, 0.5)
    (True, 20)

    Raises:
        ValueError: ``target`` is not positive.
    """
    if target <= 0:
        raise ValueError(f"target must be positive: {target}")
    values = _checked(samples)
    width = relative_half_width(values, dependent=dependent, level=level)
    if width is None:
        return None
    outer = (1 + 4 * level) / 5  # 99 % beside 95 %: looks further out, so that it is seldom narrow by chance
    wider = relative_half_width(values, dependent=dependent, level=outer)
    if wider is not None:
        width = max(width, wider * float(stats.norm.ppf(0.5 + level / 2) / stats.norm.ppf(0.5 + outer / 2)))
    return max(values.size, ceil(_SECOND_STAGE_MARGIN * values.size * (width / target) ** 2))


def num_warmup(samples: npt.ArrayLike) -> int:
    """Return how many samples at the head are slower than the rest and should not count; 0 where in doubt.

    Two signs are looked for: a few first samples above the upper fence of the rest (quartile + 3 interquartile ranges
    on logarithms, and p95), and a longer head whose ranks lie above those of the rest by more than 4 standard
    deviations (a change point). At most a quarter of the samples, and at most 50.

    >>> num_warmup([9.0, 5.0] + [1.0, 1.1, 0.9, 1.05] * 10), num_warmup([1.0, 1.1, 0.9, 1.05] * 10)
    (2, 0)
    """
    values = _checked(samples)
    n = values.size
    most = min(n // 4, _MAX_WARMUP)
    if most == 0 or (values <= 0).any():
        return 0
    logs = np.log(values)
    first, third, tail = np.quantile(logs[most:], [0.25, 0.75, 0.95])
    fence = max(third + 3 * max(third - first, 1e-3), tail)
    head = 0
    while head < most and logs[head] > fence:
        head += 1
    ranks = stats.rankdata(logs)
    sizes = np.arange(1, most + 1)
    excess = np.cumsum(ranks)[:most] - sizes * (n + 1) / 2
    scores = excess / np.sqrt(sizes * (n - sizes) * (n + 1) / 12)
    best = int(scores.argmax())
    change = best + 1 if best >= 2 and scores[best] > _WARMUP_Z else 0
    return max(head, change)


def ratio_interval(
    together: npt.ArrayLike, alone: npt.ArrayLike, *, level: float = 0.95, num_resamples: int = 999, seed: int = 0
) -> Ratio:
    """Return the ratio of geometric means of two independent sets of times, with a bootstrap-t interval.

    >>> result = ratio_interval([2.0, 2.2, 1.8, 2.1, 1.9, 2.0], [1.0, 1.1, 0.9, 1.0, 1.05, 0.95])
    >>> round(result.ratio, 2), result.low < 2 < result.high
    (2.0, True)

    Source: B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 12.

    Raises:
        ValueError: a side is empty or holds a time that is not positive.
    """
    sides = [_checked(together), _checked(alone)]
    for name, values in zip(("together", "alone"), sides, strict=True):
        if values.size == 0 or (values <= 0).any():
            raise ValueError(f"{name} must hold positive times: {values.size} samples")
    logs = [np.log(values) for values in sides]
    difference = float(logs[0].mean() - logs[1].mean())
    if min(values.size for values in logs) < 2:
        return Ratio(ratio=float(np.exp(difference)), low=None, high=None)
    error = sqrt(sum(float(values.var(ddof=1)) / values.size for values in logs))
    if error < 1e-12:
        return Ratio(ratio=float(np.exp(difference)), low=float(np.exp(difference)), high=float(np.exp(difference)))
    rng = np.random.default_rng(seed)
    draws = [values[rng.integers(0, values.size, (num_resamples, values.size))] for values in logs]
    shifts = draws[0].mean(axis=1) - draws[1].mean(axis=1) - difference
    errors = np.sqrt(sum(draw.var(axis=1, ddof=1) / draw.shape[1] for draw in draws))
    pivots = shifts / np.maximum(errors, 1e-3 * error)
    lower, upper = np.quantile(pivots, [(1 + level) / 2, (1 - level) / 2])
    return Ratio(
        ratio=float(np.exp(difference)),
        low=float(np.exp(difference - lower * error)),
        high=float(np.exp(difference - upper * error)),
    )
