"""Plan: every point of a run as a list of values, made and shuffled before anything is measured."""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from crosstraffic.bench.resolve import Scenario
from crosstraffic.patterns.step import step_to_dict
from crosstraffic.patterns.stream import Stream, round_payload, stream_to_dict

# Shares of the time budget, by kind of point. Large and mixed points need more time for the same precision.
WEIGHTS = {"alone": 1.0, "alone_real": 2.0, "steady": 4.0, "one_shot": 3.0, "step": 24.0}
MAX_MIX = 32  # streams that can be measured together
REPEAT_EVERY = 3  # every third size is visited twice, far apart in time: the repeat noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing to measure. ``streams`` holds (name, payload_bytes), in launch order."""

    kind: Literal["alone", "together", "step"]
    streams: tuple[tuple[str, int], ...]
    cadence: Literal["isolated", "streaming"] | None
    mode: Literal["steady", "one_shot"] | None
    step: str | None
    repeat: int
    weight: float
    key: str

    @property
    def label(self) -> str:
        """Name a point for people."""
        if self.step is not None:
            return f"step {self.step}"
        names = " + ".join(name for name, _ in self.streams)
        return f"{names} {self.cadence or self.mode}"


def make_plan(scenario: Scenario) -> tuple[Point, ...]:
    """List all points of a scenario in a seeded random order (order effects then look like noise, not like a trend).

    Raises:
        ValueError: a mix names an unknown stream, or the same one twice.
    """
    points = [*_alone(scenario), *_together(scenario), *_steps(scenario)]
    keys = [point.key for point in points]
    if len(set(keys)) != len(keys):
        twice = next(point.label for point in points if keys.count(point.key) > 1)
        raise ValueError(f"the plan holds the same point twice: {twice}")
    order = list(range(len(points)))
    random.Random(scenario.measure.seed).shuffle(order)
    first_visits = [index for index in order if points[index].repeat == 0]
    again = [index for index in order if points[index].repeat > 0]
    return tuple(points[index] for index in (*first_visits, *again))


def sweep_sizes(scenario: Scenario, stream: Stream) -> tuple[int, ...]:
    """Return the sizes at which a stream is measured alone, in bytes, ascending, its real sizes included."""
    measure = scenario.measure
    if measure.sizes is not None:
        wanted = list(measure.sizes)
    else:
        wanted = [round(size) for size in np.geomspace(measure.min_size, measure.max_size, measure.num_sizes)]
    rounded = {round_payload(stream.op, size, stream.group_size) for size in wanted}
    return tuple(sorted(rounded | set(scenario.real_sizes[stream.name])))


def mixes(scenario: Scenario) -> tuple[tuple[str, ...], ...]:
    """Return the sets of streams that are measured together: every pair, then some triples spread over them."""
    names = [stream.name for stream in scenario.streams]
    together = scenario.measure.together
    if together == "none":
        return ()
    if together != "pairs":
        return _checked(together, names)
    pairs = list(itertools.combinations(names, 2))
    triples = list(itertools.combinations(names, 3))
    wanted = scenario.measure.triples
    if not isinstance(wanted, int):
        return (*pairs, *_checked(wanted, names))
    patterns = {stream.name: stream.pattern for stream in scenario.streams}
    triples.sort(key=lambda triple: -len({patterns[name] for name in triple}))
    return (*pairs, *triples[:wanted])


def _checked(wanted: Sequence[tuple[str, ...]], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    for mix in wanted:
        unknown = [name for name in mix if name not in names]
        if unknown:
            raise ValueError(f"mix {'+'.join(mix)} names unknown streams {unknown}; known: {', '.join(names)}")
        if len(set(mix)) != len(mix) or len(mix) < 2:
            raise ValueError(f"mix {'+'.join(mix)} needs at least two different streams")
        if len(mix) > MAX_MIX:
            raise ValueError(f"a mix can hold up to {MAX_MIX} streams, not {len(mix)}")
    return tuple(wanted)


def _alone(scenario: Scenario) -> list[Point]:
    return [
        _point(
            scenario,
            kind="alone",
            streams=((stream.name, size),),
            cadence=cadence,
            repeat=repeat,
            weight=WEIGHTS["alone_real" if size in scenario.real_sizes[stream.name] else "alone"],
        )
        for stream in scenario.streams
        for size, cadence, num_visits in _visits(scenario, stream)
        for repeat in range(num_visits)
    ]


def _visits(scenario: Scenario, stream: Stream) -> Iterator[tuple[int, Literal["isolated", "streaming"], int]]:
    """Yield the size, cadence and number of visits of each point of a stream alone."""
    written = next((spec.points for spec in scenario.file.stream if spec.name == stream.name), None)
    if written is not None:
        for size, cadence in dict.fromkeys(written):
            yield round_payload(stream.op, size, stream.group_size), cadence, 2
        return
    for index, size in enumerate(sweep_sizes(scenario, stream)):
        is_repeated = size in scenario.real_sizes[stream.name] or index % REPEAT_EVERY == 0
        for cadence in scenario.measure.cadences:
            yield size, cadence, 2 if is_repeated else 1


def _together(scenario: Scenario) -> list[Point]:
    sizes = {stream.name: stream.payload_bytes for stream in scenario.streams}
    return [
        _point(
            scenario,
            kind="together",
            streams=tuple((name, sizes[name]) for name in mix),
            mode=mode,
            weight=WEIGHTS[mode] * len(mix) / 2,
        )
        for mix in mixes(scenario)
        for mode in scenario.measure.modes
    ]


def _steps(scenario: Scenario) -> list[Point]:
    if not scenario.measure.steps:
        return []
    return [
        _point(
            scenario,
            kind="step",
            streams=tuple((name, 0) for name in step.streams),
            step=step.name,
            weight=WEIGHTS["step"],
        )
        for step in scenario.steps
    ]


def _point(
    scenario: Scenario,
    *,
    kind: Literal["alone", "together", "step"],
    streams: tuple[tuple[str, int], ...],
    weight: float,
    cadence: Literal["isolated", "streaming"] | None = None,
    mode: Literal["steady", "one_shot"] | None = None,
    step: str | None = None,
    repeat: int = 0,
) -> Point:
    wanted: dict[str, Any] = {"kind": kind, "cadence": cadence, "mode": mode, "repeat": repeat}
    by_name = {stream.name: stream for stream in scenario.streams}
    wanted["streams"] = [[_identity(by_name[name]), size] for name, size in streams]
    if step is not None:
        wanted["step"] = next(step_to_dict(found) for found in scenario.steps if found.name == step)
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
    return Point(
        kind=kind,
        streams=streams,
        cadence=cadence,
        mode=mode,
        step=step,
        repeat=repeat,
        weight=weight,
        key=key,
    )


def _identity(stream: Stream) -> dict[str, Any]:
    """What makes a stream the same communication; words about it do not count."""
    fields = stream_to_dict(stream)
    return {name: fields[name] for name in ("name", "op", "groups", "payload_bytes", "rule")}
