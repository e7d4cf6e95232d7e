"""Transport over Gloo: torch's ProcessGroupGloo over TCP, one process group per stream and group of ranks.

The groups are made directly, over one store, and not by ``torch.distributed.new_group``: that one sorts the ranks,
while the blocks of a stream lie in the order of its group. What Gloo lacks is composed from what it has, and
``describe`` says so: torch's reduce_scatter on Gloo is an all_reduce (twice the bytes), so shares are exchanged by
all_to_all and added here. Works of send and receive complete only in ``wait`` (their ``is_completed`` stays false until
then), so ``test`` hands them to a thread of the operation that waits.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from crosstraffic.bench.buffers import allocate, blocks, check_exchange
from crosstraffic.bench.ranks import RankIdentity
from crosstraffic.bench.transport import Bytes, Channel, Exchange, Floats, Operation, group_of
from crosstraffic.errors import EnvironmentRefused
from crosstraffic.patterns.stream import Stream

# No call of a benchmark lasts this long, and a watchdog ends a stuck run far earlier; it bounds ranks left alone.
TIMEOUT = timedelta(minutes=30)
_POLL_S = 10e-6  # lets Gloo's threads, and the ones that wait here, have the processor and Python's lock
MISSING = "transport gloo needs torch: pip install 'crosstraffic[torch]' (a CPU build is enough)"


def load_torch() -> tuple[ModuleType, ModuleType]:
    """Import torch and torch.distributed, with one thread for its own kernels.

    Raises:
        EnvironmentRefused: torch is missing or was built without Gloo.
    """
    try:
        import torch
        import torch.distributed as distributed
    except (ImportError, OSError) as error:
        raise EnvironmentRefused(f"{MISSING} ({str(error).splitlines()[0]})") from error
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise EnvironmentRefused(f"{MISSING}; this torch ({torch.__version__}) was built without Gloo")
    torch.set_num_threads(1)
    return torch, distributed


class _Waiter:
    """A thread that waits for works of torch which cannot be polled. It holds no reference to the operation."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Sequence[Any] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="gloo-waiter", daemon=True).start()

    def _run(self) -> None:
        while (works := self._works.get()) is not None:
            try:
                for work in works:
                    work.wait()
            except Exception as error:  # raised again in the thread that tests or waits
                self._error = error
            self._done.set()

    def take(self, works: Sequence[Any]) -> None:
        self._done.clear()
        self._works.put(works)

    def is_done(self) -> bool:
        return self._done.is_set()

    def join(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._works.put(None)


class GlooOperation:
    """A prepared call. ``begin`` starts it and returns its works; ``end`` is what is left to do once they are done."""

    def __init__(
        self,
        exchange: Exchange,
        send: Bytes,
        receive: Bytes,
        begin: Callable[[], Sequence[Any]],
        end: Callable[[], None] | None = None,
        *,
        can_poll: bool = True,
    ) -> None:
        self.exchange, self.send, self.receive = exchange, send, receive
        self._begin, self._end, self._can_poll = begin, end, can_poll
        self._works: Sequence[Any] | None = None
        self._waiter: _Waiter | None = None
        self._is_handed_over = False

    def start(self) -> None:
        self._works = self._begin()

    def test(self) -> bool:
        works = self._works
        if works is None:
            return True
        if self._can_poll or not works:
            if not all(work.is_completed() for work in works):
                return False
        else:
            if self._waiter is None:
                self._waiter = _Waiter()
            if not self._is_handed_over:
                self._is_handed_over = True
                self._waiter.take(works)
            if not self._waiter.is_done():
                return False
        self.wait()  # returns at once; raises what went wrong
        return True

    def wait(self) -> None:
        works = self._works
        if works is None:
            return
        if self._is_handed_over and self._waiter is not None:
            self._waiter.join()
            self._is_handed_over = False
        else:
            for work in works:
                work.wait()
        if self._end is not None:
            self._end()
        self._works = None

    def free(self) -> None:
        """End the operation's thread, if it has one."""
        if self._waiter is not None:
            self._waiter.stop()
            self._waiter = None

    def __del__(self) -> None:
        if getattr(self, "_waiter", None) is not None:
            self.free()


class GlooChannel:
    """One stream on one rank: a process group of its own over the rank's group, ranks in group order."""

    def __init__(
        self, torch: ModuleType, stream: Stream, number: int, group: tuple[int, ...], index: int, process_group: Any
    ) -> None:
        self.stream = stream
        self.communicator_id = number
        self._torch, self._group, self._index, self._process_group = torch, group, index, process_group
        self._operations: weakref.WeakSet[GlooOperation] = weakref.WeakSet()

    def prepare(self, exchange: Exchange) -> GlooOperation:
        check_exchange(exchange, self._group, self._index)
        send, receive = allocate(exchange.total_send_bytes), allocate(exchange.total_receive_bytes)
        operation = _OPERATIONS[exchange.op](self._torch, self._process_group, exchange, send, receive)
        self._operations.add(operation)
        return operation

    def close(self) -> None:
        for operation in list(self._operations):
            operation.free()
        self._process_group = None


def _all_reduce(torch: ModuleType, group: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> GlooOperation:
    """Gloo adds in place: ``send`` is copied to ``receive`` inside the call."""
    source, target = torch.from_numpy(send), torch.from_numpy(receive)
    numbers = [torch.from_numpy(receive.view(np.float32))]

    def begin() -> Sequence[Any]:
        target.copy_(source)
        return (group.allreduce(numbers),)

    return GlooOperation(exchange, send, receive, begin)


def _broadcast(torch: ModuleType, group: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> GlooOperation:
    """Out of place, as NCCL's: the root (member 0) copies ``send`` to its own ``receive`` inside the call."""
    source, target = torch.from_numpy(send), torch.from_numpy(receive)
    is_root = exchange.index == 0

    def begin() -> Sequence[Any]:
        if is_root:
            target.copy_(source)
        return (group.broadcast([target]),)  # the default root is rank 0 of the group

    return GlooOperation(exchange, send, receive, begin)


def _all_gather(torch: ModuleType, group: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> GlooOperation:
    source, target = torch.from_numpy(send), torch.from_numpy(receive)
    return GlooOperation(exchange, send, receive, lambda: (group._allgather_base(target, source),))


def _reduce_scatter(torch: ModuleType, group: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> GlooOperation:
    """Each rank sends every other one its share, then adds what came: (n - 1)/n of the payload, as a ring does."""
    source = torch.from_numpy(send.view(np.float32))
    staged = torch.from_numpy(allocate(send.size).view(np.float32))
    shares = staged.view(len(exchange.group), staged.numel() // len(exchange.group))
    total = torch.from_numpy(receive.view(np.float32))

    def end() -> None:
        torch.sum(shares, dim=0, out=total)

    return GlooOperation(exchange, send, receive, lambda: (group.alltoall_base(staged, source, [], []),), end)


def _all_to_all(torch: ModuleType, group: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> GlooOperation:
    source, target = torch.from_numpy(send), torch.from_numpy(receive)
    return GlooOperation(exchange, send, receive, lambda: (group.alltoall_base(target, source, [], []),))


def _all_to_all_v(torch: ModuleType, group: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> GlooOperation:
    source, target = torch.from_numpy(send), torch.from_numpy(receive)
    outgoing, incoming = list(exchange.send_bytes), list(exchange.receive_bytes)
    return GlooOperation(exchange, send, receive, lambda: (group.alltoall_base(target, source, incoming, outgoing),))


def _peer_to_peer(torch: ModuleType, group: Any, exchange: Exchange, send: Bytes, receive: Bytes) -> GlooOperation:
    """One message per pair of ranks with bytes to move; none for a pair without, on either side."""
    outgoing = [torch.from_numpy(block) for block in blocks(send, exchange.send_bytes)]
    incoming = [torch.from_numpy(block) for block in blocks(receive, exchange.receive_bytes)]
    own = exchange.index
    peers = [peer for peer in range(len(exchange.group)) if peer != own]
    receives = [(group.recv, [incoming[peer]], peer) for peer in peers if len(incoming[peer])]
    calls = receives + [(group.send, [outgoing[peer]], peer) for peer in peers if len(outgoing[peer])]

    def begin() -> Sequence[Any]:
        works = [call(tensors, peer, 0) for call, tensors, peer in calls]
        if len(outgoing[own]):
            incoming[own].copy_(outgoing[own])
        return works

    return GlooOperation(exchange, send, receive, begin, can_poll=False)


_OPERATIONS: dict[str, Callable[[ModuleType, Any, Exchange, Bytes, Bytes], GlooOperation]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "broadcast": _broadcast,
    "send_recv": _peer_to_peer,
    "kv_transfer": _peer_to_peer,
}


class GlooTransport:
    """One rank's way to the others over Gloo; control traffic in a process group of its own."""

    name = "gloo"

    def __init__(self, identity: RankIdentity | None) -> None:
        """Meet the other ranks where the launcher says; a process without a launcher is a world of one.

        Raises:
            EnvironmentRefused: no torch, nowhere to meet, or the ranks do not find each other.
        """
        self._torch, self._distributed = load_torch()
        self.rank = 0 if identity is None else identity.rank
        self.world_size = 1 if identity is None else identity.world_size
        try:
            self._store = _meet(self._distributed, identity)
            self._control = self._process_group("control", tuple(range(self.world_size)), self.rank)
        except RuntimeError as error:
            raise EnvironmentRefused(f"gloo: rank {self.rank} did not find the others: {error}") from error
        self._channels: list[GlooChannel] = []
        self._num_opened = 0
        self._turn = 0
        self._float = self._torch.zeros(1, dtype=self._torch.float64)

    def _process_group(self, key: str, group: tuple[int, ...], index: int) -> Any:
        store = self._distributed.PrefixStore(key, self._store)
        return self._distributed.ProcessGroupGloo(store, index, len(group), TIMEOUT)

    def describe(self) -> dict[str, str]:
        return {
            "library": f"torch {self._torch.__version__}, ProcessGroupGloo",
            "all_reduce": "in place, after a copy of the send buffer inside the call",
            "reduce_scatter": "composed: all_to_all of shares, then a local sum (torch's own is an all_reduce)",
            "all_to_all_v": "all_to_all_single with split sizes",
            "send_recv": "send and receive per pair with bytes",
            "kv_transfer": "send and receive per pair with bytes, one message each",
            "torch_threads": str(self._torch.get_num_threads()),
        }

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, time_s: float) -> None:
        time.sleep(time_s)

    def barrier(self) -> None:
        self._control.barrier().wait()

    def broadcast(self, value: bytes | None) -> bytes:
        length = self._torch.tensor([len(value) if value is not None else 0], dtype=self._torch.int64)
        self._control.broadcast([length]).wait()
        buffer = np.zeros(int(length[0]), dtype=np.uint8)
        if self.rank == 0 and value:
            buffer[:] = np.frombuffer(value, dtype=np.uint8)
        if buffer.size:
            self._control.broadcast([self._torch.from_numpy(buffer)]).wait()
        return buffer.tobytes()

    def gather(self, values: Floats) -> Floats | None:
        mine = np.array(values, dtype=np.float64)
        everything = np.empty((self.world_size, *mine.shape))
        if mine.size:
            targets = [[self._torch.from_numpy(row) for row in everything.reshape(self.world_size, -1)]]
            source = [self._torch.from_numpy(mine.reshape(-1))]
            self._control.gather(targets if self.rank == 0 else [], source).wait()  # the default root is rank 0
        return everything if self.rank == 0 else None

    def gather_bytes(self, value: bytes) -> list[bytes] | None:
        torch = self._torch
        lengths = torch.zeros(self.world_size, dtype=torch.int64)
        self._control._allgather_base(lengths, torch.tensor([len(value)], dtype=torch.int64)).wait()
        longest = int(lengths.max())
        padded = np.zeros(longest, dtype=np.uint8)
        padded[: len(value)] = np.frombuffer(value, dtype=np.uint8)
        rows = np.zeros((self.world_size, longest), dtype=np.uint8)
        if longest:
            targets = [[torch.from_numpy(row) for row in rows]] if self.rank == 0 else []
            self._control.gather(targets, [torch.from_numpy(padded)]).wait()
        if self.rank != 0:
            return None
        return [row[: int(length)].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def send_float(self, peer: int, value: float) -> None:
        self._float[0] = value
        self._control.send([self._float], peer, 1).wait()

    def receive_float(self, peer: int) -> float:
        self._control.recv([self._float], peer, 1).wait()
        return float(self._float[0])

    def open_channel(self, stream: Stream) -> Channel | None:
        self._num_opened += 1  # the same on all ranks: they open the same streams in one order
        place = group_of(stream, self.rank)
        if place is None:
            return None
        group_index, index = place
        group = tuple(stream.groups[group_index])
        process_group = self._process_group(f"{self._num_opened}.{group_index}", group, index)
        channel = GlooChannel(self._torch, stream, self._num_opened, group, index, process_group)
        self._channels.append(channel)
        return channel

    def wait_any(self, operations: Sequence[Operation]) -> int:
        """Test all in turn, beginning after the one that was returned last: no stream is preferred."""
        if not operations:
            raise ValueError("wait_any needs at least one started operation")
        while True:
            for step in range(len(operations)):
                index = (self._turn + step) % len(operations)
                if operations[index].test():
                    self._turn = index + 1
                    return index
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Take down the groups in one order; a barrier before each step, for Gloo aborts when a peer goes first."""
        self.barrier()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self.barrier()
        del self._control


def _meet(distributed: ModuleType, identity: RankIdentity | None) -> Any:
    """Return the store over which the ranks find each other."""
    if identity is None:
        return distributed.HashStore()
    if identity.meeting_point is None:
        raise EnvironmentRefused(
            f"gloo: {identity.launcher} started this rank but names no place to meet: set MASTER_ADDR (the host of "
            f"rank 0) and MASTER_PORT (a free port there) for all ranks"
        )
    place = urlsplit(identity.meeting_point)
    if place.scheme == "file":
        Path(place.path).parent.mkdir(parents=True, exist_ok=True)
        return distributed.FileStore(place.path, identity.world_size)
    is_host = identity.rank == 0 and not identity.is_served
    return distributed.TCPStore(place.hostname, place.port, identity.world_size, is_host, TIMEOUT)
