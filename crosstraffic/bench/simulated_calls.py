"""Calls of a simulated world: who takes part, what they load, in which order they run, which bytes they move."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from crosstraffic.bench.fluid import Footprint
from crosstraffic.bench.simulated_truth import SimulatedTruth, footprint_of
from crosstraffic.bench.transport import Bytes, Exchange
from crosstraffic.errors import RunFailed
from crosstraffic.patterns.matrix import Matrix
from crosstraffic.patterns.stream import MATRIX_OPS, POINT_TO_POINT_OPS, Stream
from crosstraffic.patterns.wire import steps_by_tier, wire_matrix

_NOISE_BATCH = 256


class Part(Protocol):
    """One rank's side of a prepared call."""

    exchange: Exchange
    send: Bytes
    receive: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One completed call, its bytes just moved; a test may spoil ``receives`` to see whether the check finds it."""

    stream: str
    group: tuple[int, ...]
    call: int
    exchanges: tuple[Exchange, ...]
    sends: tuple[Bytes, ...]
    receives: tuple[Bytes, ...]


@dataclass(slots=True, eq=False)
class Shape:
    """Calls of one size of one group: what each member prepared, and what follows from it once all have."""

    index: int
    exchanges: list[Exchange | None]  # forgotten once all have prepared
    members: tuple[int, ...] = ()  # indices in the group of those that take part
    latency_s: float = 0.0
    footprint: Footprint | None = None

    @property
    def missing(self) -> list[int]:
        """Indices of the members that have not prepared it yet."""
        return [member for member, exchange in enumerate(self.exchanges) if exchange is None]


@dataclass(slots=True, eq=False)
class Call:
    """One call in flight: the parts that members have started, by index, and the ranks to wake when it ends."""

    group: "Group"
    shape: Shape
    number: int
    parts: dict[int, Part] = field(default_factory=dict)
    starts_s: float = 0.0
    has_begun: bool = False
    factor: float = 1.0
    done_s: float | None = None
    waiting: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Group:
    """One group of one stream: a communicator of its own."""

    stream: Stream
    index: int
    communicator_id: int
    noise: np.random.Generator
    shapes: list[Shape] = field(default_factory=list)
    calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    next_call: list[int] = field(default_factory=list)
    num_calls: int = 0
    _factors: deque[float] = field(default_factory=deque)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.stream.groups[self.index]

    def prepare(self, truth: SimulatedTruth, place: int, exchange: Exchange) -> Shape:
        """Enter what the member ``exchange.index`` prepared as its ``place``-th shape.

        Raises:
            RunFailed: members disagree on what is sent.
        """
        while len(self.shapes) <= place:
            self.shapes.append(Shape(index=len(self.shapes), exchanges=[None] * len(self.ranks)))
        shape = self.shapes[place]
        shape.exchanges[exchange.index] = exchange
        if not shape.missing:
            self._complete(truth, shape)
            shape.exchanges = []
        return shape

    def _complete(self, truth: SimulatedTruth, shape: Shape) -> None:
        exchanges = [exchange for exchange in shape.exchanges if exchange is not None]
        op, ranks = self.stream.op, self.ranks
        if op in MATRIX_OPS:
            sent = np.array([exchange.send_bytes for exchange in exchanges], dtype=np.int64)
            received = np.array([exchange.receive_bytes for exchange in exchanges], dtype=np.int64)
            _refuse_disagreement(self.stream, ranks, sent, received.T)
            wire = sent.copy()
            np.fill_diagonal(wire, 0)
        else:
            sizes = np.array([[exchange.payload_bytes] for exchange in exchanges], dtype=np.int64)
            _refuse_disagreement(self.stream, ranks, sizes, np.full_like(sizes, sizes[0]))
            wire = wire_matrix(self.stream, self.index, exchanges[0].payload_bytes)
        shape.members = tuple(member for member in range(len(ranks)) if takes_part(exchanges[member]))
        present = [ranks[member] for member in shape.members]
        if present:
            nodes = tuple(truth.node(rank) for rank in range(max(ranks) + 1))
            intra, inter = steps_by_tier(op, present, nodes)
            shape.latency_s = intra * truth.intra.latency_s + inter * truth.inter.latency_s
        shape.footprint = footprint_of(truth, ranks, wire)

    def join(self, shape: Shape, part: Part, start_number: int) -> Call:
        """Return the call that the next start of ``part`` belongs to, made if it is the first to come.

        Members of a collective start the same calls in the same order; messages between ranks belong together by the
        operation and how often it was started.

        Raises:
            RunFailed: the members' orders differ.
        """
        member = part.exchange.index
        if self.stream.op in POINT_TO_POINT_OPS:
            key = (shape.index, start_number)
        else:
            key = (0, self.next_call[member])
            self.next_call[member] += 1
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = Call(group=self, shape=shape, number=key[1])
        elif call.shape is not shape:
            there = self.ranks[min(call.parts)]
            raise RunFailed(
                f"{self.stream.name}: ranks start different calls as number {key[1]}: rank {self.ranks[member]} its "
                f"operation {shape.index}, rank {there} its operation {call.shape.index}"
            )
        call.parts[member] = part
        return call

    def leave(self, call: Call) -> None:
        """Forget a call that has ended."""
        key = (call.shape.index if self.stream.op in POINT_TO_POINT_OPS else 0, call.number)
        del self.calls[key]

    def factor(self, sigma: float) -> float:
        """Return the noise of the next call."""
        if sigma == 0:
            return 1.0
        if not self._factors:
            self._factors.extend(np.exp(sigma * self.noise.standard_normal(_NOISE_BATCH)).tolist())
        return self._factors.popleft()


def takes_part(exchange: Exchange) -> bool:
    """Tell whether a rank must start a call before it can begin: messages between ranks do not wait for idle ones."""
    return exchange.op not in POINT_TO_POINT_OPS or exchange.payload_bytes == 0 or not exchange.is_idle


def deliver(parts: Sequence[Part]) -> None:
    """Move the bytes of one call between the buffers of those that take part, in group order."""
    op = parts[0].exchange.op
    if op in ("all_reduce", "reduce_scatter"):
        total = parts[0].send.view(np.float32).copy()
        for part in parts[1:]:
            total += part.send.view(np.float32)
        summed: Bytes = total.view(np.uint8)
        for part in parts:
            size = part.exchange.total_receive_bytes
            start = part.exchange.index * size if op == "reduce_scatter" else 0
            part.receive[:] = summed[start : start + size]
    elif op == "broadcast":
        for part in parts:
            part.receive[:] = parts[0].send
    elif op == "all_gather":
        gathered = np.concatenate([part.send for part in parts])
        for part in parts:
            part.receive[:] = gathered
    else:
        receives = {part.exchange.index: part.receive for part in parts}
        filled = dict.fromkeys(receives, 0)
        for source in parts:
            sent = 0
            for member, size in enumerate(source.exchange.send_bytes):
                if size:
                    at = filled[member]
                    receives[member][at : at + size] = source.send[sent : sent + size]
                    filled[member], sent = at + size, sent + size


def _refuse_disagreement(stream: Stream, ranks: Sequence[int], ours: Matrix, theirs: Matrix) -> None:
    unlike = np.argwhere(ours != theirs)
    if len(unlike):
        row, column = unlike[0].tolist()
        raise RunFailed(
            f"{stream.name}: ranks prepared different calls: {ours[row, column]} bytes on rank {ranks[row]}, "
            f"{theirs[row, column]} on rank {ranks[column]}"
        )
