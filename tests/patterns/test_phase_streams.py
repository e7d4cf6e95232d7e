"""Bytes of prefill and decode against numbers that others published or that follow by hand."""

from collections import Counter

import numpy as np
import pytest

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import left_out, phase_step, phase_streams
from crosstraffic.patterns.stream import MATRIX_OPS, stream_from_dict, stream_to_dict
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

KIB, MIB = 2**10, 2**20


def streams_of(model, layout, framework="vllm", **workload):
    found = phase_streams(load_model(model), layout, Workload(**workload), framework)
    return {stream.name: stream for stream in found}


@pytest.mark.parametrize(
    ("model", "sizes", "per_step"),
    [
        ("Llama-3.1-8B", (8 * KIB, 512 * KIB, 2 * MIB, 64 * MIB), 65),
        ("Llama-3.1-70B", (16 * KIB, MIB, 4 * MIB, 128 * MIB), 161),
        ("Llama-3.1-405B", (32 * KIB, 2 * MIB, 8 * MIB, 256 * MIB), 253),
        ("Qwen3-32B", (10 * KIB, 640 * KIB, 2560 * KIB, 80 * MIB), 129),
        ("Qwen3-235B-A22B", (8 * KIB, 512 * KIB, 2 * MIB, 64 * MIB), 189),
        ("DeepSeek-V3", (14 * KIB, 896 * KIB, 3584 * KIB, 112 * MIB), 123),
        ("gpt-oss-120b", (5760, 360 * KIB, 1440 * KIB, 45 * MIB), 73),
    ],
)
def test_tensor_parallel_all_reduce_sizes(model, sizes, per_step):
    found = [streams_of(model, Layout(tp=4), phase="decode", batch=batch) for batch in (1, 64, 256)]
    found.append(streams_of(model, Layout(tp=4), phase="prefill", tokens=8192))
    for streams, size in zip(found, sizes, strict=True):
        reduces = [stream for stream in streams.values() if stream.op == "all_reduce"]
        assert {stream.payload_bytes for stream in reduces} == {size}
        assert sum(stream.calls_per_step for stream in reduces) == per_step


def test_n6_llama_70b_decode():
    streams = streams_of("Llama-3.1-70B", Layout(tp=8), phase="decode", batch=64)
    reduces = [stream for stream in streams.values() if stream.op == "all_reduce"]
    assert sum(stream.payload_bytes * stream.calls_per_step for stream in reduces) == 168_820_736
    assert sum(wire_bytes_per_rank(stream) * stream.calls_per_step for stream in reduces) == 295_436_288
    assert streams["tp.logits"].payload_bytes == 8 * 2_052_096


def test_n1_deepep_low_latency():
    for num_ranks in (8, 16, 32, 64, 128, 256):
        layout = Layout(dp=num_ranks, ep=num_ranks)
        streams = streams_of("DeepSeek-V3", layout, phase="decode", batch=128)
        assert streams["ep.dispatch"].payload_bytes == 7_585_792
        assert streams["ep.combine"].payload_bytes == 14_680_064
        assert streams["ep.dispatch"].calls_per_step == 58
        assert streams["ep.dispatch"].matrix().sum(axis=1).tolist() == [7_585_792] * num_ranks


@pytest.mark.parametrize(
    ("backend", "dispatch", "combine"),
    [
        ("deepep_low_latency", 7_408, 14_336),
        ("deepep_low_latency_bf16", 14_352, 14_336),
        ("alltoall", 14_340, 14_336),
    ],
)
def test_bytes_of_a_message(backend, dispatch, combine):
    streams = streams_of("DeepSeek-V3", Layout(dp=8, ep=8), phase="decode", batch=16, expert_backend=backend)
    assert streams["ep.dispatch"].rule.bytes_per_message == dispatch
    assert streams["ep.combine"].rule.bytes_per_message == combine


def test_n7_pipeline_boundary():
    streams = streams_of("DeepSeek-V3", Layout(tp=8, pp=2), phase="prefill", tokens=8192)
    assert streams["pp.activation"].payload_bytes == 29_360_128
    assert streams["pp.activation"].payload_bytes * 8 == 234_881_024
    assert streams["pp.all_gather"].calls_per_step == 2
    alone = streams_of("DeepSeek-V3", Layout(pp=2), phase="prefill", tokens=8192)
    assert alone["pp.activation"].payload_bytes == 234_881_024
    assert "pp.all_gather" not in alone
    decode = streams_of("DeepSeek-V3", Layout(tp=8, pp=2), phase="decode", batch=64)
    assert decode["pp.activation"].payload_bytes == 229_376


