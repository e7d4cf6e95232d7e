"""Measure streams together: steady (each loops while the others loop) and one-shot (all start at one barrier).

The streams alone are measured in between, in random order within the same point, so that drift cancels. That streams
really overlapped is computed from the clock readings, and that they could, from their communicators: two operations
on one communicator may be served one after the other, whatever the host's clock says.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from crosstraffic.bench import timing
from crosstraffic.bench.context import RankContext
from crosstraffic.bench.plan import Point
from crosstraffic.bench.times import (
    inside,
    isolated_times,
    local_times,
    one_shot_overlap,
    split,
    steady_window,
    streaming_times,
)
from crosstraffic.bench.transport import Floats, Operation
from crosstraffic.results.record import Mismatch

ROUNDS = 2  # of alone and together segments, interleaved
MAX_ROUNDS = 5
MIN_OVERLAP = 0.9
MIN_LOOPS, MAX_LOOPS = 8, 3000
MOST_SPEEDUP = 2.0  # of a stream together against alone: bounds a rank that waits for nobody
ONE_SHOT_CALLS = (6, 30)  # at least, at most


@dataclass(slots=True)
class Part:
    """What was seen of one stream in one mix (on rank 0): its calls together, and alone in between."""

    times: list[Floats] = field(default_factory=list)
    local: list[Floats] = field(default_factory=list)
    starts: list[Floats] = field(default_factory=list)
    ends: list[Floats] = field(default_factory=list)
    alone_times: list[Floats] = field(default_factory=list)
    alone_local: list[Floats] = field(default_factory=list)
    alone_starts: list[Floats] = field(default_factory=list)
    alone_ends: list[Floats] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the check of payloads found: calls checked of each stream, and the first mismatch of those that had one."""

    num_verified: Mapping[str, int]
    mismatches: Mapping[str, Mismatch]


