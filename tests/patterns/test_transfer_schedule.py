"""Schedules of a handoff: how each connector does it, calls that move all bytes, and times against published ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.handoff import handoff, handoff_step
from crosstraffic.patterns.kv_cache import conv_bytes, request_bytes, state_bytes
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.transfer_schedule import (
    CONNECTORS,
    demand_bytes_per_s,
    even_runs,
    exposed_s,
    num_calls,
    transfer_plan,
    transfer_s,
)
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

LLAMA = load_model("Llama-3.1-70B")


def moved(prefill=8, decode=8, framework="vllm", shape=LLAMA, **work):
    layouts = Layout(tp=prefill), Layout(tp=decode)
    sizes = [world_size(layout, framework) for layout in layouts]
    return handoff(
        shape, *layouts, Workload(phase="handoff", **work), prefill_ranks=range(sizes[0]),
        decode_ranks=range(sizes[0], sum(sizes)), framework=framework,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "connector", "schedule", "direction"),
    [
        ("vllm", None, "request", "pull"),
        ("vllm", "nixl_push", "request", "push"),
        ("vllm", "mooncake", "request", "push"),
        ("sglang", None, "chunk", "push"),
        ("sglang", "nixl", "chunk", "push"),
        ("megatron", None, "request", "pull"),
        ("megatron", "nccl", "request", "push"),
    ],
)
def test_each_connector_has_its_own_way(framework, connector, schedule, direction):
    plan = transfer_plan(framework, Workload(phase="handoff", kv_connector=connector))
    assert (plan.schedule, plan.direction, plan.is_asked) == (schedule, direction, False)


def test_a_workload_may_ask_for_another_way():
    plan = transfer_plan("vllm", Workload(phase="handoff", kv_schedule="layer", kv_direction="push"))
    assert (plan.connector, plan.schedule, plan.direction, plan.is_asked) == ("nixl", "layer", "push", True)
    with pytest.raises(ValueError, match="unknown direction of the handoff: 'sideways'; allowed: pull, push"):
        Workload(phase="handoff", kv_direction="sideways")


def test_a_connector_that_an_engine_has_not_is_refused():
    with pytest.raises(ValueError, match="sglang has no KV connector 'nixl_push'; allowed: mooncake, nixl"):
        transfer_plan("sglang", Workload(phase="handoff", kv_connector="nixl_push"))
    assert {"vllm", "sglang", "megatron", "tensorrt_llm"} == set(CONNECTORS)


@pytest.mark.parametrize(("schedule", "calls"), [("request", 1), ("layer", 80), ("chunk", 3)])
def test_a_schedule_cuts_the_handoff_and_loses_nothing(schedule, calls):
    whole = moved(8, 4, context=20_000)
    found = moved(8, 4, context=20_000, kv_schedule=schedule)
    (stream,) = found.streams
    assert stream.calls_per_step == calls == num_calls(schedule, num_layers=80, num_tokens=20_000, chunk_tokens=8192)
    step = handoff_step(LLAMA, found.streams, None, found.runs)
    assert sum(block.repeat * task.payload_bytes for block in step.lanes[0] for task in block.tasks) == int(
        whole.matrix.sum(axis=1).max()
    )
    assert np.array_equal(found.matrix, whole.matrix)
    assert {stream.payload_bytes for stream in found.streams} == {max(size for _, size in found.runs)}


def test_a_chunk_is_what_its_tokens_leave_and_the_last_one_has_the_rest():
    found = moved(8, 4, "sglang", context=20_000, kv_schedule="chunk")
    token = 80 * 2 * 128 * 2
    assert found.runs == ((2, 8192 * token), (1, (20_000 - 2 * 8192) * token))
    assert found.streams[0].payload_bytes == 8192 * token
    assert found.streams[0].matrix()[:2].sum(axis=1).tolist() == [8192 * token] * 2


def test_the_prompts_of_a_batch_fill_chunks_together():
    assert moved(context=3000, batch=5, kv_schedule="chunk").streams[0].calls_per_step == 2


def test_windows_come_with_the_last_chunk():
    shape = load_model("gpt-oss-20b")
    found = moved(1, 1, shape=shape, context=10_000, kv_schedule="chunk", chunk_tokens=4096)
    token = 8 * 64 * 2 * 2
    assert found.runs == ((2, 12 * 4096 * token), (1, 12 * (10_000 - 2 * 4096) * token + 12 * 128 * token))


def test_states_come_with_the_last_chunk_and_layer_by_layer():
    shape = load_model("Qwen3.5-397B-A17B")
    whole = request_bytes(shape, 10_000, "bfloat16")
    chunks = moved(1, 1, shape=shape, context=10_000, kv_schedule="chunk", chunk_tokens=5000)
    assert chunks.runs == ((1, 5000 * 30_720), (1, whole - 5000 * 30_720))
    layers = moved(1, 1, shape=shape, context=10_000, kv_schedule="layer")
    state = state_bytes(shape, 0) + conv_bytes(shape, 0)
    assert layers.runs[:2] == ((3, state), (1, 10_000 * 2048))
    assert sum(calls * size for calls, size in layers.runs) == whole
    assert layers.streams[0].payload_bytes == max(state, 10_000 * 2048)


def test_a_rank_of_a_stage_sends_the_layers_of_its_stage():
    sizes = [world_size(layout, "vllm") for layout in (Layout(tp=4, pp=3), Layout(tp=4))]
    found = handoff(
        LLAMA, Layout(tp=4, pp=3), Layout(tp=4), Workload(phase="handoff", context=100, kv_schedule="layer"),
        prefill_ranks=range(sizes[0]), decode_ranks=range(sizes[0], sum(sizes)), framework="vllm",
    )  # fmt: skip
    assert found.runs == ((27, 100 * 2 * 2 * 128 * 2),)
    assert found.streams[0].payload_bytes * 27 == int(found.matrix.sum(axis=1).max())


@settings(max_examples=50, deadline=None)
@given(
    model=st.sampled_from(["DeepSeek-V4-Flash", "gpt-oss-20b", "Qwen3.5-397B-A17B", "Kimi-K3", "Llama-3.1-8B"]),
    degrees=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    schedule=st.sampled_from(["request", "layer", "chunk"]),
    context=st.integers(1, 3000),
    batch=st.integers(1, 3),
    chunk=st.integers(1, 1000),
)
def test_calls_of_the_busiest_rank_are_all_that_it_sends(model, degrees, schedule, context, batch, chunk):
    found = moved(*degrees, shape=load_model(model), context=context, batch=batch, kv_schedule=schedule,
                  chunk_tokens=chunk, block_tokens=1)  # fmt: skip
    assert sum(calls * size for calls, size in found.runs) == int(found.matrix.sum(axis=1).max())
    assert found.streams[0].payload_bytes == wire_bytes_per_rank(found.streams[0])
    assert found.streams[0].calls_per_step == sum(calls for calls, _ in found.runs)


def test_without_a_schedule_the_step_is_layer_by_layer():
    found = moved(context=1000)
    assert found.runs is None
    assert found.streams[0].calls_per_step == 1
    step = handoff_step(LLAMA, found.streams, None)
    assert sum(block.repeat for block in step.lanes[0]) == 80


def test_n5_forty_gibibytes():
    found = moved(1, 1, context=131_072)
    assert found.matrix.tolist() == [[40 * 2**30]]
    assert transfer_s(40 * 2**30, 87e9) == pytest.approx(0.494, abs=5e-4)
    assert transfer_s(40 * 2**30, 190e9) == pytest.approx(0.226, abs=5e-4)


def test_layers_hide_behind_the_prefill_and_a_whole_request_does_not():
    assert exposed_s(1000, 100.0, calls=1, prefill_s=100.0) == 10.0
    assert exposed_s(1000, 100.0, calls=10, prefill_s=100.0) == pytest.approx(1.0)
    assert exposed_s(1000, 100.0, calls=10, prefill_s=4.0) == pytest.approx(7.0)
    assert demand_bytes_per_s(73_700, 70_272) == pytest.approx(5.2e9, rel=0.01)
    for calls in (0, -1):
        with pytest.raises(ValueError, match="calls must be from 1"):
            exposed_s(1, 1.0, calls=calls, prefill_s=0.0)
    with pytest.raises(ValueError, match="bytes_per_s must be positive"):
        transfer_s(1, 0.0)
    assert even_runs(0, 3) == ()
