"""Resources that streams share, and what one call of a stream loads on each of them.

A resource is a kind and an index: a rank's port in one direction inside its node (``intra_egress``, rank) or to other
nodes (``inter_egress``, rank), and a node's network card in one direction (``nic_egress``, node). Ports of one tier
have one bandwidth each (``intra``, ``inter``), network cards another (``nic``): the max-rate model of Gropp, Olson and
Samfass, "Modeling MPI Communication Performance on SMP Nodes" (2016).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from crosstraffic.patterns.stream import MATRIX_OPS, Stream
from crosstraffic.patterns.wire import steps_by_tier, wire_matrix

Resource = tuple[str, int]
TIERS = ("intra", "inter")
LINKS = ("intra", "inter", "nic")
_REFERENCE_BYTES = 2**30  # large enough that rounding to whole blocks does not show


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """One call of one group: dependent steps by tier, and bytes on each resource per byte of payload."""

    ranks: tuple[int, ...]
    steps: tuple[int, int]
    load: Mapping[Resource, float]

    def busiest(self) -> tuple[float, float, float]:
        """Return the largest load on a resource of each link, in the order of ``LINKS``."""
        return busiest(self.load)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """What the time of one call of a whole stream depends on, whatever its size; per byte of payload."""

    steps: tuple[tuple[int, int], ...]  # distinct (intra, inter) of its groups
    loads: tuple[float, float, float]  # on the busiest resource of each link, all groups running
    family: str


def busiest(load: Mapping[Resource, float]) -> tuple[float, float, float]:
    """Return the largest load on a resource of each link, in the order of ``LINKS``.

    >>> busiest({("intra_egress", 0): 2.0, ("intra_ingress", 1): 3.0, ("nic_egress", 0): 1.0})
    (3.0, 0.0, 1.0)
    """
    found = dict.fromkeys(LINKS, 0.0)
    for (kind, _), amount in load.items():
        link = kind.partition("_")[0]
        found[link] = max(found[link], amount)
    return found["intra"], found["inter"], found["nic"]


@lru_cache(maxsize=4096)
def footprint(
    stream: Stream, nodes: tuple[int, ...], group_index: int, edge: tuple[int, int] | None = None
) -> Footprint:
    """Work out one group's call; ``edge`` keeps the bytes from one member to another only.

    >>> s = Stream(name="x", pattern="tp", op="all_reduce", phase="decode", groups=((0, 1, 2, 3),), payload_bytes=400,
    ...            calls_per_step=1, dtype="bfloat16", formula="", source="")
    >>> f = footprint(s, (0, 0, 1, 1), 0)
    >>> f.steps, f.load[("intra_egress", 0)], f.load[("inter_egress", 1)], f.load[("nic_egress", 0)]
    ((4, 2), 1.5, 1.5, 1.5)

    Raises:
        ValueError: a rank of the group has no place.
    """
    group = stream.groups[group_index]
    if max(group) >= len(nodes):
        raise ValueError(f"{stream.name}: rank {max(group)} has no place among {len(nodes)} ranks")
    reference = stream.payload_bytes if stream.op in MATRIX_OPS else _REFERENCE_BYTES * len(group)
    matrix = wire_matrix(stream, group_index, reference).astype(np.float64)
    ranks, steps = group, steps_by_tier(stream.op, group, nodes)
    if edge is not None:
        kept = matrix[edge]
        matrix = np.zeros_like(matrix)
        matrix[edge] = kept
        ranks = (group[edge[0]], group[edge[1]])
        steps = steps_by_tier("send_recv", ranks, nodes)
    if reference > 0:
        matrix /= reference
    load: dict[Resource, float] = {}
    places = np.array([nodes[rank] for rank in group])
    remote = places[:, None] != places[None, :]
    for tier, here in (("intra", np.where(remote, 0.0, matrix)), ("inter", np.where(remote, matrix, 0.0))):
        for kind, totals in ((f"{tier}_egress", here.sum(axis=1)), (f"{tier}_ingress", here.sum(axis=0))):
            for index in np.flatnonzero(totals):
                _add(load, (kind, group[index]), float(totals[index]))
                if tier == "inter":
                    _add(load, (kind.replace("inter", "nic"), int(places[index])), float(totals[index]))
    return Footprint(ranks=tuple(ranks), steps=steps, load=load)


def _add(load: dict[Resource, float], resource: Resource, amount: float) -> None:
    load[resource] = load.get(resource, 0.0) + amount


@lru_cache(maxsize=1024)
def shape_of(stream: Stream, nodes: tuple[int, ...]) -> Shape:
    """Add up the groups of a stream, all of them calling at once."""
    load: dict[Resource, float] = {}
    steps: set[tuple[int, int]] = set()
    for index in range(len(stream.groups)):
        part = footprint(stream, nodes, index)
        steps.add(part.steps)
        for resource, amount in part.load.items():
            _add(load, resource, amount)
    return Shape(steps=tuple(sorted(steps)), loads=busiest(load), family=family_of(stream, nodes))


def family_of(stream: Stream, nodes: Sequence[int]) -> str:
    """Name the family of a stream: op, groups and how they lie on the nodes.

    >>> s = Stream(name="x", pattern="tp", op="all_reduce", phase="decode", groups=((0, 2), (1, 3)), payload_bytes=4,
    ...            calls_per_step=1, dtype="bfloat16", formula="", source="")
    >>> family_of(s, (0, 0, 1, 1)), family_of(s, (0, 0, 0, 0))
    ('all_reduce 2 groups of 2 over 2 nodes', 'all_reduce 2 groups of 2 in a node')
    """
    sizes = sorted({len(group) for group in stream.groups})
    spans = sorted({len({nodes[rank] for rank in group}) for group in stream.groups})
    lie = "in a node" if spans == [1] else f"over {'-'.join(map(str, spans))} nodes"
    count = "1 group" if len(stream.groups) == 1 else f"{len(stream.groups)} groups"
    return f"{stream.op} {count} of {'-'.join(map(str, sizes))} {lie}"
