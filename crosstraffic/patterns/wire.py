"""What one call of an op puts on the wire: dependent steps, bytes between ranks, nccl-tests' bandwidth factors.

Collectives are counted as their ring (or pairwise) algorithm, the bandwidth-optimal one: Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH" (2005). Ops with a byte matrix are counted as
that matrix, the diagonal (what a rank keeps) excluded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from crosstraffic.patterns.matrix import Chain, Matrix, Ring, groups_differ
from crosstraffic.patterns.stream import MATRIX_OPS, OPS, Stream


def busbw_factor(op: str, num_ranks: int) -> float:
    """Return busbw / algbw as nccl-tests defines it (doc/PERFORMANCE.md); 1 for ops with a byte matrix.

    >>> busbw_factor("all_reduce", 4), busbw_factor("all_gather", 4), busbw_factor("send_recv", 2)
    (1.5, 0.75, 1.0)
    """
    if op not in OPS:
        raise ValueError(f"unknown op: {op!r}; allowed: {', '.join(OPS)}")
    if op == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0


def num_steps(op: str, num_ranks: int) -> int:
    """Return how many dependent messages a call chains: 2(n-1) for a ring all_reduce, n-1 for the other collectives.

    A ring or chain shift, and a KV transfer, is one message; an all_to_all (pairwise exchange) has n-1 rounds.

    >>> num_steps("all_reduce", 4), num_steps("all_to_all_v", 4), num_steps("send_recv", 4), num_steps("all_gather", 1)
    (6, 3, 1, 0)
    """
    if op not in OPS:
        raise ValueError(f"unknown op: {op!r}; allowed: {', '.join(OPS)}")
    if num_ranks <= 1:
        return 0
    if op in ("send_recv", "kv_transfer"):
        return 1
    return (2 if op == "all_reduce" else 1) * (num_ranks - 1)


def wire_matrix(stream: Stream, group_index: int = 0, payload_bytes: int | None = None) -> Matrix:
    """Return bytes between the ranks of one group in one call, ``[n, n]``, zero diagonal.

    >>> from crosstraffic.patterns.stream import Stream
    >>> s = Stream(name="x", pattern="tp", op="all_reduce", phase="decode", groups=((0, 1, 2, 3),), payload_bytes=400,
    ...            calls_per_step=1, dtype="bfloat16", formula="", source="")
    >>> wire_matrix(s)[0].tolist()
    [0, 600, 0, 0]
    """
    num_ranks = len(stream.groups[group_index])
    size = stream.payload_bytes if payload_bytes is None else payload_bytes
    if stream.op in MATRIX_OPS:
        matrix = stream.matrix(group_index, size).copy()
        np.fill_diagonal(matrix, 0)
        return matrix
    matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    if num_ranks == 1:
        return matrix
    if stream.op == "all_to_all":
        matrix[:] = size // num_ranks
        np.fill_diagonal(matrix, 0)
        return matrix
    if stream.op == "broadcast":
        for source in range(num_ranks - 1):
            matrix[source, source + 1] = size
        return matrix
    per_rank = ring_bytes(stream.op, num_ranks, size)
    for source in range(num_ranks):
        matrix[source, (source + 1) % num_ranks] = per_rank
    return matrix


def ring_bytes(op: str, num_ranks: int, payload_bytes: int) -> int:
    """Return what one rank sends in a ring algorithm: 2(n-1)/n of an all_reduce's buffer, (n-1)/n of a total.

    >>> ring_bytes("all_reduce", 4, 400), ring_bytes("all_gather", 3, 2**54 + 1)
    (600, 12009599006321323)
    """
    rounds = 2 if op == "all_reduce" else 1
    return round(Fraction(rounds * (num_ranks - 1) * payload_bytes, num_ranks))


def wire_bytes_per_rank(stream: Stream) -> int:
    """Return the most bytes that one rank sends to others in one call, over all groups."""
    if stream.rule is not None and groups_differ(stream.rule):
        return max(largest_send(stream, index) for index in range(len(stream.groups)))
    index_of = {len(group): index for index, group in enumerate(stream.groups)}
    return max(largest_send(stream, index) for index in index_of.values())


def largest_send(stream: Stream, group_index: int = 0) -> int:
    """Return the most bytes that one rank of a group sends to others: the largest row sum of ``wire_matrix``."""
    num_ranks = len(stream.groups[group_index])
    if num_ranks == 1:
        return 0
    if isinstance(stream.rule, Ring | Chain):
        return stream.rule.num_bytes
    if stream.op in MATRIX_OPS:
        return int(wire_matrix(stream, group_index).sum(axis=1).max())
    if stream.op == "all_to_all":
        return stream.payload_bytes // num_ranks * (num_ranks - 1)
    return stream.payload_bytes if stream.op == "broadcast" else ring_bytes(stream.op, num_ranks, stream.payload_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one call of a stream loads, over all its groups, by rank and by node."""

    egress_bytes: Mapping[int, int]
    ingress_bytes: Mapping[int, int]
    node_egress_bytes: Mapping[int, int]
    node_ingress_bytes: Mapping[int, int]
    intra_node_bytes: int
    inter_node_bytes: int
    logical_bytes: int
    self_bytes: int

    @property
    def bottleneck_bytes(self) -> int:
        """Largest egress or ingress of a rank, what a rank keeps excluded."""
        return max([*self.egress_bytes.values(), *self.ingress_bytes.values(), 0])


