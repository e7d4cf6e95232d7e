"""What one rank holds while it measures: its transport, one channel per stream, prepared calls, clocks, heart."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from crosstraffic.bench.clocks import Clocks
from crosstraffic.bench.payload import check_receive, fill_send, poison
from crosstraffic.bench.plan import MAX_MIX
from crosstraffic.bench.resolve import Scenario
from crosstraffic.bench.timing import Ending
from crosstraffic.bench.transport import Channel, Floats, Operation, Transport, exchange_for
from crosstraffic.patterns.stream import POINT_TO_POINT_OPS, Op, Stream
from crosstraffic.results.record import Mismatch

_DECISION = struct.Struct("<qd")


class Heart(Protocol):
    """Where a rank says what it is doing, for a watchdog and a progress bar, and learns whether the run shall end."""

    def call(self, point: int, stream: int, call: int) -> None:
        """Say which call begins; costs far less than a message."""
        ...

    def progress(self, done: int, total: int, seconds_left: float) -> None:
        """Say how far the run has come."""
        ...

    def should_stop(self) -> bool:
        """Tell whether the run was asked to end."""
        ...


def open_ending(transport: Transport) -> Ending:
    """Prepare what ranks use to agree on the end of a loop; all ranks call it in the same order as their streams."""
    world = transport.world_size

    def prepare(name: str, op: Op, payload_bytes: int) -> Operation:
        stream = Stream(
            name=name,
            pattern="control",
            op=op,
            phase="prefill",
            groups=(tuple(range(world)),),
            payload_bytes=payload_bytes,
            calls_per_step=1,
            dtype="int64",
            formula="8 bytes a stream and rank",
            source="control traffic of the measurement itself",
        )
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, payload_bytes)
        if channel is None or exchange is None:
            raise ValueError(f"rank {transport.rank} is not in a group of all {world} ranks")
        return channel.prepare(exchange)

    return Ending(
        signal=prepare("signal", "broadcast", 8), agreement=prepare("agree", "all_gather", 8 * MAX_MIX * world)
    )


@dataclass(slots=True, kw_only=True)
class RankContext:
    """One rank's means of measuring. ``clocks`` lives on rank 0 only."""

    transport: Transport
    scenario: Scenario
    channels: Mapping[str, Channel | None]
    clocks: Clocks | None
    ending: Ending
    heart: Heart
    nodes: tuple[int, ...]
    started_s: float
    point_index: int = 0
    _kept: dict[tuple[str, int, tuple[int, int] | None], Operation | None] = field(default_factory=dict)
    _tags: dict[str, int] = field(default_factory=dict)

    @property
    def is_root(self) -> bool:
        return self.transport.rank == 0

    def stream(self, name: str) -> Stream:
        return next(stream for stream in self.scenario.streams if stream.name == name)

    def stream_index(self, name: str) -> int:
        return next(index for index, stream in enumerate(self.scenario.streams) if stream.name == name)

    def operation(
        self, name: str, payload_bytes: int, *, edge: tuple[int, int] | None = None, keep: bool = False
    ) -> Operation | None:
        """Prepare a call of a stream; None where this rank has no part in it. ``keep`` holds it for the whole run.

        Every member of a group prepares, also one that then has no part: members prepare in the same order. A rank
        without a message to wait for must not loop: it would run ahead of the others without bound.
        """
        key = (name, payload_bytes, edge)
        if key in self._kept:
            return self._kept[key]
        channel = self.channels[name]
        exchange = exchange_for(self.stream(name), self.transport.rank, payload_bytes, edge=edge)
        operation = None
        if channel is not None and exchange is not None:
            operation = channel.prepare(exchange)
            if exchange.is_idle and exchange.payload_bytes and exchange.op in POINT_TO_POINT_OPS:
                operation = None
        if keep:
            self._kept[key] = operation
        return operation

    def beat_for(self, name: str) -> Callable[[int], None]:
        """Return what a timed loop calls before each call of a stream."""
        heart, point, stream = self.heart.call, self.point_index, self.stream_index(name)
        return lambda call: heart(point, stream, call)

    def refresh(self, name: str, operation: Operation | None) -> int:
        """Fill the send buffer anew and poison the receive buffer; return the tag, new for this stream, in the payload.

        All ranks refresh the same streams in the same order, so that tags agree.
        """
        tag = self._tags.get(name, 0) + 1
        self._tags[name] = tag
        if operation is not None and self.scenario.measure.verify:
            fill_send(operation.exchange, operation.send, stream_index=self.stream_index(name), iteration=tag)
            poison(operation.receive)
        return tag

    def mismatch(self, name: str, operation: Operation | None, tag: int, call: int) -> Mismatch | None:
        """Check what the last call received against what its peers must have sent under this tag."""
        if operation is None or not self.scenario.measure.verify:
            return None
        found = check_receive(
            operation.exchange,
            operation.receive,
            stream_index=self.stream_index(name),
            iteration=tag,
        )
        if found is None:
            return None
        peer, wrong = found
        return Mismatch(
            rank=self.transport.rank,
            peer=peer,
            offset_bytes=wrong.offset_bytes,
            expected=wrong.expected,
            found=wrong.found,
            num_wrong_bytes=wrong.num_wrong_bytes,
            call=call,
            stream=name,
        )

    def mismatches(self, found: Sequence[Mismatch | None]) -> dict[str, Mismatch]:
        """Gather every rank's verdicts; return the first one of each stream (lowest rank first) on rank 0."""
        mine = [item.model_dump() for item in found if item is not None]
        gathered = self.transport.gather_bytes(json.dumps(mine).encode())
        first: dict[str, Mismatch] = {}
        for part in gathered or ():
            for item in json.loads(part):
                first.setdefault(item["stream"], Mismatch(**item))
        return first

    def first_mismatch(self, found: Sequence[Mismatch | None]) -> Mismatch | None:
        """Gather every rank's verdicts; return the first one of all (rank 0), or None."""
        return next(iter(self.mismatches(found).values()), None)

    def decide(self, count: int, value: float = 0.0) -> tuple[int, float]:
        """Return rank 0's decision on every rank: a whole number (of calls, say) and a value."""
        packed = self.transport.broadcast(_DECISION.pack(count, value) if self.is_root else None)
        number, real = _DECISION.unpack(packed)
        return number, real

    def synchronised(self, times: Floats) -> Floats | None:
        """Gather local readings ``[..., 2]`` and return them on rank 0's clock, ``[world, ..., 2]``, on rank 0."""
        gathered = self.transport.gather(times)
        if gathered is None:
            return None
        if self.clocks is None:
            raise ValueError("rank 0 measures without clocks")
        return np.stack([self.clocks.to_reference(rank, local) for rank, local in enumerate(gathered)])

    def clock_error_s(self, at_s: float) -> float:
        """Return the largest error of any rank's clock at a time of rank 0's clock."""
        if self.clocks is None:
            raise ValueError("only rank 0 knows the clocks")
        return max((self.clocks.error_s(rank, at_s) for rank in range(self.transport.world_size)), default=0.0)
