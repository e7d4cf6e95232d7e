"""What a model must beat: one curve at a time, from its measured points alone.

Source: alpha-beta as in Hockney (1994), fitted on relative error (the kinder of the usual fits); linear interpolation
in size with a proportional tail, and log-log interpolation with the last slope, as planners use for measured tables.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]
Baseline = Callable[[Floats, Floats, float], float]


def alpha_beta(sizes: Floats, times: Floats, size: float) -> float:
    """Predict latency + size / bandwidth, both fitted on relative error and not negative.

    >>> round(alpha_beta(np.array([0.0, 100.0, 300.0]), np.array([1.0, 2.0, 4.0]), 200.0), 6)
    3.0
    """
    columns = np.column_stack([np.ones_like(sizes), sizes]) / times[:, None]
    (alpha, beta), _ = nnls(columns, np.ones_like(times))
    return float(alpha + beta * size)


def linear(sizes: Floats, times: Floats, size: float) -> float:
    """Interpolate linearly in size; above the largest size time grows in proportion, below the smallest it stays.

    >>> linear(np.array([1.0, 3.0]), np.array([2.0, 4.0]), 2.0), linear(np.array([1.0, 3.0]), np.array([2.0, 4.0]), 6.0)
    (3.0, 8.0)
    """
    if size > sizes[-1]:
        return float(times[-1] * size / sizes[-1])
    return float(np.interp(size, sizes, times))


def loglog(sizes: Floats, times: Floats, size: float) -> float:
    """Interpolate log time in log size; outside, the nearest slope goes on.

    >>> round(loglog(np.array([1.0, 4.0, 16.0]), np.array([1.0, 2.0, 4.0]), 64.0), 6)
    8.0
    """
    x, y = np.log(np.maximum(sizes, 1.0)), np.log(times)
    at = float(np.log(max(size, 1.0)))
    if len(x) < 2 or x[0] <= at <= x[-1]:
        return float(np.exp(np.interp(at, x, y)))
    near, far = (0, 1) if at < x[0] else (-1, -2)
    return float(np.exp(y[near] + (y[near] - y[far]) / (x[near] - x[far]) * (at - x[near])))


BASELINES: Mapping[str, Baseline] = {"alpha_beta": alpha_beta, "linear": linear, "loglog": loglog}


def curve_points(sizes: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Return distinct sizes in order, each with the geometric mean of its times."""
    distinct = np.unique(sizes)
    means = np.array([float(np.exp(np.log(times[sizes == size]).mean())) for size in distinct])
    return distinct, means
