"""Every directed link of a run of suite links: latency, bandwidth, incast and outcast, from its records and samples."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.stream import Stream
from crosstraffic.results.statistics import block_median_interval
from crosstraffic.results.store import Run, load_samples

Floats = npt.NDArray[np.float64]
NUM_VISITS = 2
CLOCK_SHARE = 0.25  # of the latency that the clocks' error may be, to tell one rank's time by another's
PATTERNS = ("link", "link_both", "incast", "outcast")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Bytes per second by visit, and the 95 % interval of each visit's median; NaN where nothing was measured.

    Links are ``[num_visits, sender, receiver]``, incast and outcast ``[num_visits, end point]``. Under six intervals
    of time the extremes stand for the interval.
    """

    median: Floats
    low: Floats
    high: Floats

    @property
    def best(self) -> Floats:
        """The better visit's median: what a passing disturbance took in the other one is not the link's."""
        return _best(self.median)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A visit that left no number: of which directions (sender, receiver), and why."""

    links: tuple[tuple[int, int], ...]
    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """What a run found of its links; ``n`` end points, numbered as in ``names``.

    ``rate``: the payload over the median interval between successive ends at the receiver, calls back to back.
    ``latency_s`` and ``latency_p05_s`` ``[num_visits, n, n]``: 8 bytes, a barrier before each call; by ``clock``
    synchronised the receiver's end less the sender's start, where the clocks' error is small against it, else local,
    the time that the receiver itself spent in the call. ``duplex``: rates while the other direction is in use too.
    ``incast``: what an end point gets from ``num_peers`` others at once, in total; ``outcast``: what it sends so.
    ``incast_peer`` and ``outcast_peer`` ``[n, n]``: (sender, receiver), the better visit's share of each peer.
    """

    names: tuple[str, ...]
    rate: Rates
    latency_s: Floats
    latency_p05_s: Floats
    clock: Literal["synchronised", "local"]
    clock_error_s: float
    duplex: Rates
    incast: Rates
    outcast: Rates
    incast_peer: Floats
    outcast_peer: Floats
    num_peers: int
    gaps: tuple[Gap, ...] = ()

    @property
    def num_end_points(self) -> int:
        return len(self.names)

    @property
    def best_latency_s(self) -> Floats:
        """The lower visit's median of each direction, ``[n, n]``."""
        return -_best(-self.latency_s)


def is_links(run: Run) -> bool:
    """Tell whether a run measured links and nothing else."""
    patterns = {stream.pattern for stream in run.streams}
    return "link" in patterns and patterns <= set(PATTERNS)


def links_of(run: Run) -> Links:
    """Work out every link of a run.

    Raises:
        ValueError: the run measured no links.
        UsageError: the raw samples of a record are not in the run folder.
    """
    if not is_links(run):
        raise ValueError(f"run {run.info.run_id} measured no links: it was not made by suite links")
    ranks = sorted({rank for stream in run.streams for group in stream.groups for rank in group})
    return _Reader(run, {rank: place for place, rank in enumerate(ranks)}).links()


def empty_rates(*shape: int) -> Rates:
    """Return rates that nothing was measured of."""
    return Rates(median=np.full(shape, np.nan), low=np.full(shape, np.nan), high=np.full(shape, np.nan))


