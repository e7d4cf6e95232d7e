"""What is true in a simulated world: latency and bandwidth per tier, clocks, noise, stragglers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from crosstraffic.bench.fluid import Footprint, footprint
from crosstraffic.patterns.matrix import Matrix

_LINK = re.compile(r"\d+(?:[<>]|[->]\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of the fabric; ``latency_s`` is per dependent step of a call."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s must not be negative: {self.latency_s}")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s must be positive: {self.bandwidth_bytes_per_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTruth:
    """A fabric and its clocks.

    Resources: each rank's port, once per direction, carries all that the rank sends or receives, at
    ``intra.bandwidth_bytes_per_s``; each node's NIC, once per direction, carries what crosses nodes, at
    ``inter.bandwidth_bytes_per_s``; each node's host, if it is limited, carries every byte that starts or ends there
    (a byte that stays in the node once). ``slow_bytes_per_s`` names links between nodes that carry less: ``"2"`` both
    directions of a node's NIC, ``"2>"`` what it sends, ``"2<"`` what it gets, ``"0-3"`` a pair, each of its directions
    for itself, ``"0>3"`` one direction of a pair.

    A rank's clock shows ``time * (1 + drift) + offset``. ``noise_sigma`` is that of a lognormal factor of median 1 on
    the time of each call. ``straggler_s`` is by how much each barrier and each call of a rank returns late; it answers
    pings at once. Control messages (barriers, pings) take ``control_latency_s``, pings also ``ping_extra_s`` always and
    an exponential time of mean ``ping_jitter_s``, both given as (to a higher rank, to a lower rank).
    """

    ranks_per_node: int
    intra: Tier
    inter: Tier
    host_bytes_per_s: float | None = None
    overhead_s: float = 0.0
    noise_sigma: float = 0.0
    seed: int = 0
    clock_offset_s: Mapping[int, float] = field(default_factory=dict)
    clock_drift: Mapping[int, float] = field(default_factory=dict)
    straggler_s: Mapping[int, float] = field(default_factory=dict)
    control_latency_s: float = 5e-6
    ping_extra_s: tuple[float, float] = (0.0, 0.0)
    ping_jitter_s: tuple[float, float] = (0.0, 0.0)
    poll_s: float = 1e-7
    slow_bytes_per_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for link, rate in self.slow_bytes_per_s.items():
            if _LINK.fullmatch(link) is None:
                raise ValueError(f"not a link: {link!r}; write 2, 2>, 2<, 0-3 or 0>3")
            if not rate > 0:
                raise ValueError(f"slow_bytes_per_s must be positive: {link} at {rate}")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1: {self.ranks_per_node}")
        if self.host_bytes_per_s is not None and not self.host_bytes_per_s > 0:
            raise ValueError(f"host_bytes_per_s must be positive, or None for no limit: {self.host_bytes_per_s}")
        times = {
            "overhead_s": [self.overhead_s],
            "noise_sigma": [self.noise_sigma],
            "control_latency_s": [self.control_latency_s],
            "straggler_s": list(self.straggler_s.values()),
            "ping_extra_s": list(self.ping_extra_s),
            "ping_jitter_s": list(self.ping_jitter_s),
        }
        for name, values in times.items():
            if not all(value >= 0 for value in values):
                raise ValueError(f"{name} must not be negative: {values}")
        if not self.poll_s > 0:
            raise ValueError(f"poll_s must be positive, or a polling rank stops time: {self.poll_s}")
        if not all(drift > -1 for drift in self.clock_drift.values()):
            raise ValueError(f"clock_drift must be above -1, or a clock runs backwards: {dict(self.clock_drift)}")

    def nic_bytes_per_s(self, node: int, sign: Literal[">", "<"]) -> float:
        """Return what a node's NIC carries in one direction: ``>`` is what it sends."""
        slow = [self.slow_bytes_per_s.get(link, math.inf) for link in (f"{node}", f"{node}{sign}")]
        return min(self.inter.bandwidth_bytes_per_s, *slow)

    def pair_bytes_per_s(self, source: int, destination: int) -> float:
        """Return what one direction between two nodes carries; infinite where only their NICs bound it."""
        links = (f"{source}>{destination}", f"{source}-{destination}", f"{destination}-{source}")
        return min(self.slow_bytes_per_s.get(link, math.inf) for link in links)

    def node(self, rank: int) -> int:
        """Return the node of a rank: ranks fill one node after the other."""
        return rank // self.ranks_per_node


