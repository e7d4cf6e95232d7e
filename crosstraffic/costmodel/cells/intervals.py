"""How far predictions miss: scores of hold-outs of the same fit, by kind of extrapolation and distance.

Each kind has a width (log) that holds 90 % of a new measurement, for one octave, and grows with distance. It is the
conformal quantile of the fit's own hold-outs, drawn to a prior where they are few. Priors are the medians over fits of
A100, H100 and B200 tables (layout: one A100 system of two nodes); floors and shares were set by hand.
Source: Lei et al., "Distribution-Free Predictive Inference for Regression" (2018).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from crosstraffic.costmodel.cells.curves import CellCurve, Key
from crosstraffic.costmodel.cells.experts import Floats, log_time
from crosstraffic.costmodel.cells.reach import Curves, Reached, outside, reach

BINS = (64 * 2**10, 2**20, 16 * 2**20)  # bytes: up to 64 KiB, to 1 MiB, to 16 MiB, above
NOISE_PRIOR = (0.112, 0.032, 0.036, 0.009)  # differences between repeats, by size
SIZE_PRIOR = (0.033, 0.042, 0.129, 0.041)  # per octave of gap
RANGE_PRIOR = 0.12  # per square root of octaves beyond the largest size
GROUP_PRIOR = (0.33, 0.23, 0.7, 0.22)  # per octave of ranks, copied from one group
LAYOUT_PRIOR = 0.9  # per octave of layout
PRIOR_SCORES = 8.0  # hold-outs that a prior counts as
LEVEL = 0.9
CROSSING_WIDTH = 2.0  # a larger group on PCIe may cross a socket for the first time, which no time tells beforehand
GROUP_FLOOR = 0.1  # per octave of ranks, however well the hold-outs went
RANGE_FLOOR = 0.05  # per square root of octaves beyond the largest size, however well the hold-outs went
TREND_WIDTH = 0.55  # error of a trend through two groups against that of a copy from one, which hold-outs mostly test
RANGE_WIDTH = 0.35  # error beyond the largest size against that of hold-outs, which end nearer to the knee


class Widths(BaseModel):
    """Half-widths (log) of 90 % intervals: by size bin, per octave; ``num_scores`` hold-outs stand behind each kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    noise: tuple[float, ...]
    size: tuple[float, ...]
    range: float
    group: tuple[float, ...]
    layout: float
    num_scores: dict[str, int]


def size_bin(sizes: Floats) -> np.typing.NDArray[np.int64]:
    """Return the bin of each size.

    >>> size_bin(np.array([1024.0, 2.0**20, 2.0**30])).tolist()
    [0, 1, 3]
    """
    return np.searchsorted(np.array(BINS, dtype=np.float64), sizes, side="left").astype(np.int64)


def widths_of(curves: Sequence[CellCurve]) -> Widths:
    """Score hold-outs of these curves and return the widths."""
    made = Curves(curves)
    repeats = [(size, gap) for curve in curves for size, gap in curve.repeats_log]
    noise = _binned([size for size, _ in repeats], [gap for _, gap in repeats], NOISE_PRIOR)
    sized = _left_out_sizes(made)
    ranged = _left_out_largest(made)
    grouped = _left_out_groups(made)
    layouts = _left_out_layouts(made)
    return Widths(
        noise=noise,
        size=_binned(*sized, SIZE_PRIOR),
        range=_quantile(ranged, RANGE_PRIOR),
        group=_binned(*grouped, GROUP_PRIOR),
        layout=_quantile(layouts, LAYOUT_PRIOR),
        num_scores={
            "noise": len(repeats),
            "size": len(sized[0]),
            "range": len(ranged),
            "group": len(grouped[0]),
            "layout": len(layouts),
        },
    )


