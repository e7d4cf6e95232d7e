"""Who sends which heads and layers to whom: oracles of vLLM's map, conservation, and nobody sends what it has not."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.kv_cache import conv_bytes, request_bytes, state_bytes
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
    assume(not any(max(num_heads, layout.tp) % min(num_heads, layout.tp) for layout in layouts))
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


MLA = load_model("DeepSeek-V3")


def received(found):
    return [int(value) for value in found.matrix.sum(axis=0)]


def senders(found):
    return np.flatnonzero(found.matrix.sum(axis=1)).tolist()


def test_sglang_s_decode_ranks_read_latents_from_ranks_of_their_own():
    found = moved(MLA, Layout(tp=8), Layout(tp=4), "sglang", context=64)
    assert [np.flatnonzero(column).tolist() for column in found.matrix.T] == [[0], [2], [4], [6]]


def test_context_ranks_that_gather_keys_hold_all_of_them_and_the_first_sends():
    vllm = moved(MLA, Layout(cp=4, tp=2), Layout(tp=2), "vllm", context=64)
    assert (senders(vllm), received(vllm)) == ([0, 1], [64 * 70_272] * 2)
    sglang = moved(MLA, Layout(tp=4, cp=4), Layout(), "sglang", context=64)
    assert (senders(sglang), received(sglang)) == ([0], [64 * 70_272])


def test_context_ranks_that_keep_their_own_keys_all_send():
    found = moved(load_model("Llama-3.1-8B"), Layout(cp=4), Layout(), "megatron", context=64)
    assert found.matrix[:, 0].tolist() == [16 * 131_072] * 4


@pytest.mark.parametrize(
    ("prefill", "num_senders"),
    [(Layout(cp=2, tp=4, dcp=2), 8), (Layout(cp=2, tp=4, dcp=8), 8), (Layout(tp=4, dcp=2), 4), (Layout(tp=4), 4)],
    ids=["dcp over cp", "dcp over tp and cp", "dcp inside tp", "no dcp"],
)
def test_both_context_parallelisms_on_one_side(prefill, num_senders):
    found = moved(MLA, prefill, Layout(tp=4), context=64)
    assert received(found) == [64 * 70_272] * 4
    assert len(senders(found)) == num_senders
    dealt = moved(MLA, prefill, Layout(tp=4, dcp=4), context=64)
    assert received(dealt) == [16 * 70_272] * 4


@given(
    prefill=st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 2), (8, 8)]),
    decode=st.sampled_from([(4, 1), (4, 4), (8, 4), (2, 2), (1, 1)]),
    context=st.integers(1, 300),
)
@settings(max_examples=50, deadline=None)
def test_decode_context_ranks_get_the_tokens_that_they_are_dealt(prefill, decode, context):
    layouts = [Layout(tp=tp, dcp=dcp) for tp, dcp in (prefill, decode)]
    found = moved(MLA, *layouts, context=context)
    dcp = decode[1]
    dealt = [len(range(rank % dcp, context, dcp)) for rank in range(decode[0])]
    assert received(found) == [tokens * 70_272 for tokens in dealt]


def test_grouped_heads_with_decode_context():
    shape = load_model("Qwen3-30B-A3B")
    found = moved(shape, Layout(tp=4), Layout(tp=8, dcp=2), context=101)
    head = shape.num_layers * 2 * 128 * 2
    assert received(found) == [51 * head, 50 * head] * 4


@pytest.mark.parametrize("model", ["Qwen3.5-397B-A17B", "Kimi-K3"])
@pytest.mark.parametrize(("prefill", "decode"), [(4, 8), (8, 2), (2, 2), (16, 16)])
def test_states_are_cut_by_heads_and_latents_are_not(model, prefill, decode):
    shape = load_model(model)
    found = moved(shape, Layout(tp=prefill), Layout(tp=decode), "megatron", context=50)
    state = sum(state_bytes(shape, layer) + conv_bytes(shape, layer) for layer in shape.linear_layers)
    copies = decode if shape.mla else max(1, decode // shape.num_kv_heads)
    cached = request_bytes(shape, 50, "bfloat16") - state
    assert found.matrix.sum() == state + copies * cached
    assert len(set(received(found))) == 1


def test_a_state_does_not_depend_on_how_tokens_are_cut():
    shape = load_model("Kimi-K3")
    found = moved(shape, Layout(tp=8, dcp=8), Layout(tp=8), context=80)
    assert found.matrix.sum() == request_bytes(shape, 80, "bfloat16") + 7 * 80 * 27_648


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "message"),
    [
        ("DeepSeek-V3", Layout(tp=4), Layout(tp=4, cp=2), r"Decode cp size \(2\) should be equal to 1"),
        ("Llama-3.1-8B", Layout(tp=4), Layout(tp=4, dcp=2), "requires an MLA or hybrid-MLA KV pool"),
        ("DeepSeek-V3", Layout(tp=4, cp=2), Layout(tp=4, dcp=2), "requires prefill attention CP=1, got 2"),
    ],
)
def test_sglang_refuses_what_it_cannot_join(model, prefill, decode, message):
    with pytest.raises(ValueError, match=message):
        moved(load_model(model), prefill, decode, "sglang")


def test_a_thousand_ranks_on_each_side():
    shape = load_model("Llama-3.1-405B")
    found = moved(shape, Layout(tp=8, pp=63, dp=2), Layout(tp=8, pp=126), "megatron", context=8192)
    assert found.matrix.shape == (1008, 1008)
    assert int(found.matrix.sum()) == 2 * 8192 * 516_096
    assert set(received(found)) == {2 * 8192 * 512}
