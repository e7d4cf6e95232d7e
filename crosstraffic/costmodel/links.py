"""Resources that streams share, and what one call of a stream loads on each of them.

A resource is a kind and an index. Kinds, each in two directions but the last: a rank's port for all that it sends
(``port_egress``, rank), or one port for its own node (``intra_egress``) and one for others (``inter_egress``); a node's
network card (``nic_egress``, node), shared by its ranks: the max-rate model of Gropp, Olson and Samfass, "Modeling MPI
Communication Performance on SMP Nodes" (2016); a host's memory (``host_bytes``, node), which every byte that starts or
ends there crosses (once if it stays). Which of them a machine has is a ``Topology``, picked by the fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from crosstraffic.patterns.matrix import ByteRule, Matrix, groups_differ
from crosstraffic.patterns.stream import MATRIX_OPS, Op, Stream
from crosstraffic.patterns.wire import steps_by_tier, wire_matrix

Resource = tuple[str, int]
TIERS = ("intra", "inter")
LINKS = ("port", "intra", "inter", "nic", "host")
Topology = tuple[str, ...]
TOPOLOGIES: tuple[Topology, ...] = (
    ("port", "nic"),
    ("port", "nic", "host"),
    ("intra", "inter", "nic"),
    ("intra", "inter", "nic", "host"),
)
_REFERENCE_BYTES = 2**30  # large enough that rounding to whole blocks does not show


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """One call of one group: dependent steps by tier, and bytes on each resource per byte of payload."""

    ranks: tuple[int, ...]
    steps: tuple[int, int]
    load: Mapping[Resource, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """What the time of one call of a whole stream depends on, whatever its size; per byte of payload."""

    steps: tuple[tuple[int, int], ...]  # distinct (intra, inter) of its groups
    loads: tuple[float, ...]  # in the order of LINKS: on the busiest resource of each link, all groups running
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfGroup:
    """The rule of one group of a stream, for a stream of that group alone."""

    rule: ByteRule
    group_index: int
    kind: str = "of_group"

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        """Return the group's matrix, whichever group is asked for."""
        return self.rule.matrix(num_ranks, self.group_index)


def busiest(load: Mapping[Resource, float]) -> tuple[float, ...]:
    """Return the largest load on a resource of each link, in the order of ``LINKS``.

    >>> busiest({("intra_egress", 0): 2.0, ("intra_ingress", 1): 3.0, ("nic_egress", 0): 1.0})
    (0.0, 3.0, 0.0, 1.0, 0.0)
    """
    found = dict.fromkeys(LINKS, 0.0)
    for (kind, _), amount in load.items():
        link = kind.partition("_")[0]
        found[link] = max(found[link], amount)
    return tuple(found[link] for link in LINKS)


def footprint(
    stream: Stream, nodes: tuple[int, ...], group_index: int, edge: tuple[int, int] | None = None
) -> Footprint:
    """Work out one group's call; ``edge`` keeps the bytes from one member to another only.

    >>> s = Stream(name="x", pattern="tp", op="all_reduce", phase="decode", groups=((0, 1, 2, 3),), payload_bytes=400,
    ...            calls_per_step=1, dtype="bfloat16", formula="", source="")
    >>> f = footprint(s, (0, 0, 1, 1), 0)
    >>> f.steps, f.load["port_egress", 0], f.load["inter_egress", 1], f.load["nic_egress", 0], f.load["host_bytes", 0]
    ((4, 2), 1.5, 1.5, 1.5, 4.5)

    Raises:
        ValueError: a rank of the group has no place.
    """
    group = stream.groups[group_index]
    if max(group) >= len(nodes):
        raise ValueError(f"{stream.name}: rank {max(group)} has no place among {len(nodes)} ranks")
    numbers: dict[int, int] = {}
    places = tuple([numbers.setdefault(nodes[rank], len(numbers)) for rank in group])
    rule, differs = stream.rule, stream.rule is not None and groups_differ(stream.rule)
    size = stream.payload_bytes if stream.op in MATRIX_OPS else 0  # the others' bytes are in proportion to it
    members, steps, load = _like_group(
        stream.op,
        rule,  # type: ignore[arg-type]
        size,
        places,
        group_index if differs else 0,
        edge,
    )
    homes = tuple(numbers)
    return Footprint(
        ranks=tuple([group[member] for member in members]),
        steps=steps,
        load={(kind, (homes if of_node else group)[index]): amount for kind, of_node, index, amount in load},
    )