def test_megatron_sends_one_tensor():
    streams = streams_of("Llama-3.1-8B", Layout(pp=2), "megatron", phase="prefill", tokens=1024)
    assert streams["pp.activation"].payload_bytes == 1024 * 4096 * 2


def test_n8_decode_context_parallel():
    streams = streams_of("deepseek-r1", Layout(tp=8, dcp=8), phase="decode", batch=32)
    assert streams["dcp.query"].payload_bytes == 8 * 589_824
    assert streams["dcp.lse"].payload_bytes == 8 * 16_384
    assert streams["dcp.output"].payload_bytes == 4_194_304
    assert {streams[name].calls_per_step for name in ("dcp.query", "dcp.lse", "dcp.output")} == {61}


def test_n9_context_ring():
    streams = streams_of("Llama-3.1-405B", Layout(tp=8, cp=2), "megatron", phase="prefill", tokens=131_072)
    ring = streams["cp.kv_ring"]
    assert ring.payload_bytes == 33_554_432
    assert ring.payload_bytes * ring.calls_per_step == 4_227_858_432


def test_context_ring_and_gather_carry_the_same_bytes():
    layout, load = Layout(cp=8), {"phase": "prefill", "tokens": 131_072}
    ring = streams_of("Qwen3-32B", layout, "megatron", **load)["cp.kv_ring"]
    gather = streams_of("Qwen3-32B", layout, "megatron", context_style="all_gather", **load)["cp.kv_all_gather"]
    assert ring.calls_per_step == 7 * 64
    assert gather.calls_per_step == 2 * 64, "K, then V"
    assert 7 * ring.payload_bytes == 469_762_048 == 2 * wire_bytes_per_rank(gather)


def test_prefill_context_parallel_gathers_latents():
    streams = streams_of("DeepSeek-V3", Layout(cp=4), phase="prefill", tokens=16_384)
    latent, rope = streams["cp.kv_all_gather"], streams["cp.rope_all_gather"]
    assert latent.payload_bytes + rope.payload_bytes == 4 * 4_718_592
    assert wire_bytes_per_rank(latent) + wire_bytes_per_rank(rope) == 14_155_776
    assert latent.calls_per_step == rope.calls_per_step == 61


def test_sequence_parallelism_carries_the_bytes_of_the_all_reduces():
    load = {"phase": "prefill", "tokens": 8192}
    plain = streams_of("Llama-3.1-70B", Layout(tp=8), "megatron", **load)
    cut = streams_of("Llama-3.1-70B", Layout(tp=8), "megatron", sequence_parallel=True, **load)
    assert not any(stream.op == "all_reduce" for stream in cut.values())
    assert cut["sp.all_gather"].groups == plain["tp.mlp_output"].groups
    assert cut["sp.all_gather"].calls_per_step == cut["sp.reduce_scatter"].calls_per_step == 160

    def wire(streams):
        layers = [stream for stream in streams.values() if stream.calls_per_step > 1]
        return sum(wire_bytes_per_rank(stream) * stream.calls_per_step for stream in layers)

    assert wire(plain) == wire(cut)


def test_sequence_parallelism_pads_tokens():
    streams = streams_of("Llama-3.1-8B", Layout(tp=8), "megatron", phase="decode", batch=3, sequence_parallel=True)
    assert streams["sp.all_gather"].payload_bytes == 8 * 4096 * 2


def test_sequence_parallelism_needs_tensor_parallelism():
    with pytest.raises(ValueError, match="Cannot use sequence parallelism without tensor parallelism"):
        streams_of("Llama-3.1-8B", Layout(dp=2), "megatron", phase="decode", sequence_parallel=True)


def test_expert_tensor_parallel_gathers_what_was_received():
    streams = streams_of(
        "Qwen3-30B-A3B", Layout(tp=2, dp=4, ep=4, etp=2), "megatron", phase="decode", batch=64, sequence_parallel=True
    )
    rows = 64 // 2 * 8
    assert streams["etp.all_gather"].payload_bytes == 2 * rows * 2048 * 2
    assert wire_bytes_per_rank(streams["etp.all_gather"]) == rows * 2048 * 2


