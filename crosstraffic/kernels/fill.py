"""Payloads that tell where they came from: a function of source, destination, offset, iteration and stream.

Word i of a block is ``i * ramp + key`` modulo 2^32, little end first; the key is a sum of odd multiples of source,
destination, iteration and stream. Odd multipliers make the lowest byte of every word change whenever one of the
four changes by less than 256, so even a block of one byte shows a swap, a stale buffer or a foreign stream.

What is reduced is float32 whole numbers from 1 to 4094: sums over up to 4096 ranks are exact in any order.
"""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

EVERYONE = 0xFFFF  # the destination of bytes that every destination gets alike
MAX_SOURCES = 4096  # 4096 ranks x 4096 = 2^24: the largest range in which every whole number is a float32

_MASK = 0xFFFFFFFF
_RAMP = 0x9E3779B1  # odd, 2^32 / golden ratio: words near each other differ in their top bits as well (Knuth, 6.4)
_SOURCE, _DESTINATION, _ITERATION, _STREAM = 0x85EBCA6B, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1  # odd; xxHash and Murmur
_BASE_SHIFT = 21  # 11 bits of the ramp, 10 of the source, 10 of iteration and stream: at most 2047 + 1023 + 1023 + 1
_TEN_BITS = 0x3FF

CHUNK_WORDS = 1 << 16  # 256 KiB: the ramp and one chunk stay in a core's cache, so the memory is passed once


def ramp_step(num_words: int) -> int:
    """Return how far the ramp rises over ``num_words`` words, modulo 2^32."""
    return num_words * _RAMP & _MASK


def _read_only(array: Words) -> Words:
    array.setflags(write=False)
    return array


RAMP: Words = _read_only(np.arange(CHUNK_WORDS, dtype=np.uint32) * np.uint32(_RAMP))


def block_key(*, source: int, destination: int, iteration: int, stream: int) -> int:
    """Return what is added to the ramp for one block.

    >>> [hex(block_key(source=s, destination=0, iteration=0, stream=0)) for s in (0, 1)]
    ['0x0', '0x85ebca6b']
    """
    return (source * _SOURCE + destination * _DESTINATION + iteration * _ITERATION + stream * _STREAM) & _MASK


def source_term(source: int) -> int:
    """Return what a source adds to each of its numbers, 0 to 1023; it differs between sources less than 1024 apart."""
    return source * _SOURCE & _TEN_BITS


def call_term(*, iteration: int, stream: int) -> int:
    """Return what a call adds to the numbers of all sources alike, 1 to 1024: no sum hides a stale buffer."""
    return (iteration * _ITERATION + stream * _STREAM & _TEN_BITS) + 1


def ramp_top(first_word: int, num_words: int) -> Words:
    """Return the top 11 bits of the ramp from ``first_word``, 0 to 2047; at most ``CHUNK_WORDS`` words."""
    return (RAMP[:num_words] + np.uint32(ramp_step(first_word))) >> np.uint32(_BASE_SHIFT)


def fill_block(view: Bytes, *, source: int, destination: int, iteration: int, stream: int) -> None:
    """Write the block that ``source`` sends to ``destination``; any length, any alignment."""
    key = block_key(source=source, destination=destination, iteration=iteration, stream=stream)
    num_words, num_tail = divmod(len(view), 4)
    words = view[: 4 * num_words].view(np.uint32)
    for first in range(0, num_words, CHUNK_WORDS):
        part = words[first : first + CHUNK_WORDS]
        np.add(RAMP[: len(part)], np.uint32(key + ramp_step(first) & _MASK), out=part)
    if num_tail:
        view[4 * num_words :] = tail_bytes(key, num_words, num_tail)


def tail_bytes(key: int, word: int, num_bytes: int) -> Bytes:
    """Return the first ``num_bytes`` bytes of one word."""
    return np.frombuffer(np.uint32(key + ramp_step(word) & _MASK).tobytes()[:num_bytes], dtype=np.uint8)


def fill_reducible(view: Bytes, *, source: int, iteration: int, stream: int) -> None:
    """Write what ``source`` brings to a sum: float32 whole numbers from 1 to 4094, other ones at each place.

    Raises:
        ValueError: not a whole number of float32.
    """
    if len(view) % 4:
        raise ValueError(f"a buffer that is summed holds whole float32: {len(view)} bytes is not a multiple of 4")
    numbers = view.view(np.float32)
    term = np.uint32(source_term(source) + call_term(iteration=iteration, stream=stream))
    for first in range(0, len(numbers), CHUNK_WORDS):
        part = numbers[first : first + CHUNK_WORDS]
        part[:] = ramp_top(first, len(part)) + term
