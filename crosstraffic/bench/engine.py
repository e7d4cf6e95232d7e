"""Run a plan on one rank: open the streams, keep the clocks in step, measure point after point, keep what was found."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from crosstraffic.bench.alone import Sample, first_call, measure_alone
from crosstraffic.bench.capacity import calls_of, too_big
from crosstraffic.bench.clocks import Clocks, synchronise
from crosstraffic.bench.context import Heart, RankContext, open_ending
from crosstraffic.bench.plan import Point, make_plan
from crosstraffic.bench.recording import (
    Span,
    alone_records,
    failed_records,
    first_call_record,
    keep_samples,
    measured_s,
    mix_records,
    step_records,
)
from crosstraffic.bench.replay import StepSample, measure_step
from crosstraffic.bench.resolve import Scenario
from crosstraffic.bench.together import MixSample, measure_one_shot, measure_steady
from crosstraffic.bench.transport import Transport
from crosstraffic.bench.turns import MAX_TRIES, MIN_SHARE, Stopwatch, Turns
from crosstraffic.results.record import ClockModel, Record, Status
from crosstraffic.results.store import RunFolder

_HEADER = struct.Struct("<qdq")  # point index or -1 to end, slot in seconds, 1 to synchronise clocks first
CLOCK_ROUNDS = 12
SHORTEST_S = 1e-9  # a call of one rank with itself can take no time at all on the simulated transport
CLOCK_EVERY_S = 4.0
EXPECTED_BYTES_PER_S = 1e9  # until a stream has shown more


@dataclass(slots=True)
class Outcome:
    """How a run went, as rank 0 knows it."""

    records: list[Record] = field(default_factory=list)
    clocks: tuple[ClockModel, ...] = ()
    measured_s: float = 0.0
    wall_s: float = 0.0
    interrupted: bool = False
    num_done: int = 0


def run_plan(
    transport: Transport,
    scenario: Scenario,
    plan: Sequence[Point],
    *,
    nodes: tuple[int, ...],
    heart: Heart,
    folder: RunFolder | None,
    available_bytes: int | None = None,
    num_processors: int | None = None,
) -> Outcome | None:
    """Measure a plan; rank 0 writes records into ``folder`` as it goes and returns the outcome, others None.

    ``available_bytes`` is the memory that all ranks of a node may use for buffers together; a point that needs more
    gets a record with status ``oom``. ``num_processors`` is how many processors the ranks keep busy by polling; where
    it is known, points during which other processes took part of them are measured again at the end.
    """
    begun = transport.now_s()
    channels = {stream.name: transport.open_channel(stream) for stream in scenario.streams}
    context = RankContext(
        transport=transport,
        scenario=scenario,
        channels=channels,
        clocks=None,
        ending=open_ending(transport),
        heart=heart,
        nodes=nodes,
        started_s=begun,
    )
    _synchronise(context)
    outcome = Outcome()
    cold: dict[str, float | None] = {}
    everything = make_plan(scenario)
    for stream in scenario.streams:
        cold[stream.name] = None
        real = (stream.name, stream.payload_bytes)
        if context.decide(int(too_big(scenario, [real], available_bytes) is not None))[0]:
            continue
        cold[stream.name], worst = first_call(context, stream.name, stream.payload_bytes)
        point = next((found for found in everything if stream.name in dict(found.streams)), None)
        if worst is not None and point is not None:
            _keep(folder, outcome, [first_call_record(context, point, worst)])
    _measure(context, plan, outcome, heart, folder, cold, available_bytes, num_processors)
    _synchronise(context)
    if context.is_root and context.clocks is not None:
        outcome.clocks = tuple(context.clocks.models())
        outcome.wall_s = transport.now_s() - begun
        return outcome
    return None


def _measure(
    context: RankContext,
    plan: Sequence[Point],
    outcome: Outcome,
    heart: Heart,
    folder: RunFolder | None,
    cold: dict[str, float | None],
    available_bytes: int | None,
    num_processors: int | None,
) -> None:
    transport, scenario = context.transport, context.scenario
    guesses = _Guesses()
    turns = Turns(plan)
    disturbed: dict[int, _Try] = {}
    synchronised_s = transport.now_s()
    tries, seconds_left = 0, 0.0
    while True:
        header = None
        if context.is_root:
            elapsed = transport.now_s() - context.started_s
            left = scenario.measure.budget_s - elapsed
            outcome.interrupted = heart.should_stop()
            turn = None if outcome.interrupted else turns.take()
            if turns.give_up():
                turn = None
            while turn is not None and (why := _impossible(plan[turn[0]], guesses, left, available_bytes, scenario)):
                if turn[0] not in disturbed:
                    _keep(folder, outcome, failed_records(context, plan[turn[0]], *why, elapsed))
                turn = turns.take()
            seconds_left = 0.0 if turn is None else max(left, 0.0)
            due = transport.now_s() - synchronised_s > CLOCK_EVERY_S
            next_index, tries = (-1, 0) if turn is None else turn
            header = _HEADER.pack(next_index, 0.0 if turn is None else turns.slot_s(next_index, left), int(due))
        index, slot_s, due_now = _HEADER.unpack(transport.broadcast(header))
        heart.progress(len(plan) - len(turns.queue) if index >= 0 else len(plan), len(plan), seconds_left)
        if index < 0:
            break
        if due_now:
            _synchronise(context)
            synchronised_s = transport.now_s()
        context.point_index = index
        watch = Stopwatch(transport)
        found = _measure_point(context, plan[index], slot_s, guesses, cold, heart)
        share = watch.share(num_processors)
        if found is None:
            continue
        found = replace(found, share=share)
        if tries > 0 and share is not None:
            turns.again_shares.append(share)
        earlier = disturbed.pop(index, None)
        best = earlier
        if earlier is None or found.replaces(earlier):
            best = found
            _finish(folder, outcome, plan[index], found, tries, earlier)
        if best is not None and best.is_disturbed and tries + 1 < MAX_TRIES:
            disturbed[index] = best
            turns.again(index, tries)


def _measure_point(
    context: RankContext,
    point: Point,
    slot_s: float,
    guesses: "_Guesses",
    cold: dict[str, float | None],
    heart: Heart,
) -> "_Try | None":
    begun = context.transport.now_s()
    stopping: Callable[[], bool] = heart.should_stop if context.is_root else lambda: False
    alone_s = [guesses.time_s(name, size) for name, size in point.streams]
    sample: Sample | MixSample | StepSample | None
    if point.kind == "alone":
        sample = measure_alone(context, point, slot_s, stopping)
    elif point.kind == "step":
        sample = measure_step(context, point, slot_s, stopping)
    elif point.mode == "steady":
        sample = measure_steady(context, point, slot_s, alone_s, stopping)
    else:
        sample = measure_one_shot(context, point, slot_s, alone_s, stopping)
    if sample is None:
        return None
    now = context.transport.now_s()
    span = Span(started_s=begun - context.started_s, elapsed_s=now - begun, clock_error_s=context.clock_error_s(now))
    records = _records(context, point, sample, span, cold)
    for record in records:
        if record.status == "ok" and record.kind == "alone" and record.time_median_s is not None:
            guesses.learn(record.stream, record.payload_bytes or 0, record.time_median_s)
    return _Try(records=tuple(records), sample=sample, share=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """One attempt at a point, on rank 0; ``share`` of the processors' time that the ranks had, where they poll."""

    records: tuple[Record, ...]
    sample: Sample | MixSample | StepSample
    share: float | None

    @property
    def is_good(self) -> bool:
        return all(record.status == "ok" for record in self.records)

    @property
    def is_disturbed(self) -> bool:
        return self.is_good and self.share is not None and self.share < MIN_SHARE

    def replaces(self, earlier: "_Try") -> bool:
        """Tell whether to keep this attempt and not the earlier one. Wrong bytes are always told."""
        if any(record.status == "wrong_data" for record in self.records):
            return True
        return self.is_good and (self.share or 0.0) > (earlier.share or 0.0)


