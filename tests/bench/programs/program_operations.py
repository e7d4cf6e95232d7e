"""A rank program: run every op on a transport and compare what comes with a numpy reference; print one line a case.

Started by ``launch_local``; TEST_TRANSPORT names the transport.
"""

import os
from collections.abc import Sequence

import numpy as np

from crosstraffic.bench.open import open_transport
from crosstraffic.bench.ranks import identify
from crosstraffic.bench.transport import Exchange, Operation, Transport, exchange_for, group_of
from crosstraffic.patterns.matrix import Explicit
from crosstraffic.patterns.stream import ELEMENT_BYTES, MATRIX_OPS, OPS, Stream


def uneven(num_ranks: int, scale: int) -> Explicit:
    """Uneven bytes with zeros, on the diagonal too; one whole row and one whole column of zeros where n > 2."""
    matrix = np.fromfunction(
        lambda i, j: ((3 * i + 5 * j + 1) % 4) * (i + 1) * scale, (num_ranks, num_ranks), dtype=int
    )
    if num_ranks > 2:
        matrix[1, :] = 0
        matrix[:, 2] = 0
    return Explicit(bytes=(tuple(tuple(int(cell) for cell in row) for row in matrix),))


def stream_of(name: str, op: str, groups: tuple[tuple[int, ...], ...], payload_bytes: int) -> Stream:
    """Build a stream for a test; ops with a byte matrix get an uneven one, the same shape for all groups."""
    rule = None
    if op in MATRIX_OPS:
        rule = uneven(len(groups[0]), max(payload_bytes // 16, 1))
        payload_bytes = int(rule.matrix(len(groups[0]), 0).sum(axis=1).max())
    return Stream(
        name=name,
        pattern="test",
        op=op,  # type: ignore[arg-type]
        phase="decode",
        groups=groups,
        payload_bytes=payload_bytes,
        calls_per_step=1,
        dtype="float32",
        formula="test",
        source="test",
        rule=rule,
    )


def content(exchange: Exchange, source: int, call: int) -> np.ndarray:
    """Return what a member sends in a call, as bytes: whole float32 numbers for the ops that add."""
    sent = {
        "all_gather": exchange.payload_bytes // len(exchange.group),
    }.get(exchange.op, exchange.payload_bytes)
    if exchange.op in ("all_reduce", "reduce_scatter"):
        numbers = (np.arange(sent // ELEMENT_BYTES) % 251 + 7 * source + call) % 1000
        return numbers.astype(np.float32).view(np.uint8)
    return ((np.arange(sent) * 31 + 101 * source + 13 * call) % 256).astype(np.uint8)


def fill(stream: Stream, exchange: Exchange, operation: Operation, call: int) -> None:
    """Put this member's bytes into the send buffer and rubbish into the receive buffer."""
    if exchange.op in MATRIX_OPS:
        operation.send[:] = np.concatenate(
            [block_of(exchange, exchange.index, peer, size, call) for peer, size in enumerate(exchange.send_bytes)]
        )
    else:
        operation.send[:] = content(exchange, exchange.index, call)
    operation.receive[:] = 0xEE


def block_of(exchange: Exchange, source: int, destination: int, num_bytes: int, call: int) -> np.ndarray:
    """Return the bytes of one cell of a byte matrix."""
    return ((np.arange(num_bytes) * 17 + 59 * source + 83 * destination + 11 * call) % 256).astype(np.uint8)


def expected(exchange: Exchange, call: int) -> np.ndarray:
    """Work out with numpy what this member must hold after a call."""
    num_ranks, index = len(exchange.group), exchange.index
    if exchange.op in MATRIX_OPS:
        return np.concatenate(
            [block_of(exchange, peer, index, size, call) for peer, size in enumerate(exchange.receive_bytes)]
        )
    everyone = [content(exchange, member, call) for member in range(num_ranks)]
    if exchange.op == "broadcast":
        return everyone[0]
    if exchange.op == "all_gather":
        return np.concatenate(everyone)
    if exchange.op == "all_to_all":
        return np.concatenate([np.split(member, num_ranks)[index] for member in everyone])
    total = np.sum([member.view(np.float32) for member in everyone], axis=0, dtype=np.float32).view(np.uint8)
    return total if exchange.op == "all_reduce" else np.split(total, num_ranks)[index]


def check(operation: Operation, call: int, what: str) -> None:
    """Compare byte by byte; a wrong one ends the rank."""
    want = expected(operation.exchange, call)
    if not np.array_equal(operation.receive, want):
        where = int(np.flatnonzero(operation.receive != want)[0])
        raise SystemExit(f"{what}: wrong at byte {where}: {operation.receive[where]} instead of {want[where]}")


def groupings(world_size: int) -> list[tuple[tuple[int, ...], ...]]:
    """One group of all in an order that is not the ranks' own, and two groups, one of them of every other rank."""
    everyone = tuple(range(world_size))
    found = [(everyone[1:] + everyone[:1],)]
    if world_size >= 4:
        half = world_size // 2 * 2
        found.append((everyone[1:half:2], everyone[0:half:2]))
    return found


def every_op(transport: Transport, sizes: Sequence[int]) -> None:
    """Run each op in each grouping and size, three calls each; buffers are filled anew for each call."""
    for op in OPS:
        for number, groups in enumerate(groupings(transport.world_size)):
            for size in sizes:
                stream = stream_of(f"{op}.{number}.{size}", op, groups, size)
                channel = transport.open_channel(stream)
                exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
                assert (channel is None) == (group_of(stream, transport.rank) is None) == (exchange is None)
                if channel is not None and exchange is not None:
                    operation = channel.prepare(exchange)
                    for call in range(3):
                        fill(stream, exchange, operation, call)
                        operation.start()
                        if call == 1:
                            while not operation.test():
                                os.sched_yield()
                        else:
                            operation.wait()
                        check(operation, call, f"rank {transport.rank} {stream.name} call {call}")
                transport.barrier()
                if transport.rank == 0:
                    print("ok", op, "groups", len(groups), "of", len(groups[0]), "bytes", size, flush=True)


def main() -> None:
    transport = open_transport(os.environ["TEST_TRANSPORT"], identify(os.environ))
    every_op(transport, [0, 8, 4000, 300_000])
    transport.close()
    print("all ok", flush=True)


if __name__ == "__main__":
    main()
