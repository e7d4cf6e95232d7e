"""Payload words against a plain restatement of the rule; single wrong bytes found; keys that never collide."""

import numpy as np
import pytest

from crosstraffic.kernels import fill
from crosstraffic.kernels.fill import CHUNK_WORDS, MAX_SOURCES, fill_block, fill_reducible
from crosstraffic.kernels.verify import WrongBytes, check_block, check_reduced

WHO = {"source": 3, "destination": 5, "iteration": 7, "stream": 2}
SUM = {"iteration": 7, "stream": 2}
LENGTHS = (
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    17,
    1000,
    4 * CHUNK_WORDS - 1,
    4 * CHUNK_WORDS,
    4 * CHUNK_WORDS + 3,
    12 * CHUNK_WORDS + 5,
)


def plain_block(num_bytes: int, source: int, destination: int, iteration: int, stream: int) -> bytes:
    key = source * 0x85EBCA6B + destination * 0xC2B2AE3D + iteration * 0x27D4EB2F + stream * 0x165667B1
    words = b"".join(((word * 0x9E3779B1 + key) % 2**32).to_bytes(4, "little") for word in range(-(-num_bytes // 4)))
    return words[:num_bytes]


@pytest.mark.parametrize("num_bytes", LENGTHS)
@pytest.mark.parametrize("misalignment", [0, 1, 3])
def test_a_block_follows_the_rule_at_any_length_and_alignment(num_bytes: int, misalignment: int) -> None:
    buffer = np.full(num_bytes + misalignment + 1, 0x77, dtype=np.uint8)
    view = buffer[misalignment : misalignment + num_bytes]
    fill_block(view, **WHO)
    assert view.tobytes() == plain_block(num_bytes, **WHO)
    assert buffer[-1] == 0x77
    assert check_block(view, **WHO) is None


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 5, 17, 1000, 4 * CHUNK_WORDS + 3, 12 * CHUNK_WORDS + 5])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_changed_byte_is_found(num_bytes: int, where: str) -> None:
    view = np.zeros(num_bytes, dtype=np.uint8)
    fill_block(view, **WHO)
    offset = {"first": 0, "middle": num_bytes // 2, "last": num_bytes - 1}[where]
    right = int(view[offset])
    view[offset] ^= 0x10
    assert check_block(view, **WHO) == WrongBytes(
        offset_bytes=offset, expected=right, found=right ^ 0x10, num_wrong_bytes=1
    )


@pytest.mark.parametrize("part", ["source", "destination", "iteration", "stream"])
@pytest.mark.parametrize("num_bytes", [1, 3, 4, 1001])
def test_every_other_origin_differs_in_the_first_byte(part: str, num_bytes: int) -> None:
    view = np.zeros(num_bytes, dtype=np.uint8)
    for change in [*range(-3, 0), *range(1, 256)]:
        fill_block(view, **{**WHO, part: WHO[part] + change})
        wrong = check_block(view, **WHO)
        assert wrong is not None
        assert wrong.offset_bytes == 0


def test_no_two_near_calls_share_a_key() -> None:
    span = {"source": range(16), "destination": range(16), "iteration": range(64), "stream": range(8)}
    keys = [
        fill.block_key(source=source, destination=destination, iteration=iteration, stream=stream)
        for source in span["source"]
        for destination in span["destination"]
        for iteration in span["iteration"]
        for stream in span["stream"]
    ]
    assert len(set(keys)) == len(keys)


def test_all_wrong_bytes_are_counted_over_chunks() -> None:
    view = np.zeros(8 * CHUNK_WORDS + 4, dtype=np.uint8)
    fill_block(view, **WHO)
    view[5] ^= 1
    view[4 * CHUNK_WORDS + 1 : 4 * CHUNK_WORDS + 4] ^= 1
    view[-1] ^= 1
    wrong = check_block(view, **WHO)
    assert wrong is not None
    assert (wrong.offset_bytes, wrong.num_wrong_bytes) == (5, 5)


@pytest.mark.parametrize("num_sources", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("num_words", [0, 1, 7, CHUNK_WORDS + 3])
def test_sums_are_exact_in_any_order(num_sources: int, num_words: int) -> None:
    sources = list(range(10, 10 + num_sources))
    parts = np.zeros((num_sources, 4 * num_words), dtype=np.uint8)
    for row, source in zip(parts, sources, strict=True):
        fill_reducible(row, source=source, **SUM)
    numbers = parts.view(np.float32)
    assert np.array_equal(numbers, np.rint(numbers))
    assert not num_words or (numbers.min() >= 1 and numbers.max() <= 4094)
    forward, backward = np.zeros(num_words, np.float32), np.zeros(num_words, np.float32)
    for row in numbers:
        forward += row
    for row in numbers[::-1]:
        backward += row
    assert np.array_equal(forward, backward)
    assert check_reduced(forward.view(np.uint8), sources=sources, **SUM) is None


def test_the_largest_sum_is_exact() -> None:
    total = np.zeros(64, dtype=np.float32)
    row = np.zeros(256, dtype=np.uint8)
    for source in range(MAX_SOURCES):
        fill_reducible(row, source=source, iteration=0, stream=0)
        total += row.view(np.float32)
    assert check_reduced(total.view(np.uint8), sources=range(MAX_SOURCES), iteration=0, stream=0) is None


@pytest.mark.parametrize("num_sources", [1, 2, 3, 8, 144, 377])
def test_a_stale_sum_is_wrong_in_every_word(num_sources: int) -> None:
    sources = range(num_sources)
    total = np.zeros(16, dtype=np.float32)
    row = np.zeros(64, dtype=np.uint8)
    for source in sources:
        fill_reducible(row, source=source, iteration=4, stream=1)
        total += row.view(np.float32)
    for iteration in range(5, 300):
        for word in (0, 15):
            view = total[word : word + 1].view(np.uint8)
            assert check_reduced(view, sources=sources, iteration=iteration, stream=1, first_word=word) is not None


@pytest.mark.parametrize("fault", ["missing", "twice", "shifted", "other_stream"])
def test_a_wrong_sum_is_found(fault: str) -> None:
    sources = [0, 1, 2, 3]
    parts = np.zeros((4, 400), dtype=np.uint8)
    for row, source in zip(parts, sources, strict=True):
        fill_reducible(row, source=source, iteration=1, stream=0)
    numbers = parts.view(np.float32)
    if fault == "missing":
        numbers[2] = 0
    elif fault == "twice":
        numbers[2] = numbers[1]
    elif fault == "shifted":
        numbers[2] = np.roll(numbers[2], 1)
    else:
        fill_reducible(parts[2], source=2, iteration=1, stream=1)
    wrong = check_reduced(numbers.sum(axis=0, dtype=np.float32).view(np.uint8), sources=sources, iteration=1, stream=0)
    assert wrong is not None
    assert wrong.offset_bytes < 4


@pytest.mark.parametrize("num_words", [2**bit for bit in range(31)])
def test_numbers_a_power_of_two_apart_differ(num_words: int) -> None:
    assert fill.ramp_top(num_words, 1)[0] != fill.ramp_top(0, 1)[0]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="6 bytes is not a multiple of 4"):
        fill_reducible(np.zeros(6, np.uint8), source=0, iteration=0, stream=0)
    with pytest.raises(ValueError, match="5 bytes is not a multiple of 4"):
        check_reduced(np.zeros(5, np.uint8), sources=[0], iteration=0, stream=0)
    with pytest.raises(ValueError, match="4097 sources"):
        check_reduced(np.zeros(4, np.uint8), sources=range(4097), iteration=0, stream=0)
