import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.stages import interleaved_stages, model_chunks


@pytest.mark.parametrize(
    ("framework", "num_layers", "pp", "expected"),
    [
        pytest.param("vllm", 61, 4, [15, 15, 16, 15], id="vllm one left"),
        pytest.param("vllm", 62, 4, [15, 16, 16, 15], id="vllm two left: the middle"),
        pytest.param("vllm", 63, 4, [16, 16, 16, 15], id="vllm three left: not the last"),
        pytest.param("vllm", 61, 2, [31, 30], id="vllm two stages"),
        pytest.param("sglang", 61, 4, [15, 15, 15, 16], id="sglang one left: the last"),
        pytest.param("sglang", 62, 4, [15, 15, 16, 16], id="sglang two left"),
        pytest.param("tensorrt_llm", 62, 4, [16, 16, 15, 15], id="tensorrt_llm: the first"),
        pytest.param("megatron", 64, 4, [16, 16, 16, 16], id="megatron even"),
    ],
)
def test_what_does_not_divide(framework, num_layers, pp, expected):
    assert [len(stage) for stage in model_chunks(num_layers, Layout(pp=pp), framework)] == expected


@given(framework=st.sampled_from(["vllm", "sglang", "tensorrt_llm"]), pp=st.integers(1, 13), more=st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_each_layer_is_on_one_stage(framework, pp, more):
    chunks = model_chunks(pp + more, Layout(pp=pp), framework)
    assert [layer for chunk in chunks for layer in chunk] == list(range(pp + more))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1


def test_interleaved_chunks_as_in_megatron_cores_example():
    chunks = model_chunks(16, Layout(pp=4), "megatron", virtual_stages=2)
    numbered_from_one = [[layer + 1 for layer in stage] for stage in interleaved_stages(chunks, 4)]
    assert numbered_from_one == [[1, 2, 9, 10], [3, 4, 11, 12], [5, 6, 13, 14], [7, 8, 15, 16]]


@pytest.mark.parametrize("framework", ["vllm", "sglang", "tensorrt_llm"])
def test_a_partition_is_taken_as_it_is(framework):
    chunks = model_chunks(10, Layout(pp=3), framework, partition=(2, 5, 3))
    assert chunks == (range(2), range(2, 7), range(7, 10))


@pytest.mark.parametrize(
    ("framework", "pp", "options", "message"),
    [
        ("vllm", 33, {}, r"more pipeline stages \(33\) than layers \(32\)"),
        ("megatron", 3, {}, "should be divisible by the pipeline-model-parallel size: 32 layers, pp=3"),
        ("megatron", 4, {"virtual_stages": 3}, "32 layers, pp=4 x 3 chunks"),
        ("megatron", 1, {"virtual_stages": 2}, "greater than 1 with interleaved schedule"),
        ("vllm", 4, {"virtual_stages": 2}, "vllm does not interleave"),
        ("vllm", 4, {"partition": (16, 16)}, r"len\(partitions\)=2 does not match pp_size=4."),
        ("vllm", 2, {"partition": (16, 15)}, r"sum\(partitions\)=31 does not match num_hidden_layers=32."),
        ("vllm", 2, {"partition": (32, 0)}, "a stage needs a layer"),
        ("megatron", 2, {"partition": (16, 16)}, "layout string"),
    ],
)
def test_what_engines_refuse(framework, pp, options, message):
    with pytest.raises(ValueError, match=message):
        model_chunks(32, Layout(pp=pp), framework, **options)
