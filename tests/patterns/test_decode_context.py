"""Decode context parallelism: shares of tokens, exchanges of outputs, prefill over a cut cache, the least bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.decode_context import (
    helix_bytes,
    kv_parallel_bytes,
    largest_share,
    rank_tokens,
    token_rank,
)
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.wire import wire_bytes_per_rank, wire_matrix
from crosstraffic.patterns.workload import Workload


def streams_of(model, layout, framework="vllm", phase="decode", **workload):
    found = phase_streams(load_model(model), layout, Workload(phase=phase, **workload), framework)
    return {stream.name: stream for stream in found if stream.pattern == "dcp"}


def test_n8_gather_and_scatter():
    streams = streams_of("deepseek-r1", Layout(tp=8, dcp=8), batch=32)
    assert {name: (one.op, one.payload_bytes) for name, one in streams.items()} == {
        "dcp.query": ("all_gather", 8 * 589_824),
        "dcp.lse": ("all_gather", 8 * 16_384),
        "dcp.output": ("reduce_scatter", 4_194_304),
    }
    assert {one.calls_per_step for one in streams.values()} == {61}


def test_n8_one_exchange_of_packed_outputs():
    streams = streams_of("deepseek-r1", Layout(tp=8, dcp=8), batch=32, dcp_backend="a2a")
    assert {name: (one.op, one.payload_bytes) for name, one in streams.items()} == {
        "dcp.query": ("all_gather", 8 * 589_824),
        "dcp.exchange": ("all_to_all", 4_210_688),
    }
    assert {one.calls_per_step for one in streams.values()} == {61}


@pytest.mark.parametrize(("dtype", "lse_columns"), [("bfloat16", 2), ("float32", 1)])
def test_the_log_sum_exp_is_packed_as_columns_of_the_output(dtype, lse_columns):
    size = {"bfloat16": 2, "float32": 4}[dtype]
    packed = streams_of("deepseek-r1", Layout(tp=8, dcp=4), batch=3, dtype=dtype, dcp_backend="a2a")["dcp.exchange"]
    assert packed.payload_bytes == 4 * 3 * 16 * (512 + lse_columns) * size


def test_grouped_queries_have_their_head_size():
    streams = streams_of("Llama-3.1-70B", Layout(tp=32, dcp=4), batch=16)
    assert streams["dcp.query"].payload_bytes == 4 * 16 * 2 * 128 * 2
    assert streams["dcp.lse"].payload_bytes == 4 * 16 * 8 * 4
    assert streams["dcp.output"].payload_bytes == 16 * 8 * 128 * 2
    assert streams["dcp.query"].groups[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_sglang_merges_in_float32():
    latent = streams_of("deepseek-r1", Layout(tp=8, dcp=8), "sglang", batch=32)
    assert (latent["dcp.output"].op, latent["dcp.output"].dtype) == ("reduce_scatter", "float32")
    assert latent["dcp.output"].payload_bytes == 2 * 4_194_304
    packed = streams_of("deepseek-r1", Layout(tp=8, dcp=8), "sglang", batch=32, dcp_backend="a2a")
    assert packed["dcp.exchange"].payload_bytes == 4_210_688


@pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
def test_sglang_without_latent_attention_reduces_all_heads(backend):
    streams = streams_of("Llama-3.1-70B", Layout(tp=32, dcp=4), "sglang", batch=16, dcp_backend=backend)
    assert (streams["dcp.output"].op, streams["dcp.output"].payload_bytes) == ("all_reduce", 16 * 8 * 128 * 4)
    assert "dcp.exchange" not in streams


@pytest.mark.parametrize(
    ("dcp", "backend", "sizes"),
    [
        pytest.param(
            4,
            "ag_rs",
            {"dcp.lse": ("all_gather", 4 * 32 * 64 * 4), "dcp.output": ("all_reduce", 32 * 64 * 512 * 2)},
            id="spans PCP",
        ),
        pytest.param(
            8,
            "ag_rs",
            {
                "dcp.query": ("all_gather", 2 * 32 * 64 * 576 * 2),
                "dcp.lse": ("all_gather", 8 * 32 * 128 * 4),
                "dcp.output": ("all_reduce", 32 * 128 * 512 * 2),
            },
            id="spans TP x PCP",
        ),
        pytest.param(
            4,
            "a2a",
            {"dcp.exchange": ("all_to_all", 32 * 64 * 514 * 2), "dcp.heads": ("all_gather", 32 * 64 * 512 * 2)},
            id="spans PCP, a2a",
        ),
        pytest.param(
            8,
            "a2a",
            {
                "dcp.query": ("all_gather", 2 * 32 * 64 * 576 * 2),
                "dcp.exchange": ("all_to_all", 32 * 128 * 514 * 2),
                "dcp.heads": ("all_gather", 32 * 64 * 512 * 2),
            },
            id="spans TP x PCP, a2a",
        ),
    ],
)
def test_decode_under_prefill_context_parallelism(dcp, backend, sizes):
    streams = streams_of("deepseek-r1", Layout(tp=2, cp=4, dcp=dcp), batch=32, dcp_backend=backend)
    assert {name: (one.op, one.payload_bytes) for name, one in streams.items()} == sizes
    assert {one.group_size for name, one in streams.items() if name in ("dcp.lse", "dcp.exchange")} == {dcp}
    if "dcp.query" in streams:
        assert streams["dcp.query"].group_size == 2


@pytest.mark.parametrize(
    ("framework", "message"),
    [
        ("vllm", r"^dcp_comm_backend='a2a' requires decode_context_parallel_size > 1\.$"),
        ("sglang", "requires --dcp-size / --decode-context-parallel-size > 1, but got dcp_size=1"),
        ("megatron", "megatron has no decode context parallelism"),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_exchange_needs_a_group(framework, message, phase):
    with pytest.raises(ValueError, match=message):
        streams_of("deepseek-r1", Layout(tp=8), framework, phase, dcp_backend="a2a")


def test_an_exchange_needs_heads_for_every_rank():
    with pytest.raises(ValueError, match=r"H=4 must be divisible by DCP world size 8\."):
        streams_of("deepseek-r1", Layout(tp=32, cp=8, dcp=8), dcp_backend="a2a")


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_a_prefill_gathers_cached_latents(framework):
    layout = Layout(tp=8, dcp=8)
    streams = streams_of("deepseek-r1", layout, framework, "prefill", batch=3, context=1000, cached_tokens=101)
    assert tuple(streams) == ("dcp.context",)
    assert streams["dcp.context"].payload_bytes == 8 * 3 * 13 * 576 * 2
    assert streams["dcp.context"].calls_per_step == 61
    assert not streams_of("deepseek-r1", layout, framework, "prefill", batch=3, context=1000)


def test_vllm_gathers_long_contexts_in_chunks_of_its_workspace():
    layout = Layout(tp=8, dcp=8)
    found = streams_of("deepseek-r1", layout, phase="prefill", batch=2, context=262_144, cached_tokens=131_072)
    assert found["dcp.context"].calls_per_step == 61 * 4
    assert found["dcp.context"].payload_bytes == 65_536 * 576 * 2
    one = streams_of("deepseek-r1", layout, "sglang", "prefill", batch=2, context=262_144, cached_tokens=131_072)
    assert one["dcp.context"].calls_per_step == 61
    assert one["dcp.context"].payload_bytes == 4 * found["dcp.context"].payload_bytes


def test_caches_in_fp8_travel_as_such_in_sglang_and_dequantized_in_vllm():
    load = {"phase": "prefill", "context": 100, "cached_tokens": 80, "kv_dtype": "fp8"}
    there = streams_of("deepseek-r1", Layout(tp=8, dcp=8), "sglang", **load)["dcp.context"]
    here = streams_of("deepseek-r1", Layout(tp=8, dcp=8), "vllm", **load)["dcp.context"]
    assert here.payload_bytes == 2 * there.payload_bytes == 80 * 576 * 2
    packed = streams_of("deepseek-r1", Layout(tp=8, dcp=8), "vllm", **(load | {"kv_dtype": "fp8_ds_mla"}))
    assert packed["dcp.context"].payload_bytes == here.payload_bytes


@pytest.mark.parametrize(("framework", "op"), [("vllm", "reduce_scatter"), ("sglang", "all_reduce")])
def test_a_prefill_of_grouped_queries_attends_as_decode_does(framework, op):
    layout = Layout(tp=32, dcp=4)
    streams = streams_of("Llama-3.1-70B", layout, framework, "prefill", batch=2, context=600, cached_tokens=500)
    assert tuple(streams) == ("dcp.query", "dcp.lse", "dcp.output")
    assert streams["dcp.query"].payload_bytes == 4 * 200 * 2 * 128 * 2
    assert streams["dcp.output"].op == op
    assert not streams_of("Llama-3.1-70B", layout, framework, "prefill", batch=2, context=600)


@pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
@pytest.mark.parametrize(
    ("layout", "framework"),
    [
        (Layout(tp=8, dcp=4, pp=2), "vllm"),
        (Layout(tp=2, cp=4, dcp=8), "vllm"),
        (Layout(tp=2, cp=4, dcp=4), "vllm"),
        (Layout(tp=8, dcp=2), "sglang"),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_step_makes_the_calls(layout, framework, backend, phase):
    shape = load_model("DeepSeek-V3")
    cached = 50 if phase == "prefill" else 0
    workload = Workload(phase=phase, batch=3, context=100, cached_tokens=cached, dcp_backend=backend)
    streams = phase_streams(shape, layout, workload, framework)
    step = phase_step(shape, layout, workload, framework, streams)
    assert set(step.streams) == {stream.name for stream in streams}
    found = [stream for stream in streams if stream.pattern == "dcp"]
    assert found
    for stream in found:
        for index in range(len(stream.groups)):
            matrix = wire_matrix(stream, index)
            assert matrix.sum(axis=0).tolist() == matrix.sum(axis=1).tolist()


@settings(max_examples=50, deadline=None)
@given(num_tokens=st.integers(0, 300), dcp=st.integers(1, 11), interleave=st.integers(1, 17))
def test_shares_count_the_tokens_of_each_rank(num_tokens, dcp, interleave):
    ranks = [token_rank(token, dcp, interleave) for token in range(num_tokens)]
    shares = rank_tokens(num_tokens, dcp, interleave)
    assert shares == tuple(ranks.count(rank) for rank in range(dcp))
    assert max(shares) == largest_share(num_tokens, dcp, interleave)
    if interleave == 1:
        assert largest_share(num_tokens, dcp) == -(-num_tokens // dcp)


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(1, 40), power=st.integers(1, 3), backend=st.sampled_from(["ag_rs", "a2a"]))
def test_engines_send_no_less_than_what_is_needed(batch, power, backend):
    dcp = 2**power
    streams = streams_of("deepseek-r1", Layout(tp=dcp, dcp=dcp), batch=batch, dcp_backend=backend)
    query, outputs = kv_parallel_bytes(batch, 128, query_dim=576, value_dim=512, num_ranks=dcp, element_bytes=2)
    sent = {name: wire_bytes_per_rank(stream) for name, stream in streams.items()}
    assert sent.pop("dcp.query") == query
    if backend == "a2a":
        assert sum(sent.values()) == outputs == helix_bytes(batch, 128, value_dim=512, kvp=dcp, tpa=1, element_bytes=2)
    else:
        assert sum(sent.values()) == outputs + (dcp - 1) * batch * (128 - 128 // dcp) * 4


def test_helix_of_tensorrt_llm_sends_two_floats_a_head():
    plain = helix_bytes(7, 128, value_dim=512, kvp=8, tpa=2, element_bytes=2)
    assert plain == 7 * 7 * 8 * (1024 + 4)
    assert helix_bytes(7, 128, value_dim=512, kvp=8, tpa=2, element_bytes=2, stats_bytes=8) == 7 * 7 * 8 * (1024 + 8)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="30 heads do not divide over 4 ranks"):
        kv_parallel_bytes(1, 30, query_dim=1, value_dim=1, num_ranks=4, element_bytes=2)
    with pytest.raises(ValueError, match="30 heads do not divide over kvp x tpa = 2 x 2 ranks"):
        helix_bytes(1, 30, value_dim=1, kvp=2, tpa=2, element_bytes=2)
