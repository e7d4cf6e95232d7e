"""Two half batches: messages halve, calls double, thresholds and refusals of each engine."""

from collections import Counter

import pytest

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import notes, phase_step, phase_streams
from crosstraffic.patterns.workload import Workload

WHOLE = ("tp.logits", "tp.sampled_rows", "pp.activation", "pp.all_gather")
EP8 = Layout(dp=8, ep=8)


def streams_of(model, layout, framework="vllm", **workload):
    found = phase_streams(load_model(model), layout, Workload(**workload), framework)
    return {stream.name: stream for stream in found}


def note(model, layout, framework="vllm", **workload):
    return notes(load_model(model), layout, Workload(**workload), framework).get("two_batch")


@pytest.mark.parametrize(
    ("layout", "framework", "asked"),
    [
        (EP8, "vllm", {"phase": "decode", "batch": 64}),
        (Layout(tp=2, dp=4, ep=8, pp=2), "vllm", {"phase": "decode", "batch": 64}),
        (Layout(tp=2, dp=4, ep=8), "vllm", {"phase": "prefill", "tokens": 1024}),
        (EP8, "vllm", {"phase": "prefill", "tokens": 1024, "expert_backend": "deepep_high_throughput"}),
        (Layout(tp=8, dp=4, ep=8, pp=2), "sglang", {"phase": "decode", "batch": 64}),
        (Layout(tp=8, dp=4), "sglang", {"phase": "decode", "batch": 64}),
    ],
)
def test_messages_halve_and_calls_double(layout, framework, asked):
    whole = streams_of("Qwen3-30B-A3B", layout, framework, **asked)
    halves = streams_of("Qwen3-30B-A3B", layout, framework, two_batch=True, **asked)
    assert set(whole) == set(halves)
    for name, stream in whole.items():
        half = halves[name]
        if name in WHOLE or (framework == "sglang" and name == "tp.embedding"):
            assert half == stream
            continue
        assert half.calls_per_step == 2 * stream.calls_per_step, name
        assert half.payload_bytes == pytest.approx(stream.payload_bytes / 2, rel=0.01), name
        assert half.groups == stream.groups


def test_the_larger_half_counts():
    streams = streams_of("DeepSeek-V3", EP8, phase="decode", batch=65, two_batch=True)
    assert streams["ep.dispatch"].payload_bytes == 33 * 8 * 7408
    assert streams["ep.dispatch"].calls_per_step == 2 * 58


@pytest.mark.parametrize(
    ("layout", "framework"), [(Layout(tp=2, dp=4, ep=8, pp=2), "vllm"), (Layout(tp=8, dp=8, ep=8, pp=2), "sglang")]
)
def test_a_step_makes_the_calls_of_both_halves(layout, framework):
    shape, workload = load_model("Qwen3-30B-A3B"), Workload(phase="decode", batch=64, two_batch=True)
    streams = phase_streams(shape, layout, workload, framework)
    step = phase_step(shape, layout, workload, framework, streams)
    calls = Counter(
        (task.stream, index)
        for task in step.tasks(0)
        for index in (task.groups if task.groups is not None else range(999) if task.edge is None else ("edge",))
    )
    for stream in streams:
        most = max(count for (name, _), count in calls.items() if name == stream.name)
        assert most == stream.calls_per_step, stream.name


@pytest.mark.parametrize(
    ("phase", "tokens", "is_split"),
    [("decode", 31, False), ("decode", 32, True), ("prefill", 511, False), ("prefill", 512, True)],
)
def test_vllm_splits_from_its_thresholds_on(phase, tokens, is_split):
    asked = {"batch": tokens} if phase == "decode" else {"tokens": tokens}
    whole = streams_of("DeepSeek-V3", EP8, phase=phase, **asked)["ep.dispatch"]
    found = streams_of("DeepSeek-V3", EP8, phase=phase, two_batch=True, **asked)["ep.dispatch"]
    assert (found.calls_per_step == 2 * whole.calls_per_step) == is_split
    told = note("DeepSeek-V3", EP8, phase=phase, two_batch=True, **asked)
    if is_split:
        assert told.startswith("two half batches")
    else:
        assert f"a replica has {tokens} tokens, vLLM's dbo_{phase}_token_threshold is {tokens + 1}" in told
        assert found == whole


def test_the_smallest_replica_decides():
    uneven = note("DeepSeek-V3", Layout(dp=2, ep=2), phase="decode", replica_tokens=(100, 20), two_batch=True)
    assert "a replica has 20 tokens" in uneven
    empty = note("DeepSeek-V3", Layout(dp=2, ep=2), phase="decode", replica_tokens=(100, 50), two_batch=True)
    assert "the second half of a replica of 50 tokens, padded to 100, would be empty" in empty
    split = streams_of("DeepSeek-V3", Layout(dp=2, ep=2), phase="decode", replica_tokens=(100, 51), two_batch=True)
    assert (split["ep.dispatch"].matrix().sum(axis=1) == 50 * 8 * 7408).all()  # vLLM pads all to the largest


def test_one_replica_is_not_split_by_vllm():
    layout = Layout(tp=8, ep=8)
    assert "dp=1" in note("DeepSeek-V3", layout, phase="decode", batch=64, two_batch=True)


def test_sglang_does_not_split_a_low_latency_prefill():
    layout = Layout(tp=8, dp=8, ep=8)
    told = note("DeepSeek-V3", layout, "sglang", phase="prefill", tokens=4096, two_batch=True)
    assert told.startswith("off")
    assert "low-latency" in told
    high = {"phase": "prefill", "tokens": 4096, "expert_backend": "deepep_high_throughput"}
    assert note("DeepSeek-V3", layout, "sglang", two_batch=True, **high).startswith("two half batches")


def test_nothing_to_tell_when_nothing_is_asked():
    assert note("DeepSeek-V3", EP8, phase="decode") is None


@pytest.mark.parametrize(
    ("model", "layout", "framework", "fields", "message"),
    [
        ("Qwen3-30B-A3B", EP8, "megatron", {}, "megatron does not run two half batches"),
        ("Qwen3-30B-A3B", Layout(tp=8, dp=8, ep=8), "tensorrt_llm", {}, "tensorrt_llm does not run two half batches"),
        ("Llama-3.1-8B", Layout(dp=8), "vllm", {}, "Llama-3.1-8B has none"),
        ("DeepSeek-V3", Layout(dp=8), "vllm", {}, "Microbatching currently only supports the deepep_low_latency"),
        (
            "DeepSeek-V3",
            EP8,
            "vllm",
            {"expert_backend": "flashinfer_one_sided"},
            "flashinfer_one_sided is not supported",
        ),
        ("DeepSeek-V3", Layout(tp=8), "sglang", {}, "--enable-dp-attention is required"),
    ],
)
def test_engines_that_refuse(model, layout, framework, fields, message):
    with pytest.raises(ValueError, match=message):
        streams_of(model, layout, framework, phase="decode", batch=64, two_batch=True, **fields)