@lru_cache(maxsize=4096)
def _like_group(
    op: Op,
    rule: ByteRule | None,
    payload_bytes: int,
    places: tuple[int, ...],
    group_index: int,
    edge: tuple[int, int] | None,
) -> tuple[tuple[int, ...], tuple[int, int], tuple[tuple[str, bool, int, float], ...]]:
    """Work out the groups that lie like ``places``: who takes part, steps, and (kind, whether of a node, which, load).

    Members and nodes are counted in the order of the group; ``payload_bytes`` is that of ops with a byte matrix.
    """
    members = tuple(range(len(places)))
    reference = payload_bytes if op in MATRIX_OPS else _REFERENCE_BYTES * len(places)
    alone = Stream(
        name=op,
        pattern=op,
        op=op,
        phase="decode",
        groups=(members,),
        payload_bytes=payload_bytes,
        calls_per_step=1,
        dtype="",
        formula="",
        source="",
        rule=None if rule is None else OfGroup(rule=rule, group_index=group_index),
    )
    matrix = wire_matrix(alone, 0, reference).astype(np.float64)
    ranks = members
    if edge is not None:
        kept = matrix[edge]
        matrix = np.zeros_like(matrix)
        matrix[edge] = kept
        ranks = edge
    elif op in ("send_recv", "kv_transfer") and matrix.any():  # nobody waits for a rank with nothing to do
        busy = np.asarray(matrix.sum(axis=0) + matrix.sum(axis=1) > 0)
        ranks = tuple(rank for rank, works in zip(members, busy.tolist(), strict=True) if works)
    steps = steps_by_tier(op, ranks, places)
    if reference > 0:
        matrix = matrix / reference
    found: dict[tuple[str, bool, int], float] = {}
    homes = np.array(places)
    remote = homes[:, None] != homes[None, :]
    inside, across = np.where(remote, 0.0, matrix), np.where(remote, matrix, 0.0)
    for link, here in (("port", matrix), ("intra", inside), ("inter", across)):
        for kind, totals in ((f"{link}_egress", here.sum(axis=1)), (f"{link}_ingress", here.sum(axis=0))):
            for index in np.flatnonzero(totals).tolist():
                found[kind, False, index] = float(totals[index])
    crossing = inside.sum(axis=1) + across.sum(axis=1) + across.sum(axis=0)
    sums = (("nic_egress", across.sum(axis=1)), ("nic_ingress", across.sum(axis=0)), ("host_bytes", crossing))
    for kind, totals in sums:
        for index in np.flatnonzero(totals).tolist():
            key = (kind, True, places[index])
            found[key] = found.get(key, 0.0) + float(totals[index])
    return ranks, steps, tuple((*key, amount) for key, amount in found.items())


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
    return _family(stream.op, stream.groups, tuple(nodes))


@lru_cache(maxsize=1024)
def _family(op: str, groups: tuple[tuple[int, ...], ...], nodes: tuple[int, ...]) -> str:
    sizes = sorted({len(group) for group in groups})
    spans = sorted({len({nodes[rank] for rank in group}) for group in groups})
    lie = "in a node" if spans == [1] else f"over {'-'.join(map(str, spans))} nodes"
    count = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
    return f"{op} {count} of {'-'.join(map(str, sizes))} {lie}"
