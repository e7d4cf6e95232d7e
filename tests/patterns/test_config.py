"""Configurations as other people write them: families, nesting, and what is wrong with one."""

import math

import pytest

from crosstraffic.patterns.config import model_from_config

DENSE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
EXPERTS = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
COMPRESSED = EXPERTS | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 16,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
}


def read(config):
    return model_from_config(config, name="it", source="test")


def test_plain_config():
    shape = read(DENSE)
    assert (shape.head_dim, shape.num_kv_heads, shape.moe_layers, shape.dtype) == (8, 8, (), "bfloat16")
    assert (shape.intermediate, shape.moe_intermediate, shape.num_experts, shape.top_k) == (128, 0, 0, 0)
    assert (shape.tied_embeddings, shape.gated_mlp, shape.weight_dtype) == (False, True, None)


@pytest.mark.parametrize(
    ("nested", "dtype"),
    [
        ({"torch_dtype": "float16", "vision_config": {"hidden_size": 1}, "text_config": DENSE}, "float16"),
        ({"dtype": "float16", "llm_config": DENSE}, "float16"),
        ({"language_config": DENSE | {"torch_dtype": "torch.float32"}, "torch_dtype": "float16"}, "float32"),
        ({"thinker_config": {"text_config": DENSE, "audio_config": {}}}, "bfloat16"),
        ({"text_config": {"text_config": {"language_config": DENSE}}, "dtype": "float16"}, "float16"),
        (DENSE | {"text_config": {}}, "bfloat16"),
        (DENSE | {"text_config": {"model_type": "clip_text_model"}}, "bfloat16"),
        (DENSE | {"num_hidden_layers": 9, "text_config": DENSE}, "bfloat16"),
    ],
    ids=["text", "llm", "inner dtype first", "two levels", "three levels", "empty", "nothing in it", "inner first"],
)
def test_nested_language_models(nested, dtype):
    shape = read(nested)
    assert (shape.num_layers, shape.hidden, shape.dtype) == (4, 64, dtype)


def test_what_only_the_outer_part_says():
    outer = {
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8"},
        "architectures": ["OuterForConditionalGeneration"],
        "text_config": DENSE,
    }
    shape = read(outer)
    assert (shape.tied_embeddings, shape.weight_dtype) == (True, "float8_e4m3")
    assert not read(outer | {"text_config": DENSE | {"tie_word_embeddings": False}}).tied_embeddings
    with pytest.raises(ValueError, match="architecture OuterForConditionalGeneration"):
        read({"architectures": ["OuterForConditionalGeneration"], "text_config": {"num_hidden_layers": 4}})


