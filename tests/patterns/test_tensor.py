from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.tensor import (
    logits_shard_bytes,
    padded_vocab,
    received_logits,
    top_token_bytes,
    vocab_shard,
)
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

MIB = 2**20


def streams_of(model, layout, framework="vllm", **workload):
    found = phase_streams(load_model(model), layout, Workload(**workload), framework)
    return {stream.name: stream for stream in found}


def test_n6_logits_of_llama_70b():
    logits = streams_of("Llama-3.1-70B", Layout(tp=8), phase="decode", batch=64)["tp.logits"]
    assert logits_shard_bytes(64, 128256, 8, 2) == 2_052_096
    assert logits.payload_bytes == 16_416_768
    assert set(received_logits(64, 128256, 8, 2)) == {wire_bytes_per_rank(logits)} == {7 * 2_052_096}
    assert received_logits(64, 128256, 8, 2, to_all=False) == (7 * 2_052_096, *[0] * 7)


@pytest.mark.parametrize("framework", ["vllm", "sglang", "megatron", "tensorrt_llm"])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-32B"])
def test_n6_two_all_reduces_a_layer_and_one_embedding(model, framework):
    streams = streams_of(model, Layout(tp=4), framework, phase="decode", batch=3)
    shape = load_model(model)
    reduces = [stream for stream in streams.values() if stream.op == "all_reduce"]
    assert sum(stream.calls_per_step for stream in reduces) == 2 * shape.num_layers + 1
    assert {stream.payload_bytes for stream in reduces} == {3 * shape.hidden * 2}
    assert all(framework[:4].lower() in stream.source.replace("-", "_").lower() for stream in reduces)


@pytest.mark.parametrize("framework", ["vllm", "sglang", "megatron", "tensorrt_llm"])
def test_a_layer_of_experts_has_two_as_well(framework):
    layout = Layout(tp=4, etp=4) if framework == "megatron" else Layout(tp=4)
    streams = streams_of("Qwen3-30B-A3B", layout, framework, phase="decode", batch=3)
    calls = {name: streams[name].calls_per_step for name in ("tp.attention_output", "tp.mlp_output", "tp.embedding")}
    assert calls == {"tp.attention_output": 48, "tp.mlp_output": 48, "tp.embedding": 1}


def test_only_the_last_token_of_a_prompt_has_logits():
    prefill = streams_of("Llama-3.1-8B", Layout(tp=2), phase="prefill", batch=5, context=100)
    decode = streams_of("Llama-3.1-8B", Layout(tp=2), phase="decode", batch=5)
    assert prefill["tp.logits"].payload_bytes == decode["tp.logits"].payload_bytes == 5 * 128256 * 2


@pytest.mark.parametrize(
    ("framework", "vocab", "tp", "expected"),
    [
        pytest.param("vllm", 128256, 8, 128256, id="whole"),
        pytest.param("vllm", 50257, 1, 50304, id="64"),
        pytest.param("sglang", 50257, 2, 50304, id="sglang"),
        pytest.param("megatron", 50257, 1, 50304, id="megatron 128"),
        pytest.param("megatron", 50257, 8, 51200, id="megatron 1024"),
    ],
)
def test_padding_of_a_vocabulary(framework, vocab, tp, expected):
    assert padded_vocab(vocab, tp, framework) == expected
    assert vocab_shard(vocab, tp, framework) * tp == expected


@given(vocab=st.integers(1, 300_000), tp=st.integers(1, 17), framework=st.sampled_from(["vllm", "megatron"]))
@settings(max_examples=50, deadline=None)
def test_shards_are_equal_and_hold_the_vocabulary(vocab, tp, framework):
    shard = vocab_shard(vocab, tp, framework)
    assert vocab <= shard * tp == padded_vocab(vocab, tp, framework)
    assert padded_vocab(vocab, tp, framework) - vocab < 128 * tp


def test_top_tokens_instead_of_logits():
    assert top_token_bytes(1, 8) == 64
    assert received_logits(64, 128256, 8, 2)[0] > 3000 * top_token_bytes(64, 8)


