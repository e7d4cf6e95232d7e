"""The timed loops. Nothing happens between two clock readings but the call itself.

Times are local clock readings, one row a call; they become times on one clock in ``sampling``.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from crosstraffic.bench.transport import Floats, Operation, Transport

_SIGNAL, _AGREEMENT = -1, -2  # owners of calls that belong to no stream
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Looped:
    """Calls of streams that looped at once on one rank: ``times[i]`` is ``[num_calls, 2]``, equal counts on all ranks.

    ``free_until_s`` is when this rank first thought of ending: until then it held no stream back.
    """

    times: tuple[Floats, ...]
    free_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How ranks agree on the end of a loop: two calls over all ranks on communicators of their own.

    ``signal`` is a broadcast from rank 0: time is up. ``agreement`` is an all_gather of one int64 a stream: how many
    calls each rank has started.
    """

    signal: Operation
    agreement: Operation


def loops(
    transport: Transport,
    operations: Sequence[Operation | None],
    ending: Ending,
    duration_s: float,
    beat: Beat,
    most: Sequence[int] | None = None,
) -> Looped:
    """Loop several streams at once for about ``duration_s``, each restarted the moment it ends, to an agreed end.

    Ranks must make the same number of calls of a stream. When rank 0's time is up it says so; each rank that hears it
    starts no more, tells the others how many calls it has started, and goes on to the largest number of all.

    ``most`` bounds the calls of each stream: a rank that waits for nobody (nothing comes in, what goes out is buffered)
    would else run far ahead, and the others would have to make all those calls at the end.
    """
    num_streams, is_root = len(operations), transport.rank == 0
    begins: list[list[float]] = [[] for _ in operations]
    ends: list[list[float]] = [[] for _ in operations]
    bounds = [np.inf] * num_streams if most is None else most
    limits = [0 if operation is None else bound for operation, bound in zip(operations, bounds, strict=True)]
    now, wait_any = transport.now_s, transport.wait_any
    running: list[Operation] = []
    owners: list[int] = []

    def restart() -> None:
        for index, operation in enumerate(operations):
            if operation is not None and index not in owners and len(begins[index]) < limits[index]:
                beat(len(begins[index]))
                begins[index].append(now())
                operation.start()
                running.append(operation)
                owners.append(index)

    def tell() -> float:
        """Say how many calls this rank has started; none follows until all have said so. Return the time."""
        mine = np.frombuffer(ending.agreement.send, dtype=np.int64)
        mine[:num_streams] = [len(started) for started in begins]
        limits[:] = [len(started) for started in begins]
        ending.agreement.start()
        running.append(ending.agreement)
        owners.append(_AGREEMENT)
        return now()

    transport.barrier()
    free_until_s = deadline_s = now() + duration_s
    signalled = False
    with quiet():
        if not is_root:
            ending.signal.start()
            running.append(ending.signal)
            owners.append(_SIGNAL)
        restart()
        while True:
            if is_root and not running and not signalled:  # it has no part in any stream, or has made all it may
                transport.sleep(max(deadline_s - now(), 0.0))
            if is_root and not signalled and (not running or now() >= deadline_s):
                signalled = True
                ending.signal.start()
                running.append(ending.signal)
                owners.append(_SIGNAL)
                free_until_s = tell()
            if not running:
                break
            place = wait_any(running)
            end = now()
            index = owners[place]
            if index >= 0:
                ends[index].append(end)
                if len(begins[index]) < limits[index]:
                    beat(len(begins[index]))
                    begins[index].append(now())
                    running[place].start()
                    continue
            del running[place], owners[place]
            if index == _SIGNAL and not is_root:
                free_until_s = tell()
            elif index == _AGREEMENT:
                every = np.frombuffer(ending.agreement.receive, dtype=np.int64).reshape(transport.world_size, -1)
                limits[:] = [int(most) for most in every.max(axis=0)[:num_streams]]
                restart()
    times = []
    for index, operation in enumerate(operations):
        rows = empty_times(int(limits[index]))
        if operation is not None:
            rows[:, 0], rows[:, 1] = begins[index], ends[index]
        times.append(rows)
    return Looped(times=tuple(times), free_until_s=free_until_s)


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
