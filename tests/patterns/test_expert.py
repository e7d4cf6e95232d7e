"""Streams of expert parallelism: backends, nodes, uneven replicas, explicit matrices, experts that are cut."""

import numpy as np
import pytest

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.stream import stream_from_dict, stream_to_dict
from crosstraffic.patterns.wire import traffic, wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

HIGH_THROUGHPUT = "deepep_high_throughput"


def streams_of(model, layout, framework="vllm", **workload):
    shape = load_model(model)
    asked = Workload(**workload)
    found = phase_streams(shape, layout, asked, framework)
    step = phase_step(shape, layout, asked, framework, found)
    assert set(step.streams) == {stream.name for stream in found}
    assert all(stream_from_dict(stream_to_dict(stream)) == stream for stream in found)
    return {stream.name: stream for stream in found}


def exchanges(streams):
    return {name: stream for name, stream in streams.items() if stream.pattern in ("ep", "etp")}


@pytest.mark.parametrize(("tp", "dp", "batch", "rows"), [(8, 8, 64, 8), (8, 8, 1, 1), (4, 2, 9, 3), (2, 8, 5, 3)])
def test_rows_that_were_cut_over_tp_are_gathered_with_their_padding(tp, dp, batch, rows):
    streams = streams_of("DeepSeek-V3", Layout(tp=tp, dp=dp, ep=tp * dp), phase="decode", batch=batch)
    assert streams["ep.dispatch"].payload_bytes == rows * 8 * 7_408
    assert streams["tp.moe_gather"].payload_bytes == tp * rows * 7168 * 2
    assert ("padded" in streams["tp.moe_gather"].formula) == (batch % tp > 0)


@pytest.mark.parametrize(("model", "num_experts", "row"), [("DeepSeek-V3", 256, 7168), ("Kimi-K2", 384, 7168)])
def test_context_parallelism_without_a_dispatcher_gathers_router_logits(model, num_experts, row):
    streams = exchanges(streams_of(model, Layout(tp=4, cp=2), phase="prefill", context=10_000))
    assert {name: stream.payload_bytes for name, stream in streams.items()} == {
        "ep.all_gather": 10_000 * row * 2,
        "ep.router_gather": 10_000 * num_experts * 2,
        "ep.reduce_scatter": 10_000 * row * 2,
    }
    assert {stream.groups[0] for stream in streams.values()} == {(0, 4)}
    dispatched = streams_of(
        model, Layout(tp=4, cp=2, ep=8), phase="prefill", context=10_000, expert_backend="allgather_reducescatter"
    )
    assert "ep.router_gather" not in dispatched


@pytest.mark.parametrize("num_ranks", [8, 16, 32, 64, 128, 256])
def test_n1_bytes_do_not_depend_on_the_group(num_ranks):
    streams = streams_of("DeepSeek-V3", Layout(dp=num_ranks, ep=num_ranks), phase="decode", batch=128)
    assert streams["ep.dispatch"].payload_bytes == 7_585_792
    assert streams["ep.combine"].payload_bytes == 14_680_064
    assert list(exchanges(streams)) == ["ep.dispatch", "ep.combine"]


