"""Memory of a rank: weights, cache and buffers against closed forms, conservation and published sizes."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.buffers import Part
from crosstraffic.patterns.kv_cache import request_bytes, state_bytes
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.memory import (
    Memory,
    formats,
    rank_memory,
    rank_request_bytes,
    stored_bits,
    stored_bytes,
)
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.setting import Setting, make_setting
from crosstraffic.patterns.weights import rank_parameters, total_parameters
from crosstraffic.patterns.workload import Workload


def setting_of(model: str, layout: Layout, framework: str = "vllm", **fields: object) -> Setting:
    workload = Workload(**{"phase": "decode", "batch": 16, **fields})  # type: ignore[arg-type]
    return make_setting(load_model(model), layout, workload, framework)


def memory_of(model: str, layout: Layout, framework: str = "vllm", **fields: object) -> Memory:
    weight_dtype = fields.pop("weight_dtype", None)
    setting = setting_of(model, layout, framework, **fields)
    return rank_memory(
        setting,
        num_requests=setting.workload.batch,
        limit_bytes=72 * 10**9,
        weight_dtype=weight_dtype,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B", "Qwen3-235B-A22B"])
def test_one_rank_has_all_weights(model: str) -> None:
    assert memory_of(model, Layout()).weights.num_bytes == 2 * total_parameters(load_model(model))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tp_cuts_all_of_a_dense_model(tp: int) -> None:
    whole = memory_of("Llama-3.1-70B", Layout()).weights.num_bytes
    assert memory_of("Llama-3.1-70B", Layout(tp=tp)).weights.num_bytes == whole // tp


def test_weights_beyond_kv_heads_are_kept_more_than_once() -> None:
    shape, tp = load_model("Qwen3-235B-A22B"), 8
    kv = 2 * shape.hidden * shape.head_dim * shape.num_layers  # one KV head of K and V
    once = Fraction(2 * (total_parameters(shape) - 4 * kv - shape.hidden * shape.num_experts * shape.num_layers), tp)
    router = 2 * shape.hidden * shape.num_experts * shape.num_layers
    assert memory_of("Qwen3-235B-A22B", Layout(tp=tp)).weights.num_bytes == once + 2 * kv + router


def test_dp_attention_and_ep_of_deepseek_v3() -> None:
    """Experts over eight ranks, all else on each: 671 B parameters in fp8 come to about 100 GB a GPU."""
    shape = load_model("DeepSeek-V3")
    experts = 58 * 32 * 3 * 7168 * 2048
    found = memory_of("DeepSeek-V3", Layout(dp=8, ep=8)).weights.num_bytes
    rest = total_parameters(shape) - 8 * experts
    tables = 2 * 129280 * 7168 + 58 * 7168 * 256
    exact = (experts + rest - tables) * (8 + Fraction(1, 512)) / 8 + 2 * tables
    assert found == -(-exact // 1)
    assert 100e9 < found < 101e9


def test_bits_of_formats() -> None:
    assert [stored_bits(name) for name in ("bf16", "fp8", "fp4", "mxfp4", "fp32")] == [
        16,
        8 + Fraction(1, 512),
        Fraction(9, 2),
        Fraction(17, 4),
        32,
    ]


@pytest.mark.parametrize(
    ("model", "asked", "attention", "experts"),
    [
        ("Llama-3.1-8B", None, "bfloat16", "bfloat16"),
        ("Llama-3.1-8B", "fp8", "fp8", "fp8"),
        ("DeepSeek-V3", None, "float8_e4m3", "float8_e4m3"),
        ("DeepSeek-V3", "fp4", "fp4", "fp4"),
        ("gpt-oss-120b", None, "bfloat16", "mxfp4"),
        ("gpt-oss-120b", "bf16", "bf16", "bf16"),
        ("DeepSeek-V4-Pro", None, "float8_e4m3", "mxfp4"),
        ("DeepSeek-V4-Pro", "fp8", "fp8", "fp8"),
    ],
)
def test_formats_of_layers(model: str, asked: str | None, attention: str, experts: str) -> None:
    found = formats(load_model(model), asked, "bfloat16")
    assert (found["attention"], found["experts"]) == (attention, experts)
    assert set(found) == {"attention", "dense", "shared", "experts"}


def test_embeddings_and_router_are_never_quantised() -> None:
    shape, layout = load_model("gpt-oss-120b"), Layout()
    parameters = rank_parameters(shape, layout)
    found = stored_bytes(parameters, formats(shape, None, "bfloat16"), "bfloat16")
    assert found == -(-parameters.experts * 17 // 32) + 2 * (parameters.total - parameters.experts)
    assert 60e9 < found < 66e9  # the published checkpoint is of 60.8 GiB


def test_an_unknown_format_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'fp3'.*float8_e4m3.*mxfp4.*fp8"):
        memory_of("Llama-3.1-8B", Layout(), weight_dtype="fp3")


@settings(max_examples=50, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8, 16]),
    context=st.integers(min_value=1, max_value=300).map(lambda pages: 16 * pages),
)
def test_the_cache_of_a_request_lies_once_on_the_ranks_of_its_replica(tp: int, pp: int, context: int) -> None:
    found = rank_request_bytes(setting_of("Llama-3.1-70B", Layout(tp=tp, pp=pp), context=context))
    assert found * tp * pp == context * 327_680


@pytest.mark.parametrize(
    ("model", "layout", "share"),
    [
        ("Llama-3.1-70B", Layout(tp=8), Fraction(1, 8)),
        ("Llama-3.1-70B", Layout(tp=16), Fraction(1, 8)),  # more ranks than KV heads: two ranks hold each
        ("Llama-3.1-70B", Layout(tp=16, dcp=2), Fraction(1, 16)),
        ("Llama-3.1-70B", Layout(tp=64, dcp=8), Fraction(1, 64)),
        ("Qwen3-235B-A22B", Layout(tp=8), Fraction(1, 4)),
        ("DeepSeek-V3", Layout(tp=8), Fraction(1)),  # the latent is whole on each rank
        ("DeepSeek-V3", Layout(tp=8, dcp=8), Fraction(1, 8)),
        ("DeepSeek-V3", Layout(dp=8, ep=8), Fraction(1)),
    ],
    ids=str,
)
def test_share_of_the_cache_of_a_request(model: str, layout: Layout, share: Fraction) -> None:
    whole = request_bytes(load_model(model), 4096, "bfloat16")
    assert rank_request_bytes(setting_of(model, layout)) == whole * share


@pytest.mark.parametrize(
    ("framework", "layout", "share"),
    [
        ("vllm", Layout(cp=4), 1),
        ("vllm", Layout(cp=4, dcp=4), 4),
        ("sglang", Layout(tp=4, cp=4), 1),
        ("megatron", Layout(cp=4), 4),
        ("tensorrt_llm", Layout(cp=4), 4),
    ],
    ids=lambda value: str(value),
)
def test_context_parallelism_cuts_the_cache_where_ranks_keep_their_own_tokens(
    framework: str, layout: Layout, share: int
) -> None:
    whole = request_bytes(load_model("DeepSeek-V3"), 4096, "bfloat16")
    assert rank_request_bytes(setting_of("DeepSeek-V3", layout, framework, phase="prefill")) * share == whole


def test_a_stage_has_the_cache_of_its_layers() -> None:
    found = rank_request_bytes(setting_of("DeepSeek-V3", Layout(pp=4)))
    assert found == 16 * 4096 * 1152  # 61 layers on four stages: one has 16


def test_windowed_layers_keep_their_window() -> None:
    found = rank_request_bytes(setting_of("gpt-oss-120b", Layout()))
    assert found == 18 * (4096 + 128) * 2048


def test_pages_are_whole() -> None:
    assert rank_request_bytes(setting_of("Llama-3.1-8B", Layout(), context=17)) == 32 * 131_072
    assert rank_request_bytes(setting_of("DeepSeek-V3", Layout(tp=8, dcp=8), context=17)) == 16 * 70_272


def test_states_of_linear_attention_are_cut_by_heads() -> None:
    shape = load_model("Qwen3.5-397B-A17B")
    states = sum(state_bytes(shape, layer) for layer in shape.linear_layers)
    one, two = (rank_request_bytes(setting_of(shape.name, Layout(tp=tp))) for tp in (1, 2))
    assert one == request_bytes(shape, 4096, "bfloat16")
    assert two == one // 2
    assert one > states > 0


def test_index_keys_are_counted_beside_a_plain_dtype() -> None:
    found = rank_request_bytes(setting_of("DeepSeek-V3.2", Layout(tp=8), kv_dtype="fp8_ds_mla"))
    assert found == 4096 * 48_068
    assert rank_request_bytes(setting_of("DeepSeek-V3.2", Layout(tp=8))) == 4096 * (70_272 + 61 * 132)


def test_each_part_has_a_formula_and_a_source() -> None:
    memory = memory_of("DeepSeek-V3", Layout(tp=2, dp=4, ep=8), expert_backend="deepep_low_latency")
    assert {part.name for part in memory.buffers} == {
        "workspace",
        "logits",
        "all_reduce",
        "deepep_low_latency",
        "deepep",
    }
    assert all(part.formula and part.source and part.num_bytes > 0 for part in (memory.weights, *memory.buffers))


@settings(max_examples=50, deadline=None)
@given(
    weights=st.integers(0, 10**11),
    buffer=st.integers(0, 10**10),
    request=st.integers(1, 10**9),
    num_requests=st.integers(1, 500),
    limit=st.integers(1, 10**11),
)
def test_what_fits(weights: int, buffer: int, request: int, num_requests: int, limit: int) -> None:
    def part(num_bytes: int) -> Part:
        return Part(name="x", num_bytes=num_bytes, formula="", source="")

    memory = Memory(
        weights=part(weights),
        buffers=(part(buffer), part(buffer)),
        request_bytes=request,
        num_requests=num_requests,
        context=4096,
        limit_bytes=limit,
    )
    assert memory.total_bytes + memory.headroom_bytes == limit
    assert (memory.headroom_bytes >= 0) == (memory.max_requests >= num_requests)
    most = replace(memory, num_requests=memory.max_requests)
    assert most.headroom_bytes >= 0 or memory.max_requests == 0
    assert replace(memory, num_requests=memory.max_requests + 1).headroom_bytes < 0
    assert (memory.missing_bytes == 0) == (memory.max_requests >= 1)
    assert memory.max_tokens // 4096 == memory.max_requests
