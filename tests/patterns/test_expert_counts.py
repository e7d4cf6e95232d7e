"""Counts that are told before a dispatch."""

import pytest

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import control_streams, phase_streams
from crosstraffic.patterns.workload import Workload


def counts_of(model, layout, framework="vllm", **workload):
    found = control_streams(load_model(model), layout, Workload(**workload), framework)
    assert all(stream.role == "control" for stream in found)
    return {stream.name: stream for stream in found if stream.pattern == "ep"}


def test_megatron_gathers_counts_of_all_experts():
    layout = Layout(tp=2, dp=4, ep=4, etp=2)
    found = counts_of("Qwen3-30B-A3B", layout, "megatron", phase="decode", batch=8, sequence_parallel=True)
    counts = found["ep.counts"]
    assert (counts.op, counts.dtype) == ("all_gather", "int64")
    assert counts.groups == (tuple(range(8)),)  # over TP and EP of experts
    assert counts.payload_bytes == 8 * 8 * 128
    assert counts.calls_per_step == 48


def test_only_stages_with_experts_count():
    layout = Layout(dp=2, ep=2, pp=61)  # one layer a stage, the first three without experts
    counts = counts_of("DeepSeek-V3", layout, "megatron", phase="decode")["ep.counts"]
    assert len(counts.groups) == 58
    assert counts.calls_per_step == 1


def test_high_throughput_kernels_notify_over_nodes_and_inside():
    asked = {"phase": "prefill", "tokens": 64, "expert_backend": "deepep_high_throughput"}
    found = counts_of("DeepSeek-V3", Layout(dp=64, ep=64), **asked)
    assert list(found) == ["ep.counts", "ep.counts_fanout"]
    assert found["ep.counts"].payload_bytes == 8 * (8 + 256 // 8 + 1) * 4
    assert found["ep.counts"].groups[1] == tuple(range(1, 64, 8))
    assert found["ep.counts_fanout"].payload_bytes == 8 * (8 + 4) * 4
    assert found["ep.counts_fanout"].groups[1] == tuple(range(8, 16))
    alone = counts_of("DeepSeek-V3", Layout(dp=8, ep=8), **asked)
    assert alone["ep.counts"].payload_bytes == 4 * (8 + 256)
    assert {stream.calls_per_step for stream in (*found.values(), *alone.values())} == {58}


def test_counts_know_redundant_experts():
    found = counts_of(
        "DeepSeek-V3",
        Layout(dp=8, ep=8),
        phase="prefill",
        tokens=64,
        expert_backend="deepep_high_throughput",
        redundant_experts=32,
    )
    assert found["ep.counts"].payload_bytes == 4 * (8 + 288)


@pytest.mark.parametrize(
    "backend", ["deepep_low_latency", "deepep_low_latency_logfmt", "flashinfer_one_sided", "allgather_reducescatter"]
)
def test_no_message_of_its_own(backend):
    assert not counts_of("DeepSeek-V3", Layout(dp=8, ep=8), phase="decode", expert_backend=backend)


def test_counts_are_no_data():
    shape, layout = load_model("Qwen3-30B-A3B"), Layout(dp=4, ep=4)
    names = {stream.name for stream in phase_streams(shape, layout, Workload(phase="decode"), "megatron")}
    assert not names & {"ep.counts", "ep.counts_fanout"}


def test_each_half_batch_counts():
    asked = {"phase": "prefill", "tokens": 1024, "expert_backend": "deepep_high_throughput"}
    whole, halves = (
        counts_of("DeepSeek-V3", Layout(dp=8, ep=8), two_batch=two, **asked)["ep.counts"] for two in (False, True)
    )
    assert halves.calls_per_step == 2 * whole.calls_per_step
    assert halves.payload_bytes == whole.payload_bytes