def test_n15_high_throughput_over_eight_nodes():
    streams = streams_of(
        "DeepSeek-V3", Layout(dp=64, ep=64), phase="prefill", tokens=4096, expert_backend=HIGH_THROUGHPUT
    )
    assert list(exchanges(streams)) == ["ep.dispatch", "ep.dispatch_fanout", "ep.combine_fanin", "ep.combine"]
    across, inside = streams["ep.dispatch"], streams["ep.dispatch_fanout"]
    assert across.payload_bytes == pytest.approx(111.1e6, rel=1e-3)
    assert across.payload_bytes % 7472 == inside.payload_bytes % 7472 == 0
    assert inside.payload_bytes == pytest.approx(4096 * 7.359 * 7472, rel=1e-3)
    assert across.groups[3] == (3, 11, 19, 27, 35, 43, 51, 59)
    assert inside.groups[1] == tuple(range(8, 16))
    nodes = [rank // 8 for rank in range(64)]
    assert traffic(across, nodes).intra_node_bytes == 0
    assert traffic(inside, nodes).inter_node_bytes == 0
    assert streams["ep.combine"].payload_bytes == pytest.approx(4096 * 3.629 * 14_352, rel=1e-3)


@pytest.mark.parametrize(("num_nodes", "distinct"), [(2, 1.926), (4, 2.928), (8, 3.629)])
def test_remote_nodes_of_a_token(num_nodes, distinct):
    layout = Layout(dp=8 * num_nodes, ep=8 * num_nodes)
    streams = streams_of("DeepSeek-V3", layout, phase="prefill", tokens=4096, expert_backend=HIGH_THROUGHPUT)
    matrix = streams["ep.dispatch"].matrix(0)
    remote = (matrix.sum() - np.trace(matrix)) / (num_nodes * 4096 * 7472)
    assert remote == pytest.approx(distinct * (1 - 1 / num_nodes), rel=1e-3)


def test_high_throughput_inside_one_node_goes_to_distinct_ranks():
    streams = streams_of(
        "DeepSeek-V3", Layout(dp=8, ep=8), phase="prefill", tokens=4096, expert_backend=HIGH_THROUGHPUT
    )
    assert list(exchanges(streams)) == ["ep.dispatch", "ep.combine"]
    per_message = 7168 + 224 + 4 + 12 * 8
    assert streams["ep.dispatch"].payload_bytes % per_message == 0
    assert streams["ep.dispatch"].payload_bytes == pytest.approx(4096 * 3.629 * per_message, rel=1e-3)
    low_latency = streams_of("DeepSeek-V3", Layout(dp=8, ep=8), phase="prefill", tokens=4096)["ep.dispatch"]
    assert streams["ep.dispatch"].payload_bytes < 0.5 * low_latency.payload_bytes


@pytest.mark.parametrize("routing", [("uniform", 0.0), ("power_law", 1.01), ("one_hot", 9.0)])
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(16, 8), (12, 4), (15, 5), (9, 3), (6, 1)])
def test_what_goes_over_nodes_is_fanned_out(routing, num_ranks, ranks_per_node):
    streams = streams_of(
        "Qwen3-30B-A3B",
        Layout(dp=num_ranks, ep=num_ranks),
        phase="prefill",
        tokens=100,
        expert_backend=HIGH_THROUGHPUT,
        routing=routing[0],
        routing_parameter=min(routing[1], num_ranks - 1.0),
        ranks_per_node=ranks_per_node,
    )
    num_nodes = num_ranks // ranks_per_node
    across = streams["ep.dispatch"]
    assert across.group_size == num_nodes
    arrived = sum(across.matrix(index).sum(axis=0) for index in range(ranks_per_node))
    if ranks_per_node == 1:
        assert "ep.dispatch_fanout" not in streams
        return
    inside = streams["ep.dispatch_fanout"]
    for node in range(num_nodes):
        fanned = inside.matrix(node).sum()
        assert fanned >= arrived[node] * 0.999 - inside.rule.bytes_per_message  # each copy is wanted by some rank
        assert fanned <= arrived[node] * ranks_per_node
    totals = [
        sum(int(stream.matrix(index).sum()) for index in range(len(stream.groups))) // stream.rule.bytes_per_message
        for stream in (across, streams["ep.combine"], inside, streams["ep.combine_fanin"])
    ]
    assert totals[0] == totals[1]
    assert totals[2] == totals[3]


def test_high_throughput_needs_even_nodes():
    with pytest.raises(ValueError, match=r"groups of 12 ranks have \[4, 8\] on their nodes"):
        streams_of("Qwen3-30B-A3B", Layout(dp=12, ep=12), phase="prefill", tokens=8, expert_backend=HIGH_THROUGHPUT)


def test_groups_with_one_rank_on_each_node_have_nothing_to_fan_out():
    streams = streams_of(
        "Qwen3-30B-A3B",
        Layout(tp=8, dp=4, ep=4, etp=8),
        "megatron",
        phase="decode",
        batch=8,
        expert_backend=HIGH_THROUGHPUT,
    )
    assert "ep.dispatch_fanout" not in streams
    assert streams["ep.dispatch"].groups == tuple((rank, rank + 8, rank + 16, rank + 24) for rank in range(8))