def test_other_names_of_the_sizes():
    shape = read({"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 128, "vocab_size": 50257, "model_type": "gpt2"})
    assert (shape.num_layers, shape.hidden, shape.num_kv_heads, shape.intermediate) == (2, 32, 4, 128)
    assert (shape.gated_mlp, shape.tied_embeddings) == (False, True)


def test_llama_4_has_one_shared_expert_and_two_widths():
    config = EXPERTS | {"model_type": "llama4_text", "interleave_moe_layer_step": 2, "intermediate_size_mlp": 256}
    del config["moe_intermediate_size"]
    shape = read(config)
    assert (shape.moe_layers, shape.num_shared_experts, shape.shared_intermediate) == ((1, 3), 1, 128)
    assert (shape.intermediate, shape.moe_intermediate) == (256, 128)


@pytest.mark.parametrize(
    ("extra", "number", "width"),
    [
        ({}, 0, 0),
        ({"n_shared_experts": 2}, 2, 64),
        ({"n_shared_experts": None}, 0, 0),
        ({"shared_expert_intermediate_size": 48}, 1, 48),
        ({"shared_intermediate_size": 0}, 0, 0),
        ({"n_shared_experts": 2, "moe_shared_expert_intermediate_size": 100}, 2, 100),
    ],
    ids=["none", "DeepSeek", "null", "Qwen2-MoE", "MiniMax", "Nemotron"],
)
def test_shared_experts(extra, number, width):
    shape = read(EXPERTS | extra)
    assert (shape.num_shared_experts, shape.shared_intermediate) == (number, width)


@pytest.mark.parametrize(
    ("extra", "groups"),
    [
        ({}, (1, 1)),
        ({"n_group": 4, "topk_group": 2}, (4, 2)),
        ({"num_expert_group": 2, "topk_group": 1}, (2, 1)),
        ({"n_group": None}, (1, 1)),
    ],
)
def test_routing_groups(extra, groups):
    shape = read(EXPERTS | extra)
    assert (shape.num_expert_groups, shape.topk_groups) == groups


@pytest.mark.parametrize(
    ("extra", "layers"),
    [
        ({}, 0),
        ({"num_nextn_predict_layers": 1}, 1),
        ({"mtp_num_hidden_layers": 2}, 2),
        ({"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}, 3),
        ({"use_mtp": False, "num_mtp_modules": 3, "mtp_transformer_layers": 1}, 0),
    ],
    ids=["none", "DeepSeek", "Qwen3.5", "MiniMax", "MiniMax without"],
)
def test_mtp_layers(extra, layers):
    assert read(EXPERTS | extra).num_mtp_layers == layers


def test_latent_attention():
    shape = read(DENSE | MLA | {"q_lora_rank": None, "head_dim": 7})
    assert shape.mla is not None
    assert (shape.mla.q_lora_rank, shape.head_dim, shape.kv_bytes_per_token) == (None, 192, 4 * 576 * 2)


def test_compressed_attention():
    shape = read(COMPRESSED)
    assert (shape.compress_ratios, shape.indexer_layers, shape.sliding_layers) == ((0, 4, 128, 4), (1, 3), ())
    assert (shape.num_kv_heads, shape.kv_elements_per_head, shape.residual_streams) == (1, 512, 4)


def test_linear_attention_of_two_families():
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
    delta = read(DENSE | sizes | {"full_attention_interval": 4}).linear_attention
    assert delta is not None
    assert (delta.kind, delta.num_value_heads, delta.value_head_dim, delta.state_dtype) == ("gdn", 4, 16, "bfloat16")
    typed = read(DENSE | sizes | {"full_attention_interval": 4, "mamba_ssm_dtype": "float32"}).linear_attention
    assert typed is not None
    assert typed.state_dtype == "float32"
    kda = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 16}
    shape = read(DENSE | MLA | {"linear_attn_config": kda | {"short_conv_kernel_size": 4}})
    assert (shape.linear_layers, shape.kv_bytes_per_token) == ((0, 1, 2), 576 * 2)
    assert shape.linear_attention is not None
    assert (shape.linear_attention.kind, shape.linear_attention.state_dtype) == ("kda", "float32")
    with pytest.raises(ValueError, match="lacks short_conv_kernel_size"):
        read(DENSE | MLA | {"linear_attn_config": kda})


def test_linear_attention_holds_no_growing_cache():
    shape = read(DENSE | {"full_attention_interval": 4})
    assert shape.linear_layers == (0, 1, 2)
    assert shape.kv_bytes_per_token == 2 * 64 * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            {},
            r"it: the configuration \(architecture not named\) lacks num_hidden_layers \(or n_layer, .*hidden_size "
            r"\(or n_embd, d_model\), .*vocab_size",
            id="empty",
        ),
        pytest.param({"num_hidden_layers": 4}, "lacks hidden_size", id="no sizes"),
        pytest.param(
            {"architectures": ["MysteryForCausalLM"], "hidden_size": 4},
            r"architecture MysteryForCausalLM\) lacks num_hidden_layers \(or n_layer, num_layers, n_layers\), num_att",
            id="unknown architecture",
        ),
        pytest.param({"text_config": "text"}, "lacks num_hidden_layers", id="nested text"),
        pytest.param(DENSE | {"num_experts": 8}, "lacks num_experts_per_tok .or experts_per_token", id="no top-k"),
        pytest.param(DENSE | {"kv_lora_rank": 512}, "lacks qk_rope_head_dim, qk_nope_head_dim, v_head", id="half MLA"),
        pytest.param(COMPRESSED | {"o_groups": None}, "lacks o_groups", id="half of V4"),
        pytest.param(
            COMPRESSED | {"index_topk": 512, "index_n_heads": None}, "lacks index_n_heads", id="half an index"
        ),
        pytest.param(COMPRESSED | {"qk_rope_head_dim": 512}, "less than head_dim 512: 512", id="all rope"),
        pytest.param(
            {key: value for key, value in EXPERTS.items() if key != "intermediate_size"} | {"mlp_only_layers": [0]},
            "lacks intermediate_size .* layers without experts have it",
            id="dense layer without a width",
        ),
        pytest.param(
            DENSE | {"torch_dtype": "int3"}, "torch_dtype: unknown dtype: 'int3'; allowed: float32", id="dtype"
        ),
        pytest.param(DENSE | {"dtype": ["bfloat16"]}, "dtype: unknown dtype", id="dtype list"),
        pytest.param(DENSE | {"num_key_value_heads": 3}, "8 query heads do not divide over 3 KV heads", id="KV heads"),
        pytest.param(EXPERTS | {"num_experts_per_tok": 9}, "top_k must be between 1 and 8 experts: 9", id="top-k"),
        pytest.param(EXPERTS | {"n_group": 3}, "8 experts do not divide over 3 groups", id="groups"),
        pytest.param(EXPERTS | {"n_group": 2, "topk_group": 3}, "topk_group must be between 1 and 2", id="top groups"),
        pytest.param(EXPERTS | {"num_experts_per_tok": [2, 3]}, "a list of one that repeats", id="list"),
        pytest.param(DENSE | {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false: 1", id="switch"),
        pytest.param(DENSE | {"mamba_d_state": 128}, "has mamba_d_state: Mamba layers are not described", id="Mamba"),
        pytest.param(DENSE | {"global_head_dim": 512}, "KV heads that differ by layer are not described", id="Gemma 4"),
        pytest.param(DENSE | {"attn_type_list": [0, 1, 1, 1]}, "lightning attention is not described", id="lightning"),
    ],
)
def test_bad_configurations_say_what_is_wrong(config, message):
    with pytest.raises(ValueError, match=message):
        read(config)


WRONG = [True, "64", -1, 1.5, math.nan, math.inf, 10**9, {}]


@pytest.mark.parametrize("value", WRONG, ids=[str(value) for value in WRONG])
@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "intermediate_size",
        "first_k_dense_replace",
        "decoder_sparse_step",
        "num_nextn_predict_layers",
        "n_shared_experts",
        "n_group",
        "routed_expert_hidden_size",
        "kv_lora_rank",
        "q_lora_rank",
        "sliding_window",
    ],
)
def test_wrong_values_are_refused_with_key_value_and_what_is_allowed(key, value):
    config = EXPERTS | MLA | {key: value}
    with pytest.raises(ValueError, match=rf"^it: {key} must be a whole number from \d+ to \d+: "):
        read(config)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_nothing_is_of_size_zero(key):
    with pytest.raises(ValueError, match=f"{key} must be a whole number from 1 to .*: 0"):
        read(DENSE | {key: 0})


