"""The simulated transport: the protocol of ``transport`` over a world of known truth, in virtual time.

Time of a call = latency (dependent steps x latency of their tier; loads nothing), then its transfer, which alone takes
the largest of bytes / capacity over the resources it loads, and shares them max-min fairly with other transfers. It
begins when all that take part have started it. Calls of one communicator that share a rank run one after the other.
"""

import json
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from crosstraffic.bench.simulated_calls import Call, Group, takes_part
from crosstraffic.bench.simulated_truth import truth_to_dict
from crosstraffic.bench.simulated_world import Rank, SimulatedWorld, Stopped
from crosstraffic.bench.transport import Bytes, Exchange, Floats, Operation, group_of
from crosstraffic.patterns.stream import Stream

__all__ = ["SimulatedChannel", "SimulatedOperation", "SimulatedTransport", "SimulatedWorld", "run_simulated"]

Result = TypeVar("Result")

_LOOK_S = 0.2  # how often the main thread looks up, so that Ctrl-C reaches it
_GRACE_S = 5.0  # how long ranks get to end after a failure


class SimulatedOperation:
    """A prepared call of one rank."""

    def __init__(self, world: SimulatedWorld, rank: Rank, group: Group, place: int, exchange: Exchange) -> None:
        self.exchange = exchange
        self.send: Bytes = np.zeros(exchange.total_send_bytes, dtype=np.uint8)
        self.receive: Bytes = np.zeros(exchange.total_receive_bytes, dtype=np.uint8)
        self._world = world
        self._rank = rank
        self._group = group
        self._shape = world.prepare(group, place, exchange)
        self._takes_part = takes_part(exchange)
        self._num_starts = 0
        self._call: Call | None = None
        self._is_open = False  # started, and its end not yet seen by the caller

    def start(self) -> None:
        """Begin the call and return at once.

        Raises:
            RuntimeError: the last one is not complete.
        """
        if self._is_open:
            raise RuntimeError(f"{self._what()} was started again before it was complete")
        rank = self._rank
        rank.time_s += self._world.truth.overhead_s
        self._is_open = True
        if self._takes_part:
            self._call = self._world.start(rank, self._group, self._shape, self, self._num_starts)
        self._num_starts += 1

    def test(self) -> bool:
        """Tell whether the call is complete; a look that finds it is not takes ``poll_s``."""
        self._refuse_unstarted()
        if not self._is_open:
            return True
        world, rank = self._world, self._rank
        world.check()
        rank.num_clock_reads = 0
        if not self._is_done():
            world.catch_up(rank, lambda: f"test of {self._what()}")
        if self._is_done():
            self._is_open = False
            return True
        rank.time_s += world.truth.poll_s
        return False

    def wait(self) -> None:
        """Block until the call is complete."""
        self._refuse_unstarted()
        if not self._is_open:
            return
        world, rank = self._world, self._rank
        world.check()
        rank.num_clock_reads = 0
        call = self._call
        if call is not None:
            if call.done_s is None:
                call.waiting.append(rank.number)
                world.block(rank, lambda: f"wait of {self._what()}")
            rank.time_s = max(rank.time_s, call.done_s or 0.0)
        rank.time_s += rank.delay_s
        self._is_open = False

    def _is_done(self) -> bool:
        call = self._call
        return call is None or (call.done_s is not None and call.done_s <= self._rank.time_s)

    def _refuse_unstarted(self) -> None:
        if not self._num_starts:
            raise RuntimeError(f"{self._what()} was never started")

    def _what(self) -> str:
        if self._call is not None:
            return self._world.describe_call(self._call)
        return f"{self._group.stream.name} ({self.exchange.op}, {self.exchange.payload_bytes} bytes)"


class SimulatedChannel:
    """One stream on one rank."""

    def __init__(self, world: SimulatedWorld, rank: Rank, stream: Stream, communicator_id: int, group: Group) -> None:
        self.stream = stream
        self.communicator_id = communicator_id
        self._world = world
        self._rank = rank
        self._group = group
        self._num_prepared = 0

    def prepare(self, exchange: Exchange) -> SimulatedOperation:
        """Allocate buffers for calls of this shape; all members of the group do so in the same order.

        Raises:
            ValueError: the exchange is of another op or group.
        """
        if exchange.op != self.stream.op or exchange.group != self._group.ranks:
            raise ValueError(
                f"{self.stream.name} is {self.stream.op} of {self._group.ranks}, not {exchange.op} of {exchange.group}"
            )
        place = self._num_prepared
        self._num_prepared += 1
        return SimulatedOperation(self._world, self._rank, self._group, place, exchange)