def footprint_of(truth: SimulatedTruth, group: Sequence[int], matrix: Matrix) -> Footprint:
    """Return what one call of a group loads; ``matrix`` are bytes on the wire, ``[n, n]``, zero diagonal.

    >>> import numpy as np
    >>> tier = Tier(latency_s=1e-6, bandwidth_bytes_per_s=100.0)
    >>> truth = SimulatedTruth(ranks_per_node=2, intra=tier, inter=tier)
    >>> footprint_of(truth, (0, 1, 2), np.array([[0, 50, 0], [0, 0, 100], [0, 0, 0]])).alone_s
    1.0
    """
    needs_s: dict[Any, float] = {}
    port = truth.intra.bandwidth_bytes_per_s

    def load(kind: str, place: int | tuple[int, int], num_bytes: int, bytes_per_s: float) -> None:
        needs_s[kind, place] = needs_s.get((kind, place), 0.0) + num_bytes / bytes_per_s

    for source, row in enumerate(matrix.tolist()):
        for destination, num_bytes in enumerate(row):
            if not num_bytes:
                continue
            here, there = group[source], group[destination]
            load("rank_egress", here, num_bytes, port)
            load("rank_ingress", there, num_bytes, port)
            out, into = truth.node(here), truth.node(there)
            nodes = {out, into}
            if len(nodes) == 2:
                load("node_egress", out, num_bytes, truth.nic_bytes_per_s(out, ">"))
                load("node_ingress", into, num_bytes, truth.nic_bytes_per_s(into, "<"))
                if truth.pair_bytes_per_s(out, into) < math.inf:
                    load("pair", (out, into), num_bytes, truth.pair_bytes_per_s(out, into))
            for node in nodes if truth.host_bytes_per_s is not None else ():
                load("host", node, num_bytes, truth.host_bytes_per_s or 0.0)
    return footprint(needs_s)


def truth_to_dict(truth: SimulatedTruth) -> dict[str, Any]:
    """Turn a truth into JSON types; absent limits are left out, as TOML has no null."""
    data = {key: value for key, value in asdict(truth).items() if value is not None}
    for key in ("clock_offset_s", "clock_drift", "straggler_s"):
        data[key] = {str(rank): value for rank, value in data[key].items()}
    for key in ("ping_extra_s", "ping_jitter_s"):
        data[key] = list(data[key])
    return data


def truth_from_dict(data: Mapping[str, Any]) -> SimulatedTruth:
    """Read back what ``truth_to_dict`` wrote, or a TOML table of the same names.

    Raises:
        ValueError: an unknown name, a missing one, or a wrong value.
    """
    known = [item.name for item in fields(SimulatedTruth)]
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"unknown in a simulated truth: {', '.join(unknown)}; allowed: {', '.join(known)}")
    try:
        values = dict(data)
        for key in ("intra", "inter"):
            values[key] = Tier(**values[key])
        for key in ("clock_offset_s", "clock_drift", "straggler_s"):
            values[key] = {int(rank): float(value) for rank, value in values.get(key, {}).items()}
        slow = values.get("slow_bytes_per_s", {})
        values["slow_bytes_per_s"] = {str(link): float(rate) for link, rate in slow.items()}
        for key in ("ping_extra_s", "ping_jitter_s"):
            up_s, down_s = values.get(key, (0.0, 0.0))
            values[key] = (float(up_s), float(down_s))
        return SimulatedTruth(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a simulated truth: {error!r}") from error