@dataclass(slots=True)
class Checks:
    """Payload checks as they are made on one rank: (stream, what was wrong)."""

    found: list[tuple[str, Mismatch | None]] = field(default_factory=list)

    def make(self, context: RankContext, name: str, operation: Operation | None, tag: int, call: int) -> None:
        """Check what the last call of a stream left behind."""
        self.found.append((name, context.mismatch(name, operation, tag, call)))

    def verdict(self, context: RankContext) -> Verdict:
        """Gather the verdicts of all ranks; all ranks call it, and it is whole on rank 0."""
        num_verified = Counter(name for name, _ in self.found) if context.scenario.measure.verify else Counter()
        return Verdict(num_verified=num_verified, mismatches=context.mismatches([wrong for _, wrong in self.found]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSample:
    """A mix as measured, on rank 0. ``whole`` holds the times until all streams of a one-shot were done."""

    parts: tuple[Part, ...]
    whole: Floats
    together_s: float  # wall time inside the calls together that were kept
    overlap_fraction: float
    invalid: str | None
    together: Verdict
    alone: Verdict


def shared_communicators(context: RankContext, names: Sequence[str]) -> str | None:
    """Say which streams of a mix share a communicator on any rank (rank 0 learns it of all ranks), or None."""
    ids = [-1.0 if (channel := context.channels[name]) is None else float(channel.communicator_id) for name in names]
    gathered = context.transport.gather(np.array(ids))
    if gathered is None:
        return None
    for rank, row in enumerate(gathered):
        seen: dict[float, str] = {}
        for name, found in zip(names, row, strict=True):
            if found >= 0 and found in seen:
                return f"streams {seen[found]} and {name} share one communicator on rank {rank}: they cannot overlap"
            seen[found] = name
    return None


def measure_steady(
    context: RankContext, point: Point, slot_s: float, alone_s: Sequence[float], stopping: Callable[[], bool]
) -> MixSample | None:
    """Measure a mix in its steady state within about ``slot_s``; ``alone_s`` are first guesses of each call's time."""
    names, operations, shared = _prepare(context, point)
    if context.decide(int(shared is not None))[0]:
        return _unmeasured(names, shared)
    begun = context.transport.now_s()
    num_segments = len(names) + 1
    parts = [Part() for _ in names]
    together, alone = Checks(), Checks()
    order = random.Random(int(point.key, 16))
    guesses = list(alone_s)
    overlaps: list[float] = []
    together_s = 0.0
    good_rounds, rounds, stretch = 0, 0, 1
    going = 1
    while going:
        rounds += 1
        segments = [*range(len(names)), len(names)]
        order.shuffle(segments)
        for segment in segments:
            if segment < len(names):
                window_s = slot_s / (ROUNDS * num_segments)
                _alone_segment(context, names, operations, segment, window_s, guesses, parts, alone)
                continue
            slowest_s = len(names) * max(guesses)
            window_s = stretch * max(slot_s / (ROUNDS * num_segments), min(MIN_LOOPS * slowest_s, slot_s))
            most = [MIN_LOOPS + int(MOST_SPEEDUP * window_s / max(guess, 1e-7)) for guess in guesses]
            mixed = _mixed(context, names, operations, window_s, most, together)
            if mixed is None:
                continue
            starts, ends = zip(*(split(part) for part in mixed[0]), strict=True)
            window = steady_window(starts, ends, mixed[1])
            overlaps.append(window.overlap_fraction)
            if window.overlap_fraction < MIN_OVERLAP:
                continue
            good_rounds += 1
            together_s += window.end_s - window.begin_s
            for index, part in enumerate(parts):
                kept = inside(starts[index], ends[index], window)
                if kept.stop - kept.start >= 2:
                    part.starts.append(starts[index][kept])
                    part.ends.append(ends[index][kept])
                    part.times.append(streaming_times(ends[index][kept]))
                    part.local.append(local_times(starts[index][kept], ends[index][kept]))
        if context.is_root:
            spent = context.transport.now_s() - begun
            num_calls = min(_num_calls(part) for part in parts)
            enough = good_rounds >= ROUNDS and num_calls >= MIN_LOOPS
            late = spent > 1.5 * slot_s and num_calls > 0
            stretch *= 1 if num_calls else 2  # calls together take longer than was thought
            going = int(not (enough or late or rounds >= MAX_ROUNDS or stopping()))
        going, _ = context.decide(going)
    verdicts = together.verdict(context), alone.verdict(context)
    if not context.is_root:
        return None
    best = float(np.median([found for found in overlaps if found >= MIN_OVERLAP] or [max(overlaps)]))
    invalid = None
    if good_rounds == 0:
        invalid = f"streams overlapped {best:.0%} of the time, at least {MIN_OVERLAP:.0%} is needed"
    if invalid is None and min(_num_calls(part) for part in parts) == 0:
        invalid = "a stream made no call that lay wholly inside the window in which all streams were active"
    return MixSample(
        parts=tuple(parts),
        whole=np.empty(0),
        together_s=together_s,
        overlap_fraction=best,
        invalid=invalid,
        together=verdicts[0],
        alone=verdicts[1],
    )


def _num_calls(part: Part) -> int:
    return sum(map(len, part.times))


def measure_one_shot(
    context: RankContext, point: Point, slot_s: float, alone_s: Sequence[float], stopping: Callable[[], bool]
) -> MixSample | None:
    """Measure a mix started at one barrier, again and again, each stream alone in between, within about ``slot_s``."""
    names, operations, shared = _prepare(context, point)
    if context.decide(int(shared is not None))[0]:
        return _unmeasured(names, shared)
    parts = [Part() for _ in names]
    order = random.Random(int(point.key, 16))
    checks, alone_checks = Checks(), Checks()
    beat = context.beat_for(names[0])
    everyone = range(len(names))
    together: list[Floats] = []
    alone: list[list[Floats]] = [[] for _ in names]

    def call_alone(index: int) -> Floats:
        times: Floats = timing.isolated(context.transport, operations[index], 1, beat)[0]
        return times

    tags = _refresh(context, names, operations)  # warm-up: each kind of call once, checked, not kept
    for index in everyone:
        call_alone(index)
        alone_checks.make(context, names[index], operations[index], tags[index], 0)
    tags = _refresh(context, names, operations)
    timing.one_shot(context.transport, operations, beat, 0)
    for index in everyone:
        checks.make(context, names[index], operations[index], tags[index], 0)
    tags = _refresh(context, names, operations)
    count, _ = context.decide(int(np.clip(slot_s / (2 * sum(alone_s) + 1e-5), *ONE_SHOT_CALLS)))
    context.transport.barrier()
    begun = context.transport.now_s()
    segments = [*everyone, len(names)]
    for cycle in range(count):
        order.shuffle(segments)
        for segment in segments:
            if segment == len(names):
                together.append(timing.one_shot(context.transport, operations, beat, cycle))
            else:
                alone[segment].append(call_alone(segment))
        if cycle % 4 == 3:
            late = context.is_root and context.transport.now_s() - begun > 1.5 * slot_s
            if context.decide(int(late or (context.is_root and stopping())))[0]:
                break
    for index in everyone:  # what a stream's last call left behind, whichever kind of call it was
        last = checks if segments.index(len(names)) > segments.index(index) else alone_checks
        last.make(context, names[index], operations[index], tags[index], len(together) - 1)
    times = context.synchronised(np.stack(together))  # [world, cycles, streams, 2]
    alone_times = [context.synchronised(np.stack(calls)) for calls in alone]
    verdicts = checks.verdict(context), alone_checks.verdict(context)
    if times is None:
        return None
    overlaps = np.array([one_shot_overlap(cycle[..., 0].T, cycle[..., 1].T) for cycle in times.swapaxes(0, 1)])
    overlapped = overlaps >= MIN_OVERLAP
    if overlapped.mean() >= 0.5:  # calls that another process kept apart tell nothing about the streams
        times, overlaps = times[:, overlapped], overlaps[overlapped]
    whole = np.nanmax(times[..., 1], axis=(0, 2)) - np.nanmin(times[..., 0], axis=(0, 2))
    for index, part in enumerate(parts):
        starts, ends = split(times[:, :, index])
        first = np.nanmin(times[..., 0], axis=(0, 2))
        part.starts.append(starts)
        part.ends.append(ends)
        part.times.append(np.nanmax(ends, axis=1) - first)
        part.local.append(local_times(starts, ends))
        calls = alone_times[index]
        if calls is not None:
            alone_starts, alone_ends = split(calls)
            part.alone_starts.append(alone_starts)
            part.alone_ends.append(alone_ends)
            part.alone_times.append(isolated_times(alone_starts, alone_ends))
            part.alone_local.append(local_times(alone_starts, alone_ends))
    overlap = float(np.median(overlaps))
    invalid = None
    if overlap < MIN_OVERLAP:
        invalid = f"the shorter stream ran {overlap:.0%} of its time beside the other, {MIN_OVERLAP:.0%} is needed"
    return MixSample(
        parts=tuple(parts),
        whole=whole,
        together_s=float(whole.sum()),
        overlap_fraction=overlap,
        invalid=invalid,
        together=verdicts[0],
        alone=verdicts[1],
    )


def _refresh(context: RankContext, names: Sequence[str], operations: Sequence[Operation | None]) -> list[int]:
    """Give every stream a new payload; return the tags in it."""
    return [context.refresh(name, operation) for name, operation in zip(names, operations, strict=True)]


def _prepare(context: RankContext, point: Point) -> tuple[list[str], list[Operation | None], str | None]:
    names = [name for name, _ in point.streams]
    operations = [context.operation(name, size, keep=True) for name, size in point.streams]
    return names, operations, shared_communicators(context, names)


def _unmeasured(names: Sequence[str], shared: str | None) -> MixSample | None:
    """Return a mix that was not tried, on rank 0: calls on one communicator, in no agreed order, may never end."""
    if shared is None:
        return None
    return MixSample(
        parts=tuple(Part() for _ in names),
        whole=np.empty(0),
        together_s=0.0,
        overlap_fraction=0.0,
        invalid=shared,
        together=Verdict(num_verified={}, mismatches={}),
        alone=Verdict(num_verified={}, mismatches={}),
    )


def _alone_segment(
    context: RankContext,
    names: Sequence[str],
    operations: Sequence[Operation | None],
    index: int,
    window_s: float,
    alone_guess: list[float],
    parts: Sequence[Part],
    checks: Checks,
) -> None:
    count = int(np.clip(np.ceil(window_s / max(alone_guess[index], 1e-7)), MIN_LOOPS, MAX_LOOPS))
    count, _ = context.decide(count)
    tag = context.refresh(names[index], operations[index])
    local = timing.streaming(context.transport, operations[index], count, context.beat_for(names[index]))
    checks.make(context, names[index], operations[index], tag, count - 1)
    times = context.synchronised(local)
    if times is None:
        return
    starts, ends = split(times)
    starts, ends = starts[1:], ends[1:]
    part = parts[index]
    part.alone_starts.append(starts)
    part.alone_ends.append(ends)
    part.alone_times.append(streaming_times(ends))
    part.alone_local.append(local_times(starts, ends))
    alone_guess[index] = max(float(np.median(part.alone_times[-1])), 1e-7)


def _mixed(
    context: RankContext,
    names: Sequence[str],
    operations: Sequence[Operation | None],
    duration_s: float,
    most: Sequence[int],
    checks: Checks,
) -> tuple[list[Floats], float] | None:
    """Loop all streams; return each one's calls ``[world, num_calls, 2]`` and when the first rank thought of ending."""
    duration_s = context.decide(0, duration_s)[1]
    most = [context.decide(bound)[0] for bound in most]
    tags = _refresh(context, names, operations)
    beat = context.beat_for(names[0])
    looped = timing.loops(context.transport, operations, context.ending, duration_s, beat, most)
    for name, operation, tag, calls in zip(names, operations, tags, looped.times, strict=True):
        checks.make(context, name, operation, tag, len(calls) - 1)
    free = context.synchronised(np.array([[looped.free_until_s, looped.free_until_s]]))
    gathered = [context.synchronised(times) for times in looped.times]
    if free is None:
        return None
    return [times for times in gathered if times is not None], float(free.min())
