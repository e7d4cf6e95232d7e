"""Which layers have experts, a window, linear attention or an index, in the words of each family."""

import pytest

from crosstraffic.patterns.layer_kinds import attention_layers, compress_ratios, indexer_layers, moe_layers


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"first_k_dense_replace": 1}, (1, 2, 3)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,)),
        ({"first_k_dense_replace": 4}, ()),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, (1, 3)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
        ({"interleave_moe_layer_step": 2}, (1, 3)),
        ({"moe_layers": [3]}, (3,)),
        ({"moe_layer_start_index": 1, "moe_layer_interval": 2}, (1, 3)),
        ({"moe_layer_freq": [0, 1, 1, 0]}, (1, 2)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, (1, 2, 3)),
    ],
    ids=[
        "Mixtral",
        "DeepSeek",
        "DeepSeek freq",
        "all dense",
        "step",
        "mlp_only",
        "null",
        "Llama 4 step",
        "Llama 4 list",
        "ERNIE",
        "MiMo",
        "GLM-5.2",
    ],
)
def test_which_layers_have_experts(config, layers):
    assert moe_layers(config, 4) == layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mlp_only_layers": [999]}, "mlp_only_layers must be a whole number from 0 to 3: 999"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a whole number from 0 to 3: -1"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must be a whole number from 0 to 3: True"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers: 3"),
        ({"decoder_sparse_step": -2}, "decoder_sparse_step must be a whole number from 1 .*: -2"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1 .*: 0"),
        ({"decoder_sparse_step": "2"}, "decoder_sparse_step must be a whole number from 1 .*: '2'"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be a whole number from 1 .*: 0"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq must be a list with an entry for each of 4 layers: .* of 2"),
        ({"moe_layer_freq": [1, 1, 1, 2]}, "moe_layer_freq must be a whole number from 0 to 1: 2"),
        ({"first_k_dense_replace": 5}, "first_k_dense_replace must be at most the 4 layers: 5"),
        ({"moe_layers": [4]}, "moe_layers must be a whole number from 0 to 3: 4"),
        ({"mlp_layer_types": "sparse"}, "mlp_layer_types must be a list"),
    ],
)
def test_layers_with_experts_that_cannot_be(config, message):
    with pytest.raises(ValueError, match=message):
        moe_layers(config, 4)


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (None, (), ())),
        ({"sliding_window": None}, (None, (), ())),
        ({"sliding_window": 4096}, (4096, (0, 1, 2, 3, 4, 5), ())),
        ({"sliding_window": 4096, "use_sliding_window": False}, (None, (), ())),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, (64, (4, 5), ())),
        ({"sliding_window": 128, "layer_types": [SLIDING, FULL] * 3}, (128, (0, 2, 4), ())),
        ({"sliding_window": 128, "layer_types": [FULL] * 6}, (None, (), ())),
        ({"layer_types": ["chunked_attention", FULL] * 3}, (None, (), ())),
        ({"layer_types": ([LINEAR] * 2 + [FULL]) * 2}, (None, (), (0, 1, 3, 4))),
        ({"full_attention_interval": 3}, (None, (), (0, 1, 3, 4))),
        ({"sliding_window": 512, "sliding_window_pattern": 3}, (512, (0, 1, 3, 4), ())),
        ({"sliding_window": 512, "sliding_window_pattern": "LLG"}, (512, (0, 1, 3, 4), ())),
        ({"sliding_window": 512, "model_type": "gemma3_text"}, (512, (0, 1, 2, 3, 4), ())),
        ({"sliding_window": 512, "model_type": "gemma2"}, (512, (0, 2, 4), ())),
        ({"linear_attn_config": {"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6]}}, (None, (), (0, 1, 3, 4))),
        ({"sliding_window": 128, "compress_ratios": [0, 0, 4, 128, 4, 128, 0]}, (128, (), ())),
    ],
    ids=[
        "Llama",
        "Mixtral",
        "Mistral",
        "Qwen2.5",
        "Qwen2 windowed",
        "gpt-oss",
        "all full",
        "Llama 4",
        "Qwen3-Next types",
        "Qwen3-Next",
        "Gemma 3 pattern",
        "EXAONE 4",
        "Gemma 3",
        "Gemma 2",
        "Kimi Linear",
        "DeepSeek-V4",
    ],
)
def test_windows_and_linear_attention(config, expected):
    assert attention_layers(config, 6) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["mamba"] * 6}, "layer_types has mamba; allowed: full_attention"),
        ({"layer_types": [[1]] * 6}, r"layer_types has \[1\]"),
        ({"layer_types": [FULL]}, "layer_types must be a list with an entry for each of 6 layers"),
        ({"layer_types": [SLIDING] * 6}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window must be a whole number from 1"),
        ({"sliding_window": 8, "use_sliding_window": "yes"}, "use_sliding_window must be true or false: 'yes'"),
        ({"sliding_window": 8, "sliding_window_pattern": "XY"}, "sliding_window_pattern must be a whole number"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a whole number from 1"),
        ({"linear_attn_config": []}, "linear_attn_config must be an object"),
        ({"linear_attn_config": {"kda_layers": [0]}}, "kda_layers must be a whole number from 1 to 6: 0"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "must name each of 6 layers once"),
    ],
)
def test_kinds_of_attention_that_cannot_be(config, message):
    with pytest.raises(ValueError, match=message):
        attention_layers(config, 6)


def test_compress_ratios_of_the_layers_alone():
    assert compress_ratios({}, 3) == ()
    assert compress_ratios({"compress_ratios": [0, 4, 128, 0]}, 3) == (0, 4, 128)
    assert compress_ratios({"compress_ratios": [1, 4, 128]}, 3) == (0, 4, 128)
    for wrong in ([4, 4], [4, 4, 8], [4, 4, True], 4):
        with pytest.raises(ValueError, match="compress_ratios must be"):
            compress_ratios({"compress_ratios": wrong}, 3)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, tuple(range(8))),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6)),
        ({"index_topk_freq": 2}, (0, 1, 3, 5, 7)),
        ({"index_topk_pattern": "FSFSFSFS"}, (0, 2, 4, 6)),
        ({"indexer_types": ["full", "shared"] * 4}, (0, 2, 4, 6)),
        ({"compress_ratios": [128, 4] * 4}, (1, 3, 5, 7)),
    ],
    ids=["DeepSeek-V3.2", "GLM-5.2", "offset of 2", "pattern", "types", "DeepSeek-V4"],
)
def test_layers_with_an_index_of_their_own(config, layers):
    assert indexer_layers(config, 8) == layers


def test_glm_52_says_the_same_twice():
    """Its configuration has both the rule and the list."""
    kinds = ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3
    by_list = indexer_layers({"indexer_types": kinds}, 78)
    assert by_list == indexer_layers({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 78)
    assert len(by_list) == 21


@pytest.mark.parametrize("pattern", ["FS", 7, ["F"]])
def test_index_patterns_that_are_too_short(pattern):
    with pytest.raises(ValueError, match="index_topk_pattern must be a list"):
        indexer_layers({"index_topk_pattern": pattern}, 8)
