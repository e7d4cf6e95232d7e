"""Load: how many bytes streams put in one step on each physical resource, and which resource two loads share.

A resource is a kind and an index: ``port_egress`` and ``port_ingress`` of a rank, all that it sends or gets;
``nic_egress`` and ``nic_ingress`` of a node, what crosses to other nodes; ``fabric`` of a node, what its ranks send to
each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstraffic.patterns.step import Step
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.wire import wire_matrix

Resource = tuple[str, int]
Load = Mapping[Resource, int]
MAX_GROUP = 8192  # ranks: a matrix of half a gigabyte
# The scarcest first: a GPU's share of its node's network is an order of magnitude slower than its port to the node.
KINDS = ("nic_egress", "nic_ingress", "port_egress", "port_ingress", "fabric")


def group_calls(step: Step, streams: Sequence[Stream]) -> dict[str, tuple[int, ...]]:
    """Return how often each group of each stream calls it in one step.

    A boundary of a pipeline is a task of its own, but the byte matrix holds all of them: they count once, where the
    first stage sends.
    """
    found = {stream.name: [0] * len(stream.groups) for stream in streams}
    for block in (block for lane in step.lanes for block in lane):
        for task in block.tasks:
            if task.edge is None or task.edge[0] == 0:
                own = found[task.stream]
                for index in range(len(own)) if task.groups is None else task.groups:
                    own[index] += block.repeat
    return {name: tuple(counts) for name, counts in found.items()}


def step_load(calls: Sequence[tuple[Stream, Sequence[int]]], nodes: Sequence[int]) -> Load:
    """Add up streams with the number of calls that each of their groups makes; ``nodes[rank]`` is a rank's node.

    Bytes are those of ``wire_matrix``: rings and pairwise exchanges, what a rank keeps left out. Resources without
    bytes are left out.

    >>> s = Stream(name="x", pattern="tp", op="all_reduce", phase="decode", groups=((0, 1),), payload_bytes=400,
    ...            calls_per_step=3, dtype="bfloat16", formula="", source="")
    >>> step_load([(s, [3])], [0, 1])["nic_egress", 0]
    1200

    Raises:
        ValueError: a group of more ranks than a byte matrix is made for.
    """
    for stream, _ in calls:
        if stream.group_size > MAX_GROUP:
            raise ValueError(
                f"loads go by a matrix of bytes between the ranks of a group, at most {MAX_GROUP}: "
                f"{stream.name} has {stream.group_size}"
            )
    place = np.asarray(nodes, dtype=np.int64)
    num_nodes = int(place.max()) + 1
    ports = np.zeros((2, len(place)), dtype=np.int64)
    cards = np.zeros((2, num_nodes), dtype=np.int64)
    fabric = np.zeros(num_nodes, dtype=np.int64)
    for stream, counts in calls:
        for index, (group, count) in enumerate(zip(stream.groups, counts, strict=True)):
            if not count:
                continue
            ranks = np.asarray(group, dtype=np.int64)
            matrix = wire_matrix(stream, index) * count
            home = place[ranks]
            across = np.where(home[:, None] != home[None, :], matrix, 0)
            for direction in (0, 1):
                ports[direction, ranks] += matrix.sum(axis=1 - direction)
                np.add.at(cards[direction], home, across.sum(axis=1 - direction))
            np.add.at(fabric, home, (matrix - across).sum(axis=1))
    found: dict[Resource, int] = {}
    by_kind = zip(KINDS, (*cards, *ports, fabric), strict=True)
    for kind, amounts in by_kind:
        found |= {(kind, index): int(amounts[index]) for index in np.flatnonzero(amounts).tolist()}
    return found


def largest(load: Load, kind: str) -> int:
    """Return the bytes on the busiest resource of a kind, 0 if there are none.

    >>> largest({("nic_egress", 0): 3, ("nic_egress", 1): 5}, "nic_egress")
    5
    """
    return max((amount for (own, _), amount in load.items() if own == kind), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A resource that two loads share, and the bytes of each."""

    resource: Resource
    num_bytes: tuple[int, int]


def shared(first: Load, second: Load) -> tuple[Shared, ...]:
    """Return for each kind of resource that both load the one with most bytes, the scarcest kind first.

    >>> [one.resource for one in shared({("port_egress", 0): 5, ("port_egress", 1): 9}, {("port_egress", 0): 7})]
    [('port_egress', 0)]
    """
    found: list[Shared] = []
    for kind in KINDS:
        common = sorted(resource for resource in first.keys() & second.keys() if resource[0] == kind)
        if common:
            most = max(common, key=lambda resource: first[resource] + second[resource])
            found.append(Shared(resource=most, num_bytes=(first[most], second[most])))
    return tuple(found)
