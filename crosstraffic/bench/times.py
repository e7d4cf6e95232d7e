"""From clock readings to times of calls, as the definitions say. All on rank 0, on synchronised clocks.

``starts`` and ``ends`` are ``[num_calls, num_ranks]``; NaN where a rank takes no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstraffic.bench.transport import Floats


def split(times: Floats) -> tuple[Floats, Floats]:
    """Turn ``[world, num_calls, 2]`` into starts and ends, each ``[num_calls, world]``."""
    return np.ascontiguousarray(times[..., 0].T), np.ascontiguousarray(times[..., 1].T)


def isolated_times(starts: Floats, ends: Floats) -> Floats:
    """Time of each isolated call, s: latest end minus earliest start over the ranks, ``[num_calls]``."""
    result: Floats = np.nanmax(ends, axis=1) - np.nanmin(starts, axis=1)
    return result


def local_times(starts: Floats, ends: Floats) -> Floats:
    """Largest local time of a rank in each call, s, ``[num_calls]``: needs no clocks in step."""
    result: Floats = np.nanmax(ends - starts, axis=1)
    return result


def streaming_times(ends: Floats) -> Floats:
    """Interval between successive completions of the slowest rank, s, ``[num_calls - 1]``."""
    result: Floats = np.diff(np.nanmax(ends, axis=1))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Time in which the streams of a mix looped freely, s on rank 0's clock, and how much of it they overlapped."""

    begin_s: float
    end_s: float
    overlap_fraction: float


def steady_window(starts: Sequence[Floats], ends: Sequence[Floats], free_until_s: float) -> Window:
    """Find the window of a steady mix: every stream has begun, and no rank has held one back yet to end.

    The overlap is the share of the window in which every stream had a call in flight (on some rank).
    """
    begin = max(float(np.nanmin(start)) for start in starts)
    end = min(free_until_s, *(float(np.nanmax(found)) for found in ends))
    if end <= begin:
        return Window(begin_s=begin, end_s=begin, overlap_fraction=0.0)
    edges: list[tuple[float, int]] = []
    for start, stop in zip(starts, ends, strict=True):
        edges += _flights(np.nanmin(start, axis=1), np.nanmax(stop, axis=1), begin, end)
    together, in_flight, since = 0.0, 0, begin
    for at_s, change in sorted(edges):
        if in_flight == len(starts):
            together += at_s - since
        in_flight, since = in_flight + change, at_s
    return Window(begin_s=begin, end_s=end, overlap_fraction=together / (end - begin))


def _flights(starts: Floats, ends: Floats, begin: float, end: float) -> list[tuple[float, int]]:
    """Cut a stream's calls to the window and join those that touch: (time, +1) for each take-off, -1 for landings."""
    kept = (ends > begin) & (starts < end)
    order = np.argsort(starts[kept])
    opens, closes = np.maximum(starts[kept][order], begin), np.minimum(ends[kept][order], end)
    edges: list[tuple[float, int]] = []
    last = -np.inf
    for open_s, close_s in zip(opens.tolist(), np.maximum.accumulate(closes).tolist(), strict=True):
        if open_s > last:
            edges += [(open_s, 1), (close_s, -1)]
        elif close_s > last:
            edges[-1] = (close_s, -1)
        last = max(last, close_s)
    return edges


def inside(starts: Floats, ends: Floats, window: Window) -> slice:
    """Return the calls that lie wholly inside the window, on all ranks."""
    kept = np.flatnonzero((np.nanmin(starts, axis=1) >= window.begin_s) & (np.nanmax(ends, axis=1) <= window.end_s))
    return slice(int(kept[0]), int(kept[-1]) + 1) if len(kept) else slice(0, 0)


def one_shot_overlap(starts: Floats, ends: Floats) -> float:
    """Share of the shortest stream's time in which all streams were active; inputs ``[num_streams, world]``."""
    begins, stops = np.nanmin(starts, axis=1), np.nanmax(ends, axis=1)
    shortest = float((stops - begins).min())
    common = float(stops.min() - begins.max())
    return max(0.0, common) / shortest if shortest > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """The rank that comes last to most calls: how late after the first one (median, s), in which share of the calls."""

    rank: int
    late_s: float
    share: float


def late_rank(starts: Floats, clock_error_s: float) -> Late | None:
    """Name a straggler: one rank last in at least 80 % of the calls, by more than the clocks' error and the others.

    Returns:
        None with fewer than 6 calls or 2 ranks, or when no rank stands out.
    """
    taking_part = np.flatnonzero(~np.isnan(starts).all(axis=0))
    if len(starts) < 6 or len(taking_part) < 2:
        return None
    lateness = starts[:, taking_part] - np.nanmin(starts[:, taking_part], axis=1, keepdims=True)
    last = np.argmax(lateness, axis=1)
    rank = int(np.bincount(last, minlength=len(taking_part)).argmax())
    share = float((last == rank).mean())
    medians = np.median(lateness, axis=0)
    late_s = float(medians[rank])
    others = float(np.median(np.delete(medians, rank)))
    if share < 0.8 or late_s <= 2 * clock_error_s or late_s <= 3 * others:
        return None
    return Late(rank=int(taking_part[rank]), late_s=late_s, share=share)
