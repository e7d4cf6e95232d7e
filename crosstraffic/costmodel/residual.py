"""What the solo formula leaves over, followed in log size: a Gaussian process that fades to zero away from data.

Kernel: amplitude^2 exp(-|x - x'| / length) over x = log2(payload), the process whose interpolation is nearly a straight
line between neighbours and whose mean returns to zero outside. Hyperparameters are shared by all curves of a cadence.
Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), eq. 2.25, 2.30 and 5.12.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

Floats = npt.NDArray[np.float64]

_AMPLITUDES = (0.002, 0.01, 0.03, 0.08, 0.2, 0.5)
_LENGTHS = (1.0, 2.5, 6.0, 15.0)
_NOISES = (0.001, 0.003, 0.01, 0.03, 0.06, 0.12, 0.25)
COVERAGE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Hyperparameters: spread of the residual (log), its reach (octaves of size), noise between visits (log)."""

    amplitude: float
    length_octaves: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leftover:
    """Residuals (log time) of one curve: ``x`` log2 size, ``y`` residual, ``sd`` of each from its samples."""

    x: Floats
    y: Floats
    sd: Floats


def _kernel(process: Process, left: Floats, right: Floats) -> Floats:
    distance: Floats = np.abs(left[:, None] - right[None, :])
    result: Floats = process.amplitude**2 * np.exp(-distance / process.length_octaves)
    return result


def _covariance(process: Process, curve: Leftover) -> Floats:
    return _kernel(process, curve.x, curve.x) + np.diag(curve.sd**2 + process.noise**2)


def choose_process(curves: Sequence[Leftover]) -> Process:
    """Pick the hyperparameters under which all curves together are most likely."""
    best, best_score = Process(amplitude=_AMPLITUDES[0], length_octaves=_LENGTHS[0], noise=_NOISES[0]), -math.inf
    for amplitude, length, noise in itertools.product(_AMPLITUDES, _LENGTHS, _NOISES):
        process = Process(amplitude=amplitude, length_octaves=length, noise=noise)
        score = 0.0
        for curve in curves:
            factor, lower = cho_factor(_covariance(process, curve), lower=True)
            score -= 0.5 * float(curve.y @ cho_solve((factor, lower), curve.y))
            score -= float(np.log(np.diag(factor)).sum())
        if score > best_score:
            best, best_score = process, score
    return best


def predict(process: Process, curve: Leftover, x: Floats) -> tuple[Floats, Floats]:
    """Return the residual (log) at ``x`` and its standard deviation, that of a new measurement's noise included."""
    cross = _kernel(process, x, curve.x)
    factor = cho_factor(_covariance(process, curve), lower=True)
    mean: Floats = cross @ cho_solve(factor, curve.y)
    spread = process.amplitude**2 - np.einsum("ij,ji->i", cross, cho_solve(factor, cross.T))
    typical = float(np.median(curve.sd)) if curve.sd.size else 0.0
    deviation: Floats = np.sqrt(np.maximum(spread, 0.0) + process.noise**2 + typical**2)
    return mean, deviation


def leave_one_out(process: Process, curve: Leftover) -> tuple[Floats, Floats]:
    """Return error (log) and deviation of each point predicted from the others of its curve."""
    inverse = np.linalg.inv(_covariance(process, curve))
    variance = 1.0 / np.diag(inverse)
    error: Floats = (inverse @ curve.y) * variance
    return error, np.sqrt(variance)


def calibrate(process: Process, curves: Sequence[Leftover]) -> float:
    """Return how many deviations hold 90 % of left-out points, corrected for their finite number (conformal).

    Source: Lei et al., "Distribution-Free Predictive Inference for Regression" (2018).
    """
    scores = [np.abs(error) / spread for error, spread in (leave_one_out(process, curve) for curve in curves)]
    return conformal_quantile(np.concatenate(scores)) if scores else 1.645


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
