"""Messages of dispatchers: bytes against published sizes and rates, floors, buffers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.dispatch import (
    BACKENDS,
    exchange_floor_s,
    expert_capacity,
    high_throughput_width,
    is_all_to_all_smaller,
    low_latency_buffer_bytes,
    low_latency_width,
    scale_bytes,
)
from crosstraffic.patterns.workload import EXPERT_BACKENDS

# Published by DeepEP (H800, 128 tokens, H 7168, top-8, 1014 of 1024 selections): us and GB/s of dispatch and combine.
PUBLISHED = {
    8: (77, 114, 98, 127),
    16: (118, 195, 63, 74),
    32: (155, 273, 48, 53),
    64: (173, 314, 43, 46),
    128: (192, 369, 39, 39),
    256: (194, 360, 39, 40),
}


def sizes(name, width=7168, top_k=8, element=2):
    chosen = BACKENDS[name]
    sent = chosen.width(width)
    return chosen.messages.dispatch(sent, top_k, element), chosen.messages.combine(sent, top_k, element)


def test_every_backend_of_a_workload_is_described():
    assert set(BACKENDS) == set(EXPERT_BACKENDS)


@pytest.mark.parametrize(
    ("name", "dispatch", "combine"),
    [
        ("deepep_low_latency", 7_408, 14_336),
        ("deepep_low_latency_bf16", 14_352, 14_336),
        ("deepep_low_latency_logfmt", 7_408, 8_960 + 224),
        pytest.param("deepep_high_throughput", 7_472, 14_352, id="N15 high throughput fp8"),
        ("deepep_high_throughput_bf16", 14_416, 14_352),
        ("flashinfer_one_sided", 14_336 + 64, 14_336),
        ("alltoall", 14_340, 14_336),
        ("allgather_reducescatter", 14_336 + 64, 14_336),
    ],
)
def test_bytes_of_a_message_of_deepseek_v3(name, dispatch, combine):
    assert sizes(name) == (dispatch, combine)


@pytest.mark.parametrize(
    ("name", "dispatch", "combine"),
    [("deepep_high_throughput", 7168 + 224 + 4 + 64 + 32, 14_340), ("deepep_high_throughput_bf16", 14_436, 14_340)],
)
def test_bytes_of_a_message_inside_one_node(name, dispatch, combine):
    inside = BACKENDS[name].inside
    assert (inside.dispatch(7168, 8, 2), inside.combine(7168, 8, 2)) == (dispatch, combine)


@pytest.mark.parametrize("name", ["flashinfer_one_sided", "allgather_reducescatter"])
def test_rows_of_one_byte_bring_their_scales_and_come_back_in_two(name):
    assert sizes(name, element=1) == (7168 + 224 + 64, 14_336)


@pytest.mark.parametrize(
    ("width", "low_latency", "high_throughput"),
    [
        (7168, 7168, 7168),
        (2880, 3072, 3072),
        (3584, 4096, 3584),
        (2048, 2048, 2048),
        (5120, 5120, 5120),
        (1, 2048, 256),
    ],
)
def test_rows_are_padded_to_what_kernels_take(width, low_latency, high_throughput):
    assert low_latency_width(width) == low_latency
    assert high_throughput_width(width) == high_throughput
    assert sizes("deepep_low_latency", width)[0] == 16 + low_latency + low_latency // 32
    assert sizes("alltoall", width)[1] == 2 * width


def test_rows_wider_than_the_kernels():
    with pytest.raises(ValueError, match="Hidden Size 8193 is greater than the maximum supported hidden size 8192"):
        low_latency_width(8193)


def test_scales_of_a_row_that_is_no_multiple_of_a_block():
    assert scale_bytes(2880) == 4 * 23


@settings(max_examples=50, deadline=None)
@given(width=st.integers(1, 8192), top_k=st.integers(1, 16), name=st.sampled_from(sorted(BACKENDS)))
def test_messages_hold_the_row_and_little_more(width, top_k, name):
    chosen, element = BACKENDS[name], 2
    sent = chosen.width(width)
    there, back = sizes(name, width, top_k, element)
    assert sent >= width
    assert sent <= there <= 2 * sent + 16 + 16 * top_k + 16
    assert sent <= back <= 2 * sent + 16
    if chosen.unit == "node":
        assert there % 16 == back % 16 == 0


@pytest.mark.parametrize("num_ranks", PUBLISHED)
def test_n1_rates_of_low_latency_kernels(num_ranks):
    dispatch_us, combine_us, dispatch_rate, combine_rate = PUBLISHED[num_ranks]
    there, back = sizes("deepep_low_latency")
    assert (128 * 8 * there, 128 * 8 * back) == (7_585_792, 14_680_064)
    assert (1014 * there, 1014 * back) == (7_511_712, 14_536_704)
    assert 1014 * there / dispatch_us / 1e3 == pytest.approx(dispatch_rate, abs=1)
    assert 1014 * back / combine_us / 1e3 == pytest.approx(combine_rate, abs=1)


def test_n4_floor_of_an_exchange():
    infiniband, nvlink = (exchange_floor_s(32, 9, 7000, rate) for rate in (50e9, 900e9))
    assert infiniband * 1e6 == pytest.approx(120.96, abs=0.005)
    assert 2 * 61 * infiniband * 1e3 == pytest.approx(14.76, abs=0.005)
    assert int(1 / (2 * 61 * infiniband)) == 67
    assert nvlink * 1e6 == pytest.approx(6.72, abs=0.005)
    assert 2 * 61 * nvlink * 1e3 == pytest.approx(0.82, abs=0.005)
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s must be above 0: 0"):
        exchange_floor_s(32, 9, 7000, 0)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 9, 16, 64])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_an_all_to_all_is_smaller_with_more_ranks_than_experts_of_a_token(num_ranks, top_k):
    tokens, row = 64, 14_336
    remote = 1 - 1 / num_ranks  # of what a rank sends, or gets
    exchanged = 2 * tokens * top_k * row * remote
    gathered = 2 * tokens * num_ranks * row * remote
    assert is_all_to_all_smaller(num_ranks, top_k) == (exchanged < gathered)


@pytest.mark.parametrize(
    ("num_experts", "max_tokens", "hidden"), [(256, 128, 7168), (288, 128, 7168), (128, 64, 4096), (160, 1, 5120)]
)
def test_buffer_of_low_latency_kernels(num_experts, max_tokens, hidden):
    largest = 2 * hidden + hidden // 32
    flags = -(-4 * num_experts // 128) * 128
    expected = 4 * num_experts * max_tokens * largest + 2 * flags
    assert low_latency_buffer_bytes(num_experts, max_tokens, hidden) == expected


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "expected"),
    [(4096, 8, 256, 1.0, 128), (100, 2, 8, 1.5, 38), (0, 2, 8, 1.0, 0)],
)
def test_capacity_of_an_expert(tokens, top_k, experts, factor, expected):
    assert expert_capacity(tokens, top_k, experts, factor) == expected