def test_sglang_replicas_share_the_output_layer():
    streams = streams_of("Qwen3-30B-A3B", Layout(tp=8, dp=4), "sglang", phase="decode", batch=16)
    assert streams["tp.sampled_rows"].payload_bytes == 4 * 16 * 2048 * 2
    assert streams["tp.logits"].payload_bytes == 4 * 16 * padded_vocab(151936, 8) * 2
    assert streams["tp.logits"].group_size == streams["tp.sampled_rows"].group_size == 8
    assert streams["tp.embedding"].group_size == 2
    whole = streams_of("Qwen3-30B-A3B", Layout(tp=8), "sglang", phase="decode", batch=64)
    assert "tp.sampled_rows" not in whole
    assert whole["tp.logits"].payload_bytes == streams["tp.logits"].payload_bytes


@pytest.mark.parametrize(
    ("framework", "name", "tokens", "share", "dtype"),
    [
        pytest.param("vllm", "int8", 8192, (17, 32), "int8", id="int8"),
        pytest.param("vllm", "INT6", 8192, (13, 32), "int6", id="int6"),
        pytest.param("vllm", "int4", 8192, (9, 32), "int4", id="int4"),
        pytest.param("vllm", "int4", 64, (1, 1), "bfloat16", id="below the least size"),
        pytest.param("vllm", "fp", 8192, (1, 1), "bfloat16", id="full precision"),
        pytest.param("tensorrt_llm", "fp8", 31 * 256, (16, 31), "float8_e4m3", id="fp8"),
    ],
)
def test_quantised_all_reduces(framework, name, tokens, share, dtype):
    work = {"phase": "prefill", "tokens": tokens}
    plain = streams_of("Llama-3.1-70B", Layout(tp=8), framework, **work)
    sent = streams_of("Llama-3.1-70B", Layout(tp=8), framework, quantized_all_reduce=name, **work)
    assert plain.keys() == sent.keys()
    for stream in sent.values():
        if stream.op == "all_reduce":
            assert stream.payload_bytes * share[1] == plain[stream.name].payload_bytes * share[0]
            assert stream.dtype == dtype
        else:
            assert stream == plain[stream.name]


def test_a_buffer_too_small_to_quantise_says_so():
    streams = streams_of("Llama-3.1-70B", Layout(tp=8), phase="decode", batch=64, quantized_all_reduce="int4")
    assert "not in int4: 1048576 bytes" in streams["tp.mlp_output"].formula
    assert "quick_all_reduce.py" in streams["tp.mlp_output"].source


@pytest.mark.parametrize(
    ("framework", "layout", "fields", "message"),
    [
        ("sglang", Layout(tp=8), {"quantized_all_reduce": "int8"}, "NPUs only"),
        ("sglang", Layout(pp=2), {"quantized_all_reduce": "int8"}, "NPUs only"),
        ("megatron", Layout(tp=8), {"quantized_all_reduce": "fp8"}, "does not quantise"),
        ("vllm", Layout(tp=8), {"quantized_all_reduce": "int3"}, "only supported for TP2"),
        ("vllm", Layout(tp=8), {"quantized_all_reduce": "int8", "ranks_per_node": 4}, "spans nodes"),
        ("vllm", Layout(tp=8), {"quantized_all_reduce": "int8", "sequence_parallel": True}, "leaves no all-reduce"),
    ],
)
def test_quantised_all_reduces_that_engines_refuse(framework, layout, fields, message):
    with pytest.raises(ValueError, match=message):
        streams_of("Llama-3.1-70B", layout, framework, phase="prefill", tokens=8192, **fields)


@pytest.mark.parametrize("framework", ["vllm", "sglang", "megatron", "tensorrt_llm"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_speculation_multiplies_the_tokens_of_every_stream(framework, drafts):
    layout, work = Layout(tp=2, pp=2), {"phase": "decode", "batch": 8}
    plain = streams_of("Llama-3.1-8B", layout, framework, **work)
    more = streams_of("Llama-3.1-8B", layout, framework, num_speculative=drafts, **work)
    assert plain.keys() == more.keys() >= {"tp.attention_output", "tp.embedding", "tp.logits", "pp.activation"}
    for name, stream in more.items():
        assert stream.payload_bytes == (1 + drafts) * plain[name].payload_bytes
        assert stream.calls_per_step == plain[name].calls_per_step


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 7])
def test_prime_degrees(tp):
    shape = replace(load_model("Llama-3.1-8B"), num_heads=210, num_kv_heads=210, head_dim=64)
    streams = {one.name: one for one in phase_streams(shape, Layout(tp=tp), Workload(phase="decode"), "vllm")}
    assert ("tp.mlp_output" in streams) == (tp > 1)
    assert all(stream.group_size == tp for stream in streams.values())