class _Reader:
    """Fills the arrays of one run, record by record."""

    def __init__(self, run: Run, place_of: dict[int, int]) -> None:
        n = len(place_of)
        self._run, self._place_of = run, place_of
        links, fans = (NUM_VISITS, n, n), (NUM_VISITS, n)
        self._rates = {"link": empty_rates(*links), "link_both": empty_rates(*links)}
        self._fans = {"incast": empty_rates(*fans), "outcast": empty_rates(*fans)}
        self._peers = {"incast": np.full(links, np.nan), "outcast": np.full(links, np.nan)}
        self._by_clock = {
            clock: (np.full(links, np.nan), np.full(links, np.nan)) for clock in ("synchronised", "local")
        }
        self._clock_error_s = 0.0

    def links(self) -> Links:
        gaps = []
        by_point = self._records()
        for stream in self._run.streams:
            directions = tuple(pair for index in range(len(stream.groups)) for pair in self._directions(stream, index))
            for cadence in ("isolated", "streaming") if stream.pattern == "link" else ("streaming",):
                for visit in range(NUM_VISITS):
                    row = by_point.get((stream.name, cadence, visit))
                    if row is not None and row["status"] == "ok":
                        self._take(stream, cadence, visit, row)
                        continue
                    why = "no record of it" if row is None else f"{row['status']}: {row['why']}"
                    what = "latency" if cadence == "isolated" else stream.pattern.replace("link", "bandwidth", 1)
                    gaps.append(Gap(links=directions, what=what.replace("_", ", "), why=why))
        clock = self._clock()
        latency_s, latency_p05_s = self._by_clock[clock]
        num_peers = [len(stream.groups[0]) - 1 for stream in self._run.streams if stream.pattern == "incast"]
        return Links(
            names=self._names(),
            rate=self._rates["link"],
            latency_s=latency_s,
            latency_p05_s=latency_p05_s,
            clock=clock,
            clock_error_s=self._clock_error_s,
            duplex=self._rates["link_both"],
            incast=self._fans["incast"],
            outcast=self._fans["outcast"],
            incast_peer=_best(self._peers["incast"]),
            outcast_peer=_best(self._peers["outcast"]),
            num_peers=max(num_peers, default=0),
            gaps=tuple(gaps),
        )

    def _names(self) -> tuple[str, ...]:
        places = {place.rank: place for place in self._run.placement}
        hosts = [places[rank].host if rank in places else f"rank {rank}" for rank in self._place_of]
        if len(set(hosts)) == len(hosts):
            return tuple(hosts)
        return tuple(f"rank {rank}" for rank in self._place_of)

    def _records(self) -> dict[tuple[str, str, int], dict[str, object]]:
        """Return the record of each point; of several of one point (wrong bytes, told anew) the worst one."""
        frame = self._run.frame
        found: dict[tuple[str, str, int], dict[str, object]] = {}
        for row in frame[(frame["kind"] == "alone") & frame["baseline_of"].isna()].to_dict("records"):
            key = (str(row["stream"]), str(row["cadence"]), int(row["repeat"]))
            if key not in found or found[key]["status"] == "ok":
                found[key] = {str(name): value for name, value in row.items()}
        return found

    def _directions(self, stream: Stream, index: int) -> list[tuple[int, int]]:
        """Return who sends to whom in one group, as end points."""
        group = stream.groups[index]
        cells = np.argwhere(stream.matrix(index)).tolist()
        return [(self._place_of[group[source]], self._place_of[group[destination]]) for source, destination in cells]

    def _take(self, stream: Stream, cadence: str, visit: int, row: dict[str, object]) -> None:
        arrays = load_samples(self._run.path, row)
        starts, ends = arrays[f"{stream.name}.start"], arrays[f"{stream.name}.end"]
        batch = arrays[f"{stream.name}.batch"]
        error_s = row["clock_error_s"]
        if cadence == "isolated":
            self._clock_error_s = max(self._clock_error_s, float(error_s) if isinstance(error_s, float) else 0.0)
        ranks = list(self._place_of)
        for index, group in enumerate(stream.groups):
            matrix = stream.matrix(index)
            for source, destination in self._directions(stream, index):
                sender, receiver = ranks[source], ranks[destination]
                if cadence == "isolated":
                    synchronised = ends[:, receiver] - starts[:, sender]
                    self._keep_latency("synchronised", visit, source, destination, synchronised)
                    self._keep_latency("local", visit, source, destination, ends[:, receiver] - starts[:, receiver])
                    continue
                num_bytes = int(matrix[group.index(sender), group.index(receiver)])
                if stream.pattern in self._rates:
                    _keep(
                        self._rates[stream.pattern], (visit, source, destination), num_bytes, ends[:, receiver], batch
                    )
                else:
                    watched = sender if stream.pattern == "incast" else receiver
                    times = _intervals(ends[:, watched], batch)
                    if len(times):
                        self._peers[stream.pattern][visit, source, destination] = num_bytes / np.median(times)
            if stream.pattern in self._fans:
                hub = group[0]
                # A sender may be done when its bytes are buffered: the last receiver tells when they have arrived.
                last = ends[:, hub] if stream.pattern == "incast" else np.nanmax(ends[:, list(group[1:])], axis=1)
                _keep(self._fans[stream.pattern], (visit, self._place_of[hub]), int(matrix.sum()), last, batch)

    def _keep_latency(self, clock: str, visit: int, source: int, destination: int, times: Floats) -> None:
        if len(times):
            medians, lows = self._by_clock[clock]
            medians[visit, source, destination] = np.median(times)
            lows[visit, source, destination] = np.quantile(times, 0.05)

    def _clock(self) -> Literal["synchronised", "local"]:
        medians = self._by_clock["synchronised"][0]
        if np.isnan(medians).all():
            return "local"
        return "synchronised" if self._clock_error_s <= CLOCK_SHARE * float(np.nanmedian(medians)) else "local"


def _intervals(ends: Floats, batch: npt.NDArray[np.int64]) -> Floats:
    """Return the time between successive ends within a batch, s."""
    steps: Floats = np.diff(ends)[np.diff(batch) == 0]
    return steps[steps > 0]


def _keep(rates: Rates, place: tuple[int, ...], num_bytes: int, ends: Floats, batch: npt.NDArray[np.int64]) -> None:
    times = _intervals(ends, batch)
    if not len(times):
        return
    low_s, high_s = block_median_interval(times) or (float(times.min()), float(times.max()))
    rates.median[place] = num_bytes / np.median(times)
    rates.low[place], rates.high[place] = num_bytes / high_s, num_bytes / low_s


def _best(by_visit: Floats) -> Floats:
    """Return the largest over visits; NaN where there is none."""
    best: Floats = np.where(np.isnan(by_visit), -np.inf, by_visit).max(axis=0)
    return np.where(np.isinf(best), np.nan, best)
