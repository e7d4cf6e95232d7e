"""Placed calls: what decides the time of each call of a step, whoever is in it: op, group, nodes, size, how often."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstraffic.patterns.matrix import Ring
from crosstraffic.patterns.routing import Routed
from crosstraffic.patterns.step import Step, Task
from crosstraffic.patterns.stream import Stream


@dataclass(frozen=True, slots=True, order=True)
class Lie:
    """How a group lies: ranks, nodes, most ranks on one of them, and whether those there are neighbours.

    ``num_groups`` like it call at the same time, at most ``groups_per_node`` of them with ranks on the same node.
    """

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    placement: str
    num_groups: int
    groups_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCall:
    """Calls of one stream on one pipeline stage in one lane of a step; ``lies`` are those of its groups, which differ.

    ``times`` is how often it is called in one pass. ``message_bytes`` and ``num_messages`` are those of a dispatch of
    tokens: one message a token and expert. A ring's call is its one message to the next rank.
    """

    stream: str
    pattern: str
    op: str
    dtype: str
    payload_bytes: int
    lies: tuple[Lie, ...]
    lane: int
    stage: int
    times: int
    num_messages: int | None = None
    is_ring: bool = False


def lies_of(groups: Sequence[Sequence[int]], nodes: Sequence[int]) -> tuple[Lie, ...]:
    """Return how groups lie on nodes, each way once; groups of one rank, which have nobody to talk to, are left out.

    >>> lies_of([(0, 1), (2, 3)], (0, 0, 1, 1))
    (Lie(num_ranks=2, num_nodes=1, ranks_per_node=2, placement='consecutive', num_groups=2, groups_per_node=1),)
    >>> [(lie.placement, lie.num_nodes, lie.groups_per_node) for lie in lies_of([(0, 2), (1, 3)], (0, 0, 0, 0))]
    [('strided', 1, 2)]
    """
    place = np.asarray(nodes, dtype=np.int64)
    found: dict[tuple[int, int, int, str], list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
    by_size: dict[int, list[Sequence[int]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    for size, same in by_size.items():
        if size == 1:
            continue
        members = np.sort(np.array(same, dtype=np.int64), axis=1)
        homes = np.sort(place[members], axis=1)
        here = place[members]
        num_nodes = 1 + (np.diff(homes, axis=1) != 0).sum(axis=1)
        together = here[:, 1:] == here[:, :-1]
        near = (~together | (np.diff(members, axis=1) == 1)).all(axis=1)
        for index in range(len(same)):
            most = int(np.unique(homes[index], return_counts=True)[1].max()) if num_nodes[index] > 1 else size
            key = (size, int(num_nodes[index]), most, "consecutive" if near[index] else "strided")
            found.setdefault(key, []).append(np.unique(homes[index]))
    return tuple(
        Lie(*key, num_groups=len(where), groups_per_node=int(np.bincount(np.concatenate(where)).max()))
        for key, where in sorted(found.items(), key=lambda item: item[0])
    )


def placed_calls(
    streams: Sequence[Stream], step: Step, nodes: Sequence[int], stage_of_rank: Mapping[int, int]
) -> tuple[PlacedCall, ...]:
    """Return the calls of one pass of a step; a call over the boundary of two stages counts to the one that receives.

    >>> from crosstraffic.patterns.step import Block
    >>> s = Stream(name="x", pattern="tp", op="all_reduce", phase="decode", groups=((0, 1),), payload_bytes=400,
    ...            calls_per_step=2, dtype="bfloat16", formula="", source="")
    >>> lane = (Block(repeat=2, tasks=(Task(stream="x", payload_bytes=400),)),)
    >>> [call] = placed_calls([s], Step(name="decode", phase="decode", lanes=(lane,)), (0, 1), {0: 0, 1: 0})
    >>> call.times, call.payload_bytes, call.lies[0].num_nodes
    (2, 400, 2)
    """
    by_name = {stream.name: stream for stream in streams}
    counts: dict[tuple[int, Task], int] = {}
    for lane, blocks in enumerate(step.lanes):
        for block in blocks:
            for task in block.tasks:
                counts[lane, task] = counts.get((lane, task), 0) + block.repeat
    known: dict[tuple[str, tuple[int, ...] | None, tuple[int, int] | None], tuple[Lie, ...]] = {}
    found: list[PlacedCall] = []
    for (lane, task), times in counts.items():
        stream = by_name[task.stream]
        chosen = stream.groups if task.groups is None else tuple(stream.groups[index] for index in task.groups)
        if task.edge is not None:
            chosen = tuple((group[task.edge[0]], group[task.edge[1]]) for group in chosen)
        key = (task.stream, task.groups, task.edge)
        if key not in known:
            known[key] = lies_of(chosen, nodes)
        if not known[key]:
            continue
        rule = stream.rule
        found.append(
            PlacedCall(
                stream=stream.name,
                pattern=stream.pattern,
                op=stream.op,
                dtype=stream.dtype,
                payload_bytes=task.payload_bytes,
                lies=known[key],
                lane=lane,
                stage=stage_of_rank[chosen[0][-1]],
                times=times,
                num_messages=rule.num_tokens * rule.top_k if isinstance(rule, Routed) else None,
                is_ring=isinstance(rule, Ring),
            )
        )
    return tuple(found)