def test_null_is_absent():
    config = DENSE | dict.fromkeys(("head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank", "num_experts"))
    assert read(config) == read(DENSE)


VISION = {"deepstack_visual_indexes": [8, 16, 24]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(DENSE, (False, 0), id="text"),
        pytest.param({**DENSE, "vision_config": None}, (False, 0), id="null"),
        pytest.param({**DENSE, "vision_config": {"depth": 32}}, (True, 0), id="beside the language model"),
        pytest.param({**DENSE, "mm_vision_tower": "a name"}, (True, 0), id="by name"),
        pytest.param({"text_config": DENSE}, (True, 0), id="a copy of the language part"),
        pytest.param({"text_config": DENSE, "vision_config": VISION}, (True, 3), id="deepstack"),
        pytest.param(
            {"thinker_config": {"text_config": DENSE, "audio_config": {}, "vision_config": VISION}},
            (True, 3),
            id="deep",
        ),
    ],
)
def test_encoders(config, expected):
    shape = read(config)
    assert (shape.has_encoder, shape.num_deepstack) == expected


def test_deepstack_must_be_a_list():
    with pytest.raises(ValueError, match="deepstack_visual_indexes must be a list of layers: 3"):
        read({"text_config": DENSE, "vision_config": {"deepstack_visual_indexes": 3}})
