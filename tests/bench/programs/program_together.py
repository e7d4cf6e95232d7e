"""A rank program: several streams in flight at once on the same ranks, each restarted many times, all checked."""

import os

from program_operations import check, fill, stream_of

from crosstraffic.bench.open import open_transport
from crosstraffic.bench.ranks import identify
from crosstraffic.bench.transport import Transport, exchange_for
from crosstraffic.patterns.stream import OPS

NUM_CALLS = 40


def start_returns_at_once(transport: Transport, num_bytes: int) -> None:
    """Rank 0 starts while the others still wait for it elsewhere: a start that blocks would never come back."""
    everyone = (tuple(range(transport.world_size)),)
    for op in OPS:
        stream = stream_of(f"once.{op}", op, everyone, num_bytes)
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
        assert channel is not None
        assert exchange is not None
        operation = channel.prepare(exchange)
        fill(stream, exchange, operation, 0)
        if transport.rank == 0:
            operation.start()
        transport.barrier()
        if transport.rank != 0:
            operation.start()
        operation.wait()
        check(operation, 0, f"rank {transport.rank} {stream.name}")


def loop_together(transport: Transport) -> None:
    """Keep three streams in flight; whichever is complete is checked, filled anew and started again."""
    everyone = (tuple(range(transport.world_size)),)
    streams = [
        stream_of("a", "all_reduce", everyone, 65536),
        stream_of("b", "all_to_all_v", everyone, 20_000),
        stream_of("c", "send_recv", everyone, 5_000),
    ]
    operations = []
    identifiers = set()
    for stream in streams:
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
        assert channel is not None
        assert exchange is not None
        identifiers.add(channel.communicator_id)
        operations.append(channel.prepare(exchange))
    assert len(identifiers) == len(streams), "streams share a communicator"
    calls = [0] * len(streams)
    for stream, operation in zip(streams, operations, strict=True):
        fill(stream, operation.exchange, operation, 0)
        operation.start()
    going = list(range(len(streams)))
    while going:
        index = going[transport.wait_any([operations[number] for number in going])]
        check(operations[index], calls[index], f"rank {transport.rank} {streams[index].name} call {calls[index]}")
        calls[index] += 1
        if calls[index] == NUM_CALLS:
            going.remove(index)
            continue
        fill(streams[index], operations[index].exchange, operations[index], calls[index])
        operations[index].start()
    assert calls == [NUM_CALLS] * len(streams)


def restart_often(transport: Transport) -> None:
    """Start one operation of each op some hundred times; buffers stay the same, so every call gives the same."""
    everyone = (tuple(range(transport.world_size)),)
    for op in OPS:
        stream = stream_of(f"often.{op}", op, everyone, 64)
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
        assert channel is not None
        assert exchange is not None
        operation = channel.prepare(exchange)
        fill(stream, exchange, operation, 3)
        for _ in range(200):
            operation.start()
            operation.wait()
        check(operation, 3, f"rank {transport.rank} {stream.name}")


def main() -> None:
    transport = open_transport(os.environ["TEST_TRANSPORT"], identify(os.environ))
    start_returns_at_once(transport, 64)
    start_returns_at_once(transport, 2_000_000)
    loop_together(transport)
    restart_often(transport)
    transport.close()
    print("all ok", flush=True)


if __name__ == "__main__":
    main()
