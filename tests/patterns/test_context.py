"""Styles of context parallelism in prefill: bytes, calls, what engines refuse, what is said of them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.context import ENGINE_STYLES, context_style, style_note
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import Mla, ModelShape, load_model
from crosstraffic.patterns.phase import left_out, notes, phase_step, phase_streams
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.wire import wire_bytes_per_rank, wire_matrix
from crosstraffic.patterns.workload import CONTEXT_STYLES, Workload


def streams_of(model, layout, framework="megatron", phase="prefill", **workload):
    shape = load_model(model) if isinstance(model, str) else model
    found = phase_streams(shape, layout, Workload(phase=phase, **workload), framework)
    return {stream.name: stream for stream in found if stream.pattern in ("cp", "pcp")}


def sent_a_layer(streams, num_layers):
    """Bytes that a rank sends in the attention of one layer."""
    total = sum(wire_bytes_per_rank(one) * one.calls_per_step for one in streams.values() if one.pattern == "cp")
    assert total % num_layers == 0
    return total // num_layers


def shape_of(num_heads, num_kv_heads, head_dim=64, **fields):
    return ModelShape(
        name="test",
        num_layers=2,
        hidden=256,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate=512,
        vocab=1000,
        dtype="bfloat16",
        source="test",
        **fields,
    )


def test_n9_llama_405b_ring():
    ring = streams_of("Llama-3.1-405B", Layout(tp=8, cp=2), tokens=131_072)["cp.kv_ring"]
    assert (ring.op, ring.payload_bytes, ring.calls_per_step) == ("send_recv", 33_554_432, 126)
    assert wire_bytes_per_rank(ring) * ring.calls_per_step == 4_227_858_432


def test_more_tensor_ranks_than_kv_heads_repeat_them():
    hops = [streams_of("Llama-3.1-70B", Layout(tp=tp, cp=2), tokens=1024)["cp.kv_ring"] for tp in (8, 16, 32)]
    assert {hop.payload_bytes for hop in hops} == {512 * 2 * 128 * 2}


def test_a_ring_of_latent_attention_carries_expanded_keys_and_values():
    ring = streams_of("DeepSeek-V3", Layout(tp=8, cp=4), tokens=1024)["cp.kv_ring"]
    assert ring.payload_bytes == 256 * 16 * (128 + 64 + 128) * 2


def test_vllm_gathers_latent_and_rotary_key_in_two_calls():
    streams = streams_of("DeepSeek-V3", Layout(cp=4), "vllm", tokens=16_384)
    latent, rope = streams["cp.kv_all_gather"], streams["cp.rope_all_gather"]
    assert (latent.payload_bytes // 4, rope.payload_bytes // 4) == (4096 * 512 * 2, 4096 * 64 * 2)
    assert (latent.payload_bytes + rope.payload_bytes) // 4 == 4_718_592
    assert latent.calls_per_step == rope.calls_per_step == 61
    assert sent_a_layer(streams, 61) == 14_155_776


def test_sglang_gathers_one_tensor():
    streams = streams_of("DeepSeek-V3", Layout(tp=4, cp=4), "sglang", tokens=16_384)
    assert streams["cp.kv_all_gather"].payload_bytes == 4 * 4_718_592
    assert streams["cp.kv_all_gather"].calls_per_step == 61
    grouped = streams_of("Qwen3-32B", Layout(tp=8, cp=4), "sglang", tokens=16_384)["cp.kv_all_gather"]
    assert grouped.payload_bytes == 16_384 * 2 * 4 * 128 * 2


@pytest.mark.parametrize(("framework", "layout"), [("vllm", Layout(cp=4)), ("sglang", Layout(tp=4, cp=4))])
def test_keys_of_the_sparse_index_are_gathered_too(framework, layout):
    streams = streams_of("DeepSeek-V3.2", layout, framework, tokens=4096)
    assert streams["cp.index_all_gather"].payload_bytes == 4096 * 128 * 2
    assert "cp.index_all_gather" not in streams_of("DeepSeek-V3", layout, framework, tokens=4096)


def test_transformer_engine_gathers_expanded_keys_and_values_of_latent_attention():
    streams = streams_of("DeepSeek-V3", Layout(tp=8, cp=4), context_style="all_gather", tokens=1024)
    assert streams["cp.key_all_gather"].payload_bytes == 1024 * 16 * 192 * 2
    assert streams["cp.value_all_gather"].payload_bytes == 1024 * 16 * 128 * 2
    ring = streams_of("DeepSeek-V3", Layout(tp=8, cp=4), context_style="ring", tokens=1024)
    assert sent_a_layer(streams, 61) == sent_a_layer(ring, 61)


@pytest.mark.parametrize(
    ("framework", "layout", "phase", "size"),
    [
        pytest.param("vllm", Layout(cp=4), "prefill", 4096 * 7168 * 2, id="vllm prefill"),
        pytest.param("vllm", Layout(cp=4), "decode", 4 * 8 * 7168 * 2, id="vllm decode: every rank has all rows"),
        pytest.param("sglang", Layout(tp=4, cp=4), "prefill", 4096 * 7168 * 2, id="sglang prefill"),
        pytest.param("sglang", Layout(tp=4, cp=4), "decode", None, id="sglang decode"),
        pytest.param("tensorrt_llm", Layout(cp=4), "prefill", 4096 * 7168 * 2, id="tensorrt_llm prefill"),
        pytest.param("tensorrt_llm", Layout(cp=4), "decode", None, id="tensorrt_llm decode"),
        pytest.param("megatron", Layout(cp=4), "prefill", None, id="megatron"),
    ],
)
def test_hidden_states_come_together_behind_the_last_layer(framework, layout, phase, size):
    streams = streams_of("DeepSeek-V3", layout, framework, phase, batch=8, context=512)
    assert ("pcp.hidden_states" in streams) == (size is not None)
    if size is not None:
        assert streams["pcp.hidden_states"].payload_bytes == size
        assert streams["pcp.hidden_states"].calls_per_step == 1


@settings(max_examples=50, deadline=None)
@given(
    num_ranks=st.integers(2, 11),
    queries=st.integers(1, 4),
    kv_heads=st.integers(1, 9),
    rows=st.integers(1, 60),
    cached=st.integers(0, 40),
    batch=st.integers(1, 3),
)
def test_ring_and_gather_bring_the_same_bytes(num_ranks, queries, kv_heads, rows, cached, batch):
    shape, layout = shape_of(queries * kv_heads, kv_heads), Layout(cp=num_ranks)
    load = {"batch": batch, "context": 2 * num_ranks * rows + cached, "cached_tokens": cached}
    ring = streams_of(shape, layout, context_style="ring", **load)
    gather = streams_of(shape, layout, context_style="all_gather", **load)
    assert sent_a_layer(ring, 2) == sent_a_layer(gather, 2)
    kept = 2 * rows + 2 * -(-cached // (2 * num_ranks))
    assert sent_a_layer(ring, 2) == (num_ranks - 1) * batch * kept * 2 * kv_heads * 64 * 2


@settings(max_examples=50, deadline=None)
@given(
    num_ranks=st.integers(2, 7),
    tp=st.sampled_from([1, 2, 3]),
    queries=st.integers(1, 3),
    rows=st.integers(1, 30),
    style=st.sampled_from(CONTEXT_STYLES),
    is_latent=st.booleans(),
)
def test_all_that_is_sent_is_received(num_ranks, tp, queries, rows, style, is_latent):
    kv_heads = 6 * num_ranks
    mla = Mla(kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=24) if is_latent else None
    shape = shape_of(queries * kv_heads, queries * kv_heads if is_latent else kv_heads, mla=mla)
    workload = Workload(phase="prefill", tokens=2 * num_ranks * rows, context_style=style, ranks_per_node=tp * 2)
    streams = phase_streams(shape, Layout(tp=tp, cp=num_ranks), workload, "megatron")
    assert any(stream.pattern == "cp" for stream in streams)
    for stream in streams:
        for index, group in enumerate(stream.groups):
            matrix = wire_matrix(stream, index)
            assert matrix.shape == (len(group), len(group))
            assert matrix.sum(axis=0).tolist() == matrix.sum(axis=1).tolist()


@pytest.mark.parametrize("style", CONTEXT_STYLES)
@pytest.mark.parametrize(
    ("framework", "layout"),
    [
        ("megatron", Layout(tp=2, cp=4, pp=2)),
        ("megatron", Layout(cp=2, dp=2)),
        ("tensorrt_llm", Layout(tp=2, cp=2, pp=2)),
        ("sglang", Layout(tp=8, cp=2, pp=2)),
        ("sglang", Layout(tp=8, cp=2, dp=2)),
    ],
)
def test_a_step_has_every_style(framework, layout, style):
    shape = load_model("Qwen3-32B")
    workload = Workload(phase="prefill", batch=2, context=64, context_style=style, ranks_per_node=4)
    streams = phase_streams(shape, layout, workload, framework)
    step = phase_step(shape, layout, workload, framework, streams)
    calls = Counter(task.stream for task in step.tasks(0))
    context = [stream for stream in streams if stream.pattern == "cp"]
    assert context
    for stream in context:
        assert stream.calls_per_step % (shape.num_layers // layout.pp) == 0
        assert calls[stream.name] == stream.calls_per_step * layout.pp
    assert "cp" not in left_out(shape, layout, workload, framework, streams)


def test_what_is_in_the_cache_travels_with_keys_and_values_but_not_with_queries():
    layout, load = Layout(tp=8, cp=4), {"batch": 2, "context": 8192, "cached_tokens": 6144}
    ring = streams_of("Llama-3.1-405B", layout, context_style="ring", **load)["cp.kv_ring"]
    assert ring.payload_bytes == 2 * 8192 // 4 * 2 * 128 * 2
    queries = streams_of("Llama-3.1-405B", layout, context_style="pass_q", **load)["cp.query_ring"]
    assert queries.payload_bytes == 2 * 2048 // 4 * 16 * 128 * 2


@pytest.mark.parametrize(("framework", "layout"), [("vllm", Layout(cp=4)), ("sglang", Layout(tp=4, cp=4))])
def test_serving_engines_gather_new_tokens_alone(framework, layout):
    streams = streams_of("DeepSeek-V3", layout, framework, context=8192, cached_tokens=6144)
    assert sent_a_layer(streams, 61) == 3 * 512 * 576 * 2


def test_the_dtype_of_the_cache_counts_where_the_cache_travels():
    hop = streams_of("Llama-3.1-8B", Layout(cp=2), tokens=64, kv_dtype="fp8")["cp.kv_ring"]
    assert (hop.payload_bytes, hop.dtype) == (32 * 2 * 8 * 128, "float8_e4m3")
    gather = streams_of("DeepSeek-V3", Layout(cp=2), "vllm", tokens=64, kv_dtype="fp8_ds_mla")["cp.kv_all_gather"]
    assert (gather.payload_bytes, gather.dtype) == (64 * 512 * 2, "bfloat16")


@pytest.mark.parametrize("style", ["ring", "ulysses_ring"])
def test_transformer_engine_has_no_ring_for_windows(style):
    rule = "Context parallelism does not support sliding window attention with cp_comm_type='(p2p|a2a\\+p2p)'"
    with pytest.raises(ValueError, match=rule):
        streams_of("gpt-oss-120b", Layout(cp=4), context_style=style, tokens=1024)


@pytest.mark.parametrize("style", [None, "all_gather", "ulysses"])
def test_windows_are_gathered_or_traded(style):
    assert streams_of("gpt-oss-120b", Layout(cp=4), context_style=style, tokens=1024)
    assert "cp.kv_ring" not in streams_of("gpt-oss-120b", Layout(cp=4), context_style=style, tokens=1024)


def test_linear_attention_has_no_keys_to_gather():
    linear = tuple(layer for layer in range(48) if layer % 4 != 3)
    shape = load_model("Qwen3-30B-A3B")
    fields = {name: getattr(shape, name) for name in shape.__dataclass_fields__} | {"linear_layers": linear}
    hybrid, layout = ModelShape(**fields), Layout(tp=2, cp=2, pp=2)
    workload = Workload(phase="prefill", tokens=64)
    streams = {stream.name: stream for stream in phase_streams(hybrid, layout, workload, "megatron")}
    assert streams["cp.kv_ring"].calls_per_step == 6
    assert streams["tp.attention_output"].calls_per_step == 24
    step = phase_step(hybrid, layout, workload, "megatron", tuple(streams.values()))
    calls = Counter(task.stream for task in step.tasks(0))
    assert (calls["cp.kv_ring"], calls["tp.attention_output"]) == (12, 48)


@pytest.mark.parametrize("framework", sorted(ENGINE_STYLES))
@pytest.mark.parametrize("style", [None, *CONTEXT_STYLES])
def test_styles_that_an_engine_lacks_are_said_to_be_missing(framework, style):
    layout = Layout(tp=2, cp=2)
    model = "DeepSeek-V3" if framework == "vllm" else "Qwen3-32B"
    workload = Workload(phase="prefill", tokens=64, context_style=style)
    setting = make_setting(load_model(model), layout, workload, framework)
    note = style_note(setting)
    assert notes(load_model(model), layout, workload, framework).get("context_style") == note
    if context_style(setting) in ENGINE_STYLES[framework]:
        assert note is None
    else:
        assert note is not None
        assert note.startswith(f"{framework} has no {style} context parallelism")
    assert phase_streams(load_model(model), layout, workload, framework)


def test_notes_of_what_an_engine_does_with_short_prompts_and_windows():
    short = make_setting(load_model("Qwen3-32B"), Layout(tp=4, cp=4), Workload(phase="prefill", context=7), "sglang")
    assert "SGLang cuts prompts from 2 x cp = 8 tokens on" in (style_note(short) or "")
    window = make_setting(load_model("gpt-oss-20b"), Layout(cp=2), Workload(phase="prefill"), "megatron")
    assert "gathered instead" in (style_note(window) or "")
    decode = make_setting(load_model("Qwen3-32B"), Layout(cp=2), Workload(phase="decode"), "megatron")
    assert style_note(decode) is None


@pytest.mark.parametrize(
    ("layout", "framework", "phase", "reason"),
    [
        pytest.param(Layout(), "vllm", "prefill", "cp=1: its groups have one rank", id="none"),
        pytest.param(Layout(cp=2), "megatron", "decode", "only dcp > 1 puts traffic on the wire", id="decode"),
        pytest.param(Layout(cp=2), "tensorrt_llm", "decode", "or Helix) is not described", id="tensorrt_llm"),
        pytest.param(Layout(tp=8, dcp=8), "vllm", "prefill", "finds nothing in it (cached_tokens=0)", id="dcp"),
    ],
)
def test_why_nothing_crosses(layout, framework, phase, reason):
    asked = load_model("DeepSeek-V3"), layout, Workload(phase=phase, context=64), framework
    reasons = left_out(*asked, phase_streams(*asked))
    assert reason in reasons["cp"]
