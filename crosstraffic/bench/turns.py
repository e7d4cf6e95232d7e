"""In which order points are measured: as planned, and once more at the end what other processes disturbed.

Ranks that poll use all of the processors they may run on. What they did not get while a point was measured, other
processes had, and the times of that point are theirs as much as the interconnect's.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crosstraffic.bench.plan import Point
from crosstraffic.bench.transport import Transport
from crosstraffic.results.record import Place

MIN_SHARE = 0.8  # of the processors' time that ranks which poll must have had
MAX_TRIES = 3
MANY_TRIES = 12


def polled_processors(transport_name: str, places: Sequence[Place]) -> int | None:
    """Return how many processors ranks keep busy by polling, over all machines; None where ranks sleep instead.

    Hosts that are one machine (containers, namespaces) share its processors.
    """
    if transport_name != "mpi":
        return None
    machines: dict[str, list[Place]] = {}
    for place in places:
        machines.setdefault(place.machine or f"node {place.node}", []).append(place)
    total = sum(min(len(own), len({cpu for place in own for cpu in place.cpus})) for own in machines.values())
    return total or None


class Stopwatch:
    """Processor time and wall time of one rank since it was made."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._wall_s, self._processor_s = time.perf_counter(), time.process_time()

    def share(self, num_processors: int | None) -> float | None:
        """Return the share of the processors' time that all ranks together had, on rank 0; all ranks call it."""
        mine = np.array([time.process_time() - self._processor_s, time.perf_counter() - self._wall_s])
        gathered = None if num_processors is None else self._transport.gather(mine)
        if gathered is None or num_processors is None:
            return None
        wall_s = float(gathered[:, 1].max())
        return min(float(gathered[:, 0].sum()) / (wall_s * num_processors), 1.0) if wall_s > 0 else None


@dataclass(slots=True)
class Turns:
    """Points still to measure, on rank 0: (index in the plan, attempts so far), and the weight of those left."""

    plan: Sequence[Point]
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    weight: float = 0.0
    again_shares: list[float] = field(default_factory=list)  # of the processors, in attempts after the first

    def __post_init__(self) -> None:
        self.queue.extend((index, 0) for index in range(len(self.plan)))
        self.weight = sum(point.weight for point in self.plan)

    def give_up(self) -> bool:
        """Tell whether measuring again helps no more: most of the last attempts were disturbed like the first ones."""
        last = self.again_shares[-MANY_TRIES:]
        return len(last) == MANY_TRIES and sum(share < MIN_SHARE for share in last) > MANY_TRIES / 2

    def take(self) -> tuple[int, int] | None:
        """Take the next point off the queue."""
        if not self.queue:
            return None
        index, tries = self.queue.popleft()
        self.weight -= self.plan[index].weight
        return index, tries

    def again(self, index: int, tries: int) -> None:
        """Put a point that was disturbed at the end of the queue."""
        self.queue.append((index, tries + 1))
        self.weight += self.plan[index].weight

    def slot_s(self, index: int, left_s: float) -> float:
        """Return the share of the time left that a point which was just taken may use."""
        weight = self.plan[index].weight
        return max(left_s, 0.05) * weight / max(self.weight + weight, weight)
