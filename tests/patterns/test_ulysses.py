"""Ulysses: four all-to-alls of heads, what heads must divide, and with a ring across sub-groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.context import hop_bytes
from crosstraffic.patterns.heads import Heads, rank_heads
from crosstraffic.patterns.layout import Layout, process_groups
from crosstraffic.patterns.model import ModelShape, load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.ulysses import crossover_ranks, sent_bytes, subgroups
from crosstraffic.patterns.wire import wire_bytes_per_rank, wire_matrix
from crosstraffic.patterns.workload import Workload

ALL_TO_ALLS = ("cp.ulysses_query", "cp.ulysses_key", "cp.ulysses_value", "cp.ulysses_output")


def shape_of(num_heads, num_kv_heads, head_dim=64):
    return ModelShape(
        name="test",
        num_layers=3,
        hidden=256,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate=512,
        vocab=1000,
        dtype="bfloat16",
        source="test",
    )


def streams_of(shape, layout, framework="megatron", style="ulysses", **workload):
    found = phase_streams(shape, layout, Workload(phase="prefill", context_style=style, **workload), framework)
    return {stream.name: stream for stream in found if stream.pattern == "cp"}


def test_n20_ulysses_and_ring():
    shape, layout = load_model("Qwen3-32B"), Layout(cp=8)
    traded = streams_of(shape, layout, tokens=131_072)
    assert tuple(traded) == ALL_TO_ALLS
    assert {stream.op for stream in traded.values()} == {"all_to_all"}
    assert {stream.calls_per_step for stream in traded.values()} == {64}
    assert sum(map(wire_bytes_per_rank, traded.values())) == 528_482_304
    ring = streams_of(shape, layout, style="ring", tokens=131_072)["cp.kv_ring"]
    assert 7 * wire_bytes_per_rank(ring) == 469_762_048
    assert crossover_ranks(64, 8) == 9


def test_payload_is_all_that_a_rank_has():
    traded = streams_of(load_model("Qwen3-32B"), Layout(cp=8), tokens=131_072)
    assert [stream.payload_bytes for stream in traded.values()] == [
        16_384 * 64 * 128 * 2,
        16_384 * 8 * 128 * 2,
        16_384 * 8 * 128 * 2,
        16_384 * 64 * 128 * 2,
    ]


@settings(max_examples=50, deadline=None)
@given(
    queries=st.integers(1, 6),
    times=st.integers(1, 4),
    num_ranks=st.integers(2, 7),
    rows=st.integers(1, 50),
    head_dim=st.sampled_from([64, 80, 128]),
)
def test_streams_carry_the_formula(queries, times, num_ranks, rows, head_dim):
    kv_heads = times * num_ranks
    shape = shape_of(queries * kv_heads, kv_heads, head_dim)
    traded = streams_of(shape, Layout(cp=num_ranks), tokens=2 * num_ranks * rows)
    total = sum(map(wire_bytes_per_rank, traded.values()))
    assert total == sent_bytes(2 * rows, rank_heads(shape, 1), num_ranks, 2)
    assert total * num_ranks == (num_ranks - 1) * 2 * rows * (2 * queries + 2) * kv_heads * head_dim * 2
    for stream in traded.values():
        matrix = wire_matrix(stream)
        assert matrix.sum(axis=0).tolist() == matrix.sum(axis=1).tolist()


@settings(max_examples=50, deadline=None)
@given(queries=st.integers(1, 8), times=st.integers(1, 3), rows=st.integers(1, 30))
def test_ulysses_and_ring_are_equal_at_the_crossover(queries, times, rows):
    num_ranks = queries + 1
    kv_heads = times * num_ranks
    shape = shape_of(queries * kv_heads, kv_heads)
    assert crossover_ranks(shape.num_heads, shape.num_kv_heads) == num_ranks
    layout, tokens = Layout(cp=num_ranks), 2 * num_ranks * rows
    traded = streams_of(shape, layout, tokens=tokens)
    ring = streams_of(shape, layout, style="ring", tokens=tokens)["cp.kv_ring"]
    assert sum(map(wire_bytes_per_rank, traded.values())) == (num_ranks - 1) * wire_bytes_per_rank(ring)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32])
def test_few_ranks_favour_the_ring_and_many_ulysses(num_ranks):
    heads = Heads(query_heads=64, kv_heads=8, key_dim=128, value_dim=128)
    traded = sent_bytes(131_072 // num_ranks, heads, num_ranks, 2)
    ring = (num_ranks - 1) * hop_bytes(131_072 // num_ranks, heads, 2)
    assert (traded <= ring) == (num_ranks >= crossover_ranks(64, 8))


@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 7), (0, 1), (8, 0)])
def test_heads_that_make_no_groups(heads, kv_heads):
    with pytest.raises(ValueError, match="do not divide over"):
        crossover_ranks(heads, kv_heads)


@pytest.mark.parametrize(
    ("tp", "cp", "cap"),
    [
        pytest.param(1, 16, 8, id="TP1: P <= 8"),
        pytest.param(2, 8, 4, id="TP2: P <= 4"),
        pytest.param(8, 2, 1, id="TP8: P <= 1"),
        pytest.param(1, 3, 8, id="no divisor"),
    ],
)
def test_kv_heads_cap_the_ranks_of_llama_70b(tp, cp, cap):
    shape = load_model("Llama-3.1-70B")
    with pytest.raises(ValueError, match=rf"num_heads % cp_size == 0 .* P <= KV heads / TP = {cap}$"):
        streams_of(shape, Layout(tp=tp, cp=cp), context=768)
    if cap > 1:
        assert streams_of(shape, Layout(tp=tp, cp=cap), context=768)


def test_latent_attention_trades_expanded_heads():
    traded = streams_of(load_model("DeepSeek-V3"), Layout(tp=8, cp=4), tokens=1024)
    rows, heads = 256, 16
    assert [stream.payload_bytes for stream in traded.values()] == [
        rows * heads * 192 * 2,
        rows * heads * 192 * 2,
        rows * heads * 128 * 2,
        rows * heads * 128 * 2,
    ]


def test_tensorrt_llm_fuses_and_repeats_kv_heads():
    shape = load_model("Llama-3.1-70B")
    traded = streams_of(shape, Layout(tp=2, cp=2), "tensorrt_llm", style=None, tokens=1000)
    assert tuple(traded) == ("cp.ulysses_qkv", "cp.ulysses_output")
    assert traded["cp.ulysses_qkv"].payload_bytes == 500 * (32 + 2 * 4) * 128 * 2
    assert traded["cp.ulysses_output"].payload_bytes == 500 * 32 * 128 * 2
    repeated = streams_of(shape, Layout(tp=8, cp=2), "tensorrt_llm", style=None, tokens=1000)
    assert repeated["cp.ulysses_qkv"].payload_bytes == 500 * (8 + 2 * 2) * 128 * 2
    with pytest.raises(ValueError, match="P <= heads / TP = 8"):
        streams_of(shape, Layout(tp=8, cp=3), "tensorrt_llm", style=None, tokens=999)


@settings(max_examples=50, deadline=None)
@given(inner=st.integers(1, 6), outer=st.integers(1, 6), tp=st.integers(1, 4))
def test_subgroups_cross_each_other(inner, outer, tp):
    groups = process_groups(Layout(tp=tp, cp=inner * outer), "megatron")["cp"]
    traders, rings = subgroups(groups, inner)
    everyone = sorted(rank for group in groups for rank in group)
    for found, size in ((traders, inner), (rings, outer)):
        assert {len(group) for group in found} == {size}
        assert sorted(rank for group in found for rank in group) == everyone
    assert all(len(set(trader) & set(ring)) <= 1 for trader in traders for ring in rings)


def test_hierarchical_groups_of_megatron_core():
    inner, outer = subgroups((tuple(range(8)),), 2)
    assert inner == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert outer == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("ranks_per_node", "asked", "trading"),
    [
        pytest.param(8, None, 4, id="tp2 leaves four on a node"),
        pytest.param(4, None, 2, id="two on a node"),
        pytest.param(16, None, 8, id="all on one node"),
        pytest.param(8, 2, 2, id="as asked"),
    ],
)
def test_ulysses_inside_nodes_and_a_ring_across(ranks_per_node, asked, trading):
    shape, layout = shape_of(32, 16), Layout(tp=2, cp=8)
    found = streams_of(
        shape, layout, style="ulysses_ring", tokens=4096, ranks_per_node=ranks_per_node, ulysses_ranks=asked
    )
    assert {found[name].group_size for name in ALL_TO_ALLS} == {trading}
    ring = streams_of(shape, layout, style="ring", tokens=4096)["cp.kv_ring"]
    if trading == 8:
        assert tuple(found) == ALL_TO_ALLS
        return
    assert found["cp.kv_ring"].payload_bytes == ring.payload_bytes
    assert found["cp.kv_ring"].calls_per_step == 3 * (8 // trading - 1)
    assert tuple(found) == (*ALL_TO_ALLS[:3], "cp.kv_ring", ALL_TO_ALLS[3])


def test_one_rank_a_node_leaves_the_ring():
    found = streams_of(shape_of(32, 16), Layout(cp=4), style="ulysses_ring", tokens=64, ranks_per_node=1)
    assert tuple(found) == ("cp.kv_ring",)
    assert found["cp.kv_ring"].calls_per_step == 3 * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ulysses_ranks": 3}, "ulysses_ranks must divide the context-parallel ranks: 3 of 8"),
        ({"ulysses_ranks": 8}, "P <= KV heads / TP = 4"),
        ({"ranks_per_node": 8}, "P <= KV heads / TP = 4"),
    ],
)
def test_sub_groups_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        streams_of(shape_of(32, 4), Layout(cp=8), style="ulysses_ring", tokens=64, **fields)
