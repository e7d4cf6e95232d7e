"""What the solo formula leaves over, followed in log size: a Gaussian process that fades to zero away from data.

Kernel: amplitude^2 exp(-|x - x'| / length) over x = log2(payload), the process whose interpolation is nearly a straight
line between neighbours and whose mean returns to zero outside. Hyperparameters are shared by all curves of a cadence.
Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), eq. 2.25, 2.30 and 5.12.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

Floats = npt.NDArray[np.float64]

_AMPLITUDES = (0.002, 0.01, 0.03, 0.08, 0.2, 0.5, 1.0)
_LENGTHS = (1.0, 2.5, 6.0, 15.0)
_NOISES = (0.001, 0.003, 0.01, 0.03, 0.06, 0.12, 0.25, 0.5)
_MEDIAN_VARIANCE = math.pi / 2  # of the median of many, times n / variance
COVERAGE = 0.9
MIN_REPEATS = 6  # pairs of visits from which the noise between visits is taken
OUTLIER = 4.0  # deviations; a point further from what its neighbours say counts as less sure


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Hyperparameters: spread of the residual (log), its reach (octaves of size), noise between visits (log)."""

    amplitude: float
    length_octaves: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leftover:
    """Residuals (log time) of one curve by distinct size.

    ``x`` is log2 of the size, ``y`` the median residual of its visits, ``within`` the deviation that the samples of a
    visit give it, ``count`` the number of visits. ``visits`` are (index of the size, residual), for the fit only.
    """

    x: Floats
    y: Floats
    within: Floats
    count: Floats
    visits: tuple[tuple[int, float], ...] = ()


def gather(x: Floats, y: Floats, within: Floats) -> Leftover:
    """Merge visits of one size."""
    sizes, index = np.unique(x, return_inverse=True)
    members = [np.flatnonzero(index == place) for place in range(len(sizes))]
    return Leftover(
        x=sizes,
        y=np.array([float(np.median(y[mine])) for mine in members]),
        within=np.array([float(np.median(within[mine])) for mine in members]),
        count=np.array([float(len(mine)) for mine in members]),
        visits=tuple((int(place), float(value)) for place, value in zip(index, y, strict=True)),
    )


def repeat_noise(curves: Sequence[Leftover]) -> float | None:
    """Return the noise between visits of one size (log), or None where too few sizes were visited twice.

    It is the mean of what the middle and what the tail of the differences say; for Gaussian noise both say the same.
    """
    gaps: list[float] = []
    for curve in curves:
        by_size: dict[int, list[float]] = {}
        for index, value in curve.visits:
            by_size.setdefault(index, []).append(value)
        gaps += [abs(right - left) for seen in by_size.values() for left, right in itertools.pairwise(seen)]
    if len(gaps) < MIN_REPEATS:
        return None
    middle, tail = np.quantile(gaps, [0.5, 0.9]) / math.sqrt(2)
    return max(float(middle / 0.6745 + tail / 1.645) / 2, _NOISES[0])


def _kernel(process: Process, left: Floats, right: Floats) -> Floats:
    distance: Floats = np.abs(left[:, None] - right[None, :])
    result: Floats = process.amplitude**2 * np.exp(-distance / process.length_octaves)
    return result


def _covariance(process: Process, curve: Leftover) -> Floats:
    spread = (curve.within**2 + process.noise**2) / curve.count
    spread = np.where(curve.count > 2, _MEDIAN_VARIANCE * spread, spread)
    return _kernel(process, curve.x, curve.x) + np.diag(spread)


def choose_process(curves: Sequence[Leftover], noise: float | None = None) -> Process:
    """Pick the hyperparameters under which all curves together are most likely, ``noise`` among them if not given."""
    best, best_score = Process(amplitude=_AMPLITUDES[0], length_octaves=_LENGTHS[0], noise=_NOISES[0]), -math.inf
    for amplitude, length, level in itertools.product(_AMPLITUDES, _LENGTHS, _NOISES if noise is None else (noise,)):
        process = Process(amplitude=amplitude, length_octaves=length, noise=level)
        score = 0.0
        for curve in curves:
            factor, lower = cho_factor(_covariance(process, curve), lower=True)
            score -= 0.5 * float(curve.y @ cho_solve((factor, lower), curve.y))
            score -= float(np.log(np.diag(factor)).sum())
        if score > best_score:
            best, best_score = process, score
    return best


def fit_process(curves: Sequence[Leftover]) -> tuple[Process, list[Leftover]]:
    """Fit the hyperparameters; points that their neighbours contradict are made less sure, not thrown away."""
    noise = repeat_noise(curves)
    doubted = list(curves)
    process = choose_process(doubted, noise)
    for _ in range(2):
        before = doubted
        doubted = [_doubt(process, curve) for curve in doubted]
        if all(new is old for new, old in zip(doubted, before, strict=True)):
            break
        process = choose_process(doubted, noise)
    return process, doubted


def _doubt(process: Process, curve: Leftover) -> Leftover:
    error, spread = leave_one_out(process, curve)
    far = np.abs(error) > OUTLIER * spread
    if not far.any():
        return curve
    within = np.where(far, np.maximum(curve.within, np.abs(error) * np.sqrt(curve.count)), curve.within)
    return replace(curve, within=within)


def predict(process: Process, curve: Leftover, x: Floats) -> tuple[Floats, Floats]:
    """Return the residual (log) at ``x`` and its standard deviation, that of a new measurement's noise included."""
    cross = _kernel(process, x, curve.x)
    factor = cho_factor(_covariance(process, curve), lower=True)
    mean: Floats = cross @ cho_solve(factor, curve.y)
    spread = process.amplitude**2 - np.einsum("ij,ji->i", cross, cho_solve(factor, cross.T))
    typical = float(np.median(curve.within)) if curve.within.size else 0.0
    deviation: Floats = np.sqrt(np.maximum(spread, 0.0) + process.noise**2 + typical**2)
    return mean, deviation


def leave_one_out(process: Process, curve: Leftover) -> tuple[Floats, Floats]:
    """Return error (log) and deviation of each size predicted from the other sizes of its curve."""
    inverse = np.linalg.inv(_covariance(process, curve))
    variance = 1.0 / np.diag(inverse)
    error: Floats = (inverse @ curve.y) * variance
    return error, np.sqrt(variance)


def calibrate(process: Process, curves: Sequence[Leftover]) -> float:
    """Return how many deviations hold 90 % of the visits of left-out sizes, corrected for their number (conformal).

    Source: Lei et al., "Distribution-Free Predictive Inference for Regression" (2018).
    """
    scores: list[float] = []
    for curve in curves:
        error, spread = leave_one_out(process, curve)
        whole = np.sqrt(spread**2 + process.noise**2 * (1.0 - 1.0 / curve.count))
        for index, value in curve.visits:
            scores.append(abs(value - (curve.y[index] - error[index])) / float(whole[index]))
    return conformal_quantile(np.array(scores))


def conformal_quantile(scores: Floats, level: float = COVERAGE) -> float:
    """Return the smallest score that is at least as large as ``level`` of new ones; at least 1, never infinite.

    >>> conformal_quantile(np.arange(1.0, 20.0))
    18.0
    """
    if scores.size == 0:
        return 1.645
    rank = math.ceil(level * (scores.size + 1))
    if rank > scores.size:
        return max(1.645, float(scores.max()))
    return max(1.0, float(np.sort(scores)[rank - 1]))
