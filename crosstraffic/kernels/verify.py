"""Exact checks of the payloads of ``fill``: the first wrong byte, what it should be, and how many are wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crosstraffic.kernels.fill import (
    CHUNK_WORDS,
    MAX_SOURCES,
    RAMP,
    Bytes,
    Words,
    block_key,
    call_term,
    ramp_step,
    ramp_top,
    source_term,
    tail_bytes,
)

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBytes:
    """The first wrong byte of a view, and how many of its bytes are wrong."""

    offset_bytes: int
    expected: int
    found: int
    num_wrong_bytes: int


def check_block(view: Bytes, *, source: int, destination: int, iteration: int, stream: int) -> WrongBytes | None:
    """Check a block that ``source`` sent to ``destination``; None where every byte is right."""
    key = block_key(source=source, destination=destination, iteration=iteration, stream=stream)
    num_words, num_tail = divmod(len(view), 4)

    def expected() -> Iterator[tuple[int, Bytes]]:
        scratch: Words = np.empty(min(num_words, CHUNK_WORDS), dtype=np.uint32)
        for first in range(0, num_words, CHUNK_WORDS):
            part = scratch[: min(CHUNK_WORDS, num_words - first)]
            np.add(RAMP[: len(part)], np.uint32(key + ramp_step(first) & _MASK), out=part)
            yield 4 * first, part.view(np.uint8)
        if num_tail:
            yield 4 * num_words, tail_bytes(key, num_words, num_tail)

    return _compare(view, expected())


def check_reduced(
    view: Bytes, *, sources: Sequence[int], iteration: int, stream: int, first_word: int = 0
) -> WrongBytes | None:
    """Check a sum over ``sources`` of what ``fill_reducible`` wrote, from its word ``first_word`` on.

    Raises:
        ValueError: not a whole number of float32, or more sources than a float32 can sum exactly.
    """
    if len(view) % 4:
        raise ValueError(f"a sum holds whole float32: {len(view)} bytes is not a multiple of 4")
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ValueError(f"a sum over {len(sources)} sources; exact for 1 to {MAX_SOURCES}")
    num_words = len(view) // 4
    count = np.uint32(len(sources))
    terms = np.uint32(sum(map(source_term, sources)) + len(sources) * call_term(iteration=iteration, stream=stream))

    def expected() -> Iterator[tuple[int, Bytes]]:
        for first in range(0, num_words, CHUNK_WORDS):
            top = ramp_top(first_word + first, min(CHUNK_WORDS, num_words - first))
            yield 4 * first, (top * count + terms).astype(np.float32).view(np.uint8)

    return _compare(view, expected())


def _compare(view: Bytes, expected: Iterator[tuple[int, Bytes]]) -> WrongBytes | None:
    """Compare piece by piece; count on after the first wrong byte."""
    first: tuple[int, int, int] | None = None
    num_wrong = 0
    for start, piece in expected:
        found = view[start : start + len(piece)]
        if _equal(found, piece):
            continue
        wrong = np.flatnonzero(found != piece)
        num_wrong += len(wrong)
        if first is None:
            at = int(wrong[0])
            first = start + at, int(piece[at]), int(found[at])
    if first is None:
        return None
    return WrongBytes(offset_bytes=first[0], expected=first[1], found=first[2], num_wrong_bytes=num_wrong)


def _equal(found: Bytes, expected: Bytes) -> bool:
    if len(found) % 4:
        return bool((found == expected).all())
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())
