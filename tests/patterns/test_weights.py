"""Parameters: published sizes of models, N12, and what lies on a rank."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.config import model_from_config
from crosstraffic.patterns.layout import Layout, expert_tp
from crosstraffic.patterns.model import catalog_names, load_model
from crosstraffic.patterns.placement import attention_tp
from crosstraffic.patterns.weights import (
    expert_bytes,
    expert_parameters,
    layer_parameters,
    mtp_parameters,
    rank_parameters,
    total_parameters,
)

MIB = 2**20
# Model cards and papers; without MTP layers where these are told apart.
PUBLISHED = {
    "Llama-3.1-8B": 8.03e9,
    "Llama-3.1-70B": 70.6e9,
    "Llama-3.1-405B": 405.9e9,
    "Qwen3-8B": 8.19e9,
    "Qwen3-32B": 32.8e9,
    "Qwen3-30B-A3B": 30.5e9,
    "Qwen3-235B-A22B": 235.1e9,
    "Mixtral-8x7B": 46.7e9,
    "DeepSeek-V3": 671e9,
    "DeepSeek-V4-Flash": 284e9,
    "DeepSeek-V4-Pro": 1.6e12,
    "Kimi-K2": 1.03e12,
    "GLM-4.5": 355e9,
    "GLM-5": 744e9,
    "gpt-oss-120b": 116.8e9,
    "gpt-oss-20b": 20.9e9,
    "Qwen3.5-397B-A17B": 397e9,
    "MiniMax-M2.5": 229e9,
    "Llama-4-Maverick": 400e9,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_published_sizes(name, published):
    assert total_parameters(load_model(name)) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("Llama-3.1-8B", 8_030_261_248 - 65 * 4096),
        ("Qwen3-8B", 8_190_735_360 - 73 * 4096 - 36 * 2 * 128),
        ("Mixtral-8x7B", 46_702_792_704 - 65 * 4096),
    ],
)
def test_exact_but_for_norms(name, exact):
    """Checkpoints have two norms a layer and a last one; Qwen3 one more of each query and key head."""
    assert total_parameters(load_model(name)) == exact


def test_mtp_of_deepseek_v3():
    """README_WEIGHTS: 11.5 B parameters that are its own."""
    assert mtp_parameters(load_model("DeepSeek-V3")) == pytest.approx(11.5e9, rel=0.02)
    assert mtp_parameters(load_model("Kimi-K2")) == 0
    shape = load_model("MiniMax-M2.5")
    assert mtp_parameters(shape) == 3 * (layer_parameters(shape, 61).total + 2 * 3072**2)


def test_n12_one_expert_of_deepseek():
    shape = load_model("DeepSeek-V3")
    assert expert_parameters(shape) == 3 * 7168 * 2048 == 44_040_192
    assert expert_bytes(shape, "fp8", with_scales=False) == 44_040_192
    assert expert_bytes(shape, "fp8") == 44_040_192 + 10_752
    assert expert_bytes(shape, "bf16") == 2 * 44_040_192
    assert expert_bytes(shape, "fp4", with_scales=False) == 21 * MIB
    assert expert_bytes(shape, "fp4") == 3 * 7168 * 2048 * 45 // 80 == 24_772_608
    assert -(-expert_bytes(shape, "fp4") // MIB) == 24


def test_n12_tensorrt_llm_blog_4():
    """58 layers of 256 experts, of 24 MiB each in whole MiB: 348 GiB."""
    shape = load_model("DeepSeek-V3")
    whole = -(-expert_bytes(shape, "fp4") // MIB) * MIB
    assert shape.num_moe_layers * shape.num_experts * whole == 348 * 2**30


def test_layers_of_deepseek_v3():
    shape = load_model("DeepSeek-V3")
    dense, sparse = layer_parameters(shape, 0), layer_parameters(shape, 3)
    attention = 7168 * (1536 + 576) + 128 * (1536 * 192 + 512 * 256 + 128 * 7168)
    assert dense.attention == sparse.attention == attention
    assert dense.replicated == 7168 * (1536 + 576)
    assert (dense.dense, dense.shared, dense.router, dense.experts) == (3 * 7168 * 18432, 0, 0, 0)
    assert (sparse.dense, sparse.shared) == (0, 44_040_192)
    assert (sparse.router, sparse.experts) == (7168 * 256, 256 * 44_040_192)
    assert sparse.total == attention + 257 * 44_040_192 + 7168 * 256


def test_the_index_of_deepseek_v32_is_on_every_rank():
    plain, indexed = (layer_parameters(load_model(name), 5) for name in ("DeepSeek-V3", "DeepSeek-V3.2"))
    index = 1536 * 64 * 128 + 7168 * (64 + 128)
    assert indexed.attention - plain.attention == indexed.replicated - plain.replicated == index


def test_attention_of_deepseek_v4():
    shape = load_model("DeepSeek-V4-Flash")
    heads = 64 * (1024 * 512 + 512 * 1024) + 8 * 1024 * 4096
    down = 4096 * (1024 + 512)
    index = 1024 * 64 * 128 + 4096 * (64 + 4 * 128)
    fours, large = 2 * 1024 * 4096 + 4 * 1024, 2 * 512 * 4096 + 128 * 512
    found = [layer_parameters(shape, layer).attention for layer in (0, 2, 3)]
    assert found == [heads + down, heads + down + fours + index, heads + down + large]


def test_linear_attention_of_qwen35():
    key, value = 16 * 128, 64 * 128
    expected = 4096 * (2 * key + 2 * value + 2 * 64) + 4 * (2 * key + value) + value * 4096
    shape = load_model("Qwen3.5-397B-A17B")
    assert layer_parameters(shape, 0).attention == expected
    assert layer_parameters(shape, 3).attention == 4096 * 256 * (3 * 32 + 2 * 2)


def test_linear_attention_of_kimi_k3():
    width = 96 * 128
    expected = 7168 * (4 * width + 128 + 96) + 128 * width + 3 * width * 4 + width * 7168
    shape = load_model("Kimi-K3")
    found = layer_parameters(shape, 0)
    assert (found.attention, found.replicated) == (expected, 7168 * 128)
    low_rank = replace(shape, linear_attention=replace(shape.linear_attention, full_rank_gate=False))
    assert layer_parameters(low_rank, 0).attention == expected - 7168 * width + 7168 * 128 + 128 * width


def test_latent_moe_of_kimi_k3():
    found = layer_parameters(load_model("Kimi-K3"), 1)
    assert found.experts == 896 * 3 * 3584 * 3072
    assert found.shared == 3 * 7168 * 6144
    assert found.router == 7168 * (896 + 2 * 3584)


def test_two_matrices_without_a_gate():
    config = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_inner": 32, "vocab_size": 10, "model_type": "gpt2"}
    shape = model_from_config(config, name="it", source="test")
    assert layer_parameters(shape, 0).dense == 2 * 8 * 32
    assert total_parameters(shape) == 2 * (4 * 8 * 8 + 2 * 8 * 32) + 10 * 8


def test_one_rank_has_all():
    for name in catalog_names():
        shape = load_model(name)
        padded = (-(-shape.vocab // 64) * 64 - shape.vocab) * shape.hidden * (1 if shape.tied_embeddings else 2)
        assert rank_parameters(shape, Layout()).total == total_parameters(shape) + padded


def test_kv_heads_are_replicated_when_tp_is_larger():
    shape = load_model("Llama-3.1-8B")
    head = 4096 * 128
    for tp, kv_heads in ((1, 8), (2, 4), (8, 1), (16, 1), (32, 1)):
        assert rank_parameters(shape, Layout(tp=tp)).attention == 32 * head * (2 * 32 // tp + 2 * kv_heads)


def test_down_projections_of_mla_are_replicated():
    shape = load_model("DeepSeek-V3")
    down, heads = 7168 * 2112, 128 * (1536 * 192 + 512 * 256 + 128 * 7168)
    assert rank_parameters(shape, Layout(tp=8)).attention == 61 * (down + heads // 8)


@pytest.mark.parametrize(
    ("layout", "framework", "redundant", "experts", "width"),
    [
        (Layout(dp=32, ep=32), "vllm", 0, 8, 2048),
        (Layout(dp=32, ep=32), "vllm", 32, 9, 2048),
        (Layout(dp=144, ep=144), "vllm", 32, 2, 2048),
        (Layout(dp=3, ep=3), "vllm", 0, 86, 2048),
        (Layout(tp=8), "vllm", 0, 256, 256),
        (Layout(tp=4, dp=2), "vllm", 0, 256, 256),
        (Layout(tp=8, ep=8), "sglang", 0, 32, 2048),
        (Layout(tp=8, ep=4), "sglang", 0, 64, 1024),
        (Layout(tp=8, ep=2, etp=4), "tensorrt_llm", 0, 128, 512),
        (Layout(tp=2, dp=4, ep=8), "megatron", 0, 32, 2048),
        (Layout(tp=4), "megatron", 0, 256, 512),
    ],
    ids=lambda value: str(value),
)
def test_experts_of_a_rank(layout, framework, redundant, experts, width):
    found = rank_parameters(load_model("DeepSeek-V3"), layout, framework, redundant)
    assert found.experts == 58 * experts * 3 * 7168 * width


def test_the_fullest_stage():
    """61 layers over 4 stages, 3 dense ones first: the third stage has 16 layers, all with experts."""
    found = rank_parameters(load_model("DeepSeek-V3"), Layout(pp=4))
    assert (found.stage, found.experts, found.embeddings) == (2, 16 * 256 * 44_040_192, 0)
    small = rank_parameters(load_model("Llama-3.1-8B"), Layout(pp=2))
    assert small.embeddings == 128256 * 4096


def test_tied_tables_lie_on_both_ends():
    shape = replace(load_model("Qwen3-8B"), tied_embeddings=True)
    table = 151936 * 4096
    assert rank_parameters(shape, Layout()).embeddings == table
    assert rank_parameters(shape, Layout(pp=2)).embeddings == table


def test_shared_experts_are_whole_where_ranks_have_tokens_of_their_own():
    shape = load_model("DeepSeek-V3")
    whole, eighth = 58 * 44_040_192, 58 * 44_040_192 // 8
    assert rank_parameters(shape, Layout(tp=8)).shared == eighth
    assert rank_parameters(shape, Layout(tp=8, ep=8)).shared == eighth
    assert rank_parameters(shape, Layout(tp=8, dp=2, ep=16)).shared == whole
    sglang = Layout(tp=8, dp=8, ep=8)
    assert rank_parameters(shape, sglang, "sglang").shared == eighth
    assert rank_parameters(shape, sglang, "sglang", expert_backend="deepep_low_latency").shared == whole


def test_attention_of_data_parallel_replicas_in_sglang():
    """Attention and embeddings are whole on each rank, a dense MLP and the output layer are cut over all of tp."""
    shape = load_model("DeepSeek-V3")
    found = rank_parameters(shape, Layout(tp=8, dp=8, ep=8), "sglang")
    assert found.attention == 61 * layer_parameters(shape, 0).attention
    assert found.dense == 3 * 3 * 7168 * 18432 // 8
    assert found.embeddings == 129280 * 7168 * 9 // 8


def test_attention_data_parallel_in_tensorrt_llm():
    shape = load_model("DeepSeek-V3")
    found = rank_parameters(shape, Layout(tp=8, dp=8, ep=8), "tensorrt_llm")
    assert found.dense == 3 * 3 * 7168 * 18432
    assert found.embeddings == 2 * 129280 * 7168


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(catalog_names()), tp=st.sampled_from((1, 2, 4, 8, 16)), pp=st.sampled_from((1, 2, 3, 5)))
def test_ranks_together_have_at_least_all(name, tp, pp):
    shape, layout = load_model(name), Layout(tp=tp, pp=pp)
    found = rank_parameters(shape, layout)
    assert attention_tp(layout, "vllm") == expert_tp(layout, "vllm") == tp
    assert found.total * tp * pp >= total_parameters(shape)
    assert found.total <= rank_parameters(shape, Layout()).total


def test_what_is_refused():
    shape = load_model("DeepSeek-V3")
    with pytest.raises(ValueError, match="layer must be from 0 to 60: 61"):
        layer_parameters(shape, 61)
    with pytest.raises(ValueError, match="redundant_experts must not be negative: -1"):
        rank_parameters(shape, Layout(), redundant_experts=-1)
    with pytest.raises(ValueError, match="unknown weight dtype: 'fp3'"):
        expert_bytes(shape, "fp3")
    with pytest.raises(ValueError, match="the sizes of linear attention are unknown"):
        layer_parameters(replace(load_model("Kimi-K3"), linear_attention=None), 0)
