"""The timed loops. Nothing happens between two clock readings but the call itself.

Times are local clock readings, one row a call; they become times on one clock in ``sampling``.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from crosstraffic.bench.transport import Floats, Operation, Transport

Beat = Callable[[int], None]  # told the index of the call that comes next


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector out of a timed loop."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def empty_times(count: int) -> Floats:
    """Return room for (start, end) of each call, ``[count, 2]``; NaN where this rank takes no part."""
    return np.full((count, 2), np.nan)


def isolated(transport: Transport, operation: Operation | None, count: int, beat: Beat) -> Floats:
    """Make ``count`` calls, each after a barrier of all ranks; return ``[count, 2]``."""
    times = empty_times(count)
    now, barrier = transport.now_s, transport.barrier
    with quiet():
        if operation is None:
            for _ in range(count):
                barrier()
            return times
        start, wait = operation.start, operation.wait
        for call in range(count):
            beat(call)
            barrier()
            begin = now()
            start()
            wait()
            end = now()
            times[call, 0] = begin
            times[call, 1] = end
    return times


def streaming(transport: Transport, operation: Operation | None, count: int, beat: Beat) -> Floats:
    """Make ``count`` calls back to back after one barrier; return ``[count, 2]``."""
    times = empty_times(count)
    transport.barrier()
    if operation is None:
        return times
    now, start, wait = transport.now_s, operation.start, operation.wait
    with quiet():
        for call in range(count):
            beat(call)
            begin = now()
            start()
            wait()
            end = now()
            times[call, 0] = begin
            times[call, 1] = end
    return times


def loops(
    transport: Transport, operations: Sequence[Operation | None], counts: Sequence[int], beat: Beat
) -> list[Floats]:
    """Loop several streams at once after one barrier, each restarted the moment it ends, ``counts[i]`` calls of it."""
    times = [empty_times(count) for count in counts]
    active = [index for index, operation in enumerate(operations) if operation is not None and counts[index] > 0]
    running = [operation for index in active if (operation := operations[index]) is not None]
    done = [0] * len(counts)
    now, wait_any = transport.now_s, transport.wait_any
    transport.barrier()
    with quiet():
        for place, index in enumerate(active):
            beat(0)
            times[index][0, 0] = now()
            running[place].start()
        while active:
            place = wait_any(running)
            end = now()
            index = active[place]
            call = done[index]
            times[index][call, 1] = end
            call += 1
            done[index] = call
            if call == counts[index]:
                del active[place], running[place]
                continue
            beat(call)
            times[index][call, 0] = now()
            running[place].start()
    return times


def one_shot(transport: Transport, operations: Sequence[Operation | None], beat: Beat, call: int) -> Floats:
    """Start one call of each stream after one barrier, in order; return ``[num_streams, 2]``."""
    times = empty_times(len(operations))
    active = [index for index, operation in enumerate(operations) if operation is not None]
    running = [operation for operation in operations if operation is not None]
    now, wait_any = transport.now_s, transport.wait_any
    beat(call)
    transport.barrier()
    with quiet():
        for place, index in enumerate(active):
            times[index, 0] = now()
            running[place].start()
        while active:
            place = wait_any(running)
            times[active[place], 1] = now()
            del active[place], running[place]
    return times


def lanes(transport: Transport, sequences: Sequence[Sequence[Operation]], beat: Beat) -> Floats:
    """Run sequences of calls at the same time, each in order; return ``[num_lanes, 2]``: first start, last end."""
    times = empty_times(len(sequences))
    now, wait_any = transport.now_s, transport.wait_any
    active = [lane for lane, sequence in enumerate(sequences) if sequence]
    done = [0] * len(sequences)
    transport.barrier()
    with quiet():
        if len(active) == 1:
            lane = active[0]
            times[lane, 0] = now()
            for call, operation in enumerate(sequences[lane]):
                beat(call)
                operation.start()
                operation.wait()
            times[lane, 1] = now()
            return times
        running = [sequences[lane][0] for lane in active]
        for place, lane in enumerate(active):
            times[lane, 0] = now()
            running[place].start()
        while active:
            place = wait_any(running)
            lane = active[place]
            done[lane] += 1
            if done[lane] == len(sequences[lane]):
                times[lane, 1] = now()
                del active[place], running[place]
                continue
            beat(done[lane])
            running[place] = sequences[lane][done[lane]]
            running[place].start()
    return times