def test_one_sided_messages_go_once_to_each_rank():
    streams = streams_of(
        "Qwen3-30B-A3B", Layout(dp=8, ep=8), phase="decode", batch=100, expert_backend="flashinfer_one_sided"
    )
    row = 2048 * 2
    assert streams["ep.dispatch"].payload_bytes == pytest.approx(100 * 5.339 * (row + 64), rel=2e-3)
    assert streams["ep.combine"].payload_bytes == pytest.approx(100 * 5.339 * row, rel=2e-3)
    narrow = streams_of(
        "Qwen3-30B-A3B",
        Layout(dp=8, ep=8),
        phase="decode",
        batch=100,
        expert_backend="flashinfer_one_sided",
        dtype="fp8",
    )
    assert narrow["ep.dispatch"].rule.bytes_per_message == 2048 + 64 + 64
    assert (narrow["ep.combine"].dtype, narrow["ep.combine"].rule.bytes_per_message) == ("bfloat16", row)


def test_rows_that_no_kernel_takes_are_padded():
    streams = streams_of("gpt-oss-120b", Layout(dp=8, ep=8), phase="decode", batch=128)
    assert streams["ep.dispatch"].payload_bytes == 128 * 4 * (16 + 3072 + 96)
    assert streams["ep.combine"].payload_bytes == 128 * 4 * 2 * 3072
    plain = streams_of("gpt-oss-120b", Layout(dp=8, ep=8), phase="decode", batch=128, expert_backend="alltoall")
    assert plain["ep.combine"].payload_bytes == 128 * 4 * 2 * 2880


def test_gathering_rows_of_one_byte():
    streams = streams_of(
        "DeepSeek-V3",
        Layout(dp=8, ep=8),
        phase="decode",
        batch=4,
        expert_backend="allgather_reducescatter",
        dtype="fp8",
    )
    assert streams["ep.all_gather"].payload_bytes == 8 * 4 * (7168 + 224 + 64)
    assert streams["ep.reduce_scatter"].payload_bytes == 8 * 4 * 7168 * 2
    assert streams["ep.reduce_scatter"].dtype == "bfloat16"


def test_uneven_replicas_dispatch_uneven_rows():
    tokens = (1, 2, 3, 0)
    streams = streams_of("DeepSeek-V3", Layout(dp=4, ep=4), phase="decode", replica_tokens=tokens)
    sent = streams["ep.dispatch"].matrix().sum(axis=1) // 7408
    assert sent.tolist() == [8, 16, 24, 8]  # a replica without work runs a dummy token
    assert streams["ep.dispatch"].payload_bytes == 24 * 7408
    padded = streams_of("DeepSeek-V3", Layout(dp=4, ep=4), phase="decode", replica_tokens=tokens, padded=True)
    assert (padded["ep.dispatch"].matrix().sum(axis=1) == 24 * 7408).all()


def test_uneven_replicas_gather_the_sum_or_the_padded():
    asked = {"phase": "decode", "replica_tokens": (1, 2, 3, 4), "expert_backend": "allgather_reducescatter"}
    row = 7168 * 2 + 64
    uneven = streams_of("DeepSeek-V3", Layout(dp=4, ep=4), **asked)["ep.all_gather"]
    assert uneven.payload_bytes == 10 * row
    padded = streams_of("DeepSeek-V3", Layout(dp=4, ep=4), padded=True, **asked)["ep.all_gather"]
    assert padded.payload_bytes == 16 * row
    off = streams_of("DeepSeek-V3", Layout(dp=4), **asked)["ep.all_gather"]
    assert off.payload_bytes == 10 * row


