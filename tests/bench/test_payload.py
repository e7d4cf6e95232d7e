"""Faults put into the receive buffers of every op: each is found, with the rank and the offset it happened at."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from crosstraffic.bench.payload import check_receive, fill_send, poison
from crosstraffic.bench.transport import Bytes, Exchange, exchange_for
from crosstraffic.patterns.matrix import Explicit
from crosstraffic.patterns.stream import MATRIX_OPS, OPS, Stream

SIZES = (1, 2, 3, 5, 8)
CALL = {"stream_index": 2, "iteration": 9}
BLOCK_OPS = ("all_gather", "all_to_all", "all_to_all_v", "send_recv", "kv_transfer")


def stream_of(op: str, num_ranks: int, first_rank: int = 10, salt: int = 0) -> Stream:
    """Return a stream with odd and zero counts in its matrix."""
    cells = tuple(
        tuple(0 if (i + j + salt) % 4 == 3 else 1 + (37 * i + 11 * j) % 53 for j in range(num_ranks))
        for i in range(num_ranks)
    )
    rule = Explicit(bytes=(cells,)) if op in MATRIX_OPS else None
    payload = max(map(sum, cells)) if op in MATRIX_OPS else 4 * 7 * num_ranks
    return Stream(
        name="x",
        pattern="x",
        op=op,  # type: ignore[arg-type]
        phase="decode",
        groups=(tuple(range(first_rank, first_rank + num_ranks)),),
        payload_bytes=payload,
        calls_per_step=1,
        dtype="bfloat16",
        formula="",
        source="",
        rule=rule,
    )


def deliver(exchanges: list[Exchange], sends: list[Bytes], receives: list[Bytes]) -> None:
    """Do the op in the plainest way."""
    op = exchanges[0].op
    if op in ("all_reduce", "reduce_scatter"):
        total = np.sum([send.view(np.float32) for send in sends], axis=0, dtype=np.float32).view(np.uint8)
    elif op == "all_gather":
        total = np.concatenate(sends)
    for member, (exchange, receive) in enumerate(zip(exchanges, receives, strict=True)):
        if op == "broadcast":
            receive[:] = sends[0]
        elif op == "reduce_scatter":
            share = exchange.total_receive_bytes
            receive[:] = total[member * share : (member + 1) * share]
        elif op in ("all_reduce", "all_gather"):
            receive[:] = total
        else:
            blocks = []
            for other, source in enumerate(exchanges):
                start = sum(source.send_bytes[:member])
                blocks.append(sends[other][start : start + source.send_bytes[member]])
            receive[:] = np.concatenate(blocks)


def exchanged(stream: Stream, **call: int) -> tuple[list[Exchange], list[Bytes]]:
    """Return the exchanges of the group's members and what each received."""
    exchanges = []
    for rank in stream.groups[0]:
        exchange = exchange_for(stream, rank, stream.payload_bytes)
        assert exchange is not None
        exchanges.append(exchange)
    sends = [np.zeros(exchange.total_send_bytes, dtype=np.uint8) for exchange in exchanges]
    receives = [np.zeros(exchange.total_receive_bytes, dtype=np.uint8) for exchange in exchanges]
    for exchange, send, receive in zip(exchanges, sends, receives, strict=True):
        fill_send(exchange, send, **{**CALL, **call})
        poison(receive)
    deliver(exchanges, sends, receives)
    return exchanges, receives


