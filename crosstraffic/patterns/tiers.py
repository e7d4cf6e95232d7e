"""What one step sends inside nodes and between them, from the busiest rank and out of the busiest node."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstraffic.patterns.load import group_calls
from crosstraffic.patterns.matrix import Matrix
from crosstraffic.patterns.step import Step
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.wire import wire_matrix

# Rules that give every group of a stream the same matrix.
UNIFORM = frozenset({"ring", "chain", "routed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTiers:
    """One stream in one step: bytes that its busiest rank sends inside its node and to others, and its calls."""

    name: str
    intra_node_bytes: int
    inter_node_bytes: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Traffic of one step by tier.

    ``intra_node_bytes`` and ``inter_node_bytes``: the most that one rank sends inside its node, and to other nodes;
    ``node_egress_bytes``: the most that leaves one node; ``calls``: calls of one pass, one after another, through all
    pipeline stages.
    """

    intra_node_bytes: int
    inter_node_bytes: int
    node_egress_bytes: int
    calls: int
    streams: tuple[StreamTiers, ...]


NOTHING = Tiers(intra_node_bytes=0, inter_node_bytes=0, node_egress_bytes=0, calls=0, streams=())


def _matrices(stream: Stream) -> Matrix:
    """Return the bytes of one call between the ranks of each group, ``[groups or 1, n, n]``."""
    same = stream.rule is None or stream.rule.kind in UNIFORM
    return np.stack([wire_matrix(stream, index) for index in range(1 if same else len(stream.groups))])


def _calls_in_row(step: Step) -> int:
    """Return the calls of the longest lane, one after another."""
    return max((sum(block.repeat * len(block.tasks) for block in lane) for lane in step.lanes), default=0)


def step_tiers(streams: Sequence[Stream], step: Step, nodes: Sequence[int], num_passes: int = 1) -> Tiers:
    """Add up ``num_passes`` times the streams of ``step``; ``nodes[rank]`` is the node of each rank.

    Bytes are those of ``wire_matrix``: collectives as rings in the order of their group, dispatches message by message.

    >>> from crosstraffic.patterns.step import Block, Task
    >>> s = Stream(name="x", pattern="tp", op="all_reduce", phase="decode", groups=((0, 1, 2, 3),), payload_bytes=400,
    ...            calls_per_step=2, dtype="bfloat16", formula="", source="")
    >>> twice = (Block(repeat=2, tasks=(Task(stream="x", payload_bytes=400),)),)
    >>> found = step_tiers([s], Step(name="decode", phase="decode", lanes=(twice,)), (0, 0, 1, 1))
    >>> found.intra_node_bytes, found.inter_node_bytes, found.node_egress_bytes, found.calls
    (1200, 1200, 1200, 2)
    """
    place = np.asarray(nodes, dtype=np.int64)
    intra, inter = np.zeros((2, len(place)), dtype=np.int64)
    counted = group_calls(step, streams)
    rows: list[StreamTiers] = []
    for stream in streams:
        counts = np.array(counted[stream.name], dtype=np.int64)
        sizes = {len(group) for group in stream.groups}
        if len(sizes) != 1:
            raise ValueError(f"{stream.name}: groups of different sizes: {sorted(sizes)}")
        members = np.array(stream.groups, dtype=np.int64)
        matrices, weights = _matrices(stream), counts[:, None, None] * num_passes
        homes = place[members]
        same = homes[:, :, None] == homes[:, None, :]
        inside = (matrices * same * weights).sum(axis=2)
        across = (matrices * weights).sum(axis=2) - inside
        intra[members] += inside
        inter[members] += across
        rows.append(
            StreamTiers(
                name=stream.name,
                intra_node_bytes=int(inside.max()),
                inter_node_bytes=int(across.max()),
                calls=int(counts.max()) * num_passes,
            )
        )
    egress = np.zeros(int(place.max()) + 1, dtype=np.int64)
    np.add.at(egress, place, inter)
    return Tiers(
        intra_node_bytes=int(intra.max()),
        inter_node_bytes=int(inter.max()),
        node_egress_bytes=int(egress.max()),
        calls=_calls_in_row(step),
        streams=tuple(rows),
    )
