"""Data parallelism: what replicas agree on before a step, and what SGLang gathers of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.data import BACKGROUND, occasional, padding_mode, useful_fraction, why_nothing
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import control_streams, left_out, phase_streams
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload


def control_of(model, layout, framework="vllm", **workload):
    found = control_streams(load_model(model), layout, Workload(**({"phase": "decode"} | workload)), framework)
    return {stream.name: stream for stream in found}


def streams_of(model, layout, framework, **workload):
    found = phase_streams(load_model(model), layout, Workload(**({"phase": "decode"} | workload)), framework)
    return {stream.name: stream for stream in found}


def setting_of(model, layout, framework="vllm", **workload):
    return make_setting(load_model(model), layout, Workload(**({"phase": "decode"} | workload)), framework)


@pytest.mark.parametrize("dp", [2, 3, 5, 16])
def test_n14_vllm_replicas_agree_in_16_bytes_each(dp):
    sync = control_of("DeepSeek-V3", Layout(dp=dp, ep=dp))["dp.batch_sync"]
    assert (sync.op, sync.payload_bytes, sync.dtype, sync.role) == ("all_reduce", 16 * dp, "int32", "control")
    assert sync.calls_per_step == 1
    assert sync.groups == (tuple(range(dp)),)
    assert dp != 16 or sync.payload_bytes == 256


def test_n14_sglang_gathers_56_bytes_of_each_rank():
    sync = control_of("DeepSeek-V3", Layout(tp=16, dp=4), "sglang")["dp.batch_sync"]
    assert (sync.op, sync.payload_bytes, sync.dtype) == ("all_gather", 896, "int64")
    assert sync.payload_bytes // sync.group_size == 56
    assert wire_bytes_per_rank(sync) == 15 * 56


def test_megatron_agrees_over_the_expert_group():
    sync = control_of("Qwen3-30B-A3B", Layout(tp=2, dp=4, ep=4), "megatron")["dp.batch_sync"]
    assert (sync.op, sync.payload_bytes) == ("all_reduce", 8)
    assert sync.group_size == 4


@pytest.mark.parametrize(
    ("model", "layout", "framework"),
    [
        pytest.param("Llama-3.1-70B", Layout(tp=2, dp=8), "vllm", id="dense replicas are independent"),
        pytest.param("DeepSeek-V3", Layout(tp=8), "vllm", id="one replica"),
        pytest.param("DeepSeek-V3", Layout(tp=8), "sglang", id="sglang without dp attention"),
        pytest.param("Llama-3.1-70B", Layout(tp=2, dp=8), "megatron", id="megatron without experts"),
    ],
)
def test_where_nobody_waits_for_another_replica(model, layout, framework):
    assert "dp.batch_sync" not in control_of(model, layout, framework)
    assert occasional(setting_of(model, layout, framework)) == ()


def test_dense_sglang_with_attention_replicas_does_agree():
    assert control_of("Llama-3.1-70B", Layout(tp=8, dp=2), "sglang")["dp.batch_sync"].payload_bytes == 8 * 56


def test_micro_batches_are_steps_of_their_own():
    layout = Layout(tp=4, dp=2, pp=2, ep=8)
    sync = control_of("DeepSeek-V3", layout, phase="prefill", tokens=64, num_micro_batches=4)["dp.batch_sync"]
    assert sync.calls_per_step == 4


def test_what_is_not_sent_in_every_step():
    (vllm,) = occasional(setting_of("DeepSeek-V3", Layout(dp=16, ep=16)))
    assert (vllm.num_bytes, vllm.every_steps, vllm.op, vllm.group) == (8, 32, "all_reduce", "dp")
    (megatron,) = occasional(setting_of("Qwen3-30B-A3B", Layout(dp=4, ep=4), "megatron"))
    assert (megatron.num_bytes, megatron.every_steps, megatron.group) == (8, 20, "ep")


def test_control_is_no_data():
    assert "dp.batch_sync" not in streams_of("DeepSeek-V3", Layout(dp=16, ep=16), "vllm")


@pytest.mark.parametrize(
    ("tokens", "is_extend", "mode"),
    [
        ((8, 8), False, "max_len"),
        ((8, 0), False, "max_len"),
        ((8, 0, 0), False, "sum_len"),
        ((8, 2, 2), False, "max_len"),
        ((8, 2, 1), False, "sum_len"),
        ((8, 8), True, "sum_len"),
        ((8,), True, "max_len"),
    ],
)
def test_sglang_takes_what_costs_less(tokens, is_extend, mode):
    assert padding_mode(tokens, is_extend=is_extend) == mode


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 50), min_size=2, max_size=9).filter(any))
def test_sglang_never_takes_what_costs_more(tokens):
    gather, reduce = len(tokens) * max(tokens), 2 * sum(tokens)
    assert (padding_mode(tokens, is_extend=False) == "max_len") == (gather <= reduce)
    assert sum(tokens) / (len(tokens) * max(tokens)) == useful_fraction(tokens)


@pytest.mark.parametrize(
    ("workload", "ops", "rows"),
    [
        pytest.param({"replica_tokens": (16, 12, 8, 9)}, "all_gather", 64, id="max_len"),
        pytest.param({"replica_tokens": (16, 1, 0, 3)}, "all_reduce", 16 + 2 + 0 + 4, id="sum_len"),
        pytest.param({"replica_tokens": (16, 1, 0, 3), "padded": True}, "all_gather", 64, id="graph: max_len"),
        pytest.param(
            {"phase": "prefill", "replica_tokens": (7, 11, 13, 0)}, "all_reduce", 8 + 12 + 14, id="prompts: sum_len"
        ),
    ],
)
def test_sglang_gathers_tokens_padded_to_attention_tp(workload, ops, rows):
    streams = streams_of("Qwen3-30B-A3B", Layout(tp=8, dp=4), "sglang", **workload)
    gather, row = streams["dp.gather"], 2048 * 2
    assert (gather.op, gather.payload_bytes) == (ops, rows * row)
    wire = 2 * 7 * rows * row // 8 if ops == "all_reduce" else 7 * rows * row // 8
    assert wire_bytes_per_rank(gather) == wire
    assert ("dp.scatter" in streams) == (ops == "all_gather")
    assert ("dp.mlp_output" in streams) == (ops == "all_reduce")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("tokens", "mode"), [((7, 5, 6), "max_len"), ((9, 1, 1), "sum_len"), ((5, 0, 0), "sum_len")], ids=str
)
def test_sglang_gathers_real_tokens_where_attention_is_whole(tokens, mode, phase):
    streams = streams_of("gpt-oss-120b", Layout(tp=3, dp=3), "sglang", phase=phase, replica_tokens=tokens)
    row, is_max = 2880 * 2, mode == "max_len" and phase == "decode"
    rows = 3 * max(tokens) if is_max else sum(tokens)
    gather = streams["dp.gather"]
    assert (gather.op, gather.payload_bytes) == ("all_gather" if is_max else "all_reduce", rows * row)
    assert wire_bytes_per_rank(gather) == (1 if is_max else 2) * 2 * rows * row // 3
    assert "padded" not in gather.formula


@pytest.mark.parametrize(("batch", "rows"), [(4, 4), (5, 6), (7, 8)])
def test_attention_ranks_take_equal_shares(batch, rows):
    streams = streams_of("Qwen3-30B-A3B", Layout(tp=8, dp=4), "sglang", batch=batch)
    assert streams["dp.gather"].payload_bytes == streams["dp.scatter"].payload_bytes == 4 * rows * 2048 * 2
    for name in ("dp.attention_scatter", "dp.attention_gather"):
        assert streams[name].payload_bytes == rows * 2048 * 2
    assert ("padded" in streams["dp.gather"].formula) == (batch != rows)


@pytest.mark.parametrize(
    ("tokens", "rows", "names"),
    [
        pytest.param((8, 6, 8), 3 * 4, {"dp.gather", "dp.scatter"}, id="max_len"),
        pytest.param((8, 2, 0), 4 + 1 + 0, {"dp.gather", "dp.mlp_output"}, id="sum_len"),
        pytest.param((5, 1, 1), 3 + 1 + 1, {"dp.gather", "dp.mlp_output"}, id="halves alone would be max_len"),
    ],
)
def test_half_batches_are_gathered_in_the_mode_of_the_whole_step(tokens, rows, names):
    layout = Layout(tp=3, dp=3)
    whole = streams_of("gpt-oss-120b", layout, "sglang", replica_tokens=tokens)
    halves = streams_of("gpt-oss-120b", layout, "sglang", replica_tokens=tokens, two_batch=True)
    for streams in (whole, halves):
        assert {name for name in streams if name.startswith("dp.")} == names
    for name in names:
        assert halves[name].op == whole[name].op
        assert halves[name].payload_bytes == rows * 2880 * 2
        assert halves[name].calls_per_step == 2 * whole[name].calls_per_step


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(any))
def test_halves_carry_at_least_the_whole(tokens):
    layout, load = Layout(tp=3, dp=3), {"replica_tokens": tuple(tokens)}
    whole = streams_of("gpt-oss-120b", layout, "sglang", **load)
    halves = streams_of("gpt-oss-120b", layout, "sglang", two_batch=True, **load)
    assert set(whole) == set(halves)
    for name in (name for name in whole if name.startswith("dp.")):
        extra = 2 * halves[name].payload_bytes - whole[name].payload_bytes
        assert 0 <= extra <= 3 * 2880 * 2  # at most one more token of each replica


def test_micro_batches_gather_their_own_tokens():
    load = {"phase": "prefill", "replica_tokens": (40, 20, 12)}
    whole = streams_of("gpt-oss-120b", Layout(tp=3, dp=3), "sglang", **load)["dp.gather"]
    parts = streams_of("gpt-oss-120b", Layout(tp=3, dp=3), "sglang", num_micro_batches=4, **load)["dp.gather"]
    assert (whole.payload_bytes, parts.payload_bytes) == (72 * 2880 * 2, 18 * 2880 * 2)
    assert parts.calls_per_step == 4 * whole.calls_per_step


def test_half_batches_agree_once():
    load = {"batch": 64, "expert_backend": "deepep_low_latency"}
    sync = control_of("DeepSeek-V3", Layout(dp=16, ep=16), two_batch=True, **load)["dp.batch_sync"]
    assert (sync.payload_bytes, sync.calls_per_step) == (256, 1)


@pytest.mark.parametrize(
    ("framework", "layout", "speculative", "dummy"),
    [
        pytest.param("vllm", Layout(dp=2, ep=2), 0, 1, id="vllm"),
        pytest.param("vllm", Layout(dp=2, ep=2), 3, 4, id="vllm speculating"),
        pytest.param("megatron", Layout(dp=2, ep=2), 0, 1, id="megatron"),
        pytest.param("sglang", Layout(tp=2, dp=2), 0, 0, id="sglang: empty"),
    ],
)
def test_an_idle_replica_runs_a_dummy_batch(framework, layout, speculative, dummy):
    load = {"replica_tokens": (8, 0), "num_speculative": speculative}
    assert setting_of("Qwen3-30B-A3B", layout, framework, **load).replica_tokens == (8, dummy)


def test_one_replica_is_gathered_as_max_len():
    streams = streams_of("Qwen3-30B-A3B", Layout(tp=8, cp=2), "sglang", phase="prefill", tokens=64)
    assert (streams["dp.gather"].op, streams["dp.gather"].payload_bytes) == ("all_gather", 64 * 2048 * 2)


def test_useful_fraction_needs_a_token():
    with pytest.raises(ValueError, match="no replica has a token"):
        useful_fraction((0, 0))


def test_what_else_crosses_is_never_waited_for():
    assert {entry.what for entry in BACKGROUND} >= {"weights", "metrics", "requests and answers"}
    assert not any(entry.on_forward_path for entry in BACKGROUND)


def test_why_there_is_nothing():
    assert "dense" in why_nothing(setting_of("Llama-3.1-8B", Layout(dp=2)))
    assert "dense" in why_nothing(setting_of("Llama-3.1-8B", Layout(replicas=2)))
    assert "independent" in why_nothing(setting_of("DeepSeek-V3", Layout(tp=8, replicas=2)))
    assert "experts" in why_nothing(setting_of("DeepSeek-V3", Layout(dp=2, ep=2)))
    assert why_nothing(setting_of("Llama-3.1-8B", Layout())) == "dp=1: one replica"


AGREES = "agree on each step in control messages"


@pytest.mark.parametrize(
    ("model", "layout", "framework", "said", "unsaid"),
    [
        pytest.param("Llama-3.1-8B", Layout(dp=2), "vllm", "dense model are independent", AGREES, id="dense"),
        pytest.param("DeepSeek-V3", Layout(dp=2, ep=2), "vllm", AGREES, "independent", id="experts"),
        pytest.param("DeepSeek-V3", Layout(tp=8, replicas=2), "vllm", "independent", AGREES, id="worlds"),
        pytest.param("Qwen3-30B-A3B", Layout(tp=2, dp=2), "megatron", "independent", "ep.*", id="megatron without ep"),
        pytest.param("Qwen3-30B-A3B", Layout(tp=8, dp=8, ep=8), "tensorrt_llm", "ep.*", AGREES, id="tensorrt_llm"),
        pytest.param("Llama-3.1-8B", Layout(tp=2), "vllm", "one replica", "independent", id="one"),
    ],
)
def test_a_step_says_why_its_replicas_send_nothing(model, layout, framework, said, unsaid):
    asked = load_model(model), layout, Workload(phase="decode"), framework
    why = left_out(*asked, phase_streams(*asked))["dp"]
    assert said in why
    assert unsaid not in why
    assert (AGREES in why) == ("dp.batch_sync" in control_of(model, layout, framework))
