"""Descriptors of a handoff against numbers that others published."""

import pytest

from crosstraffic.patterns.descriptors import num_regions, posting_s, registered_descriptors
from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.workload import Workload

LLAMA = load_model("Llama-3.1-70B")


def moved(prefill=8, decode=8, framework="vllm", shape=LLAMA, **work):
    layouts = Layout(tp=prefill), Layout(tp=decode)
    sizes = [world_size(layout, framework) for layout in layouts]
    return handoff(
        shape, *layouts, Workload(phase="handoff", **work), prefill_ranks=range(sizes[0]),
        decode_ranks=range(sizes[0], sum(sizes)), framework=framework,
    )  # fmt: skip


def test_n16_packed_pages():
    found = moved(context=8192)
    assert found.descriptors.count[0][0] == 40_960
    assert found.descriptors.bytes[0][0] == 8_192
    assert found.matrix.sum(axis=0).tolist() == [335_544_320] * 8


def test_n16_keys_and_values_apart():
    found = moved(context=1_888, kv_split=True)
    assert found.descriptors.count[0][0] == 18_880
    assert found.descriptors.bytes[0][0] == 4_096
    assert posting_s(18_880) == pytest.approx(0.046, rel=0.02)


def test_n16_96_descriptors_a_block():
    shape = load_model("Qwen3-30B-A3B")  # 48 layers, K and V apart: 96 a block
    found = moved(1, 1, shape=shape, context=16, kv_split=True)
    assert (found.descriptors.count[0][0], found.descriptors.bytes[0][0]) == (96, 16_384)
    assert found.matrix.sum() == 1_572_864


def test_n16_slices_of_sglang_where_tp_differs():
    found = moved(8, 4, "sglang", context=8192)
    assert found.descriptors.count[0][0] == 1_310_720
    assert found.descriptors.bytes[0][0] == 256


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_larger_pages_are_fewer_and_the_bytes_are_the_same(block, kv_dtype):
    found = moved(context=8192, block_tokens=block, kv_dtype=kv_dtype)
    pages = found.descriptors
    assert pages.count[0][0] * pages.bytes[0][0] == found.matrix[0, 0]
    assert pages.count[0][0] == 80 * 8192 // block


def test_pages_of_all_layers_are_one_piece():
    found = moved(context=8192, cross_layer_blocks=True)
    assert (found.descriptors.count[0][0], found.descriptors.bytes[0][0]) == (512, 80 * 8_192)
    assert num_regions(LLAMA, Layout(tp=8), "vllm", Workload(phase="handoff", cross_layer_blocks=True)) == 1


def test_pages_in_a_row_become_one_piece_with_mooncake():
    whole = moved(context=8192, kv_connector="mooncake")
    assert whole.descriptors.count[0][0] == 80
    in_fours = moved(context=8192, kv_connector="mooncake", contiguous_blocks=4)
    assert in_fours.descriptors.count[0][0] == 80 * 512 // 4


def test_what_a_rank_registers_is_regions_times_pages():
    asked = Workload(phase="handoff")
    assert registered_descriptors(LLAMA, Layout(tp=8), "vllm", asked, num_blocks=10_000) == 800_000
    assert registered_descriptors(LLAMA, Layout(tp=4, pp=2), "vllm", asked, num_blocks=10) == 400
    with pytest.raises(ValueError, match="num_blocks must be"):
        registered_descriptors(LLAMA, Layout(tp=8), "vllm", asked, num_blocks=0)


def test_who_posts_depends_on_who_moves():
    pulled, pushed = moved(8, 4, context=160), moved(8, 4, context=160, kv_connector="nixl_push")
    assert (pulled.plan.direction, pushed.plan.direction) == ("pull", "push")
    assert pulled.descriptors.max_count_per_poster == 2 * pushed.descriptors.max_count_per_poster == 2 * 800


@pytest.mark.parametrize(("work", "pages"), [({"context": 1000}, 9), ({"context": 100}, 7), ({"tokens": 40}, 3)])
def test_vllm_moves_one_page_more_of_a_window(work, pages):
    shape = load_model("gpt-oss-20b")
    tokens = work.get("tokens", work.get("context"))
    found = moved(1, 1, shape=shape, **work)
    assert found.descriptors.count == ((12 * pages + 12 * -(-tokens // 16),),)


def test_latents_and_index_keys_lie_in_regions_of_their_own():
    shape = load_model("DeepSeek-V3.2")
    found = moved(8, 4, shape=shape, context=64, block_tokens=64, kv_dtype="fp8_ds_mla")
    assert found.descriptors.count[0][0] == 2 * 61
    assert found.descriptors.bytes[0][0] == 64 * 656
    assert num_regions(shape, Layout(tp=8), "vllm", Workload(phase="handoff", kv_dtype="fp8_ds_mla")) == 122


def test_megatron_names_tokens_where_heads_are_cut_otherwise():
    same, other = moved(8, 8, "megatron", context=64), moved(8, 4, "megatron", context=64)
    assert (same.descriptors.count[0][0], same.descriptors.bytes[0][0]) == (2 * 80 * 4, 16 * 128 * 2)
    assert (other.descriptors.count[0][0], other.descriptors.bytes[0][0]) == (2 * 80 * 64, 128 * 2)


def test_sglang_names_runs_of_pages_chunk_by_chunk():
    found = moved(8, 8, "sglang", context=20_000, block_tokens=64)
    assert found.descriptors.count[0][0] == 2 * 80 * 3
    assert found.descriptors.bytes[0][0] == 8192 * 128 * 2
    single = moved(8, 8, "sglang", context=20_000, block_tokens=64, contiguous_blocks=1)
    assert single.descriptors.count[0][0] == 2 * 80 * 313


def test_a_state_is_four_pieces_a_layer_whatever_the_length():
    shape = load_model("Qwen3.5-397B-A17B")
    counts = [moved(2, 2, shape=shape, context=context).descriptors.count[0][0] for context in (16, 32)]
    assert counts == [45 * 4 + 15, 45 * 4 + 30]


@pytest.mark.parametrize(
    ("framework", "model", "message"),
    [("sglang", "Llama-3.1-70B", "cross_layer_blocks is vLLM's"), ("vllm", "gpt-oss-20b", "layers that all cache")],
)
def test_pages_of_all_layers_need_an_engine_and_layers_alike(framework, model, message):
    with pytest.raises(ValueError, match=message):
        moved(framework=framework, shape=load_model(model), cross_layer_blocks=True)
