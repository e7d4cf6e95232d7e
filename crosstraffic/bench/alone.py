"""Measure one stream alone at one size: find the warm-up, size the sample once, stop on precision or on time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from crosstraffic.bench import timing
from crosstraffic.bench.context import RankContext
from crosstraffic.bench.plan import Point
from crosstraffic.bench.times import isolated_times, local_times, split, streaming_times
from crosstraffic.bench.transport import Floats, Operation
from crosstraffic.results.record import Mismatch
from crosstraffic.results.statistics import num_warmup, relative_half_width, samples_needed

PROBE_CALLS = 3  # discarded: caches, connections, page faults
MIN_CALLS = 6
PILOT_CALLS = 24

StoppedBy = Literal["interval", "time", "calls", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Calls of one stream, on rank 0: kept starts and ends ``[num_calls, world]`` in order, and how they came about."""

    starts: Floats
    ends: Floats
    times: Floats
    local: Floats
    batch: npt.NDArray[np.int64]  # which calls were made in one go, ``[num_calls]``
    num_warmup: int
    stopped_by: StoppedBy
    num_verified: int
    mismatch: Mismatch | None


def measure_alone(context: RankContext, point: Point, slot_s: float, stopping: Callable[[], bool]) -> Sample | None:
    """Measure a point within about ``slot_s``; return the sample on rank 0, None elsewhere.

    Two stages, so that the interval keeps its coverage: a pilot fixes how many calls are needed, and that many are
    made, unless the time is spent first.
    """
    (name, size), cadence = point.streams[0], point.cadence
    keep = size in context.scenario.real_sizes[name]
    operation = context.operation(name, size, keep=keep)
    loop = timing.isolated if cadence == "isolated" else timing.streaming
    beat = context.beat_for(name)
    begun = context.transport.now_s()
    rule = context.scenario.measure
    batches: list[Floats] = []
    mismatches: list[Mismatch | None] = []

    def batch(count: int) -> Floats | None:
        tag = context.refresh(name, operation)
        times = loop(context.transport, operation, count, beat)
        mismatches.append(context.mismatch(name, operation, tag, count - 1))
        return context.synchronised(times)

    probe = batch(PROBE_CALLS)
    count = 0
    if probe is not None:
        per_call = max(float(np.median(local_times(*split(probe)))), 1e-7)
        count = int(np.clip(0.3 * slot_s / per_call, MIN_CALLS, min(PILOT_CALLS, rule.max_calls)))
    count, _ = context.decide(count)
    pilot = batch(count)
    more = 0
    if pilot is not None:
        batches.append(pilot)
        values = _values(pilot, cadence)
        spent = context.transport.now_s() - begun
        per_call = max(spent / (PROBE_CALLS + count), 1e-7)
        needed = samples_needed(values, rule.target, dependent=cadence == "streaming")
        wanted = rule.max_calls if needed is None else needed - len(values)
        fits = int((slot_s - spent) / per_call)
        more = 0 if stopping() else int(max(0, min(wanted, fits, rule.max_calls - count)))
    more, _ = context.decide(more)
    if more > 0:
        rest = batch(more)
        if rest is not None:
            batches.append(rest)
    worst = context.first_mismatch(mismatches)
    if not context.is_root:
        return None
    return _sample(
        batches,
        cadence=cadence,
        target=rule.target,
        max_calls=rule.max_calls,
        interrupted=stopping(),
        num_verified=len(mismatches) if rule.verify else 0,
        mismatch=worst,
    )


def _values(times: Floats, cadence: str | None) -> Floats:
    starts, ends = split(times)
    return isolated_times(starts, ends) if cadence == "isolated" else streaming_times(ends)


def _sample(
    batches: list[Floats],
    *,
    cadence: str | None,
    target: float,
    max_calls: int,
    interrupted: bool,
    num_verified: int,
    mismatch: Mismatch | None,
) -> Sample:
    values = [_values(part, cadence) for part in batches]
    skipped = min(num_warmup(values[0]), len(values[0]) - MIN_CALLS) if len(values[0]) > MIN_CALLS else 0
    skipped = max(skipped, 0)
    kept = np.concatenate([values[0][skipped:], *values[1:]])
    parts = [split(part) for part in batches]
    starts = np.concatenate([start if index else start[skipped:] for index, (start, _) in enumerate(parts)])
    ends = np.concatenate([end if index else end[skipped:] for index, (_, end) in enumerate(parts)])
    width = relative_half_width(kept, dependent=cadence == "streaming")
    stopped: StoppedBy
    if interrupted:
        stopped = "interrupted"
    elif width is not None and width <= target:
        stopped = "interval"
    else:
        stopped = "calls" if len(starts) + skipped >= max_calls else "time"
    return Sample(
        starts=starts,
        ends=ends,
        times=kept,
        local=local_times(starts, ends),
        batch=np.repeat(
            np.arange(len(parts)), [len(start) - (0 if index else skipped) for index, (start, _) in enumerate(parts)]
        ),
        num_warmup=PROBE_CALLS + skipped,
        stopped_by=stopped,
        num_verified=num_verified,
        mismatch=mismatch,
    )


def first_call(context: RankContext, name: str, size: int) -> tuple[float | None, Mismatch | None]:
    """Make the very first call of a stream on its new communicator; return its time, s, and what was wrong (rank 0)."""
    operation: Operation | None = context.operation(name, size, keep=True)
    tag = context.refresh(name, operation)
    times = context.synchronised(timing.isolated(context.transport, operation, 1, context.beat_for(name)))
    worst = context.first_mismatch([context.mismatch(name, operation, tag, 0)])
    if times is None:
        return None, None
    return float(isolated_times(*split(times))[0]), worst
