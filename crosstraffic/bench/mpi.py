"""Transport over MPI (mpi4py): every call is a set of persistent requests, polled with ``sched_yield`` in between.

Why persistent requests and not non-blocking calls: measured with MPICH 5.0 (ch4:ucx, shared memory) as the mean time
of start + wait of 4 ranks on 2 cores: all_reduce of 8 B 13.7 against 15.5 µs, all_gather 14.1 against 18.0, ring shift
3.3 against 4.9; reduce_scatter of 1 MiB 0.40 against 1.75 ms, the other ops of 1 MiB within 10 % of each other.
Why ``MPI_Test`` and ``sched_yield`` and not ``MPI_Wait``: at 8 B all_reduce 13.7 against 14.9 µs, broadcast 5.8 against
8.5, ring shift 3.3 against 7.4, all_to_all equal; at 1 MiB equal but for all_to_all_v and broadcast, 5 to 7 % slower.
The host's own cost of start + wait (a group of one rank) is 0.26 µs, 0.5 µs where the call holds a local copy.
"""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from crosstraffic.bench.buffers import allocate, blocks, check_exchange, offsets
from crosstraffic.bench.transport import Bytes, Channel, Exchange, Floats, Operation, group_of
from crosstraffic.errors import EnvironmentRefused
from crosstraffic.patterns.stream import Stream

_FLOAT_TAG = 1
MISSING = (
    "transport mpi needs mpi4py and an MPI library: pip install 'crosstraffic[local]' (brings MPICH), "
    "or 'crosstraffic[mpi]' with the site's MPI loaded"
)


def load_mpi() -> ModuleType:
    """Import mpi4py.MPI, which initialises MPI, for calls from one thread only (spares a lock in each call).

    Raises:
        EnvironmentRefused: mpi4py or the MPI library is missing.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EnvironmentRefused(f"{MISSING} ({str(error).splitlines()[0]})") from error
    module: ModuleType = MPI
    return module


class MpiOperation:
    """A prepared call: its persistent requests, and what is copied locally inside the call."""

    __slots__ = ("__weakref__", "_requests", "exchange", "receive", "send", "start", "test")

    start: Callable[[], None]
    test: Callable[[], bool]

    def __init__(
        self,
        exchange: Exchange,
        send: Bytes,
        receive: Bytes,
        requests: Sequence[Any],
        copies: Sequence[tuple[Bytes, Bytes]],
    ) -> None:
        self.exchange, self.send, self.receive = exchange, send, receive
        self._requests = list(requests)
        plain = len(requests) == 1 and not copies
        self.start = requests[0].Start if plain else _start_all([request.Start for request in requests], copies)
        self.test = requests[0].Test if len(requests) == 1 else _test_all([request.Test for request in requests])

    def wait(self) -> None:
        test, give_way = self.test, os.sched_yield
        while not test():
            give_way()

    def free(self) -> None:
        """Give the requests back to MPI; the operation must not be started again."""
        for request in self._requests:
            request.Free()
        self._requests.clear()

    def __del__(self) -> None:
        requests = getattr(self, "_requests", None)
        if requests:
            from mpi4py import MPI

            if not MPI.Is_finalized():
                self.free()


def _start_all(starts: Sequence[Callable[[], None]], copies: Sequence[tuple[Bytes, Bytes]]) -> Callable[[], None]:
    def start() -> None:
        for begin in starts:
            begin()
        for destination, source in copies:
            destination[:] = source

    return start


def _test_all(tests: Sequence[Callable[[], bool]]) -> Callable[[], bool]:
    def test() -> bool:
        # A completed persistent request is inactive, and MPI_Test of an inactive one is true.
        return all(is_complete() for is_complete in tests)

    return test


class MpiChannel:
    """One stream on one rank: a communicator of its own over the rank's group, ranks in group order."""

    def __init__(self, mpi: ModuleType, stream: Stream, group: tuple[int, ...], index: int, communicator: Any) -> None:
        self.stream = stream
        self.communicator_id: int = communicator.py2f()
        self._mpi, self._group, self._index, self._communicator = mpi, group, index, communicator
        self._operations: weakref.WeakSet[MpiOperation] = weakref.WeakSet()

    def prepare(self, exchange: Exchange) -> MpiOperation:
        check_exchange(exchange, self._group, self._index)
        send, receive = allocate(exchange.total_send_bytes), allocate(exchange.total_receive_bytes)
        requests, copies = _REQUESTS[exchange.op](self._mpi, self._communicator, exchange, send, receive)
        operation = MpiOperation(exchange, send, receive, requests, copies)
        self._operations.add(operation)
        return operation

    def close(self) -> None:
        for operation in list(self._operations):
            operation.free()
        self._communicator.Free()


