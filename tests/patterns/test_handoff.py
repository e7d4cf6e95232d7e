"""KV handoff: who sends which heads to whom, nothing lost, nothing twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.handoff import handoff, handoff_step, on_ranks
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.model import ModelShape, load_model
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.reshard import heads_of, holdings, token_shares
from crosstraffic.patterns.workload import Workload


def shape_of(num_kv_heads=8, num_layers=4, **changes):
    fields = {
        "name": "toy",
        "num_layers": num_layers,
        "hidden": 64,
        "num_heads": num_kv_heads * 8,
        "num_kv_heads": num_kv_heads,
        "head_dim": 16,
        "intermediate": 64,
        "vocab": 1000,
        "dtype": "bfloat16",
        "source": "made up",
    }
    return ModelShape(**(fields | changes))


def moved(shape, prefill, decode, framework="vllm", **workload):
    num_prefill, num_decode = world_size(prefill, framework), world_size(decode, framework)
    return handoff(
        shape,
        prefill,
        decode,
        Workload(phase="handoff", **workload),
        prefill_ranks=range(num_prefill),
        decode_ranks=range(num_prefill, num_prefill + num_decode),
        framework=framework,
    )


def sources(found):
    return [[row for row, size in enumerate(column) if size] for column in zip(*found.matrix_bytes, strict=True)]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "num_kv_heads", "expected"),
    [
        (8, 4, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 8, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (2, 8, 4, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (16, 4, 8, [[0, 2], [4, 6], [8, 10], [12, 14]]),
        (16, 16, 8, [[rank] for rank in range(16)]),
        (1, 1, 8, [[0]]),
    ],
)
def test_sources_of_each_decode_rank(prefill_tp, decode_tp, num_kv_heads, expected):
    found = moved(shape_of(num_kv_heads), Layout(tp=prefill_tp), Layout(tp=decode_tp), context=32)
    assert sources(found) == expected


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(8, 4), (4, 8), (8, 8), (1, 8)])
def test_latents_come_from_one_rank(prefill_tp, decode_tp):
    found = moved(load_model("DeepSeek-V3"), Layout(tp=prefill_tp), Layout(tp=decode_tp), context=100)
    assert sources(found) == [[rank * prefill_tp // decode_tp] for rank in range(decode_tp)]
    assert {size for row in found.matrix_bytes for size in row if size} == {100 * 70_272}


def test_megatron_takes_the_first_rank_that_has_it():
    found = moved(load_model("DeepSeek-V3"), Layout(tp=8), Layout(tp=4), "megatron", context=100)
    assert sources(found) == [[0], [0], [0], [0]]


@settings(max_examples=120, deadline=None)
@given(
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    num_layers=st.sampled_from([4, 12]),
    prefill=st.fixed_dictionaries({"tp": st.sampled_from([1, 2, 4, 8]), "pp": st.sampled_from([1, 2, 4])}),
    decode=st.fixed_dictionaries({"tp": st.sampled_from([1, 2, 4, 8]), "pp": st.sampled_from([1, 2, 4])}),
    context=st.sampled_from([1, 7, 32, 129]),
    cuts=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3])),
    batch=st.integers(1, 3),
)
def test_each_decode_rank_gets_exactly_what_it_holds(num_kv_heads, num_layers, prefill, decode, context, cuts, batch):
    shape = shape_of(num_kv_heads, num_layers)
    cp, prefill_dp, decode_dp = cuts
    source, sink = Layout(**prefill, cp=cp, dp=prefill_dp), Layout(**decode, dp=decode_dp)
    found = moved(shape, source, sink, "megatron", context=context, batch=batch)
    received = np.array(found.matrix_bytes).sum(axis=0)
    requests = [request % decode_dp for request in range(batch * prefill_dp)]
    for holding in holdings(shape, sink, "megatron"):
        tokens = context * requests.count(holding.replica)
        assert received[holding.rank] == tokens * len(holding.heads) * len(holding.layers) * 2 * 16 * 2
    whole = np.array(found.matrix_bytes).sum()
    replication = max(1, sink.tp // num_kv_heads)
    assert whole == shape.kv_bytes(context) * batch * prefill_dp * replication


@settings(max_examples=60, deadline=None)
@given(num_heads=st.integers(1, 16), tp=st.integers(1, 24))
def test_heads_cover_all_and_are_even(num_heads, tp):
    held = [heads_of(rank, tp, num_heads) for rank in range(tp)]
    assert {head for heads in held for head in heads} == set(range(num_heads))
    assert all(heads for heads in held)
    if num_heads >= tp:
        assert sum(map(len, held)) == num_heads


def test_zig_zag_gives_rank_r_chunks_r_and_last_minus_r():
    owners = token_shares(8, Layout(cp=4), "megatron")
    assert [np.nonzero(owners == rank)[0].tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_context_cuts_on_both_sides():
    decode = moved(load_model("DeepSeek-V3"), Layout(tp=8), Layout(tp=8, dcp=8), context=64)
    assert np.array(decode.matrix_bytes).sum() == 64 * 70_272
    both = moved(load_model("DeepSeek-V3"), Layout(cp=4), Layout(tp=2, dcp=2), context=64)
    assert np.array(both.matrix_bytes).sum() == 64 * 70_272
    assert np.array(both.matrix_bytes).sum(axis=0).tolist() == [32 * 70_272] * 2


def test_windowed_layers_hand_over_their_window():
    shape = load_model("gpt-oss-20b")
    found = moved(shape, Layout(tp=2), Layout(tp=4), context=1000)
    assert np.array(found.matrix_bytes).sum() == shape.kv_bytes(1000)


def test_n16_descriptors():
    shape = load_model("Llama-3.1-70B")
    found = moved(shape, Layout(tp=8), Layout(tp=8), context=8192)
    assert found.descriptors.max_count_per_rank == 40_960
    assert max(map(max, found.descriptors.bytes)) == 8_192
    assert found.streams[0].payload_bytes == 335_544_320
    split = moved(shape, Layout(tp=8), Layout(tp=8), context=1888, kv_split=True)
    assert split.descriptors.max_count_per_rank == 18_880
    assert max(map(max, split.descriptors.bytes)) == 4_096
    slices = moved(shape, Layout(tp=8), Layout(tp=4), "sglang", context=8192)
    assert slices.descriptors.count[0][0] == 1_310_720
    assert slices.descriptors.bytes[0][0] == 256


def test_descriptors_times_bytes_are_the_transfer_where_pages_are_full():
    found = moved(load_model("Llama-3.1-8B"), Layout(tp=4), Layout(tp=2), context=4096, batch=3)
    count, each = np.array(found.descriptors.count), np.array(found.descriptors.bytes)
    assert np.array_equal(count * each, np.array(found.matrix_bytes))


def test_groups_are_the_connected_ranks():
    found = moved(load_model("Llama-3.1-8B"), Layout(tp=4), Layout(tp=2), context=16)
    (stream,) = found.streams
    assert stream.groups == ((0, 1, 4), (2, 3, 5))
    assert stream.matrix(0).tolist() == stream.matrix(1).tolist()
    assert (stream.matrix(0)[2] == 0).all()
    assert stream.payload_bytes == max(map(sum, found.matrix_bytes))
    whole = sum(int(stream.matrix(index).sum()) for index in range(len(stream.groups)))
    assert whole == np.array(found.matrix_bytes).sum()


def test_pools_on_any_ranks():
    found = handoff(
        load_model("Llama-3.1-8B"),
        Layout(tp=2),
        Layout(tp=2),
        Workload(phase="handoff", context=16),
        prefill_ranks=(5, 3),
        decode_ranks=(0, 9),
        framework="vllm",
    )
    assert found.streams[0].groups == ((5, 0), (3, 9))


@pytest.mark.parametrize(
    ("prefill", "decode", "framework", "message"),
    [
        (Layout(tp=8), Layout(tp=2, pp=2), "sglang", "decode pp must equal prefill pp"),
        (Layout(tp=4), Layout(tp=32), "vllm", None),
    ],
)
def test_pools_that_an_engine_joins_or_not(prefill, decode, framework, message):
    if message is None:
        assert moved(load_model("Llama-3.1-8B"), prefill, decode, framework, context=16).streams
        return
    with pytest.raises(ValueError, match=message):
        moved(load_model("Llama-3.1-8B"), prefill, decode, framework, context=16)


def test_nixl_needs_tensor_parallel_sizes_that_divide():
    shape = shape_of(num_kv_heads=6)
    with pytest.raises(
        ValueError, match="Local tensor parallel size 2 is not divisible by remote tensor parallel size 3"
    ):
        moved(shape, Layout(tp=3), Layout(tp=2), context=16)
    assert sources(moved(shape, Layout(tp=3), Layout(tp=2), "megatron", context=16)) == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "message"),
    [((0, 1), (1, 2), "in both pools"), ((0,), (1, 2), "takes 2 ranks, 1 are given"), ((0, 0), (1, 2), "twice")],
)
def test_ranks_must_fit_the_pools(prefill_ranks, decode_ranks, message):
    with pytest.raises(ValueError, match=message):
        handoff(
            shape_of(),
            Layout(tp=2),
            Layout(tp=2),
            Workload(phase="handoff", context=16),
            prefill_ranks=prefill_ranks,
            decode_ranks=decode_ranks,
            framework="vllm",
        )


@pytest.mark.parametrize("context", [1, 7, 1000])
def test_layer_wise_step_moves_the_whole_payload(context):
    shape = load_model("Llama-3.1-8B")
    found = moved(shape, Layout(tp=2, pp=3), Layout(tp=2), context=context)
    step = handoff_step(shape, found.streams, None)
    tasks = step.tasks(0)
    assert len(tasks) == shape.num_layers
    assert sum(task.payload_bytes for task in tasks) == found.streams[0].payload_bytes
    assert {task.stream for task in tasks} == {"pd.kv"}


def test_handoff_beside_decode():
    shape, layout, workload = load_model("Llama-3.1-8B"), Layout(tp=2), Workload(phase="decode", batch=4)
    streams = on_ranks(phase_streams(shape, layout, workload, "vllm"), (2, 3))
    assert {stream.groups for stream in streams} == {((2, 3),)}
    beside = phase_step(shape, layout, workload, "vllm", phase_streams(shape, layout, workload, "vllm"))
    step = handoff_step(shape, moved(shape, layout, layout, context=16).streams, beside)
    assert len(step.lanes) == 2
    assert step.lanes[1] == beside.lanes[0]
    assert step.phase == "handoff"
