"""The cache of one request: published sizes, closed forms, and what grows how."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.config import model_from_config
from crosstraffic.patterns.kv_cache import (
    cache_bytes,
    cached_entries,
    check_kv_dtype,
    compressor_bytes,
    conv_bytes,
    index_bytes,
    index_entries,
    layer_bytes,
    request_bytes,
    state_bytes,
    state_elements,
    token_bytes,
)
from crosstraffic.patterns.model import catalog_names, load_model

QWEN25_72B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "vocab_size": 152064,
    "max_window_layers": 80,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [pytest.param("DeepSeek-V3", 70_272, id="N3 DeepSeek-V3"), pytest.param("Llama-3.1-405B", 516_096, id="N3 405B")],
)
def test_n3_bytes_of_a_token(name, num_bytes):
    shape = load_model(name)
    assert shape.kv_bytes_per_token == cache_bytes(shape, 1, "bfloat16") == request_bytes(shape, 1, "bf16") == num_bytes


def test_n3_qwen25_72b():
    shape = model_from_config(QWEN25_72B, name="Qwen2.5-72B", source="huggingface.co/Qwen/Qwen2.5-72B")
    assert shape.kv_bytes_per_token == 327_680


def test_n5_mooncake_payload():
    assert load_model("Llama-3.1-70B").kv_bytes(131_072) == 42_949_672_960 == 40 * 2**30


def test_fp8_ds_mla_of_deepseek_v32():
    shape = load_model("DeepSeek-V3.2")
    assert (token_bytes(shape, 0, "fp8_ds_mla"), index_bytes(shape, 0)) == (656 + 132, 132)
    assert cache_bytes(shape, 1, "fp8_ds_mla") == 61 * 656 + 61 * 132 == 40_016 + 8_052 == 48_068
    assert cache_bytes(shape, 777, "fp8_ds_mla") == 777 * 48_068


def test_plain_dtypes_count_the_attention_cache_alone():
    """So do published sizes; the index keys beside it are told apart."""
    shape = load_model("GLM-5")
    assert cache_bytes(shape, 1, "bfloat16") == 78 * 576 * 2 == 89_856
    assert cache_bytes(shape, 1, "fp8") == 78 * 576
    assert sum(index_entries(shape, layer, 10) * index_bytes(shape, layer) for layer in range(78)) == 10 * 78 * 132


def test_fp8_ds_mla_without_an_index():
    assert cache_bytes(load_model("DeepSeek-V3"), 1, "fp8_ds_mla") == 61 * 656
    assert cache_bytes(load_model("Kimi-K3"), 1, "fp8_ds_mla") == 24 * 656


def test_layers_that_share_an_index_have_no_keys():
    shape = replace(load_model("GLM-5"), indexer_layers=(0, 2))
    assert cache_bytes(shape, 1, "fp8_ds_mla") == 78 * 656 + 2 * 132


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("DeepSeek-V4-Flash", 0.51), ("DeepSeek-V4-Pro", 0.73)], ids=["V4-Flash", "V4-Pro"]
)
def test_deepseek_v4_at_128k(name, gigabytes):
    """Derived, not published: entries of 584 bytes, and 132 bytes of index key for each group of 4 (its fp8 cache)."""
    shape = load_model(name)
    assert shape.kv_bytes(131_072) == cache_bytes(shape, 131_072, "fp8_ds_mla")
    assert shape.kv_bytes(131_072) / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 127, 128, 129, 131_071, 131_072, 1_048_576])
def test_deepseek_v4_closed_form(num_tokens):
    window, fours, large = min(num_tokens, 128), num_tokens // 4, num_tokens // 128
    expected = 584 * (43 * window + 21 * fours + 20 * large) + 21 * fours * 132
    assert load_model("DeepSeek-V4-Flash").kv_bytes(num_tokens) == expected


def test_deepseek_v4_in_a_plain_dtype_has_rows_of_512():
    shape = load_model("DeepSeek-V4-Pro")
    assert token_bytes(shape, 0, "bfloat16") == 1024
    assert token_bytes(shape, 0, "fp8") == 512
    assert layer_bytes(shape, 2, 4096, "bfloat16") == (128 + 1024) * 1024


def test_unfinished_groups_of_deepseek_v4():
    """Groups of 4: 8 rows of 2 x 2 x (512 + 128) float32; of 128: 128 rows of 2 x 512."""
    shape = load_model("DeepSeek-V4-Flash")
    found = [compressor_bytes(shape, layer) for layer in (0, 2, 3)]
    assert found == [0, 8 * 4 * 640 * 4, 128 * 2 * 512 * 4]
    assert compressor_bytes(load_model("DeepSeek-V3"), 0) == 0


def test_windowed_layers_keep_their_window():
    shape = load_model("gpt-oss-120b")
    per_layer = 2 * 8 * 64 * 2
    assert shape.kv_bytes(1000) == 18 * per_layer * 1000 + 18 * per_layer * 128
    assert shape.kv_bytes(100) == 36 * per_layer * 100
    assert [cached_entries(shape, layer, 1000) for layer in (0, 1)] == [128, 1000]


def test_chunked_attention_keeps_all():
    assert load_model("Llama-4-Maverick").kv_bytes(100_000) == 100_000 * 196_608


@pytest.mark.parametrize(("kv_heads", "num_bytes"), [(8, 2 * 8 * 16 * 2), (2, 2 * 2 * 16 * 2), (1, 2 * 16 * 2)])
def test_mha_gqa_mqa(kv_heads, num_bytes):
    config = {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": kv_heads}
    shape = model_from_config(config | {"intermediate_size": 1, "vocab_size": 1}, name="it", source="test")
    assert [token_bytes(shape, layer, "bf16") for layer in range(3)] == [num_bytes] * 3
    assert token_bytes(shape, 0, "fp8") == num_bytes // 2


def test_state_of_kimi_k3():
    shape = load_model("Kimi-K3")
    assert len(shape.linear_layers) == 69
    elements = sum(state_elements(shape, layer) for layer in range(93))
    assert elements == 69 * 96 * 128 * 128 == 108_527_616
    assert sum(state_bytes(shape, layer, "bfloat16") for layer in range(93)) == 4 * elements
    assert sum(state_bytes(shape, layer, state_dtype="bf16") for layer in range(93)) == 2 * elements
    assert conv_bytes(shape, 0) == 3 * 3 * 96 * 128 * 2
    assert conv_bytes(shape, 3) == state_bytes(shape, 3) == 0
    fixed = 4 * elements + 69 * conv_bytes(shape, 0)
    assert request_bytes(shape, 1000, "bfloat16") == 1000 * 27_648 + fixed
    assert shape.kv_bytes(1000) == 1000 * 27_648


def test_state_of_qwen35():
    shape = load_model("Qwen3.5-397B-A17B")
    assert state_bytes(shape, 0) == 64 * 128 * 128 * 4
    assert conv_bytes(shape, 0) == 3 * (2 * 16 * 128 + 64 * 128) * 2
    fixed = 45 * (state_bytes(shape, 0) + conv_bytes(shape, 0))
    assert request_bytes(shape, 7, "fp8") == 7 * 15 * 2 * 2 * 256 + fixed


def test_a_state_of_unknown_size_is_told():
    config = QWEN25_72B | {"full_attention_interval": 4}
    shape = model_from_config(config, name="it", source="test")
    assert cache_bytes(shape, 1, "bf16") == 20 * 4096
    with pytest.raises(ValueError, match=r"it: the state of linear attention is unknown.*linear_num_value_heads"):
        request_bytes(shape, 1, "bf16")


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gpt-oss-20b", "Qwen3.5-397B-A17B"])
def test_fp8_ds_mla_is_for_latent_attention(name):
    shape = load_model(name)
    with pytest.raises(ValueError, match=rf"{name}: fp8_ds_mla is a layout of latent attention \(MLA\)"):
        shape.kv_bytes(1, "fp8_ds_mla")
    with pytest.raises(ValueError, match="fp8_ds_mla is a layout"):
        state_bytes(shape, 0, "fp8_ds_mla")


def test_fp8_ds_mla_is_for_its_own_sizes():
    shape = load_model("DeepSeek-V3")
    other = replace(shape, mla=replace(shape.mla, kv_lora_rank=256))
    with pytest.raises(ValueError, match="requires kv_lora_rank == 512 and qk_rope_head_dim == 64: 256 and 64"):
        check_kv_dtype(other, "fp8_ds_mla")
    with pytest.raises(ValueError, match="requires head_dim == 512: 256"):
        check_kv_dtype(replace(load_model("DeepSeek-V4-Pro"), head_dim=256), "fp8_ds_mla")


def test_wrong_dtypes_layers_and_tokens():
    shape = load_model("DeepSeek-V3")
    with pytest.raises(ValueError, match=r"unknown dtype: 'fp5'; allowed: .*bf16.*also fp8_ds_mla"):
        token_bytes(shape, 0, "fp5")
    with pytest.raises(ValueError, match="num_tokens must not be negative: -1"):
        cache_bytes(shape, -1, "bf16")
    for layer in (-1, 61):
        for call in (index_bytes, conv_bytes, compressor_bytes, state_elements):
            with pytest.raises(ValueError, match=f"layer must be from 0 to 60: {layer}"):
                call(shape, layer)
        with pytest.raises(ValueError, match=f"layer must be from 0 to 60: {layer}"):
            token_bytes(shape, layer, "bf16")
        with pytest.raises(ValueError, match=f"layer must be from 0 to 60: {layer}"):
            cached_entries(shape, layer, 1)


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(catalog_names()), tokens=st.integers(0, 2_000_000), more=st.integers(0, 1000))
def test_a_longer_request_never_has_less(name, tokens, more):
    shape = load_model(name)
    small, large = (cache_bytes(shape, number, shape.kv_dtype) for number in (tokens, tokens + more))
    assert 0 <= small <= large
    assert small == shape.kv_bytes(tokens)
    assert small == sum(layer_bytes(shape, layer, tokens, shape.kv_dtype) for layer in range(shape.num_layers))


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(catalog_names()), tokens=st.integers(0, 1_000_000))
def test_half_the_bytes_in_fp8(name, tokens):
    shape = load_model(name)
    assert cache_bytes(shape, tokens, "bf16") == 2 * cache_bytes(shape, tokens, "fp8")
