"""What each op's buffers hold before and after a call: fill what is sent, check what came. Never in the timed region.

Broadcasts come from the first member of the group. Sources and destinations are ranks of the whole run, so that bytes
of another group of the same stream are wrong too.
"""

from collections.abc import Iterator

from crosstraffic.bench.transport import Bytes, Exchange
from crosstraffic.kernels.fill import EVERYONE, fill_block, fill_reducible
from crosstraffic.kernels.verify import WrongBytes, check_block, check_reduced

POISON = 0xFF  # as float32 not a number; a byte that no transport wrote is not taken for a payload

_REDUCING = frozenset({"all_reduce", "reduce_scatter"})
_ALIKE = frozenset({"all_gather", "broadcast"})


def fill_send(exchange: Exchange, send: Bytes, *, stream_index: int, iteration: int) -> None:
    """Write what this rank sends in one call."""
    rank = exchange.group[exchange.index]
    if exchange.op in _REDUCING:
        fill_reducible(send[: exchange.total_send_bytes], source=rank, iteration=iteration, stream=stream_index)
        return
    for member, block in _blocks(exchange.send_bytes, send):
        destination = EVERYONE if exchange.op in _ALIKE else exchange.group[member]
        fill_block(block, source=rank, destination=destination, iteration=iteration, stream=stream_index)


def poison(receive: Bytes) -> None:
    """Overwrite a receive buffer, so that bytes that never came are seen."""
    receive[:] = POISON


def check_receive(
    exchange: Exchange, receive: Bytes, *, stream_index: int, iteration: int
) -> tuple[int | None, WrongBytes] | None:
    """Check what one call left in this rank's receive buffer.

    Returns:
        None where every byte is right; else the rank whose bytes are wrong (None where all ranks contribute to each
        byte) and the first wrong byte, its offset counted from the start of that rank's block.
    """
    rank = exchange.group[exchange.index]
    if exchange.op in _REDUCING:
        share = exchange.total_receive_bytes
        first_word = exchange.index * share // 4 if exchange.op == "reduce_scatter" else 0
        wrong = check_reduced(
            receive[:share], sources=exchange.group, iteration=iteration, stream=stream_index, first_word=first_word
        )
        return None if wrong is None else (None, wrong)
    for member, block in _blocks(exchange.receive_bytes, receive):
        source = exchange.group[0] if exchange.op == "broadcast" else exchange.group[member]
        destination = EVERYONE if exchange.op in _ALIKE else rank
        wrong = check_block(block, source=source, destination=destination, iteration=iteration, stream=stream_index)
        if wrong is not None:
            return source, wrong
    return None


def _blocks(sizes: tuple[int, ...], buffer: Bytes) -> Iterator[tuple[int, Bytes]]:
    """Cut a buffer into the blocks of the members that have any bytes."""
    end = 0
    for member, size in enumerate(sizes):
        start, end = end, end + size
        if size:
            yield member, buffer[start:end]
