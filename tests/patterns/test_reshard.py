"""Who sends which heads and layers to whom: oracles of vLLM's map, conservation, and nobody sends what it has not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.kv_cache import request_bytes
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.model import ModelShape, load_model
from crosstraffic.patterns.reshard import head_flow, head_offset, heads_of, holdings
from crosstraffic.patterns.workload import Workload


def shape_of(num_kv_heads, num_layers=6):
    return ModelShape(
        name="x", num_layers=num_layers, hidden=64, num_heads=num_kv_heads * 16, num_kv_heads=num_kv_heads, head_dim=16,
        intermediate=64, vocab=64, dtype="bfloat16", source="",
    )  # fmt: skip


def moved(shape, prefill, decode, framework="vllm", prefill_instances=1, decode_instances=1, **work):
    sizes = (
        world_size(prefill, framework) * prefill_instances,
        world_size(decode, framework) * decode_instances,
    )
    return handoff(
        shape, prefill, decode, Workload(phase="handoff", **work),
        prefill_ranks=range(sizes[0]), decode_ranks=range(sizes[0], sum(sizes)), framework=framework,
        prefill_instances=prefill_instances, decode_instances=decode_instances,
    )  # fmt: skip


def sources(prefill_tp, decode_tp, num_heads):
    flow = head_flow(num_heads, prefill_tp, decode_tp, prefers_own=True)
    return [np.flatnonzero(flow[:, rank]).tolist() for rank in range(decode_tp)]


@pytest.mark.parametrize(
    ("prefill", "decode", "heads", "expected"),
    [
        (8, 4, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 8, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (2, 8, 4, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (8, 2, 4, [[0, 2], [4, 6]]),
        (8, 8, 8, [[rank] for rank in range(8)]),
        (8, 4, 1, [[0], [2], [4], [6]]),
    ],
    ids=["N11-P8D4K8", "N11-P4D8K8", "N11-P2D8K4", "P8D2K4", "P8D8K8", "MLA-P8D4"],
)
def test_n11_decode_ranks_read_from_the_ranks_that_vllm_s_map_names(prefill, decode, heads, expected):
    assert sources(prefill, decode, heads) == expected


@pytest.mark.parametrize(
    ("prefill", "decode", "heads", "expected"),
    [(4, 8, 8, [0, 1] * 4), (2, 8, 4, [0, 0, 1, 1] * 2), (8, 4, 8, [0] * 4)],
    ids=["N11-P4D8K8", "N11-P2D8K4", "P8D4K8"],
)
def test_n11_offsets_into_the_remote_heads(prefill, decode, heads, expected):
    assert [head_offset(rank, prefill, decode, heads) for rank in range(decode)] == expected


@given(st.integers(1, 16), st.integers(1, 12), st.integers(1, 12), st.booleans())
@settings(max_examples=200, deadline=None)
def test_each_decode_rank_gets_each_head_once_from_one_that_has_it(num_heads, prefill_tp, decode_tp, prefers_own):
    flow = head_flow(num_heads, prefill_tp, decode_tp, prefers_own=prefers_own)
    for taker in range(decode_tp):
        wanted = heads_of(taker, decode_tp, num_heads)
        assert flow[:, taker].sum() == len(wanted)
        for giver in np.flatnonzero(flow[:, taker]):
            assert flow[giver, taker] <= len(set(heads_of(int(giver), prefill_tp, num_heads)) & set(wanted))


@given(
    st.sampled_from([1, 2, 3, 5, 8]),
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3])),
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3])),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 70),
)
@settings(max_examples=80, deadline=None)
def test_several_instances_on_both_sides_lose_nothing(num_heads, prefill, decode, num_prefill, num_decode, context):
    shape = shape_of(num_heads)
    layouts = [Layout(tp=tp, pp=pp) for tp, pp in (prefill, decode)]
    if any(max(num_heads, layout.tp) % min(num_heads, layout.tp) for layout in layouts):
        return
    found = moved(shape, *layouts, "megatron", num_prefill, num_decode, context=context, batch=2)
    received = found.matrix.sum(axis=0).reshape(num_decode, -1)
    requests = [request % num_decode for request in range(2 * num_prefill)]
    for instance in range(num_decode):
        tokens = context * requests.count(instance)
        for holding in holdings(shape, layouts[1], "megatron"):
            expected = tokens * len(holding.heads) * len(holding.layers) * 2 * 16 * 2
            assert received[instance, holding.rank] == expected


@pytest.mark.parametrize(
    "model", ["DeepSeek-V3", "DeepSeek-V4-Flash", "gpt-oss-20b", "Qwen3.5-397B-A17B", "Kimi-K3", "GLM-5"]
)
def test_one_rank_hands_over_all_that_a_request_has(model):
    shape = load_model(model)
    found = moved(shape, Layout(), Layout(), context=5000)
    assert found.matrix.tolist() == [[request_bytes(shape, 5000, shape.kv_dtype)]]


def test_v3_2_in_its_own_cache_format_takes_its_index_keys_along():
    found = moved(load_model("DeepSeek-V3.2"), Layout(tp=8), Layout(tp=4), context=100, kv_dtype="fp8_ds_mla")
    assert found.matrix.sum(axis=0).tolist() == [100 * 48_068] * 4


def test_what_mla_holds_on_every_rank_is_sent_once_to_each_decode_rank():
    found = moved(load_model("DeepSeek-V3"), Layout(tp=8), Layout(tp=8), context=64)
    assert found.matrix.tolist() == np.diag([64 * 70_272] * 8).tolist()


def test_a_large_reshard_is_a_matter_of_corners_not_of_tokens():
    shape = load_model("Llama-3.1-405B")
    found = moved(shape, Layout(tp=8, dp=8), Layout(tp=4, dp=16), context=8192, batch=4)
    assert found.matrix.shape == (64, 64)
    assert int(found.matrix.sum()) == 32 * 8192 * 516_096


@pytest.mark.parametrize(
    ("framework", "prefill", "decode", "message"),
    [
        ("vllm", Layout(tp=8), Layout(tp=3), "divisible by tensor parallel size"),
        ("sglang", Layout(tp=4, pp=3), Layout(tp=4, pp=2), r"decode pp must equal prefill pp \(3\) or be 1: 2"),
    ],
)
def test_engines_refuse_what_they_cannot_join(framework, prefill, decode, message):
    with pytest.raises(ValueError, match=message):
        moved(load_model("Llama-3.1-8B"), prefill, decode, framework)


def test_vllm_s_tensor_parallel_sizes_must_divide():
    shape = shape_of(12)
    with pytest.raises(ValueError, match="Local tensor parallel size 4 is not divisible by remote"):
        moved(shape, Layout(tp=6), Layout(tp=4))


@pytest.mark.parametrize(("side", "number"), [("prefill", 0), ("decode", -1)])
def test_instances_are_counted_from_one(side, number):
    with pytest.raises(ValueError, match=f"{side}: instances must be a whole number from 1: {number}"):
        handoff(
            shape_of(2), Layout(), Layout(), Workload(phase="handoff"), prefill_ranks=[0], decode_ranks=[1],
            framework="vllm", **{f"{side}_instances": number},
        )  # fmt: skip