def test_uneven_replicas_cut_over_tensor_ranks():
    streams = streams_of("DeepSeek-V3", Layout(tp=2, dp=2, ep=4), phase="decode", replica_tokens=(5, 8))
    assert (streams["ep.dispatch"].matrix().sum(axis=1) // 7408).tolist() == [24, 24, 32, 32]


def test_groups_of_different_replicas_have_bytes_of_their_own():
    streams = streams_of("Qwen3-30B-A3B", Layout(dp=4, ep=2), "megatron", phase="decode", replica_tokens=(1, 2, 3, 4))
    dispatch = streams["ep.dispatch"]
    assert dispatch.groups == ((0, 1), (2, 3))
    rows = [(dispatch.matrix(index).sum(axis=1) // 4100 // 8).tolist() for index in range(2)]
    assert rows == [[1, 2], [3, 4]]
    assert dispatch.payload_bytes == 4 * 8 * 4100


@pytest.mark.parametrize("tokens", [(1, 2, 3), (1,), (1, 2, 3, 4, 5)])
def test_a_number_for_each_replica(tokens):
    with pytest.raises(ValueError, match=f"each of the 4 data-parallel replicas: {len(tokens)} given"):
        streams_of("DeepSeek-V3", Layout(dp=4, ep=4), phase="decode", replica_tokens=tokens)


def test_some_replica_needs_a_token():
    with pytest.raises(ValueError, match="no replica has a token"):
        streams_of("DeepSeek-V3", Layout(dp=2, ep=2), phase="decode", replica_tokens=(0, 0))


MATRIX = ((0, 5, 7), (1, 0, 2), (9, 4, 1))


def test_an_explicit_matrix_and_its_way_back():
    streams = streams_of("Qwen3-30B-A3B", Layout(dp=3, ep=3), phase="decode", routing="matrix", routing_matrix=MATRIX)
    dispatch, combine = streams["ep.dispatch"], streams["ep.combine"]
    assert dispatch.matrix().tolist() == [list(row) for row in MATRIX]
    assert (combine.matrix() == dispatch.matrix().T).all()
    assert (dispatch.payload_bytes, combine.payload_bytes) == (14, 10)
    assert dispatch.calls_per_step == 48


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        (Layout(dp=4, ep=4), {}, "routing matrix of 3 ranks does not fit an expert-parallel group of 4 ranks"),
        (Layout(tp=4, ep=4), {}, r"routing matrix: vllm dispatches nothing here \(tensor\)"),
        (Layout(dp=3), {}, r"vllm dispatches nothing here \(gather_scatter\)"),
        (Layout(dp=3, ep=3), {"routing": "uniform"}, "routing_matrix goes with routing matrix, and only with it"),
        (Layout(dp=3, ep=3), {"routing_matrix": ()}, "routing_matrix goes with routing matrix"),
    ],
)
def test_a_matrix_that_does_not_fit(layout, fields, message):
    asked = {"phase": "decode", "routing": "matrix", "routing_matrix": MATRIX} | fields
    with pytest.raises(ValueError, match=message):
        streams_of("Qwen3-30B-A3B", layout, **asked)


def test_recorded_counts_of_experts():
    counts = tuple(float(expert % 8 == 0) for expert in range(128))
    streams = streams_of(
        "Qwen3-30B-A3B", Layout(dp=16, ep=16), phase="decode", batch=8, routing="explicit", routing_weights=counts
    )
    assert (streams["ep.dispatch"].matrix() == 8 * 8 // 16 * streams["ep.dispatch"].rule.bytes_per_message).all()


def test_redundant_experts_let_ranks_exceed_experts():
    streams = streams_of("DeepSeek-V3", Layout(dp=288, ep=288), phase="decode", batch=128, redundant_experts=32)
    assert streams["ep.dispatch"].payload_bytes == 7_585_792
    assert streams["ep.dispatch"].group_size == 288


@pytest.mark.parametrize(
    ("model", "layout", "framework", "redundant", "message"),
    [
        ("DeepSeek-V3", Layout(dp=288, ep=288), "vllm", 0, "expert parallel size .288. is larger than"),
        ("DeepSeek-V3", Layout(dp=8, ep=8), "vllm", 3, "EPLB currently only supports even distribution of experts"),
        ("DeepSeek-V3", Layout(dp=8), "vllm", 8, "enable_expert_parallel must be True to use EPLB"),
        ("Qwen3-30B-A3B", Layout(dp=8, ep=8), "megatron", 8, "there is no expert load balancer: 8 redundant experts"),
    ],
)
def test_redundant_experts_that_engines_refuse(model, layout, framework, redundant, message):
    with pytest.raises(ValueError, match=message):
        streams_of(model, layout, framework, phase="decode", redundant_experts=redundant)


def test_megatron_experts_that_are_cut_about_double_the_bytes():
    layout = Layout(tp=2, dp=4, ep=4, etp=2)
    streams = streams_of("Qwen3-30B-A3B", layout, "megatron", phase="decode", batch=64, sequence_parallel=True)
    rows, row = 64 // 2 * 8, 2048 * 2
    assert list(exchanges(streams)) == ["ep.dispatch", "etp.all_gather", "etp.reduce_scatter", "ep.combine"]
    assert streams["etp.all_gather"].groups == ((0, 1), (2, 3), (4, 5), (6, 7))  # the innermost links
    sent = [streams[name].payload_bytes // 2 for name in ("etp.all_gather", "etp.reduce_scatter")]
    assert sent == [rows * row] * 2
    assert streams["ep.combine"].payload_bytes == rows * row


def test_megatron_gathers_all_that_the_hottest_rank_got():
    streams = streams_of(
        "Qwen3-30B-A3B",
        Layout(tp=2, dp=2, ep=2, etp=2),
        "megatron",
        phase="decode",
        batch=64,
        sequence_parallel=True,
        routing="one_hot",
        routing_parameter=1,
    )
    assert streams["etp.all_gather"].payload_bytes == 2 * (2 * 32 * 8) * 2048 * 2


@pytest.mark.parametrize(
    ("model", "layout", "names"),
    [
        pytest.param("Qwen3-30B-A3B", Layout(tp=8, ep=4), {"ep.all_reduce", "etp.all_reduce"}, id="sums apart"),
        pytest.param("Qwen3-30B-A3B", Layout(tp=8, ep=8), {"tp.mlp_output"}, id="whole experts"),
        pytest.param("Qwen3-30B-A3B", Layout(tp=8), {"tp.mlp_output"}, id="cut over all ranks"),
        pytest.param("DeepSeek-V3", Layout(tp=8, ep=4), {"tp.mlp_output"}, id="sums at once"),
    ],
)
def test_sglang_sums_experts_that_are_cut(model, layout, names):
    streams = streams_of(model, layout, "sglang", phase="decode", batch=16)
    sums = {name for name in streams if name in ("ep.all_reduce", "etp.all_reduce", "tp.mlp_output")}
    assert sums == names
    if "etp.all_reduce" in names:
        assert streams["etp.all_reduce"].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
        assert streams["ep.all_reduce"].groups == ((0, 2, 4, 6), (1, 3, 5, 7))
        assert streams["ep.all_reduce"].payload_bytes == 16 * 2048 * 2


def test_tensorrt_llm_sums_over_all_ranks_at_once():
    streams = streams_of("Qwen3-30B-A3B", Layout(tp=8, ep=4, etp=2), "tensorrt_llm", phase="decode", batch=16)
    assert streams["tp.mlp_output"].group_size == 8
    assert not exchanges(streams)


def test_vllm_cuts_experts_over_all_ranks_only_without_expert_parallelism():
    streams = streams_of("Qwen3-30B-A3B", Layout(tp=2, dp=2), phase="decode", batch=16)
    assert set(exchanges(streams)) == {"ep.all_gather", "ep.reduce_scatter"}
    with pytest.raises(ValueError, match="experts are not cut when expert parallelism is on: etp=2"):
        streams_of("Qwen3-30B-A3B", Layout(tp=2, dp=2, ep=4, etp=2), phase="decode")


def test_a_latent_row_goes_to_experts():
    shape = load_model("Kimi-K3")
    assert shape.expert_row < shape.hidden
    streams = streams_of("Kimi-K3", Layout(dp=16, ep=16), phase="decode", batch=16, expert_backend="alltoall")
    assert streams["ep.combine"].rule.bytes_per_message == 2 * shape.expert_row


def test_the_largest_sender_may_be_in_any_group():
    streams = streams_of(
        "Qwen3-30B-A3B",
        Layout(dp=16, ep=16),
        phase="prefill",
        tokens=64,
        expert_backend=HIGH_THROUGHPUT,
        routing="one_hot",
        routing_parameter=1,
    )
    fanout = streams["ep.dispatch_fanout"]
    assert wire_bytes_per_rank(fanout) == 2 * 64 * fanout.rule.bytes_per_message
    uneven = streams_of("Qwen3-30B-A3B", Layout(dp=4, ep=2), "megatron", phase="decode", replica_tokens=(9, 9, 1, 1))
    sent = [int(uneven["ep.dispatch"].matrix(index).sum(axis=1).max()) for index in range(2)]
    assert sent[0] == 9 * sent[1] == uneven["ep.dispatch"].payload_bytes
    assert wire_bytes_per_rank(uneven["ep.dispatch"]) == sent[0] // 2


def test_replicas_of_sglang_lie_inside_the_tensor_ranks():
    streams = streams_of(
        "Qwen3-30B-A3B", Layout(tp=8, dp=4, ep=8), "sglang", phase="decode", replica_tokens=(2, 4, 0, 7)
    )
    rows = streams["ep.dispatch"].matrix().sum(axis=1) // streams["ep.dispatch"].rule.bytes_per_message // 8
    assert rows.tolist() == [1, 1, 2, 2, 0, 0, 4, 4]  # an idle replica sends nothing