class SimulatedTransport:
    """One rank's way to the others."""

    name = "simulated"

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.num_ranks
        self.node = world.truth.node(rank)
        self.host = f"node{self.node}"
        self._world = world
        self._state = world.ranks[rank]

    def describe(self) -> dict[str, str]:
        """Return the truth, as JSON."""
        return {"transport": self.name, "truth": json.dumps(truth_to_dict(self._world.truth), sort_keys=True)}

    def now_s(self) -> float:
        """Read this rank's clock."""
        return self._world.read_clock(self._state)

    def sleep(self, time_s: float) -> None:
        """Let time pass, measured on this rank's clock."""
        self._world.check()
        self._state.num_clock_reads = 0
        self._state.time_s += max(time_s, 0.0) / self._state.clock_rate

    def barrier(self) -> None:
        """Return when every rank has come."""
        self._world.meet(self._state, "barrier", None)

    def broadcast(self, value: bytes | None) -> bytes:
        """Return rank 0's value on every rank."""
        sent = self._world.meet(self._state, "broadcast", value if self.rank == 0 else None)[0]
        if not isinstance(sent, bytes):
            raise TypeError(f"rank 0 must broadcast bytes, not {type(sent).__name__}")
        return sent

    def gather(self, values: Floats) -> Floats | None:
        """Return every rank's values, ``[world_size, *values.shape]``, on rank 0."""
        rows = self._world.meet(self._state, "gather", np.array(values, dtype=np.float64))
        return np.stack([np.asarray(row, dtype=np.float64) for row in rows]) if self.rank == 0 else None

    def gather_bytes(self, value: bytes) -> list[bytes] | None:
        """Return every rank's value on rank 0."""
        rows = self._world.meet(self._state, "gather_bytes", value)
        return [row for row in rows if isinstance(row, bytes)] if self.rank == 0 else None

    def send_float(self, peer: int, value: float) -> None:
        """Send one number."""
        self._world.post(self._state, peer, value)

    def receive_float(self, peer: int) -> float:
        """Receive one number."""
        return self._world.fetch(self._state, peer)

    def open_channel(self, stream: Stream) -> SimulatedChannel | None:
        """Make a stream's communicator; None where this rank takes no part."""
        communicator_id, groups = self._world.open(self._state, stream)
        place = group_of(stream, self.rank)
        if place is None:
            return None
        return SimulatedChannel(self._world, self._state, stream, communicator_id, groups[place[0]])

    def wait_any(self, operations: Sequence[Operation]) -> int:
        """Block until one of the started operations is complete; return its index.

        Raises:
            RuntimeError: none of them is started.
        """
        world, rank = self._world, self._state
        world.check()
        rank.num_clock_reads = 0
        started = [(index, item) for index, item in enumerate(map(_ours, operations)) if item._is_open]
        if not started:
            raise RuntimeError(f"rank {self.rank} waits for any of {len(operations)} operations, none of them started")
        pending = [item._call for _, item in started if item._call is not None and item._call.done_s is None]
        if len(pending) == len(started):
            for call in pending:
                call.waiting.append(rank.number)
            world.block(rank, lambda: "wait_any of " + " | ".join(map(world.describe_call, pending)))
            for call in pending:
                if call.done_s is None:
                    call.waiting.remove(rank.number)
        ends = [
            (0.0 if item._call is None else item._call.done_s, index, item)
            for index, item in started
            if item._call is None or item._call.done_s is not None
        ]
        done_s, index, item = min(ends, key=lambda end: (end[0] or 0.0, end[1]))
        rank.time_s = max(rank.time_s, done_s or 0.0) + rank.delay_s
        item._is_open = False
        return index

    def close(self) -> None:
        """End in order."""


def _ours(operation: Operation) -> SimulatedOperation:
    if not isinstance(operation, SimulatedOperation):
        raise TypeError(f"not an operation of the simulated transport: {type(operation).__name__}")
    return operation


def run_simulated(world: SimulatedWorld, function: Callable[[SimulatedTransport], Result]) -> list[Result]:
    """Run ``function(transport)`` on every rank of a fresh world; return the results in rank order.

    The first failure of a rank ends the others and is raised here, with a note that names the rank. KeyboardInterrupt
    ends all ranks at their next call and is raised again.
    """
    results: dict[int, Result] = {}
    failures: list[BaseException] = []
    all_done = threading.Semaphore(0)
    ending = threading.Lock()

    def end(following: Rank | None) -> None:
        """Hand over to the next rank, or let all ranks go."""
        if following is not None:
            following.lock.release()
        elif ending.acquire(blocking=False):
            world.is_stopping = True
            for rank in world.ranks:
                if rank.lock.locked():
                    rank.lock.release()

    def fail(rank: Rank, error: BaseException) -> None:
        if not isinstance(error, Stopped) and not failures:
            error.add_note(f"on rank {rank.number} of {world.num_ranks}")
            failures.append(error)
        end(None)

    def body(rank: Rank) -> None:
        rank.lock.acquire()
        try:
            world.check()
            results[rank.number] = function(SimulatedTransport(world, rank.number))
            rank.has_returned = True
            if not all(other.has_returned for other in world.ranks):
                world.check()
                end(world.next_rank())
        except BaseException as error:  # handed to the main thread, which raises it
            rank.has_returned = True
            fail(rank, error)
        finally:
            all_done.release()

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank.number}", daemon=True) for rank in world.ranks
    ]
    for rank in world.ranks:
        world.wake(rank)
    for thread in threads:
        thread.start()
    try:
        end(world.next_rank())
        for _ in threads:
            while not all_done.acquire(timeout=_LOOK_S):
                pass
    except KeyboardInterrupt:
        world.is_stopping = True
        for thread in threads:
            thread.join(timeout=_GRACE_S / len(threads))
        raise
    for thread in threads:
        thread.join(timeout=_GRACE_S)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world.num_ranks)]
