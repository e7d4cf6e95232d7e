"""Replay a whole prefill, decode or handoff step: every call that a rank makes, in its real order, lanes at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from crosstraffic.bench import timing
from crosstraffic.bench.context import RankContext
from crosstraffic.bench.plan import Point
from crosstraffic.bench.transport import Floats, Operation, group_of
from crosstraffic.patterns.step import Step
from crosstraffic.results.record import Mismatch

MIN_REPLAYS, MAX_REPLAYS = 4, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Replays of a step, on rank 0: starts and ends ``[num_replays, world, num_lanes]``, times ``[num_replays]``, s."""

    starts: Floats
    ends: Floats
    times: Floats
    local: Floats
    num_verified: int
    mismatch: Mismatch | None


def sequences(context: RankContext, step: Step) -> list[list[Operation]]:
    """Return this rank's calls of a step, lane by lane, in order; what it takes no part in is left out."""
    found: list[list[Operation]] = []
    for lane in range(len(step.lanes)):
        calls: list[Operation] = []
        for task in step.tasks(lane):
            operation = context.operation(task.stream, task.payload_bytes, edge=task.edge, keep=True)
            place = group_of(context.stream(task.stream), context.transport.rank)
            if operation is None or place is None:
                continue
            if task.groups is None or place[0] in task.groups:
                calls.append(operation)
        found.append(calls)
    return found


def measure_step(context: RankContext, point: Point, slot_s: float, stopping: Callable[[], bool]) -> StepSample | None:
    """Replay a step a few times within about ``slot_s``; the first replay is warm-up and sizes the sample."""
    step = next(step for step in context.scenario.steps if step.name == point.step)
    calls = sequences(context, step)
    distinct = {
        (task.stream, task.payload_bytes, task.edge): context.operation(
            task.stream, task.payload_bytes, edge=task.edge, keep=True
        )
        for lane in range(len(step.lanes))
        for task in step.tasks(lane)
    }
    used = {id(operation) for lane in calls for operation in lane}
    beat = context.beat_for(step.streams[0])
    mismatches: list[Mismatch | None] = []

    def replay(count: int) -> Floats:
        tags = {key: context.refresh(key[0], operation) for key, operation in distinct.items()}
        times = np.stack([timing.lanes(context.transport, calls, beat) for _ in range(count)])
        for key, operation in distinct.items():
            if operation is not None and id(operation) in used:
                mismatches.append(context.mismatch(key[0], operation, tags[key], count - 1))
        return times

    warm = context.synchronised(replay(1))
    count = 0
    if warm is not None:
        once = float(np.nanmax(warm[..., 1]) - np.nanmin(warm[..., 0]))
        count = MIN_REPLAYS if stopping() else int(np.clip(slot_s / max(once, 1e-6) - 1, MIN_REPLAYS, MAX_REPLAYS))
    count, _ = context.decide(count)
    times = context.synchronised(replay(count))
    worst = context.first_mismatch(mismatches)
    if times is None:
        return None
    starts, ends = times[..., 0].swapaxes(0, 1), times[..., 1].swapaxes(0, 1)
    return StepSample(
        starts=starts,
        ends=ends,
        times=np.nanmax(ends, axis=(1, 2)) - np.nanmin(starts, axis=(1, 2)),
        local=np.nanmax(np.nanmax(ends, axis=2) - np.nanmin(starts, axis=2), axis=1),
        num_verified=len(mismatches) if context.scenario.measure.verify else 0,
        mismatch=worst,
    )
