from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.pipeline import sent_tensors
from crosstraffic.patterns.schedule import num_messages
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.wire import wire_matrix
from crosstraffic.patterns.workload import Workload


def several_streams(num_streams):
    return replace(load_model("DeepSeek-V3"), residual_streams=num_streams)


def streams_of(model, layout, framework="vllm", **workload):
    shape = load_model(model) if isinstance(model, str) else model
    return {stream.name: stream for stream in phase_streams(shape, layout, Workload(**workload), framework)}


@pytest.mark.parametrize(
    ("model", "layout", "framework", "work", "payload", "gathers"),
    [
        pytest.param(
            "DeepSeek-V3", Layout(pp=2), "vllm", {"phase": "prefill", "tokens": 8192}, 234_881_024, 0, id="N7 boundary"
        ),
        pytest.param(
            "DeepSeek-V3", Layout(tp=8, pp=2), "vllm", {"phase": "prefill", "tokens": 8192}, 29_360_128, 2, id="N7 tp=8"
        ),
        pytest.param(
            several_streams(4),
            Layout(pp=2),
            "vllm",
            {"phase": "prefill", "tokens": 8192},
            469_762_048,
            0,
            id="N7 four residual streams",
        ),
        pytest.param(
            several_streams(4),
            Layout(tp=8, pp=2),
            "sglang",
            {"phase": "prefill", "tokens": 8192},
            58_720_256,
            1,
            id="four residual streams are one tensor",
        ),
        pytest.param(
            "DeepSeek-V3", Layout(pp=2), "vllm", {"phase": "decode", "batch": 64}, 1_835_008, 0, id="N7 decode"
        ),
        pytest.param(
            "DeepSeek-V3", Layout(tp=8, pp=2), "vllm", {"phase": "decode", "batch": 64}, 229_376, 2, id="N7 decode tp=8"
        ),
        pytest.param(
            "Llama-3.1-8B", Layout(tp=4, pp=2), "megatron", {"phase": "decode", "batch": 64}, 524_288, 0, id="megatron"
        ),
        pytest.param(
            "Llama-3.1-8B",
            Layout(tp=4, pp=2),
            "megatron",
            {"phase": "decode", "batch": 64, "sequence_parallel": True},
            131_072,
            0,
            id="megatron sp",
        ),
        pytest.param(
            "Llama-3.1-8B",
            Layout(tp=4, pp=2),
            "vllm",
            {"phase": "prefill", "tokens": 64, "sequence_parallel": True},
            2 * 131_072,
            1,
            id="vllm sp: the scattered residual is not gathered with it",
        ),
        pytest.param(
            "Llama-3.1-8B",
            Layout(tp=4, pp=2),
            "tensorrt_llm",
            {"phase": "decode", "batch": 64},
            2 * 524_288,
            0,
            id="tensorrt_llm",
        ),
    ],
)
def test_n7_bytes_over_a_boundary(model, layout, framework, work, payload, gathers):
    streams = streams_of(model, layout, framework, **work)
    assert streams["pp.activation"].payload_bytes == payload
    calls = streams["pp.all_gather"].calls_per_step if "pp.all_gather" in streams else 0
    assert calls == gathers
    if gathers:
        tensors = 1 if "pp.residual_gather" in streams else gathers
        sent = payload * layout.tp // (2 if "pp.residual_gather" in streams else 1)
        assert streams["pp.all_gather"].payload_bytes * tensors == sent


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_n7_deepseek_v4_pro(framework):
    streams = streams_of("DeepSeek-V4-Pro", Layout(pp=2), framework, phase="prefill", tokens=8192)
    assert streams["pp.activation"].payload_bytes == 469_762_048


