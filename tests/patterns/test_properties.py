"""What holds for any stream: nothing is lost, matrices turn round, equal counts are nccl-tests' bus bandwidth."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import Layout, process_groups, world_size
from crosstraffic.patterns.matrix import Explicit
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import control_streams, phase_streams
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.wire import busbw_factor, traffic, wire_bytes_per_rank, wire_matrix
from crosstraffic.patterns.workload import Workload

CASES = [
    ("DeepSeek-V3", Layout(tp=2, dp=4, ep=8), "vllm", {"routing": "power_law", "routing_parameter": 1.2}),
    ("DeepSeek-V3", Layout(dp=16, ep=16), "vllm", {"expert_backend": "deepep_high_throughput"}),
    ("Qwen3-30B-A3B", Layout(dp=3, ep=3), "vllm", {"replica_tokens": (7, 0, 31)}),
    ("Qwen3-30B-A3B", Layout(tp=2, cp=2, pp=2, ep=4), "megatron", {"sequence_parallel": True}),
    ("Llama-3.1-70B", Layout(tp=8, dp=4, pp=2), "sglang", {}),
    ("gpt-oss-20b", Layout(tp=4, ep=4), "tensorrt_llm", {}),
    ("Kimi-K3", Layout(tp=4, pp=3, dp=2, ep=8), "vllm", {"num_micro_batches": 2}),
]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("model", "layout", "framework", "work"), CASES, ids=[str(case[1]) for case in CASES])
def test_what_is_sent_is_received(model, layout, framework, work, phase):
    own = {"batch": 31} if phase == "decode" else {"batch": 1, "context": 512}
    workload = Workload(phase=phase, **own, **work)
    shape = load_model(model)
    asked = (shape, layout, workload, framework)
    streams = (*phase_streams(*asked), *control_streams(*asked))
    assert streams
    nodes = [rank // 8 for rank in range(world_size(layout, framework))]
    for stream in streams:
        found = traffic(stream, nodes)
        assert sum(found.egress_bytes.values()) == sum(found.ingress_bytes.values()) > 0, stream.name
        assert sum(found.node_egress_bytes.values()) == sum(found.node_ingress_bytes.values()) == found.inter_node_bytes
        assert found.intra_node_bytes + found.inter_node_bytes == sum(found.egress_bytes.values())
        assert wire_bytes_per_rank(stream) == max(
            int(wire_matrix(stream, index).sum(axis=1).max()) for index in range(len(stream.groups))
        )


def stream_of(matrix):
    rows = tuple(map(tuple, matrix.tolist()))
    return Stream(
        name="ep.x", pattern="ep", op="all_to_all_v", phase="decode", groups=(tuple(range(len(rows))),),
        payload_bytes=int(matrix.sum(axis=1).max()), calls_per_step=1, dtype="uint8", formula="", source="",
        rule=Explicit(bytes=(rows,)),
    )  # fmt: skip


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_transposed_matrix_swaps_ingress_and_egress(num_ranks, ranks_per_node, seed):
    matrix = np.random.default_rng(seed).integers(0, 1000, (num_ranks, num_ranks))
    nodes = [rank // ranks_per_node for rank in range(num_ranks)]
    there, back = traffic(stream_of(matrix), nodes), traffic(stream_of(matrix.T), nodes)
    assert there.egress_bytes == back.ingress_bytes
    assert there.node_ingress_bytes == back.node_egress_bytes
    assert (there.self_bytes, there.inter_node_bytes) == (back.self_bytes, back.inter_node_bytes)
    assert there.bottleneck_bytes == back.bottleneck_bytes


@given(st.integers(2, 13), st.integers(1, 10**6))
@settings(max_examples=60, deadline=None)
def test_equal_counts_have_the_bottleneck_of_nccl_tests_busbw(num_ranks, each):
    stream = stream_of(np.full((num_ranks, num_ranks), each))
    plain = replace(stream, op="all_to_all", rule=None)
    assert traffic(stream, [0] * num_ranks).bottleneck_bytes == (num_ranks - 1) * each
    assert traffic(plain, [0] * num_ranks).bottleneck_bytes == (num_ranks - 1) * each
    assert (num_ranks - 1) * each == pytest.approx(busbw_factor("all_to_all", num_ranks) * stream.payload_bytes)


@given(
    st.sampled_from(["vllm", "megatron", "tensorrt_llm", "sglang"]),
    st.sampled_from([1, 2, 3, 5, 7]),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 3, 11]),
)
@settings(max_examples=80, deadline=None)
def test_groups_partition_the_ranks_for_prime_degrees_too(framework, tp, pp, dp):
    layout = Layout(tp=tp, pp=pp, dp=dp) if framework in ("vllm", "megatron") else Layout(tp=tp * dp, pp=pp)
    world = world_size(layout, framework)
    for name, groups in process_groups(layout, framework).items():
        assert sorted(rank for group in groups for rank in group) == list(range(world)), name