def test_sglang_attention_data_parallel_gathers_every_layer():
    streams = streams_of("Qwen3-30B-A3B", Layout(tp=8, dp=4), "sglang", phase="decode", batch=16)
    whole = 4 * 16 * 2048 * 2
    assert (streams["dp.gather"].op, streams["dp.gather"].payload_bytes) == ("all_gather", whole)
    assert (streams["dp.scatter"].op, streams["dp.scatter"].payload_bytes) == ("reduce_scatter", whole)
    assert streams["dp.attention_scatter"].group_size == 2
    prefill = streams_of("Qwen3-30B-A3B", Layout(tp=8, dp=4), "sglang", phase="prefill", tokens=16)
    assert prefill["dp.gather"].op == "all_reduce"


def test_gather_scatter_backend():
    streams = streams_of(
        "DeepSeek-V3", Layout(dp=8, ep=8), phase="decode", batch=4, expert_backend="allgather_reducescatter"
    )
    assert streams["ep.all_gather"].payload_bytes == 8 * 4 * (7168 * 2 + 8 * 8)
    assert streams["ep.reduce_scatter"].payload_bytes == 8 * 4 * 7168 * 2


@pytest.mark.parametrize(
    ("model", "layout", "names"),
    [
        pytest.param("DeepSeek-V3", Layout(tp=8, ep=8), ("tp.mlp_output",), id="ep without dp: all-reduce"),
        pytest.param("DeepSeek-V3", Layout(tp=8, dp=2, ep=16), ("ep.dispatch", "tp.moe_gather"), id="ep with dp"),
        pytest.param("DeepSeek-V3", Layout(tp=8, dp=2), ("ep.all_gather",), id="dp without ep: gather over dp"),
    ],
)
def test_where_vllm_makes_an_all_to_all(model, layout, names):
    streams = streams_of(model, layout, phase="decode", batch=64)
    assert set(names) <= set(streams)
    assert ("ep.dispatch" in streams) == ("ep.dispatch" in names)


def test_data_parallel_of_a_dense_model_sends_nothing():
    shape, layout, workload = load_model("Llama-3.1-8B"), Layout(dp=8), Workload(phase="decode", batch=64)
    assert phase_streams(shape, layout, workload, "vllm") == ()
    reasons = left_out(shape, layout, workload, "vllm", ())
    assert set(reasons) == {"tp", "cp", "pp", "ep", "dp"}
    assert "share no tensor" in reasons["dp"]


def test_speculative_decoding_multiplies_tokens():
    plain = streams_of("Llama-3.1-8B", Layout(tp=2), phase="decode", batch=8)
    more = streams_of("Llama-3.1-8B", Layout(tp=2), phase="decode", batch=8, num_speculative=3)
    assert more["tp.mlp_output"].payload_bytes == 4 * plain["tp.mlp_output"].payload_bytes


CASES = [
    pytest.param("Llama-3.1-70B", Layout(tp=8, pp=3), "vllm", {}, id="pp uneven"),
    pytest.param("DeepSeek-V3", Layout(tp=8, pp=4), "vllm", {}, id="dense first"),
    pytest.param("DeepSeek-V3", Layout(tp=4, dp=2, pp=2, ep=8), "vllm", {}, id="ep in stages"),
    pytest.param(
        "DeepSeek-V3",
        Layout(tp=8, dp=2, ep=16),
        "vllm",
        {"routing": "power_law", "routing_parameter": 1.2},
        id="skewed",
    ),
    pytest.param("Qwen3-30B-A3B", Layout(tp=2, dp=2), "vllm", {}, id="gather scatter"),
    pytest.param("Qwen3-30B-A3B", Layout(tp=2, cp=2, pp=2, dp=2, ep=4), "megatron", {}, id="megatron"),
    pytest.param(
        "Qwen3-30B-A3B",
        Layout(tp=2, cp=2, pp=2, dp=2, ep=4, etp=2),
        "megatron",
        {"sequence_parallel": True},
        id="megatron sp etp",
    ),
    pytest.param("Qwen3-30B-A3B", Layout(tp=8, dp=4, ep=8, pp=2), "sglang", {}, id="sglang deepep"),
    pytest.param("Qwen3-30B-A3B", Layout(tp=8, dp=4), "sglang", {}, id="sglang gather"),
    pytest.param("Qwen3-30B-A3B", Layout(tp=8, dp=8, ep=8), "tensorrt_llm", {}, id="trt attention dp"),
    pytest.param("Llama-3.1-8B", Layout(tp=4, cp=3), "megatron", {}, id="cp 3"),
    pytest.param("Llama-3.1-8B", Layout(pp=5), "vllm", {}, id="pp 5"),
    pytest.param("DeepSeek-V3", Layout(tp=1, dp=3, ep=3), "vllm", {}, id="ep 3"),
    pytest.param("DeepSeek-V3", Layout(dp=7, ep=7), "vllm", {}, id="ep 7"),
    pytest.param("Llama-3.1-8B", Layout(), "vllm", {}, id="one rank"),
]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("model", "layout", "framework", "extra"), CASES)
def test_a_step_makes_the_calls_that_its_streams_say(model, layout, framework, extra, phase):
    shape, workload = load_model(model), Workload(phase=phase, batch=5, context=7, **extra)
    streams = phase_streams(shape, layout, workload, framework)
    step = phase_step(shape, layout, workload, framework, streams)
    assert set(step.streams) == {stream.name for stream in streams}
    for stream in streams:
        calls = Counter()
        for task in step.tasks(0) if step.lanes else ():
            if task.stream != stream.name:
                continue
            assert task.payload_bytes == stream.payload_bytes
            if task.edge is not None:
                calls[task.edge] += 1
            for index in task.groups if task.groups is not None else range(len(stream.groups)):
                if task.edge is None:
                    calls[index] += 1
        assert max(calls.values()) == stream.calls_per_step, stream.name
        if stream.name == "pp.activation":
            assert set(calls) == {(stage, stage + 1) for stage in range(layout.pp - 1)}
        else:
            assert set(calls) == set(range(len(stream.groups)))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("model", "layout", "framework", "extra"), CASES)
