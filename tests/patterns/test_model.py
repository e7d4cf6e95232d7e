"""Model shapes: published cache sizes, and configurations as other people write them."""

import json

import pytest

from crosstraffic.patterns.model import catalog_names, load_model

LLAMA = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def write(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("name", "kv_bytes", "num_moe_layers"),
    [
        pytest.param("DeepSeek-V3", 70_272, 58, id="N3 DeepSeek-V3"),
        pytest.param("Llama-3.1-405B", 516_096, 0, id="N3 Llama-3.1-405B"),
        ("Llama-3.1-8B", 131_072, 0),
        ("Llama-3.1-70B", 327_680, 0),
        ("Qwen3-8B", 147_456, 0),
        ("Qwen3-32B", 262_144, 0),
        ("Qwen3-30B-A3B", 98_304, 48),
        ("Qwen3-235B-A22B", 192_512, 94),
        ("Mixtral-8x7B", 131_072, 32),
        ("Kimi-K2", 70_272, 60),
        ("gpt-oss-120b", 73_728, 36),
        ("gpt-oss-20b", 49_152, 24),
    ],
)
def test_kv_bytes_per_token(name, kv_bytes, num_moe_layers):
    shape = load_model(name)
    assert shape.kv_bytes_per_token == kv_bytes
    assert shape.num_moe_layers == num_moe_layers


def test_n3_qwen25_72b_and_n5_mooncake_payload(tmp_path):
    config = LLAMA | {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    assert load_model(write(tmp_path, config)).kv_bytes_per_token == 327_680
    assert load_model("Llama-3.1-70B").kv_bytes(131_072) == 40 * 2**30


def test_windowed_layers_keep_their_window():
    shape = load_model("gpt-oss-120b")
    per_layer = 2 * 8 * 64 * 2
    assert shape.kv_bytes(1000) == 18 * per_layer * 1000 + 18 * per_layer * 128


def test_every_catalogue_entry_loads_and_has_a_source():
    assert {"Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-30B-A3B", "DeepSeek-V3"} <= set(catalog_names())
    for name in catalog_names():
        shape = load_model(name)
        assert shape.name == name
        assert shape.source


@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"])
def test_names_are_forgiving(name):
    assert load_model(name).name == "Llama-3.1-8B"


def test_alias():
    assert load_model("deepseek-ai/DeepSeek-R1").num_experts == 256


def test_plain_config(tmp_path):
    shape = load_model(write(tmp_path, LLAMA))
    assert (shape.head_dim, shape.num_kv_heads, shape.moe_layers, shape.dtype) == (8, 8, (), "bfloat16")
    assert load_model(str(tmp_path)).hidden == 64


def test_nested_text_config(tmp_path):
    shape = load_model(write(tmp_path, {"torch_dtype": "float16", "vision_config": {}, "text_config": LLAMA}))
    assert (shape.num_layers, shape.dtype) == (4, "float16")


@pytest.mark.parametrize(
    ("extra", "moe_layers"),
    [
        ({"n_routed_experts": 8, "first_k_dense_replace": 1}, (1, 2, 3)),
        ({"num_experts": 8, "decoder_sparse_step": 2}, (1, 3)),
        ({"num_experts": 8, "mlp_only_layers": [0, 2]}, (1, 3)),
        ({"num_local_experts": 8}, (0, 1, 2, 3)),
        ({"num_local_experts": 8, "interleave_moe_layer_step": 2}, (1, 3)),
        ({"n_routed_experts": 8, "moe_layer_freq": [0, 1, 1, 0]}, (1, 2)),
        ({"num_experts": 1}, ()),
    ],
    ids=["deepseek", "step", "mlp_only", "mixtral", "llama4", "list", "one expert is dense"],
)
def test_which_layers_have_experts(tmp_path, extra, moe_layers):
    config = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 32} | extra
    assert load_model(write(tmp_path, config)).moe_layers == moe_layers


def test_linear_attention_holds_no_growing_cache(tmp_path):
    shape = load_model(write(tmp_path, LLAMA | {"full_attention_interval": 4}))
    assert shape.linear_layers == (0, 1, 2)
    assert shape.kv_bytes_per_token == 2 * 64 * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param({}, "lacks num_hidden_layers .* hidden_size .* vocab_size", id="empty"),
        pytest.param({"num_hidden_layers": 4}, "lacks hidden_size", id="no sizes"),
        pytest.param(LLAMA | {"num_experts": 8}, "lacks num_experts_per_tok", id="experts without top-k"),
        pytest.param(LLAMA | {"kv_lora_rank": 512}, "lacks qk_rope_head_dim", id="half an MLA"),
        pytest.param(LLAMA | {"hidden_size": -64}, "hidden_size must be a whole number", id="negative"),
        pytest.param(LLAMA | {"hidden_size": "64"}, "hidden_size must be a whole number", id="text"),
        pytest.param(LLAMA | {"hidden_size": True}, "hidden_size must be a whole number", id="bool"),
        pytest.param(LLAMA | {"num_attention_heads": 0}, "must be positive", id="zero heads"),
        pytest.param(LLAMA | {"num_key_value_heads": 3}, "do not divide", id="heads"),
        pytest.param(LLAMA | {"num_experts": 4, "num_experts_per_tok": 8}, "top_k must be between", id="top-k"),
        pytest.param(LLAMA | {"torch_dtype": "int3"}, "unknown dtype", id="dtype"),
        pytest.param([], "not a JSON object", id="list"),
        pytest.param(
            LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": "2"},
            "decoder_sparse_step must be a whole number",
            id="step",
        ),
    ],
)
def test_bad_configurations_say_what_is_wrong(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load_model(write(tmp_path, config))


def test_unknown_names_list_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"unknown model: 'gpt-9'; allowed: .*Llama-3.1-8B"):
        load_model("gpt-9")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable JSON"):
        load_model(str(tmp_path))
