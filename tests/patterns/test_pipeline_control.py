from dataclasses import replace

import pytest

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import control_streams, phase_streams
from crosstraffic.patterns.pipeline_control import model_runner
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.stream import stream_from_dict, stream_to_dict
from crosstraffic.patterns.workload import Workload


def control_of(model, layout, framework="vllm", **workload):
    found = control_streams(load_model(model), layout, Workload(**workload), framework)
    return {stream.name: stream for stream in found if stream.pattern == "pp"}


def test_token_ids_of_vllms_first_runner():
    ids = control_of("Llama-3.1-8B", Layout(tp=2, pp=2), phase="decode", batch=64)["pp.token_ids"]
    assert (ids.op, ids.dtype, ids.payload_bytes, ids.calls_per_step) == ("broadcast", "int32", 256, 1)
    assert ids.groups == ((2, 0), (3, 1))


@pytest.mark.parametrize(("drafts", "ids", "counts"), [(0, 512, 512), (3, 2048, 512)])
def test_token_ids_of_vllms_second_runner(drafts, ids, counts):
    found = control_of(
        "Llama-3.1-8B", Layout(pp=2), phase="decode", batch=64, num_speculative=drafts, model_runner="v2"
    )
    assert (found["pp.token_ids"].payload_bytes, found["pp.token_ids"].dtype) == (ids, "int64")
    assert (found["pp.token_counts"].payload_bytes, found["pp.token_counts"].dtype) == (counts, "int32")


def test_drafts_in_the_first_runner_go_by_way_of_the_scheduler():
    found = control_of("Llama-3.1-8B", Layout(pp=2), phase="decode", batch=64, num_speculative=1)
    assert set(found) == {"pp.metadata_size", "pp.metadata"}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("Llama-3.1-8B", {}, "v1"),
        ("DeepSeek-V3", {}, "v1"),
        ("DeepSeek-V4-Pro", {}, "v2"),
        ("Kimi-K3", {}, "v2"),
        ("DeepSeek-V4-Pro", {"model_runner": "v1"}, "v1"),
        ("DeepSeek-V4-Pro", {"sequence_parallel": True}, "v1"),
    ],
)
def test_which_runner_a_model_has(name, fields, expected):
    shape = replace(load_model("Llama-3.1-8B"), name=name)
    assert model_runner(make_setting(shape, Layout(tp=2, pp=2), Workload(phase="decode", **fields), "vllm")) == expected


def test_each_transfer_is_announced():
    found = control_of("Llama-3.1-8B", Layout(tp=2, pp=4), phase="prefill", tokens=64, num_micro_batches=8)
    assert found["pp.metadata_size"].payload_bytes == 8
    assert found["pp.metadata"].payload_bytes == 103 + 2 * 37
    assert {stream.calls_per_step for stream in found.values()} == {8}
    assert found["pp.metadata_size"].matrix().sum() == 3 * 8


@pytest.mark.parametrize(
    ("batch", "tp", "payload"), [pytest.param(64, 2, 128, id="sliced"), pytest.param(3, 2, 12, id="whole")]
)
def test_sglang_passes_tokens_around(batch, tp, payload):
    found = control_of("Llama-3.1-8B", Layout(tp=tp, pp=4), "sglang", phase="decode", batch=batch)
    assert (found["pp.token_ids"].op, found["pp.token_ids"].payload_bytes) == ("send_recv", payload)
    assert found["pp.token_ids"].matrix()[3, 0] == payload
    assert ("pp.token_ids_gather" in found) == (payload != 4 * batch)


@pytest.mark.parametrize("framework", ["vllm", "sglang", "megatron", "tensorrt_llm"])
def test_control_is_small_and_apart_from_data(framework):
    shape, layout, workload = load_model("Llama-3.1-8B"), Layout(tp=2, pp=2), Workload(phase="decode", batch=8)
    control = control_streams(shape, layout, workload, framework)
    assert bool(control) == (framework in ("vllm", "sglang"))
    assert not {stream.name for stream in control} & {s.name for s in phase_streams(shape, layout, workload, framework)}
    for stream in control:
        assert stream.role == "control"
        assert stream.payload_bytes < 1024
        assert stream_from_dict(stream_to_dict(stream)) == stream
    assert not control_of("Llama-3.1-8B", Layout(tp=2), framework, phase="decode", batch=8)