def blocks_of(exchange: Exchange) -> list[tuple[int, slice]]:
    """Return (rank, where in the buffer) of the blocks that hold something."""
    ends = np.cumsum(exchange.receive_bytes)
    return [
        (rank, slice(int(end) - size, int(end)))
        for rank, size, end in zip(exchange.group, exchange.receive_bytes, ends, strict=True)
        if size
    ]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_right_bytes_pass(op: str, num_ranks: int) -> None:
    for salt in range(4):
        exchanges, receives = exchanged(stream_of(op, num_ranks, salt=salt))
        for exchange, receive in zip(exchanges, receives, strict=True):
            assert check_receive(exchange, receive, **CALL) is None


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("change", ["stale", "other_stream"])
def test_bytes_of_another_call_are_wrong_from_the_start(op: str, num_ranks: int, change: str) -> None:
    call = {"iteration": 8} if change == "stale" else {"stream_index": 3}
    exchanges, receives = exchanged(stream_of(op, num_ranks), **call)
    for exchange, receive in zip(exchanges, receives, strict=True):
        found = check_receive(exchange, receive, **CALL)
        if not len(receive):
            assert found is None
            continue
        assert found is not None
        peer, wrong = found
        assert wrong.offset_bytes < 4
        if op in BLOCK_OPS:
            assert peer == blocks_of(exchange)[0][0]
            assert wrong.offset_bytes == 0
        else:
            assert peer == (exchange.group[0] if op == "broadcast" else None)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_one_changed_byte_names_peer_and_offset(op: str, num_ranks: int) -> None:
    exchanges, receives = exchanged(stream_of(op, num_ranks))
    for exchange, receive in zip(exchanges, receives, strict=True):
        for place in {0, len(receive) // 2, len(receive) - 1} if len(receive) else ():
            right = int(receive[place])
            receive[place] ^= 0x40
            found = check_receive(exchange, receive, **CALL)
            receive[place] = right
            assert found is not None
            peer, wrong = found
            assert (wrong.expected, wrong.found, wrong.num_wrong_bytes) == (right, right ^ 0x40, 1)
            if op in BLOCK_OPS:
                rank, block = next((r, b) for r, b in blocks_of(exchange) if b.start <= place < b.stop)
                assert (peer, wrong.offset_bytes) == (rank, place - block.start)
            else:
                assert (peer, wrong.offset_bytes) == (exchange.group[0] if op == "broadcast" else None, place)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_short_receive_is_found(op: str, num_ranks: int) -> None:
    exchanges, receives = exchanged(stream_of(op, num_ranks))
    for exchange, receive in zip(exchanges, receives, strict=True):
        if not len(receive):
            continue
        missing = min(5, len(receive))
        poison(receive[len(receive) - missing :])
        found = check_receive(exchange, receive, **CALL)
        assert found is not None
        peer, wrong = found
        assert wrong.found == 0xFF
        if op in BLOCK_OPS:
            assert peer in [rank for rank, block in blocks_of(exchange) if block.stop > len(receive) - missing]
        else:
            assert wrong.offset_bytes >= len(receive) - missing


@pytest.mark.parametrize("op", BLOCK_OPS)
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_two_swapped_blocks_are_found(op: str, num_ranks: int) -> None:
    exchanges, receives = exchanged(stream_of(op, num_ranks))
    seen = 0
    for exchange, receive in zip(exchanges, receives, strict=True):
        blocks = blocks_of(exchange)
        for (one, here), (_, there) in itertools.pairwise(blocks):
            size = min(here.stop - here.start, there.stop - there.start)
            copy = receive.copy()
            copy[here.start : here.start + size] = receive[there.start : there.start + size]
            copy[there.start : there.start + size] = receive[here.start : here.start + size]
            found = check_receive(exchange, copy, **CALL)
            assert found is not None
            assert (found[0], found[1].offset_bytes) == (one, 0)
            seen += 1
    assert seen


@pytest.mark.parametrize("op", ["all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_what_was_meant_for_another_rank_is_found(op: str, num_ranks: int) -> None:
    exchanges, receives = exchanged(stream_of(op, num_ranks))
    found = check_receive(exchanges[0], receives[1], **CALL)
    assert found is not None
    assert found[0] == (exchanges[0].group[0] if op == "all_to_all" else None)
    assert found[1].offset_bytes < 4


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_two_swapped_pieces_of_one_buffer_are_found(op: str) -> None:
    exchanges, receives = exchanged(stream_of(op, 4))
    receive = receives[2].copy()
    receive[8:16], receive[16:24] = receives[2][16:24], receives[2][8:16]
    found = check_receive(exchanges[2], receive, **CALL)
    assert found is not None
    assert 8 <= found[1].offset_bytes < 12


@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("order", [lambda n: n[::-1], lambda n: n[1:] + n[:1]], ids=["reversed", "rotated"])
def test_a_wrong_rank_order_names_the_first_rank_out_of_place(op: str, order: Callable[[list[int]], list[int]]) -> None:
    exchanges, receives = exchanged(stream_of(op, 4))
    for exchange, receive in zip(exchanges, receives, strict=True):
        wrong = receive.reshape(4, -1)[order([0, 1, 2, 3])].reshape(-1)
        found = check_receive(exchange, wrong, **CALL)
        assert found is not None
        assert (found[0], found[1].offset_bytes) == (exchange.group[0], 0)


@pytest.mark.parametrize("op", [op for op in OPS if op != "broadcast"])
def test_bytes_of_another_group_are_wrong(op: str) -> None:
    exchanges, _ = exchanged(stream_of(op, 3, first_rank=10))
    _, others = exchanged(stream_of(op, 3, first_rank=20))
    for exchange, other in zip(exchanges, others, strict=True):
        assert not len(other) or check_receive(exchange, other, **CALL) is not None


def test_a_broadcast_from_the_wrong_root_is_found() -> None:
    exchanges, receives = exchanged(stream_of("broadcast", 3))
    fill_send(exchanges[1], receives[0], **CALL)
    found = check_receive(exchanges[0], receives[0], **CALL)
    assert found is not None
    assert (found[0], found[1].offset_bytes) == (10, 0)
