"""What a transport can do. Everything that measures is written against these three protocols and nothing else.

A run is SPMD: each rank has one ``Transport``; streams are opened on all ranks in the same order. One ``Channel`` is
one stream on one rank: its own communicator and nothing shared with other streams. One ``Operation`` is a prepared
call of one size with its buffers; it can be started again and again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.matrix import Matrix
from crosstraffic.patterns.stream import MATRIX_OPS, Stream, round_payload

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One call as one rank of one group sees it: how many bytes to and from each member, in group order.

    For all_reduce and broadcast the buffer of ``payload_bytes`` is sent and received whole; all_gather sends
    ``payload_bytes / n`` and receives ``payload_bytes``; reduce_scatter the other way round; all_to_all sends and
    receives ``payload_bytes`` in n equal blocks; ops with a byte matrix send row ``index`` of it and receive column
    ``index``. Blocks lie in group order, without gaps.
    """

    op: str
    group: tuple[int, ...]
    index: int
    payload_bytes: int
    send_bytes: tuple[int, ...]
    receive_bytes: tuple[int, ...]

    @property
    def total_send_bytes(self) -> int:
        return sum(self.send_bytes)

    @property
    def total_receive_bytes(self) -> int:
        return sum(self.receive_bytes)

    @property
    def is_idle(self) -> bool:
        """True when this rank neither sends nor receives anything in this call."""
        return not any(self.send_bytes) and not any(self.receive_bytes)


class Operation(Protocol):
    """A prepared call; ``send`` and ``receive`` are its buffers as bytes (host memory, or a host view of a device)."""

    exchange: Exchange
    send: Bytes
    receive: Bytes

    def start(self) -> None:
        """Begin the call and return at once."""
        ...

    def test(self) -> bool:
        """Push progress; tell whether the call that was started is complete on this rank."""
        ...

    def wait(self) -> None:
        """Block until the call that was started is complete on this rank."""
        ...


class Channel(Protocol):
    """One stream on one rank. ``communicator_id`` differs between streams: two ops on one communicator serialise."""

    stream: Stream
    communicator_id: int

    def prepare(self, exchange: Exchange) -> Operation:
        """Allocate buffers for calls of this shape (all members of the group do so in the same order)."""
        ...


class Transport(Protocol):
    """One rank's way to the others. Control calls (barrier, broadcast, gather) never share a stream's communicator."""

    name: str
    rank: int
    world_size: int

    def describe(self) -> dict[str, str]:
        """Return library names and versions, and settings that matter, for the run's record."""
        ...

    def now_s(self) -> float:
        """Read this rank's clock, in seconds; clocks of two ranks may differ in offset and rate."""
        ...

    def sleep(self, time_s: float) -> None:
        """Let time pass on this rank."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come."""
        ...

    def broadcast(self, value: bytes | None) -> bytes:
        """Return rank 0's value on every rank (pass None elsewhere)."""
        ...

    def gather(self, values: Floats) -> Floats | None:
        """Return every rank's values, ``[world_size, *values.shape]``, on rank 0; None elsewhere. Shapes are equal."""
        ...

    def gather_bytes(self, value: bytes) -> list[bytes] | None:
        """Return every rank's value on rank 0; None elsewhere. Lengths may differ."""
        ...

    def send_float(self, peer: int, value: float) -> None:
        """Send one number to a rank that calls ``receive_float``: the ping-pong of the clocks."""
        ...

    def receive_float(self, peer: int) -> float:
        """Receive one number from ``peer``."""
        ...

    def open_channel(self, stream: Stream) -> Channel | None:
        """Make a stream's own communicator; called by all ranks in one order. None where this rank takes no part."""
        ...

    def wait_any(self, operations: Sequence[Operation]) -> int:
        """Block until one of the started operations is complete; return its index. Pushes progress of all."""
        ...

    def close(self) -> None:
        """End in order: all ranks call it."""
        ...


def group_of(stream: Stream, rank: int) -> tuple[int, int] | None:
    """Return (group index, index within the group) of a rank, or None where it takes no part."""
    for group_index, group in enumerate(stream.groups):
        if rank in group:
            return group_index, group.index(rank)
    return None


def exchange_for(
    stream: Stream, rank: int, payload_bytes: int, *, edge: tuple[int, int] | None = None
) -> Exchange | None:
    """Work out one rank's part of a call of ``payload_bytes``; None where the rank is in no group of the stream.

    ``edge`` keeps only the bytes from one member to another (one boundary of a pipeline).
    """
    place = group_of(stream, rank)
    if place is None:
        return None
    group_index, index = place
    group = stream.groups[group_index]
    num_ranks = len(group)
    if stream.op in MATRIX_OPS:
        matrix: Matrix = stream.matrix(group_index, payload_bytes)
        if edge is not None:
            kept = int(matrix[edge])
            matrix = np.zeros_like(matrix)
            matrix[edge] = kept
        send, receive = matrix[index].tolist(), matrix[:, index].tolist()
    else:
        payload_bytes = round_payload(stream.op, payload_bytes, num_ranks)
        share = payload_bytes // num_ranks
        mine = [share if member == index else 0 for member in range(num_ranks)]
        whole = [payload_bytes if member == index else 0 for member in range(num_ranks)]
        send, receive = {
            "all_reduce": (whole, whole),
            "broadcast": (whole, whole),
            "all_gather": (mine, [share] * num_ranks),
            "reduce_scatter": ([share] * num_ranks, mine),
            "all_to_all": ([share] * num_ranks, [share] * num_ranks),
        }[stream.op]
    return Exchange(
        op=stream.op,
        group=group,
        index=index,
        payload_bytes=payload_bytes,
        send_bytes=tuple(send),
        receive_bytes=tuple(receive),
    )