def test_streams_are_whole_values(model, layout, framework, extra, phase):
    workload = Workload(phase=phase, batch=5, context=7, **extra)
    for stream in phase_streams(load_model(model), layout, workload, framework):
        assert stream.group_size > 1
        assert stream.formula
        assert "@" in stream.source or "TensorRT" in stream.source
        assert stream_from_dict(stream_to_dict(stream)) == stream
        if stream.op in MATRIX_OPS:
            largest = max(int(stream.matrix(index).sum(axis=1).max()) for index in range(len(stream.groups)))
            assert largest == stream.payload_bytes


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 7, 8])
def test_what_is_dispatched_comes_back(num_ranks):
    streams = streams_of(
        "DeepSeek-V3",
        Layout(dp=num_ranks, ep=num_ranks),
        phase="decode",
        batch=9,
        routing="lognormal",
        routing_parameter=1.0,
    )
    dispatch, combine = streams["ep.dispatch"].matrix(), streams["ep.combine"].matrix()
    assert np.array_equal(dispatch * 14_336, combine.T * 7_408)


def test_after_names_what_came_before():
    streams = phase_streams(load_model("DeepSeek-V3"), Layout(tp=8, dp=2, ep=16), Workload(phase="decode"), "vllm")
    names = [stream.name for stream in streams]
    assert streams[0].after == ()
    assert [stream.after[0] for stream in streams[1:]] == names[:-1]


def test_large_layouts_need_no_matrix_of_all_ranks():
    layout = Layout(tp=8, pp=16, dp=128, ep=64)
    streams = phase_streams(load_model("Qwen3-30B-A3B"), layout, Workload(phase="decode", batch=64), "megatron")
    assert {stream.name for stream in streams} >= {"ep.dispatch", "tp.attention_output", "pp.activation"}
    assert sum(map(len, streams[-1].groups)) <= 16_384


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phase": "train"}, "unknown phase: 'train'; allowed: prefill, decode, handoff"),
        ({"phase": "decode", "batch": -1}, "batch must be a whole number from 1: -1"),
        ({"phase": "prefill", "context": 0}, "context must be a whole number from 1: 0"),
        ({"phase": "prefill", "tokens": -5}, "tokens must be a whole number from 1: -5"),
        ({"phase": "decode", "batch": 2, "tokens": 3}, "one token per request"),
        ({"phase": "decode", "dtype": "int7"}, "unknown dtype: 'int7'"),
        ({"phase": "decode", "expert_backend": "pplx"}, "unknown expert backend"),
        ({"phase": "decode", "context_style": "spiral"}, "unknown context style"),
        ({"phase": "decode", "seed": -1}, "seed must not be negative"),
    ],
)
def test_bad_workloads(fields, message):
    with pytest.raises(ValueError, match=message):
        Workload(**fields)
