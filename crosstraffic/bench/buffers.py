"""Host buffers of operations: page-aligned, and touched before anything is timed."""

from collections.abc import Sequence

import numpy as np

from crosstraffic.bench.transport import Bytes, Exchange

PAGE_BYTES = 4096
MAX_BUFFER_BYTES = 2**31 - 1  # counts of MPI-3 and of torch's split lists are C ints


def allocate(num_bytes: int) -> Bytes:
    """Return a zeroed buffer that starts on a page; every page is written once, so no page fault falls into a call.

    Raises:
        ValueError: negative, or more than a C int can count.
    """
    if not 0 <= num_bytes <= MAX_BUFFER_BYTES:
        raise ValueError(f"a buffer must hold 0 to {MAX_BUFFER_BYTES} bytes (2 GiB - 1): {num_bytes}")
    memory = np.empty(num_bytes + PAGE_BYTES, dtype=np.uint8)
    memory.fill(0)
    skip = -memory.ctypes.data % PAGE_BYTES
    return memory[skip : skip + num_bytes]


def offsets(counts: Sequence[int]) -> list[int]:
    """Return where each block starts when blocks lie one after the other.

    >>> offsets([3, 0, 5])
    [0, 3, 3]
    """
    return [sum(counts[:index]) for index in range(len(counts))]


def blocks(buffer: Bytes, counts: Sequence[int]) -> list[Bytes]:
    """Cut a buffer into views, one for each member of the group."""
    return [buffer[start : start + count] for start, count in zip(offsets(counts), counts, strict=True)]


def check_exchange(exchange: Exchange, group: Sequence[int], index: int) -> None:
    """Refuse a call that does not belong to a channel: every rank must refuse before any rank starts.

    Raises:
        ValueError: another group, another place in it, or a reducing call that is not made of whole float32.
    """
    if exchange.group != tuple(group) or exchange.index != index:
        raise ValueError(
            f"{exchange.op}: prepared for member {exchange.index} of group {exchange.group}, "
            f"but this channel is member {index} of group {tuple(group)}"
        )
    sizes = (exchange.total_send_bytes, exchange.total_receive_bytes)
    if exchange.op in ("all_reduce", "reduce_scatter") and any(size % 4 for size in sizes):
        raise ValueError(f"{exchange.op} adds float32: payload_bytes must be whole elements of 4 bytes: {sizes}")
