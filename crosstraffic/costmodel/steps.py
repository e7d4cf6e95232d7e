"""A whole step: every rank makes its calls in order, lanes at the same time, calls share links as in any mix.

A call starts when all members of its group have come to it, and each member goes on when the call is done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from crosstraffic.costmodel.calls import Call, curve_of, make_calls, make_sharing, ranks_by_node
from crosstraffic.costmodel.contention import Job, advance, make_job
from crosstraffic.costmodel.model import Contention, Model
from crosstraffic.patterns.step import Step, Task
from crosstraffic.results.record import Cadence


@dataclass(slots=True, eq=False)
class _Meeting:
    """One group's call in one lane: who has come, and what it is a call of."""

    kind: int
    members: int
    come: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Plan:
    """All meetings of a step, and each rank's way through them, lane by lane."""

    calls: list[Call] = field(default_factory=list)
    meetings: list[_Meeting] = field(default_factory=list)
    ways: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (lane, rank) -> meetings in order


def step_time(model: Model, step: Step, cadence: Cadence, factors: Contention | None = None) -> float:
    """Return the time of a step, s, from its common start to its last call's end.

    Raises:
        ValueError: a stream of the step is unknown or was not fitted.
    """
    plan = _lay_out(model, step, cadence)
    if not plan.meetings:
        return 0.0
    sharing = make_sharing(
        plan.calls,
        model.nodes,
        model.contention if factors is None else factors,
        ranks_by_node(model, step.streams),
    )
    at = dict.fromkeys(plan.ways, 0)
    lane_of = {index: lane for (lane, _), way in plan.ways.items() for index in way}

    def arrive(lane: int, rank: int) -> Job | None:
        way = plan.ways[lane, rank]
        if at[lane, rank] >= len(way):
            return None
        index = way[at[lane, rank]]
        meeting = plan.meetings[index]
        meeting.come += 1
        if meeting.come < meeting.members:
            return None
        call = plan.calls[meeting.kind]
        return make_job(index, (2 * meeting.kind, call.latency_s), (2 * meeting.kind + 1, call.transfer_s))

    def done(tags: list[int], now: float) -> list[Job]:
        started = []
        for index in tags:
            lane = lane_of[index]
            for rank in plan.meetings[index].ranks:
                at[lane, rank] += 1
                job = arrive(lane, rank)
                if job is not None:
                    started.append(job)
        return started

    first = [job for lane, rank in plan.ways if (job := arrive(lane, rank)) is not None]
    return advance(sharing, first, done)[0]


def _lay_out(model: Model, step: Step, cadence: Cadence) -> _Plan:
    plan = _Plan()
    kinds: dict[tuple[Task, int], int] = {}
    for lane in range(len(step.lanes)):
        for task in step.tasks(lane):
            groups = model.stream(task.stream).groups
            indices = range(len(groups)) if task.groups is None else task.groups
            missing = [index for index in indices if (task, index) not in kinds]
            made = make_calls(model, task.stream, task.payload_bytes, cadence, missing, edge=task.edge)
            kinds |= {(task, index): len(plan.calls) + place for place, index in enumerate(missing)}
            plan.calls += made
            for group_index in indices:
                kind = kinds[task, group_index]
                ranks = plan.calls[kind].ranks
                plan.meetings.append(_Meeting(kind=kind, members=len(ranks), ranks=ranks))
                for rank in ranks:
                    plan.ways.setdefault((lane, rank), []).append(len(plan.meetings) - 1)
    return plan


def unmeasured_sizes(model: Model, step: Step, cadence: Cadence) -> list[str]:
    """Say which calls of a step lie outside the sizes that were measured."""
    found: dict[str, None] = {}
    for lane in range(len(step.lanes)):
        for block in step.lanes[lane]:
            for task in block.tasks:
                _, curve = curve_of(model, cadence, task.stream)
                if not curve.min_payload_bytes <= task.payload_bytes <= curve.max_payload_bytes:
                    found[f"{task.stream} at {task.payload_bytes} bytes"] = None
    return list(found)


def calls_of(step: Step) -> Mapping[tuple[str, int], int]:
    """Count the calls of a step by stream and size."""
    counts: dict[tuple[str, int], int] = {}
    for lane in step.lanes:
        for block in lane:
            for task in block.tasks:
                key = (task.stream, task.payload_bytes)
                counts[key] = counts.get(key, 0) + block.repeat
    return counts
