"""Capacity shared by calls in flight, advanced in time: a fluid simulation from event to event.

A call has two phases: latency (loads no link) and transfer. Each phase in flight runs at a speed of at most 1, that of
the call alone. Speeds are the weighted max-min fair ones under: on each resource, the sum of speed x utilisation stays
within the capacity (progressive filling; Bertsekas and Gallager, "Data Networks" (1992), section 6.5.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_EPSILON = 1e-12


def max_min_speeds(loads: Floats, weights: Floats, capacity: Floats) -> Floats:
    """Return the speed of each flow; ``loads[resource, flow]`` is its utilisation of a resource at speed 1.

    >>> max_min_speeds(np.array([[1.0, 1.0]]), np.ones(2), np.ones(1)).tolist()
    [0.5, 0.5]
    >>> max_min_speeds(np.array([[1.0, 0.25]]), np.ones(2), np.ones(1)).tolist()
    [0.8, 0.8]
    >>> max_min_speeds(np.array([[1.0, 1.0]]), np.array([1.0, 4.0]), np.ones(1)).tolist()
    [0.2, 0.8]
    """
    speeds = np.zeros(len(weights))
    growing = np.ones(len(weights), dtype=bool)
    while growing.any():
        rate = np.where(growing, weights, 0.0)
        step = float(((1.0 - speeds[growing]) / weights[growing]).min())
        pressure = loads @ rate
        slack = capacity - loads @ speeds
        pressed = pressure > _EPSILON
        if pressed.any():
            step = min(step, float((np.maximum(slack[pressed], 0.0) / pressure[pressed]).min()))
        speeds = speeds + step * rate
        full = capacity - loads @ speeds <= _EPSILON * 10
        stopped = (speeds >= 1.0 - _EPSILON) | ((loads[full] > _EPSILON).any(axis=0))
        if not (stopped & growing).any():
            break  # rounding left nobody to stop; the speeds are right to 1e-12
        growing &= ~stopped
    return speeds


@dataclass(slots=True, eq=False)
class Sharing:
    """Speeds of the phases in flight; remembers each set it has worked out.

    ``loads`` is ``[resources, columns]``; a column is one phase of one kind of call. On the resources marked in
    ``is_host`` each active stream beyond the first takes ``crowding`` of the capacity away.
    """

    loads: Floats
    weights: Floats
    owner: tuple[int, ...]  # the stream of each column
    is_host: npt.NDArray[np.bool_]
    crowding: float = 0.0
    _known: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)

    def speeds(self, active: tuple[int, ...]) -> tuple[float, ...]:
        """Return the speed of each active column, in the order given; a column may be there more than once."""
        found = self._known.get(active)
        if found is None:
            found = self._work_out(active)
            self._known[active] = found
        return found

    def _work_out(self, active: tuple[int, ...]) -> tuple[float, ...]:
        columns = list(active)
        loads = self.loads[:, columns]
        capacity = np.ones(len(loads))
        if self.crowding > 0 and self.is_host.any():
            streams = np.array([self.owner[column] for column in columns])
            users = np.zeros(len(loads))
            for stream in np.unique(streams):
                users += (loads[:, streams == stream] > 0).any(axis=1)
            capacity = np.where(self.is_host, 1.0 / (1.0 + self.crowding * np.maximum(users - 1, 0)), capacity)
        tight = loads.sum(axis=1) > capacity + _EPSILON
        if not tight.any():
            return (1.0,) * len(columns)
        speeds = max_min_speeds(loads[tight], self.weights[columns], capacity[tight])
        return tuple(speeds.tolist())


@dataclass(slots=True, eq=False)
class Job:
    """One call in flight: what is left of its phases, as (column, seconds at speed 1)."""

    tag: int
    column: int
    left_s: float
    then: tuple[int, float] | None


def make_job(tag: int, latency: tuple[int, float], transfer: tuple[int, float]) -> Job:
    """Start a call with its latency phase."""
    return Job(tag=tag, column=latency[0], left_s=latency[1], then=transfer)


def advance(
    sharing: Sharing, jobs: Sequence[Job], on_done: Callable[[list[int], float], list[Job]], max_events: int = 10**7
) -> tuple[float, list[Job]]:
    """Run from event to event until nothing is in flight or ``max_events`` have passed.

    ``on_done`` is told the tags of the calls that ended and when, and returns the calls to start then.

    Returns:
        The time of the last event, s, and the calls still in flight.
    """
    running = list(jobs)
    now = 0.0
    events = 0
    while running and events < max_events:
        events += 1
        running.sort(key=_column)
        speeds = sharing.speeds(tuple([job.column for job in running]))
        spans = [job.left_s / speed for job, speed in zip(running, speeds, strict=True)]
        step = min(spans)
        now += step
        limit = step * (1 + 1e-9) + 1e-15
        ended: list[int] = []
        still: list[Job] = []
        for job, speed, span in zip(running, speeds, spans, strict=True):
            if span > limit:
                job.left_s -= speed * step
            elif job.then is None:
                ended.append(job.tag)
                continue
            else:
                job.column, job.left_s = job.then
                job.then = None
            still.append(job)
        running = still
        if ended:
            running += on_done(ended, now)
    return now, running


def _column(job: Job) -> int:
    return job.column
