"""Several streams at once: time per call when each loops (steady), and when all start at one barrier (one-shot)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crosstraffic.costmodel.calls import Call, make_calls, make_sharing, pick_cadence, ranks_by_node
from crosstraffic.costmodel.contention import Job, Sharing, advance, make_job
from crosstraffic.costmodel.model import Contention, Model
from crosstraffic.results.record import Cadence, Mode

CADENCE_OF_MODE: Mapping[Mode, Cadence] = {"steady": "streaming", "one_shot": "isolated"}
NUM_CALLS = 12  # of the slowest stream in a steady mix
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crowd:
    """Calls that behave alike merged into one: ``phases[i]`` are (latency, transfer) seconds of class i."""

    phases: tuple[tuple[float, float], ...]
    stream: tuple[int, ...]  # index of the stream of each class
    sharing: Sharing

    def job(self, index: int) -> Job:
        """Start a call of class ``index``."""
        latency, transfer = self.phases[index]
        return make_job(index, (2 * index, latency), (2 * index + 1, transfer))


def gather_crowd(
    model: Model,
    mix: Sequence[tuple[str, int]],
    mode: Mode,
    factors: Contention,
    alone_s: Mapping[str, float] | None = None,
) -> Crowd:
    """Collect all calls of a mix and merge the groups that no one can tell apart.

    Groups are told apart by refinement: what they load, and who else loads that. Merged groups run in step, so the
    answer is exact, and a mix of a thousand like groups costs no more than a mix of one.

    Raises:
        ValueError: an unknown or unfitted stream.
    """
    cadence = pick_cadence(model, CADENCE_OF_MODE[mode])
    calls: list[Call] = []
    owner: list[int] = []
    for index, (name, payload_bytes) in enumerate(mix):
        known = None if alone_s is None else alone_s.get(name)
        made = make_calls(model, name, payload_bytes, cadence, range(len(model.stream(name).groups)), alone_s=known)
        calls += made
        owner += [index] * len(made)
    sharing = make_sharing(calls, model.nodes, factors, ranks_by_node(model, [name for name, _ in mix]))
    return merge(calls, owner, sharing, len(mix))


def merge(calls: Sequence[Call], owner: Sequence[int], sharing: Sharing, num_streams: int) -> Crowd:
    """Merge calls that refinement cannot tell apart (equitable partition)."""
    if len(calls) == num_streams:
        phases = tuple((call.latency_s, call.transfer_s) for call in calls)
        return Crowd(phases=phases, stream=tuple(owner), sharing=sharing)
    keys: list[Any] = [
        (stream, f"{call.latency_s:.9e}", f"{call.transfer_s:.9e}") for call, stream in zip(calls, owner, strict=True)
    ]
    colours = _number(keys)
    rows = _number(sharing.is_host.tolist())
    latency, transfer = sharing.loads[:, 0::2], sharing.loads[:, 1::2]
    cells = [
        (row, call, f"{latency[row, call]:.9e} {transfer[row, call]:.9e}")
        for row, call in zip(*np.nonzero(latency + transfer), strict=True)
    ]
    while True:
        of_rows: list[list[Any]] = [[] for _ in rows]
        of_calls: list[list[Any]] = [[] for _ in calls]
        for row, call, load in cells:
            of_rows[row].append((colours[call], load))
        new_rows = _number([(old, tuple(sorted(seen))) for old, seen in zip(rows, of_rows, strict=True)])
        for row, call, load in cells:
            of_calls[call].append((new_rows[row], load))
        new = _number([(old, tuple(sorted(seen))) for old, seen in zip(colours, of_calls, strict=True)])
        if max(new) == max(colours) and max(new_rows) == max(rows):
            break
        colours, rows = new, new_rows
    first = [colours.index(colour) for colour in range(max(colours) + 1)]
    kept_rows = [rows.index(row) for row in range(max(rows) + 1)]
    member = np.eye(len(first))[colours]  # [calls, classes]
    loads = np.zeros((len(kept_rows), 2 * len(first)))
    loads[:, 0::2] = latency[kept_rows] @ member
    loads[:, 1::2] = transfer[kept_rows] @ member
    columns = [column for call in first for column in (2 * call, 2 * call + 1)]
    return Crowd(
        phases=tuple((calls[call].latency_s, calls[call].transfer_s) for call in first),
        stream=tuple(owner[call] for call in first),
        sharing=Sharing(
            loads=loads,
            weights=sharing.weights[columns],
            owner=tuple(sharing.owner[column] for column in columns),
            is_host=sharing.is_host[kept_rows],
            crowding=sharing.crowding,
        ),
    )


def _number(keys: Sequence[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def one_shot_times(crowd: Crowd, num_streams: int) -> list[float]:
    """Return when each stream is done, s after the common start, if each makes one call."""
    ends = [0.0] * num_streams

    def done(tags: list[int], now: float) -> list[Job]:
        for tag in tags:
            ends[crowd.stream[tag]] = max(ends[crowd.stream[tag]], now)
        return []

    advance(crowd.sharing, [crowd.job(index) for index in range(len(crowd.phases))], done)
    return ends


def steady_times(crowd: Crowd, num_streams: int, max_events: int = 4000) -> list[float]:
    """Return each stream's time per call while all loop, s: the median interval between its slowest group's ends."""
    completions: list[list[float]] = [[] for _ in crowd.phases]

    def done(tags: list[int], now: float) -> list[Job]:
        for tag in tags:
            completions[tag].append(now)
        if min(map(len, completions)) >= NUM_CALLS + WARM_UP:
            return []
        return [crowd.job(tag) for tag in tags]

    now, running = advance(
        crowd.sharing, [crowd.job(index) for index in range(len(crowd.phases))], done, max_events=max_events
    )
    left = {job.tag: job.left_s + (job.then[1] if job.then else 0.0) for job in running}
    times = [0.0] * num_streams
    for stream in range(num_streams):
        mine = [index for index, owner in enumerate(crowd.stream) if owner == stream]
        count = min(len(completions[index]) for index in mine)
        if count >= WARM_UP + 3:
            ends = np.max([completions[index][:count] for index in mine], axis=0)
            times[stream] = float(np.median(np.diff(ends[WARM_UP - 1 :])))
            continue
        for index in mine:  # too slow beside the others to see several calls: take how far it came
            whole = sum(crowd.phases[index])
            progress = len(completions[index]) + (1.0 - left.get(index, whole) / whole if whole > 0 else 0.0)
            times[stream] = max(times[stream], now / max(progress, 1e-9))
    return times


def together_times(
    model: Model,
    mix: Sequence[tuple[str, int]],
    mode: Mode,
    *,
    factors: Contention | None = None,
    alone_s: Mapping[str, float] | None = None,
    max_events: int = 4000,
) -> list[float]:
    """Return each stream's time together, s, in the order of ``mix``."""
    crowd = gather_crowd(model, mix, mode, model.contention if factors is None else factors, alone_s)
    if mode == "one_shot":
        return one_shot_times(crowd, len(mix))
    return steady_times(crowd, len(mix), max_events)
