"""Pass-Q: which of queries and keys travels with fewer bytes, and what goes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.context import hop_bytes as kv_hop_bytes
from crosstraffic.patterns.heads import Heads
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.pass_query import choose_pass, hop_bytes, pass_kv_threshold
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload


def test_n18_threshold_of_llama_405b():
    assert pass_kv_threshold(128, 8) == 0.125
    assert choose_pass(16_384, 114_688, 128, 8) == "pass_kv"
    assert choose_pass(16_383, 114_689, 128, 8) == "pass_q"
    assert choose_pass(1, 0, 128, 8) == "pass_kv"


@settings(max_examples=50, deadline=None)
@given(
    new=st.integers(1, 10_000),
    cached=st.integers(0, 100_000),
    kv_heads=st.integers(1, 16),
    queries=st.integers(1, 20),
)
def test_what_travels_is_what_has_fewer_bytes(new, cached, kv_heads, queries):
    heads = Heads(query_heads=kv_heads * queries, kv_heads=kv_heads, key_dim=128, value_dim=128)
    chosen = choose_pass(new, cached, heads.query_heads, kv_heads)
    assert (chosen == "pass_kv") == (kv_hop_bytes(new + cached, heads, 2) <= hop_bytes(new, heads, 2))


@pytest.mark.parametrize("numbers", [(0, 1, 8, 1), (1, -1, 8, 1), (1, 1, 0, 1), (1, 1, 8, 0)])
def test_numbers_that_make_no_choice(numbers):
    with pytest.raises(ValueError, match="must be whole numbers from 1"):
        choose_pass(*numbers)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_queries_go_round_and_partial_outputs_back(num_ranks):
    shape, layout = load_model("Llama-3.1-405B"), Layout(tp=8, cp=num_ranks)
    rows = 2 * 100
    workload = Workload(phase="prefill", tokens=rows * num_ranks, context_style="pass_q")
    streams = {stream.name: stream for stream in phase_streams(shape, layout, workload, "megatron")}
    ring, back = streams["cp.query_ring"], streams["cp.partial_output"]
    assert (ring.op, ring.payload_bytes) == ("send_recv", rows * 16 * 128 * 2)
    assert ring.calls_per_step == 126 * (num_ranks - 1)
    assert (back.op, back.calls_per_step) == ("all_to_all", 126)
    assert back.payload_bytes == num_ranks * rows * 16 * (128 * 2 + 4)
    assert wire_bytes_per_rank(back) == (num_ranks - 1) * rows * 16 * (128 * 2 + 4)
    assert back.after == ("cp.query_ring",)