def _finish(
    folder: RunFolder | None, outcome: Outcome, point: Point, best: _Try, num_disturbed: int, earlier: _Try | None
) -> None:
    """Keep the records and samples of a point at once, in place of those of an earlier attempt: ranks can die."""
    extra: dict[str, object] = {"processor_share": best.share, "num_disturbed": num_disturbed}
    if folder is not None:
        extra["samples"] = keep_samples(folder, point, best.sample)
    if earlier is None:
        outcome.num_done += 1
    else:
        outcome.records = [record for record in outcome.records if record.point != point.key]
        outcome.measured_s -= measured_s(earlier.sample)
    _keep(folder, outcome, [record.model_copy(update=extra) for record in best.records])
    outcome.measured_s += measured_s(best.sample)


def _records(
    context: RankContext,
    point: Point,
    sample: Sample | MixSample | StepSample,
    span: Span,
    cold: dict[str, float | None],
) -> list[Record]:
    if isinstance(sample, Sample):
        name, size = point.streams[0]
        is_first = size == context.stream(name).payload_bytes and point.repeat == 0 and point.cadence == "isolated"
        return alone_records(context, point, sample, span, cold[name] if is_first else None)
    if isinstance(sample, MixSample):
        return mix_records(context, point, sample, span)
    return step_records(context, point, sample, span)


def _keep(folder: RunFolder | None, outcome: Outcome, records: list[Record]) -> None:
    for record in records:
        outcome.records.append(record)
        if folder is not None:
            folder.append(record)


def _synchronise(context: RankContext) -> None:
    models = synchronise(context.transport, CLOCK_ROUNDS)
    if models is None:
        return
    known = context.clocks
    context.clocks = Clocks(syncs=(tuple(models),)) if known is None else known.with_sync(models)


class _Guesses:
    """How long a call of a stream alone takes, from what was measured so far: to size samples, never a result."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int, float]] = {}

    def learn(self, name: str, size: int, time_s: float) -> None:
        self._known.setdefault(name, {})[size] = max(time_s, SHORTEST_S)

    def time_s(self, name: str, size: int) -> float:
        known = self._known.get(name)
        if not known:
            return 1e-4 + size / EXPECTED_BYTES_PER_S
        nearest = min(known, key=lambda other: abs(np.log((other + 1) / (size + 1))))
        rate = max(EXPECTED_BYTES_PER_S, *(other / time_s for other, time_s in known.items()))
        return known[nearest] + max(size - nearest, 0) / rate


def _impossible(
    point: Point, guesses: _Guesses, left_s: float, available_bytes: int | None, scenario: Scenario
) -> tuple[Status, str] | None:
    """Say why a point cannot be measured: no time left, or buffers larger than the memory."""
    if left_s <= 0:
        return "skipped", f"the time budget of {scenario.measure.budget_s:g} s was spent before this point's turn"
    need_s = sum(guesses.time_s(name, size) for name, size in point.streams) * (10 if point.kind != "step" else 0)
    if need_s > left_s:
        return "skipped", f"needs about {need_s:.3g} s, {left_s:.3g} s of the time budget are left"
    why = too_big(scenario, calls_of(scenario, point), available_bytes)
    return None if why is None else ("oom", why)