_Prepared = tuple[list[Any], list[tuple[Bytes, Bytes]]]


def _all_reduce(mpi: ModuleType, communicator: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> _Prepared:
    return [communicator.Allreduce_init([send, mpi.FLOAT], [receive, mpi.FLOAT], mpi.SUM)], []


def _all_gather(mpi: ModuleType, communicator: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> _Prepared:
    return [communicator.Allgather_init([send, mpi.BYTE], [receive, mpi.BYTE])], []


def _reduce_scatter(mpi: ModuleType, communicator: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> _Prepared:
    return [communicator.Reduce_scatter_block_init([send, mpi.FLOAT], [receive, mpi.FLOAT], mpi.SUM)], []


def _all_to_all(mpi: ModuleType, communicator: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> _Prepared:
    return [communicator.Alltoall_init([send, mpi.BYTE], [receive, mpi.BYTE])], []


def _all_to_all_v(mpi: ModuleType, communicator: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> _Prepared:
    outgoing = [send, (list(exchange.send_bytes), offsets(exchange.send_bytes)), mpi.BYTE]
    incoming = [receive, (list(exchange.receive_bytes), offsets(exchange.receive_bytes)), mpi.BYTE]
    return [communicator.Alltoallv_init(outgoing, incoming)], []


def _broadcast(mpi: ModuleType, communicator: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> _Prepared:
    """Out of place, as NCCL's: the root (member 0) sends ``send`` and copies it to its own ``receive``."""
    if exchange.index == 0:
        return [communicator.Bcast_init([send, mpi.BYTE], 0)], [(receive, send)]
    return [communicator.Bcast_init([receive, mpi.BYTE], 0)], []


def _peer_to_peer(mpi: ModuleType, communicator: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> _Prepared:
    """One message per pair of ranks with bytes to move; none for a pair without, on either side."""
    outgoing, incoming = blocks(send, exchange.send_bytes), blocks(receive, exchange.receive_bytes)
    peers = [peer for peer in range(len(exchange.group)) if peer != exchange.index]
    requests = [communicator.Recv_init([incoming[peer], mpi.BYTE], peer) for peer in peers if incoming[peer].size]
    requests += [communicator.Send_init([outgoing[peer], mpi.BYTE], peer) for peer in peers if outgoing[peer].size]
    own = exchange.index
    return requests, [(incoming[own], outgoing[own])] if outgoing[own].size else []


_REQUESTS: dict[str, Callable[[ModuleType, Any, Exchange, Bytes, Bytes], _Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "broadcast": _broadcast,
    "send_recv": _peer_to_peer,
    "kv_transfer": _peer_to_peer,
}


class MpiTransport:
    """One rank's way to the others over MPI; control traffic on a communicator of its own."""

    name = "mpi"

    def __init__(self, *, expected_world_size: int | None = None) -> None:
        """Duplicate the world; every rank does so.

        Raises:
            EnvironmentRefused: no MPI, or MPI sees another number of ranks than the launcher started.
        """
        mpi = load_mpi()
        world = mpi.COMM_WORLD
        self.rank: int = world.Get_rank()
        self.world_size: int = world.Get_size()
        if expected_world_size is not None and expected_world_size != self.world_size:
            raise EnvironmentRefused(
                f"the launcher started {expected_world_size} ranks, but MPI sees a world of {self.world_size}: "
                f"the ranks would run as independent jobs. Start them with the mpiexec of this MPI, or with srun "
                f"and the --mpi plug-in that it supports (srun --mpi=list)"
            )
        self._mpi = mpi
        self._base, self._control = world.Dup(), world.Dup()
        self._channels: list[MpiChannel] = []
        self._barrier = self._control.Barrier_init()
        self._float: Floats = np.zeros(1)
        self._turn = 0

    def describe(self) -> dict[str, str]:
        import mpi4py

        return {
            "library": " ".join(self._mpi.Get_library_version().strip().split("\n")[0].split()),
            "mpi4py": mpi4py.__version__,
            "mpi_standard": ".".join(str(part) for part in self._mpi.Get_version()),
            "requests": "persistent, polled with MPI_Test and sched_yield",
            "all_to_all_v": "MPI_Alltoallv_init",
            "send_recv": "MPI_Recv_init and MPI_Send_init per pair with bytes",
            "kv_transfer": "MPI_Recv_init and MPI_Send_init per pair with bytes, one message each",
        }

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, time_s: float) -> None:
        time.sleep(time_s)

    def barrier(self) -> None:
        self._barrier.Start()
        test, give_way = self._barrier.Test, os.sched_yield
        while not test():
            give_way()

    def broadcast(self, value: bytes | None) -> bytes:
        length = np.array([len(value) if value is not None else 0], dtype=np.int64)
        self._control.Bcast(length, 0)
        buffer = np.empty(int(length[0]), dtype=np.uint8)
        if self.rank == 0 and value:
            buffer[:] = np.frombuffer(value, dtype=np.uint8)
        self._control.Bcast([buffer, self._mpi.BYTE], 0)
        return buffer.tobytes()

    def gather(self, values: Floats) -> Floats | None:
        out = np.empty((self.world_size, *values.shape)) if self.rank == 0 else None
        self._control.Gather(np.ascontiguousarray(values, dtype=np.float64), out, 0)
        return out

    def gather_bytes(self, value: bytes) -> list[bytes] | None:
        lengths = np.zeros(self.world_size, dtype=np.int64)
        self._control.Gather(np.array([len(value)], dtype=np.int64), lengths if self.rank == 0 else None, 0)
        counts = [int(length) for length in lengths]
        everything = np.empty(sum(counts), dtype=np.uint8)
        target = [everything, (counts, offsets(counts)), self._mpi.BYTE] if self.rank == 0 else None
        self._control.Gatherv([np.frombuffer(value, dtype=np.uint8), self._mpi.BYTE], target, 0)
        return [block.tobytes() for block in blocks(everything, counts)] if self.rank == 0 else None

    def send_float(self, peer: int, value: float) -> None:
        self._float[0] = value
        self._control.Send(self._float, peer, _FLOAT_TAG)

    def receive_float(self, peer: int) -> float:
        self._control.Recv(self._float, peer, _FLOAT_TAG)
        return float(self._float[0])

    def open_channel(self, stream: Stream) -> Channel | None:
        place = group_of(stream, self.rank)
        color, key = (self._mpi.UNDEFINED, 0) if place is None else place
        communicator = self._base.Split(color, key)
        if place is None:
            return None
        channel = MpiChannel(self._mpi, stream, tuple(stream.groups[color]), key, communicator)
        self._channels.append(channel)
        return channel

    def wait_any(self, operations: Sequence[Operation]) -> int:
        """Test all in turn, beginning after the one that was returned last: no stream is preferred."""
        if not operations:
            raise ValueError("wait_any needs at least one started operation")
        num_operations, give_way = len(operations), os.sched_yield
        tests = [operation.test for operation in operations]
        turn = self._turn
        while True:
            for step in range(num_operations):
                index = (turn + step) % num_operations
                if tests[index]():
                    self._turn = index + 1
                    return index
            give_way()

    def close(self) -> None:
        self.barrier()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._barrier.Free()
        self._control.Free()
        self._base.Free()


def open_mpi(*, expected_world_size: int | None = None) -> MpiTransport:
    """Join the MPI world of this process."""
    return MpiTransport(expected_world_size=expected_world_size)