def half_width(widths: Widths, kind: str, sizes: Floats, reached: Reached) -> Floats:
    """Return the half-width (log) of each prediction: noise, size, range and group or layout in quadrature."""
    bins, beyond, gap = size_bin(sizes), reached.beyond, reached.gap
    total = np.array(widths.noise)[bins] ** 2
    inside = beyond <= 0
    if kind != "measured":
        total = total + np.where(inside, np.array(widths.size)[bins] * np.minimum(gap, 8.0), 0.0) ** 2
        total = total + np.where(inside, 0.0, max(RANGE_WIDTH * widths.range, RANGE_FLOOR)) ** 2 * np.maximum(
            beyond, 0.1
        )
    if kind == "group":
        share = (1.0 if reached.copied else TREND_WIDTH) * (CROSSING_WIDTH if reached.may_cross else 1.0)
        total = total + (np.maximum(share * np.array(widths.group)[bins], GROUP_FLOOR) * reached.apart) ** 2
    if kind == "layout":
        total = total + (widths.layout * reached.apart) ** 2
    answer: Floats = np.sqrt(total)
    return answer


def _quantile(scores: Sequence[float], prior: float) -> float:
    """Return the conformal quantile, drawn to the prior by the number of scores."""
    if not scores:
        return prior
    rank = min(math.ceil(LEVEL * (len(scores) + 1)), len(scores))
    seen = max(float(np.sort(scores)[rank - 1]), 1e-4)
    share = len(scores) / (len(scores) + PRIOR_SCORES)
    return float(math.exp(share * math.log(seen) + (1 - share) * math.log(prior)))


def _binned(sizes: Sequence[float], scores: Sequence[float], priors: Sequence[float]) -> tuple[float, ...]:
    bins = size_bin(np.array(sizes, dtype=np.float64))
    values = np.array(scores, dtype=np.float64)
    return tuple(_quantile(values[bins == place].tolist(), prior) for place, prior in enumerate(priors))


def _left_out_sizes(curves: Curves) -> tuple[list[float], list[float]]:
    """Leave out every other size of each curve; the error is counted per octave of the gap that this leaves."""
    sizes: list[float] = []
    scores: list[float] = []
    for x, y in curves.arrays.values():
        for start in (1, 2):
            left = np.arange(len(x)) % 2 == start % 2
            left[[0, -1]] = False
            if (~left).sum() >= 2 and left.any():
                error = np.abs(log_time(x[~left], y[~left], x[left]) - np.log(y[left]))
                sizes += x[left].tolist()
                scores += (error / np.maximum(outside(x[~left], x[left])[1], 0.1)).tolist()
    return sizes, scores


def _left_out_largest(curves: Curves) -> list[float]:
    """Leave out the largest one to three sizes; the error is counted per square root of octaves beyond."""
    scores: list[float] = []
    for x, y in curves.arrays.values():
        for left in (1, 2, 3):
            kept = len(x) - left
            if kept >= 3:
                error = np.abs(log_time(x[:kept], y[:kept], x[kept:]) - np.log(y[kept:]))
                octaves = np.log2(x[kept:] / max(x[kept - 1], 1.0))
                scores += (error / np.sqrt(np.maximum(octaves, 0.1))).tolist()
    return scores


def _left_out_groups(curves: Curves) -> tuple[list[float], list[float]]:
    found = _each_left_out(curves, "group")
    return [size for size, _ in found], [score for _, score in found]


def _left_out_layouts(curves: Curves) -> list[float]:
    return [score for _, score in _each_left_out(curves, "layout")]


def _each_left_out(curves: Curves, kind: str) -> list[tuple[float, float]]:
    """Leave each curve of each family out in turn; return size and score per octave of answers of this kind."""
    found: list[tuple[float, float]] = []
    for family in curves.families.values():
        arrays: Mapping[Key, tuple[Floats, Floats]] = {key: curves.arrays[key] for key in family}
        for key in family if len(family) > 1 else ():
            x, y = (array[:: max(1, len(array) // 64)] for array in arrays[key])
            answer = reach(Curves.of({other: arrays[other] for other in family if other != key}), key, x)
            if not isinstance(answer, str) and answer.kind == kind:
                error = np.abs(answer.log_time - np.log(y)) / max(answer.apart, 0.5)
                near = answer.beyond <= 1
                found += list(zip(x[near].tolist(), error[near].tolist(), strict=True))
    return found
