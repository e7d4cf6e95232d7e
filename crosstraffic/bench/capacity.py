"""Whether the buffers of a point fit: into what one call counts, and into the memory of the node. Judged beforehand."""

from collections.abc import Iterable

from crosstraffic.bench.buffers import MAX_BUFFER_BYTES
from crosstraffic.bench.plan import Point
from crosstraffic.bench.resolve import Scenario
from crosstraffic.patterns.stream import Stream

MEMORY_SHARE = 0.7  # of what is available; the rest is for the transport's own buffers


def buffer_bytes(stream: Stream, payload_bytes: int) -> tuple[int, int]:
    """Return the largest buffer of one rank and the sum over all ranks of a call of this size, in bytes."""
    if stream.rule is None:
        return payload_bytes, 2 * payload_bytes * sum(map(len, stream.groups))
    largest = total = 0
    for index in range(len(stream.groups)):
        matrix = stream.matrix(index, payload_bytes)
        largest = max(largest, int(matrix.sum(axis=0).max()), int(matrix.sum(axis=1).max()))
        total += 2 * int(matrix.sum())
    return largest, total


def calls_of(scenario: Scenario, point: Point) -> set[tuple[str, int]]:
    """Return the distinct (stream, size) of the calls of a point."""
    if point.step is None:
        return set(point.streams)
    step = next(step for step in scenario.steps if step.name == point.step)
    return {(task.stream, task.payload_bytes) for lane in step.lanes for block in lane for task in block.tasks}


def too_big(scenario: Scenario, calls: Iterable[tuple[str, int]], available_bytes: int | None) -> str | None:
    """Say why calls cannot be made: a buffer over what a call can count, or more than the memory; None if they can.

    ``available_bytes`` is what all ranks of a node may use together; all ranks are taken to be on one node.
    """
    by_name = {stream.name: stream for stream in scenario.streams}
    sum_bytes = 0
    for name, size in calls:
        largest, total = buffer_bytes(by_name[name], size)
        if largest > MAX_BUFFER_BYTES:
            return f"{name} needs a buffer of {largest} bytes, a call can count up to {MAX_BUFFER_BYTES}"
        sum_bytes += total
    if available_bytes is not None and sum_bytes > MEMORY_SHARE * available_bytes:
        return f"buffers of all ranks need {sum_bytes} bytes, {available_bytes} bytes of memory are available"
    return None
