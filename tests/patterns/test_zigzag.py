"""Zig-zag cuts: each token on one rank, even attention, what each engine does with prompts that do not divide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.workload import Workload
from crosstraffic.patterns.zigzag import (
    CUTS,
    attention_pairs,
    check_length,
    chunk_sizes,
    chunks_of,
    local_rows,
    padded_tokens,
    rank_tokens,
    request_lengths,
    token_ranks,
)

RANKS = st.integers(1, 13)
TOKENS = st.integers(1, 400)
ALL_CUTS = st.sampled_from(["padded", "ceil", "even", "contiguous"])


def test_four_ranks_own_an_early_and_a_late_chunk():
    assert [chunks_of(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [np.nonzero(token_ranks(8, 4) == rank)[0].tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_group_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank must be from 0 to 3: {rank}"):
        chunks_of(rank, 4)


@settings(max_examples=50, deadline=None)
@given(num_ranks=RANKS)
def test_chunks_are_a_partition(num_ranks):
    owned = [chunk for rank in range(num_ranks) for chunk in chunks_of(rank, num_ranks)]
    assert sorted(owned) == list(range(2 * num_ranks))


@settings(max_examples=50, deadline=None)
@given(num_tokens=TOKENS, num_ranks=RANKS, cut=ALL_CUTS)
def test_tokens_are_partitioned_as_the_chunks_say(num_tokens, num_ranks, cut):
    sizes = chunk_sizes(num_tokens, num_ranks, cut)
    owners = token_ranks(num_tokens, num_ranks, cut)
    assert len(sizes) == 2 * num_ranks
    assert owners.shape == (num_tokens,)
    assert set(owners.tolist()) <= set(range(num_ranks))
    held = np.bincount(owners, minlength=num_ranks)
    rows = np.array(rank_tokens((num_tokens,), num_ranks, cut))
    assert (rows >= held).all()
    if cut in ("ceil", "even"):
        assert rows.tolist() == held.tolist()
        assert sum(sizes) == num_tokens
    if cut == "padded":
        assert set(rows.tolist()) == {padded_tokens(num_tokens, num_ranks) // num_ranks}
    if cut == "contiguous":
        assert set(rows.tolist()) == {-(-num_tokens // num_ranks)}
        assert (np.diff(owners) >= 0).all()
    if cut == "even":
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50, deadline=None)
@given(num_chunk=st.integers(1, 40), num_ranks=RANKS, cached=st.integers(0, 1000))
def test_causal_attention_is_even_where_chunks_are_equal(num_chunk, num_ranks, cached):
    num_tokens = 2 * num_ranks * num_chunk
    for cut in ("ceil", "even", "padded"):
        pairs = attention_pairs(num_tokens, num_ranks, cut, num_cached=cached)
        assert set(pairs) == {(num_tokens * (num_tokens + 1) // 2 + cached * num_tokens) // num_ranks}


@settings(max_examples=50, deadline=None)
@given(num_tokens=TOKENS, num_ranks=RANKS, cut=ALL_CUTS, cached=st.integers(0, 50))
def test_every_pair_of_causal_attention_is_somewhere(num_tokens, num_ranks, cut, cached):
    pairs = attention_pairs(num_tokens, num_ranks, cut, num_cached=cached)
    assert sum(pairs) == num_tokens * (num_tokens + 1) // 2 + cached * num_tokens


def test_consecutive_shares_are_uneven():
    assert attention_pairs(64, 4, "contiguous") == (136, 392, 648, 904)
    assert attention_pairs(64, 4) == (520,) * 4


@settings(max_examples=50, deadline=None)
@given(num_tokens=TOKENS, num_ranks=RANKS)
def test_padding_is_the_least_that_divides(num_tokens, num_ranks):
    padded = padded_tokens(num_tokens, num_ranks)
    assert padded % (2 * num_ranks) == 0
    assert 0 <= padded - num_tokens < 2 * num_ranks


@settings(max_examples=50, deadline=None)
@given(num_tokens=st.integers(0, 500), num_requests=st.integers(1, 60))
def test_requests_are_even_and_not_empty(num_tokens, num_requests):
    lengths = request_lengths(num_tokens, num_requests)
    assert sum(lengths) == num_tokens
    assert len(lengths) == min(num_tokens, num_requests)
    assert not lengths or 1 <= min(lengths) <= max(lengths) <= min(lengths) + 1


@pytest.mark.parametrize(
    ("framework", "rows"),
    [("megatron", 20), ("vllm", 15), ("sglang", 15), ("tensorrt_llm", 15)],
)
def test_five_prompts_of_seven_on_three_ranks(framework, rows):
    """Chunks of ceil(7 / 6) = 2: padded to 12 a prompt (4 a rank); 2, 2, 2, 1, 0, 0: 2, 2, 3; 2, 1, ...: 3, 2, 2."""
    assert local_rows(35, 5, 3, framework) == rows


@pytest.mark.parametrize(
    ("framework", "rows"),
    [("megatron", 18), ("vllm", 18), ("sglang", 15), ("tensorrt_llm", 15)],
)
def test_three_prompts_of_seventeen_on_four_ranks(framework, rows):
    """Chunks of ceil(17 / 8) = 3: 24 a prompt if padded; 3, 3, 3, 3, 3, 2, 0, 0: 3, 3, 5, 6; 3, 2, ...: 5, 4, 4, 4."""
    assert local_rows(51, 3, 4, framework) == rows
    setting = make_setting(
        load_model("DeepSeek-V3"),
        Layout(tp=4, cp=4),
        Workload(phase="prefill", batch=3, context=17),
        framework,
    )
    assert setting.local_tokens == rows


@pytest.mark.parametrize("framework", sorted(CUTS))
def test_rows_of_prompts_that_divide_are_the_same_everywhere(framework):
    assert local_rows(16_384, 1, 4, framework) == 4096
    assert local_rows(16_384, 8, 4, framework) == 4096
    assert local_rows(17, 3, 1, framework) == 17
    assert local_rows(0, 3, 4, framework) == 0


@settings(max_examples=50, deadline=None)
@given(num_tokens=TOKENS, num_requests=st.integers(1, 9), num_ranks=RANKS, framework=st.sampled_from(sorted(CUTS)))
def test_rows_hold_all_tokens(num_tokens, num_requests, num_ranks, framework):
    rows = local_rows(num_tokens, num_requests, num_ranks, framework)
    assert rows * num_ranks >= num_tokens
    assert rows <= -(-num_tokens // num_ranks) + 2 * num_requests


def test_a_prompt_shorter_than_two_chunks_a_rank_is_refused():
    check_length(8, 4)
    with pytest.raises(ValueError, match="7 tokens is shorter than 2 x cp = 8"):
        check_length(7, 4)


@pytest.mark.parametrize("style", [None, "ring", "pass_q"])
def test_rings_need_two_chunks_a_rank(style):
    shape, layout = load_model("Llama-3.1-8B"), Layout(cp=4)
    load = {"phase": "prefill", "batch": 3, "context_style": style}
    assert phase_streams(shape, layout, Workload(context=8, **load), "megatron")
    with pytest.raises(ValueError, match="7 tokens is shorter than 2 x cp = 8"):
        phase_streams(shape, layout, Workload(context=7, **load), "megatron")


@pytest.mark.parametrize("context", [1, 7])
def test_gathering_needs_no_two_chunks(context):
    workload = Workload(phase="prefill", context=context)
    assert phase_streams(load_model("DeepSeek-V3"), Layout(cp=4), workload, "vllm")


def test_padding_travels_with_everything_in_transformer_engine():
    shape, workload = load_model("Llama-3.1-8B"), Workload(phase="prefill", batch=5, context=7)
    setting = make_setting(shape, Layout(tp=4, cp=3), workload, "megatron")
    assert setting.local_tokens == 20
    streams = {stream.name: stream for stream in phase_streams(shape, Layout(tp=4, cp=3), workload, "megatron")}
    assert streams["tp.mlp_output"].payload_bytes == 20 * 4096 * 2
    assert streams["cp.kv_ring"].payload_bytes == 20 * 2 * 2 * 128 * 2