def test_later_boundaries_of_kimi_k3_carry_more_blocks():
    layout, state = Layout(tp=8, pp=4), 64 * 7168 * 2
    shape, workload = load_model("Kimi-K3"), Workload(phase="decode", batch=64)
    streams = {stream.name: stream for stream in phase_streams(shape, layout, workload, "vllm")}
    matrix = streams["pp.activation"].matrix()
    # Stages begin at layers 23, 46 and 70, with 2, 4 and 6 blocks of 12 layers begun before them.
    assert [int(matrix[stage, stage + 1]) for stage in range(3)] == [state * width // 8 for width in (3, 5, 7)]
    assert int(matrix.sum()) == state * 15 // 8
    assert streams["pp.activation"].payload_bytes == state * 7 // 8
    assert (streams["pp.all_gather"].payload_bytes, streams["pp.all_gather"].calls_per_step) == (state, 1)
    assert streams["pp.residual_gather"].payload_bytes == 6 * state
    step = phase_step(shape, layout, workload, "vllm", tuple(streams.values()))
    assert [task.edge for task in step.tasks(0) if task.edge] == [(0, 1), (1, 2), (2, 3)]


def test_vllms_scattered_residual_is_gathered_before_the_first_layer():
    streams = streams_of("Llama-3.1-8B", Layout(tp=4, pp=2), phase="prefill", tokens=64, sequence_parallel=True)
    assert streams["pp.residual_gather"].payload_bytes == 64 * 4096 * 2
    assert streams["pp.residual_gather"].calls_per_step == 1
    megatron = streams_of(
        "Llama-3.1-8B", Layout(tp=4, pp=2), "megatron", phase="prefill", tokens=64, sequence_parallel=True
    )
    assert "pp.residual_gather" not in megatron


def test_a_tensor_that_does_not_divide_is_sent_whole():
    shape = replace(load_model("Llama-3.1-8B"), hidden=4095, num_heads=6, num_kv_heads=6)
    odd, even = (streams_of(shape, Layout(tp=2, pp=2), phase="decode", batch=batch) for batch in (3, 4))
    assert odd["pp.activation"].payload_bytes == 2 * 3 * 4095 * 2
    assert "pp.all_gather" not in odd
    assert even["pp.activation"].payload_bytes == 4 * 4095 * 2
    two = streams_of(
        replace(shape, residual_streams=2), Layout(tp=2, pp=2), phase="decode", batch=3
    )  # 2 x 3 x 4095 divides, 3 x 4095 does not
    assert two["pp.all_gather"].calls_per_step == 1


@given(
    framework=st.sampled_from(["vllm", "sglang", "megatron", "tensorrt_llm"]),
    tokens=st.integers(1, 500),
    tp=st.sampled_from([1, 2, 4, 8]),
    num_streams=st.integers(1, 4),
    is_sequence=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_every_rank_has_the_whole_state_behind_a_boundary(framework, tokens, tp, num_streams, is_sequence):
    shape = replace(load_model("Llama-3.1-8B"), residual_streams=num_streams)
    is_sequence = is_sequence and tp > 1 and framework in ("vllm", "megatron")
    workload = Workload(phase="prefill", tokens=tokens, sequence_parallel=is_sequence)
    setting = make_setting(shape, Layout(tp=tp, pp=2), workload, framework)
    streams = streams_of(
        shape, Layout(tp=tp, pp=2), framework, phase="prefill", tokens=tokens, sequence_parallel=is_sequence
    )
    whole = sum(tensor.width for tensor in sent_tensors(setting)) * setting.hidden_bytes
    received = streams["pp.activation"].payload_bytes
    for name in ("pp.all_gather", "pp.residual_gather"):
        if name in streams:
            received += (tp - 1) * streams[name].payload_bytes * streams[name].calls_per_step // tp
    assert received == (whole // tp if is_sequence and framework == "megatron" else whole)


def test_megatrons_stages_all_get_the_logits():
    logits = streams_of("Llama-3.1-8B", Layout(tp=2, pp=2), "megatron", phase="decode", batch=64)["pp.logits"]
    assert (logits.op, logits.groups) == ("broadcast", ((2, 0), (3, 1)))
    assert logits.payload_bytes == 64 * 128_256 * 2
    assert "pp.logits" not in streams_of("Llama-3.1-8B", Layout(tp=2), "megatron", phase="decode", batch=64)


def test_a_prefill_is_split_into_micro_batches():
    layout, work = Layout(tp=8, pp=4), {"phase": "prefill", "batch": 8, "context": 1024}
    whole = streams_of("DeepSeek-V3", layout, **work)
    split = streams_of("DeepSeek-V3", layout, num_micro_batches=4, **work)
    assert whole.keys() == split.keys()
    for name, stream in split.items():
        assert stream.calls_per_step == 4 * whole[name].calls_per_step
        assert 4 * stream.payload_bytes == whole[name].payload_bytes


def test_the_largest_micro_batch_counts():
    split = streams_of("Llama-3.1-8B", Layout(pp=2), phase="prefill", tokens=10, num_micro_batches=4)
    assert split["pp.activation"].payload_bytes == 2 * 3 * 4096 * 2
    with pytest.raises(ValueError, match="more micro-batches than tokens: 11 of 10"):
        Workload(phase="prefill", tokens=10, num_micro_batches=11)


def test_decode_batches_in_flight_are_not_split():
    one = streams_of("Llama-3.1-8B", Layout(tp=2, pp=4), phase="decode", batch=64)
    four = streams_of("Llama-3.1-8B", Layout(tp=2, pp=4), phase="decode", batch=64, num_micro_batches=4)
    for name, stream in four.items():
        assert stream == replace(one[name], calls_per_step=4 * one[name].calls_per_step)


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 4, 8])
def test_interleaving_multiplies_the_messages(virtual_stages, num_micro_batches):
    work = {"phase": "decode", "batch": 4, "virtual_stages": virtual_stages, "num_micro_batches": num_micro_batches}
    shape, layout = load_model("Llama-3.1-8B"), Layout(tp=2, pp=4)
    streams = phase_streams(shape, layout, Workload(**work), "megatron")
    boundary = next(stream for stream in streams if stream.name == "pp.activation")
    assert boundary.calls_per_step == virtual_stages * num_micro_batches
    assert boundary.rule.kind == ("ring" if virtual_stages > 1 else "chain")
    assert int(wire_matrix(boundary)[3, 0]) == (boundary.payload_bytes if virtual_stages > 1 else 0)
    step = phase_step(shape, layout, Workload(**work), "megatron", streams)
    edges = Counter(task.edge for task in step.tasks(0) if task.edge is not None)
    assert sum(edges.values()) == num_messages(4, num_micro_batches, virtual_stages)
    assert edges.pop((3, 0), 0) == (virtual_stages - 1) * num_micro_batches
    assert edges == {(stage, stage + 1): virtual_stages * num_micro_batches for stage in range(3)}


CASES = [
    pytest.param("Llama-3.1-8B", Layout(tp=2, pp=4), "vllm", {"num_micro_batches": 4}, id="vllm"),
    pytest.param("Llama-3.1-8B", Layout(tp=2, pp=3), "sglang", {"num_micro_batches": 5}, id="sglang uneven"),
    pytest.param("Llama-3.1-8B", Layout(tp=2, pp=4), "megatron", {"virtual_stages": 2}, id="interleaved"),
    pytest.param(
        "Qwen3-30B-A3B",
        Layout(tp=2, pp=4, dp=2, ep=4),
        "megatron",
        {"virtual_stages": 3, "num_micro_batches": 6, "sequence_parallel": True},
        id="interleaved experts",
    ),
    pytest.param("Llama-3.1-8B", Layout(pp=2), "vllm", {"layer_partition": (20, 12)}, id="partition"),
    pytest.param("Llama-3.1-8B", Layout(tp=2), "vllm", {"num_micro_batches": 2}, id="one stage"),
]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("model", "layout", "framework", "extra"), CASES)
def test_a_step_makes_the_calls_that_its_streams_say(model, layout, framework, extra, phase):
    shape, workload = load_model(model), Workload(phase=phase, batch=6, context=8, **extra)
    streams = phase_streams(shape, layout, workload, framework)
    step = phase_step(shape, layout, workload, framework, streams)
    assert set(step.streams) == {stream.name for stream in streams}
    for stream in streams:
        calls = Counter()
        for task in step.tasks(0):
            if task.stream != stream.name:
                continue
            assert task.payload_bytes == stream.payload_bytes
            if task.edge is not None:
                calls[task.edge] += 1
                continue
            for index in task.groups if task.groups is not None else range(len(stream.groups)):
                calls[index] += 1
        assert max(calls.values()) == stream.calls_per_step, stream.name


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 7])
def test_a_stage_gets_each_micro_batch_before_it_passes_it_on(num_micro_batches):
    workload = Workload(phase="decode", batch=4, virtual_stages=2, num_micro_batches=num_micro_batches)
    shape, layout = load_model("Llama-3.1-8B"), Layout(pp=4)
    streams = phase_streams(shape, layout, workload, "megatron")
    edges = [task.edge for task in phase_step(shape, layout, workload, "megatron", streams).tasks(0) if task.edge]
    received, sent = Counter(), Counter()
    for source, destination in edges:
        assert source == 0 or sent[source] < received[source]
        sent[source] += 1
        received[destination] += 1
    assert received[0] == num_micro_batches


@pytest.mark.parametrize(
    ("framework", "layout", "extra", "message"),
    [
        ("megatron", Layout(), {"virtual_stages": 2}, "greater than 1 with interleaved schedule"),
        ("megatron", Layout(pp=4), {"virtual_stages": 3}, "should be divisible"),
        ("vllm", Layout(pp=4), {"virtual_stages": 2}, "vllm does not interleave"),
        ("sglang", Layout(pp=2), {"layer_partition": (30, 3)}, "does not match num_hidden_layers=32"),
        ("vllm", Layout(pp=2), {"model_runner": "v3"}, "unknown model runner: 'v3'; allowed: v1, v2"),
    ],
)
def test_what_engines_refuse(framework, layout, extra, message):
    with pytest.raises(ValueError, match=message):
        streams_of("Llama-3.1-8B", layout, framework, phase="decode", **extra)