def traffic(stream: Stream, nodes: Sequence[int], payload_bytes: int | None = None) -> Traffic:
    """Add up one call of a stream; ``nodes[rank]`` is the node of each rank."""
    size = stream.payload_bytes if payload_bytes is None else payload_bytes
    egress: dict[int, int] = {}
    ingress: dict[int, int] = {}
    node_egress: dict[int, int] = {}
    node_ingress: dict[int, int] = {}
    intra = inter = logical = kept = 0
    for index, group in enumerate(stream.groups):
        matrix = wire_matrix(stream, index, size)
        if stream.op in MATRIX_OPS:
            full = stream.matrix(index, size)
            logical, kept = logical + int(full.sum()), kept + int(np.trace(full))
        else:
            logical += int(matrix.sum())
        for source, destination in zip(*np.nonzero(matrix), strict=True):
            num_bytes, here, there = int(matrix[source, destination]), group[source], group[destination]
            egress[here] = egress.get(here, 0) + num_bytes
            ingress[there] = ingress.get(there, 0) + num_bytes
            if nodes[here] == nodes[there]:
                intra += num_bytes
                continue
            inter += num_bytes
            node_egress[nodes[here]] = node_egress.get(nodes[here], 0) + num_bytes
            node_ingress[nodes[there]] = node_ingress.get(nodes[there], 0) + num_bytes
    return Traffic(
        egress_bytes=egress,
        ingress_bytes=ingress,
        node_egress_bytes=node_egress,
        node_ingress_bytes=node_ingress,
        intra_node_bytes=intra,
        inter_node_bytes=inter,
        logical_bytes=logical,
        self_bytes=kept,
    )


def steps_by_tier(op: str, group: Sequence[int], nodes: Sequence[int]) -> tuple[int, int]:
    """Split the dependent messages of a call into (inside a node, between nodes).

    A ring crosses nodes once per node: 2(nodes-1) of an all_reduce's steps wait for the network, nodes-1 of the
    others' (NCCL src/graph/tuning.cc counts alike); a pairwise exchange crosses for each peer on another node.

    >>> nodes = (0, 0, 1, 1)
    >>> steps_by_tier("all_reduce", (0, 1, 2, 3), nodes), steps_by_tier("all_to_all_v", (0, 1, 2, 3), nodes)
    ((4, 2), (1, 2))
    """
    total = num_steps(op, len(group))
    places = [nodes[rank] for rank in group]
    num_nodes = len(set(places))
    if total == 0 or num_nodes == 1:
        return total, 0
    if op in ("send_recv", "kv_transfer"):
        return 0, total
    if op in ("all_to_all", "all_to_all_v"):
        remote = max(len(group) - places.count(place) for place in set(places))
        return total - remote, remote
    inter = (2 if op == "all_reduce" else 1) * (num_nodes - 1)
    return total - inter, inter
