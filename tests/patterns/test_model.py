"""Model shapes: every model of the catalogue against its published sizes, and models by name."""

import json

import pytest

from crosstraffic.patterns.model import ModelShape, catalog_names, load_model

# name, L, H, Hq, K (None: MLA), d (None: MLA), width of a dense MLP (0: none), of an expert, (E, top-k, shared),
# layers with experts, vocabulary, bytes of a token's KV (None: not linear in tokens)
ROWS = [
    ("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 0, (0, 0, 0), 0, 128256, 131_072),
    ("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 0, (0, 0, 0), 0, 128256, 327_680),
    ("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 0, (0, 0, 0), 0, 128256, 516_096),
    ("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 0, (0, 0, 0), 0, 151936, 147_456),
    ("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 0, (0, 0, 0), 0, 151936, 262_144),
    ("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 0, 768, (128, 8, 0), 48, 151936, 98_304),
    ("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 0, 1536, (128, 8, 0), 94, 151936, 192_512),
    ("Mixtral-8x7B", 32, 4096, 32, 8, 128, 0, 14336, (8, 2, 0), 32, 32000, 131_072),
    ("DeepSeek-V3", 61, 7168, 128, None, None, 18432, 2048, (256, 8, 1), 58, 129280, 70_272),
    ("DeepSeek-V3.2", 61, 7168, 128, None, None, 18432, 2048, (256, 8, 1), 58, 129280, 70_272),
    ("DeepSeek-V4-Flash", 43, 4096, 64, 1, 512, 0, 2048, (256, 6, 1), 43, 129280, None),
    ("DeepSeek-V4-Pro", 61, 7168, 128, 1, 512, 0, 3072, (384, 6, 1), 61, 129280, None),
    ("Kimi-K2", 61, 7168, 64, None, None, 18432, 2048, (384, 8, 1), 60, 163840, 70_272),
    ("GLM-4.5", 92, 5120, 96, 8, 128, 12288, 1536, (160, 8, 1), 89, 151552, 376_832),
    ("gpt-oss-120b", 36, 2880, 64, 8, 64, 0, 2880, (128, 4, 0), 36, 201088, 73_728),
    ("gpt-oss-20b", 24, 2880, 64, 8, 64, 0, 2880, (32, 4, 0), 24, 201088, 49_152),
    ("GLM-5", 78, 6144, 64, None, None, 12288, 2048, (256, 8, 1), 75, 154880, 89_856),
    ("Qwen3.5-397B-A17B", 60, 4096, 32, 2, 256, 0, 1024, (512, 10, 1), 60, 248320, 30_720),
    ("MiniMax-M2.5", 62, 3072, 48, 8, 128, 0, 1536, (256, 8, 0), 62, 200064, 253_952),
    ("Llama-4-Maverick", 48, 5120, 40, 8, 128, 16384, 8192, (128, 1, 1), 24, 202048, 196_608),
    ("Kimi-K3", 93, 7168, 96, None, None, 33792, 3072, (896, 16, 2), 92, 163840, 27_648),
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_sizes_of_the_catalogue(row):
    name, layers, hidden, heads, kv_heads, head_dim, dense, width, experts, moe_layers, vocab, kv_bytes = row
    shape = load_model(name)
    assert (shape.num_layers, shape.hidden, shape.num_heads, shape.vocab) == (layers, hidden, heads, vocab)
    assert (shape.intermediate, shape.moe_intermediate, shape.num_moe_layers) == (dense, width, moe_layers)
    assert (shape.num_experts, shape.top_k, shape.num_shared_experts) == experts
    assert shape.dtype == "bfloat16"
    if kv_heads is None:
        assert shape.mla is not None
        assert shape.kv_heads_stored == 1
    else:
        assert (shape.num_kv_heads, shape.head_dim) == (kv_heads, head_dim)
    if kv_bytes is not None:
        assert shape.kv_bytes_per_token == kv_bytes


def test_the_catalogue_is_the_table_and_says_its_sources():
    assert set(catalog_names()) == {row[0] for row in ROWS}
    for name in catalog_names():
        shape = load_model(name)
        assert shape.name == name
        assert "huggingface.co/" in shape.source


# q_lora, kv_lora, rope, nope, v
MLA_ROWS = [
    ("DeepSeek-V3", (1536, 512, 64, 128, 128)),
    ("DeepSeek-V3.2", (1536, 512, 64, 128, 128)),
    ("Kimi-K2", (1536, 512, 64, 128, 128)),
    ("Kimi-K3", (1536, 512, 64, 128, 128)),
    ("GLM-5", (2048, 512, 64, 192, 256)),
    ("DeepSeek-V4-Flash", (1024, 448, 64, 448, 512)),
    ("DeepSeek-V4-Pro", (1536, 448, 64, 448, 512)),
]


@pytest.mark.parametrize(("name", "ranks"), MLA_ROWS, ids=[name for name, _ in MLA_ROWS])
def test_latent_attention(name, ranks):
    mla = load_model(name).mla
    assert mla is not None
    found = (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim, mla.qk_nope_head_dim, mla.v_head_dim)
    assert found == ranks


@pytest.mark.parametrize(
    ("name", "heads", "dim", "top_k", "layers"),
    [
        ("DeepSeek-V3.2", 64, 128, 2048, 61),
        ("GLM-5", 32, 128, 2048, 78),
        ("DeepSeek-V4-Flash", 64, 128, 512, 21),
        ("DeepSeek-V4-Pro", 64, 128, 1024, 30),
    ],
)
def test_indexers(name, heads, dim, top_k, layers):
    shape = load_model(name)
    assert shape.indexer is not None
    assert (shape.indexer.num_heads, shape.indexer.head_dim, shape.indexer.top_k) == (heads, dim, top_k)
    assert len(shape.indexer_layers) == layers


@pytest.mark.parametrize(
    ("name", "counts"), [("DeepSeek-V4-Flash", {4: 21, 128: 20, 0: 2}), ("DeepSeek-V4-Pro", {4: 30, 128: 31})]
)
def test_compression_of_deepseek_v4(name, counts):
    """The 44 and 62 entries of the configurations have one more 0: that of the MTP layer."""
    shape = load_model(name)
    assert {ratio: shape.compress_ratios.count(ratio) for ratio in set(shape.compress_ratios)} == counts
    assert (shape.sliding_window, shape.residual_streams, shape.num_mtp_layers) == (128, 4, 1)


def test_first_dense_layers_routing_groups_and_mtp():
    firsts = {"DeepSeek-V3": 3, "DeepSeek-V3.2": 3, "Kimi-K2": 1, "Kimi-K3": 1, "GLM-4.5": 3, "GLM-5": 3}
    assert {name: load_model(name).moe_layers[0] for name in firsts} == firsts
    groups = {name: (load_model(name).num_expert_groups, load_model(name).topk_groups) for name in catalog_names()}
    limited = {name for name, pair in groups.items() if pair != (1, 1)}
    assert limited == {"DeepSeek-V3", "DeepSeek-V3.2"}
    assert groups["DeepSeek-V3"] == (8, 4)
    mtp = {name: load_model(name).num_mtp_layers for name in ("DeepSeek-V3", "Kimi-K2", "Qwen3.5-397B-A17B")}
    assert mtp == {"DeepSeek-V3": 1, "Kimi-K2": 0, "Qwen3.5-397B-A17B": 1}


def test_layers_that_differ():
    assert load_model("gpt-oss-20b").sliding_layers == tuple(range(0, 24, 2))
    assert load_model("Llama-4-Maverick").moe_layers == tuple(range(1, 48, 2))
    qwen, kimi = load_model("Qwen3.5-397B-A17B"), load_model("Kimi-K3")
    assert [layer for layer in range(60) if layer not in qwen.linear_layers] == list(range(3, 60, 4))
    assert [layer for layer in range(93) if layer not in kimi.linear_layers] == [*range(3, 92, 4), 92]


def test_latent_moe_and_block_residuals_of_kimi_k3():
    shape = load_model("Kimi-K3")
    assert (shape.expert_row, shape.routed_hidden, shape.residual_block_layers) == (3584, 3584, 12)
    assert load_model("Kimi-K2").expert_row == 7168


def test_formats_of_checkpoints():
    found = {name: (load_model(name).weight_dtype, load_model(name).expert_dtype) for name in catalog_names()}
    assert found["DeepSeek-V3"] == found["Kimi-K2"] == found["MiniMax-M2.5"] == ("float8_e4m3", None)
    assert found["gpt-oss-120b"] == found["Kimi-K3"] == ("mxfp4", None)
    assert found["DeepSeek-V4-Pro"] == ("float8_e4m3", "mxfp4")
    assert found["Llama-3.1-8B"] == found["Qwen3-235B-A22B"] == (None, None)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"])
def test_names_are_forgiving(name):
    assert load_model(name).name == "Llama-3.1-8B"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("moonshotai/Kimi-K2-Instruct", "Kimi-K2"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "Llama-4-Maverick"),
    ],
)
def test_aliases(alias, name):
    assert load_model(alias).name == name


def test_a_file_or_its_folder(tmp_path):
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load_model(str(path)).hidden == load_model(str(tmp_path)).hidden == 64
    assert load_model(str(path)).name == tmp_path.name


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": ' + "9" * 5000 + "}", "[" * 100_000])
def test_files_that_are_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="not a"):
        load_model(str(tmp_path))


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"unknown model: 'gpt-9'; allowed: .*Kimi-K3.*Llama-3.1-8B"):
        load_model("gpt-9")


SMALL = {
    "name": "small",
    "num_layers": 2,
    "hidden": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "intermediate": 8,
    "vocab": 16,
    "dtype": "bfloat16",
    "source": "test",
}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hidden": 0}, "hidden must be positive: 0"),
        ({"num_kv_heads": 3}, "4 query heads do not divide over 3 KV heads"),
        ({"moe_layers": (0,), "num_experts": 4, "top_k": 5}, "top_k must be between 1 and 4 experts: 5"),
        ({"moe_layers": (2,), "num_experts": 4, "top_k": 1}, "moe_layers must be layers from 0 to 1: 2"),
        ({"moe_layers": (0,), "num_experts": 4, "top_k": 1, "num_expert_groups": 3}, "4 experts .* over 3 groups"),
        ({"topk_groups": 2}, "topk_group must be between 1 and 1 groups: 2"),
        ({"compress_ratios": (4,)}, "compress_ratios must be one for each of 2 layers: 1"),
        ({"dtype": "int3"}, "unknown dtype: 'int3'"),
    ],
)
def test_shapes_that_cannot_be(extra, message):
    with pytest.raises(ValueError, match=message):
        ModelShape(**(SMALL | extra))
