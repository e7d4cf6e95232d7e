"""Layouts of a model on some GPUs: every one that the engine accepts, at equal work, the expected one first."""

from dataclasses import fields
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.degrees import combinations, divisors
from crosstraffic.patterns.layout import FRAMEWORKS, Layout, world_size
from crosstraffic.patterns.layouts import (
    Found,
    candidate_of,
    find_layouts,
    one_pass,
    rule_of,
    sort_key,
)
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.placement import attention_tp, check_model
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

GB = 10**9
H100 = 81_559 * 2**20  # what an H100 of 80 GB has


def found_of(
    model: str, num_gpus: int, gpu_memory_bytes: int = 80 * GB, framework: str = "vllm", **fields: object
) -> Found:
    names = {"batch", "weight_dtype", "utilization"}
    own = {name: value for name, value in fields.items() if name in names}
    work = {"phase": "decode", **{name: value for name, value in fields.items() if name not in names}}
    return find_layouts(
        load_model(model),
        num_gpus,
        Workload(**work),  # type: ignore[arg-type]
        framework,
        gpu_memory_bytes=gpu_memory_bytes,
        **{"batch": 16 * num_gpus, **own},  # type: ignore[arg-type]
    )


TEXTBOOK = {
    "fits one GPU, many requests": ("Llama-3.1-8B", 80 * GB, {}, Layout(dp=8)),
    "fits one GPU, more requests": ("Llama-3.1-8B", 80 * GB, {"batch": 256}, Layout(dp=8)),
    "needs four": ("Llama-3.1-70B", 80 * GB, {}, Layout(tp=4, dp=2)),
    "needs four, long prompts": ("Llama-3.1-70B", 80 * GB, {"batch": 32, "context": 16_384}, Layout(tp=4, dp=2)),
    "needs eight": ("Llama-3.1-405B", 80 * GB, {"weight_dtype": "fp8"}, Layout(tp=8)),
    "needs eight, few requests": ("Llama-3.1-405B", 80 * GB, {"weight_dtype": "fp8", "batch": 32}, Layout(tp=8)),
    "large MoE, bf16": ("Qwen3-235B-A22B", H100, {"batch": 32, "context": 2048}, Layout(dp=8, ep=8)),
    "large MoE, all memory": ("Qwen3-235B-A22B", 80 * GB, {"batch": 16, "utilization": 0.95}, Layout(dp=8, ep=8)),
    "large MoE, fp8": ("Qwen3-235B-A22B", 80 * GB, {"weight_dtype": "fp8"}, Layout(dp=8, ep=8)),
    "larger MoE": ("DeepSeek-V3", 141 * GB, {}, Layout(dp=8, ep=8)),
    "larger MoE, more requests": ("DeepSeek-V3", 141 * GB, {"batch": 512}, Layout(dp=8, ep=8)),
    "larger MoE, gathered": (
        "DeepSeek-V3",
        141 * GB,
        {"expert_backend": "allgather_reducescatter"},
        Layout(dp=8, ep=8),
    ),
    "larger MoE, prefill": ("DeepSeek-V3", 141 * GB, {"phase": "prefill", "batch": 8}, Layout(dp=8, ep=8)),
}


@pytest.mark.parametrize("case", TEXTBOOK)
def test_the_expected_layout_on_eight_gpus_is_first(case: str) -> None:
    model, memory, asked, expected = TEXTBOOK[case]
    found = found_of(model, 8, memory, **asked)
    assert found.candidates[0].layout == expected
    assert found.candidates[0].rounds < inf


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("vllm", Layout(dp=8)),
        ("megatron", Layout(dp=8)),
        ("sglang", Layout(replicas=8)),
        ("tensorrt_llm", Layout(replicas=8)),
    ],
)
def test_replicas_of_a_small_model_in_each_engine(framework: str, expected: Layout) -> None:
    best = found_of("Llama-3.1-8B", 8, framework=framework).candidates[0]
    assert best.layout == expected
    assert (best.tiers.intra_node_bytes, best.tiers.node_egress_bytes, best.tiers.calls) == (0, 0, 0)


def test_a_model_larger_than_a_node_is_a_pipeline_of_nodes() -> None:
    found = found_of("Llama-3.1-405B", 16)
    assert found.candidates[0].layout == Layout(tp=8, pp=2)
    across = next(one for one in found.candidates if one.layout == Layout(tp=16))
    assert across.crosses_nodes
    assert not found.candidates[0].crosses_nodes


def test_pipelines_come_after_what_fits_without_though_they_send_less() -> None:
    found = found_of("Llama-3.1-70B", 8).candidates
    whole = [one for one in found if one.rounds == 1]
    assert [one.layout.pp for one in whole] == sorted(one.layout.pp for one in whole)
    assert whole[0].tiers.intra_node_bytes > min(one.tiers.intra_node_bytes for one in whole if one.layout.pp > 1)


def test_a_pipeline_is_first_where_nothing_else_runs() -> None:
    best = found_of("Mixtral-8x7B", 7, 20 * GB).candidates[0]  # 32 heads on 7 ranks: no tp; 93 GB of weights
    assert best.layout == Layout(pp=7)
    assert best.pipeline_utilization == 1.0


BRUTE = [
    ("Llama-3.1-8B", "vllm", 8),
    ("Qwen3-30B-A3B", "vllm", 8),
    ("DeepSeek-V3", "vllm", 6),
    ("Qwen3-30B-A3B", "megatron", 8),
    ("Llama-3.1-8B", "megatron", 12),
    ("Qwen3-30B-A3B", "sglang", 8),
    ("Llama-3.1-8B", "sglang", 6),
    ("Qwen3-30B-A3B", "tensorrt_llm", 8),
    ("DeepSeek-V3", "tensorrt_llm", 5),
    ("Llama-3.1-8B", "vllm", 1),
]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("model", "framework", "num_gpus"), BRUTE, ids=str)
def test_no_valid_layout_is_missed(model: str, framework: str, num_gpus: int, phase: str) -> None:
    """Try all degrees; those that differ in name only (replicas and dp where replicas never talk) count once."""
    shape = load_model(model)
    names = ["tp", "pp", "cp", "dp", "ep", "dcp", "moe_dp", "replicas"]
    fixed = {"cp" if phase == "decode" else "dcp", *(() if shape.moe_layers else ("ep", "moe_dp"))}
    if framework == "megatron" or (framework == "vllm" and not shape.moe_layers):
        fixed.add("replicas")
    if framework != "sglang":
        fixed.add("moe_dp")
    if framework in ("megatron", "tensorrt_llm"):
        fixed.add("dcp")
    expected = set()
    for degrees in product(*((1,) if name in fixed else divisors(num_gpus) for name in names)):
        layout = Layout(**dict(zip(names, degrees, strict=True)))
        try:
            check_model(shape, layout, framework)
        except ValueError:
            continue
        if world_size(layout, framework) != num_gpus:
            continue
        if framework == "sglang" and attention_tp(layout, framework) % layout.dcp:
            continue
        expected.add(layout)
    found = find_layouts(
        shape,
        num_gpus,
        Workload(phase=phase),  # type: ignore[arg-type]
        framework,
        batch=num_gpus,
        gpu_memory_bytes=80 * GB,
    )
    layouts = [one.layout for one in found.candidates if one.layout.etp is None]
    refused = expected - set(layouts)
    for layout in refused:  # the engine has no such path for tokens to experts, or heads do not divide
        with pytest.raises(ValueError, match=r"needs ep|requires num_heads % cp_size"):
            phase_streams(shape, layout, Workload(phase=phase), framework)  # type: ignore[arg-type]
    assert set(layouts) == expected - refused
    assert len(set(layouts)) == len(layouts)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-20b"]),
    framework=st.sampled_from(sorted(FRAMEWORKS)),
    num_gpus=st.sampled_from([1, 2, 3, 5, 6, 8, 12]),
    phase=st.sampled_from(["decode", "prefill"]),
    batch=st.integers(1, 100),
)
def test_all_gpus_are_used_and_work_is_equal(model: str, framework: str, num_gpus: int, phase: str, batch: int) -> None:
    found = found_of(model, num_gpus, 80 * GB, framework, phase=phase, batch=batch, context=64)
    assert found.candidates
    for one in found.candidates:
        assert world_size(one.layout, framework) == num_gpus
        assert 0 <= one.num_replicas * one.memory.num_requests - batch < one.num_replicas
        assert one.num_replicas == one.layout.dp * one.layout.replicas
    keys = [sort_key(one) for one in found.candidates]
    assert keys == sorted(keys)


def test_combinations_and_refusals_add_up() -> None:
    shape = load_model("DeepSeek-V3")
    tried = list(combinations(8, shape, "prefill", "vllm"))
    found = found_of("DeepSeek-V3", 8, phase="prefill", batch=8)
    assert len(set(tried)) == len(tried) == len(found.candidates) + found.num_refused
    assert found.refusals[0][0].startswith("vLLM: PCP does not support data parallelism yet")
    assert [count for _, count in found.refusals] == sorted((count for _, count in found.refusals), reverse=True)


@pytest.mark.parametrize(
    ("refusal", "rule"),
    [
        ("vllm cannot run X-8B as tp=3,dp=2: heads (32) not divisible by (3).", "heads (#) not divisible by (#)."),
        ("SGLang: tp_size over moe_dp_size: 8, 3 (tp=8,dp=3)", "SGLang: tp_size over moe_dp_size: #, #"),
        ("x: an all-to-all backend needs ep = tp: tp=8,ep=4", "x: an all-to-all backend needs ep = tp"),
        ("MRV2 PCP does not support PP yet: cp=2, pp=4", "MRV2 PCP does not support PP yet: cp=#, pp=#"),
    ],
)
def test_a_rule_is_a_refusal_without_its_numbers(refusal: str, rule: str) -> None:
    assert rule_of(refusal) == rule


@pytest.mark.parametrize("num_gpus", [5, 7, 11])
def test_prime_numbers_of_gpus(num_gpus: int) -> None:
    found = found_of("Llama-3.1-8B", num_gpus)
    assert found.candidates[0].layout == Layout(dp=num_gpus)
    assert {str(one.layout) for one in found.candidates} == {f"dp={num_gpus}", f"pp={num_gpus}"}
    assert ("Total number of attention heads (#) must be divisible by tensor parallel size (#).", 2) in found.refusals


def test_tp_sends_what_its_streams_say() -> None:
    shape, layout = load_model("Llama-3.1-70B"), Layout(tp=8)
    own = Workload(phase="decode", batch=64)
    one = candidate_of(shape, layout, Workload(phase="decode"), "vllm", batch=64, limit_bytes=72 * GB)
    streams = phase_streams(shape, layout, own, "vllm")
    assert one.tiers.intra_node_bytes == sum(wire_bytes_per_rank(s) * s.calls_per_step for s in streams)
    assert one.tiers.inter_node_bytes == one.tiers.node_egress_bytes == 0


@pytest.mark.parametrize(("per_node", "crosses"), [(8, False), (4, True), (3, True)])
def test_nodes_decide_what_crosses(per_node: int, crosses: bool) -> None:
    found = found_of("Llama-3.1-70B", 8, ranks_per_node=per_node)
    one = next(one for one in found.candidates if one.layout == Layout(tp=8))
    assert one.crosses_nodes == crosses == (one.tiers.node_egress_bytes > 0)


def test_experts_cut_across_nodes_come_after_whole_ones() -> None:
    found = found_of("DeepSeek-V3", 16)
    assert found.candidates[0].layout == Layout(dp=16, ep=16)
    cut = next(one for one in found.candidates if one.layout == Layout(dp=16))
    assert cut.crosses_nodes
    assert not found.candidates[0].crosses_nodes


@pytest.mark.parametrize(
    ("requests", "num_stages", "expected"), [(10, 4, (3, 4)), (2, 8, (1, 2)), (1, 1, (1, 1)), (128, 1, (128, 1))]
)
def test_decode_passes(requests: int, num_stages: int, expected: tuple[int, int]) -> None:
    own, num_passes = one_pass(Workload(phase="decode"), requests, num_stages)
    assert (own.batch, num_passes) == expected
    assert own.batch * num_passes >= requests


@pytest.mark.parametrize(("requests", "expected"), [(1, (4096, 1)), (2, (8192, 1)), (3, (6144, 2)), (5, (6827, 3))])
def test_prefill_goes_in_chunks(requests: int, expected: tuple[int, int]) -> None:
    own, num_passes = one_pass(Workload(phase="prefill"), requests, 1)
    assert (own.num_tokens, num_passes) == expected


def test_an_idle_stage_shows_in_the_utilization() -> None:
    found = {str(one.layout): one for one in found_of("Llama-3.1-8B", 8, batch=2).candidates}
    assert found["pp=8"].pipeline_utilization == 2 / 8
    assert found["tp=8"].pipeline_utilization == 1
    prefill = {str(one.layout): one for one in found_of("Llama-3.1-8B", 8, batch=8, phase="prefill").candidates}
    assert prefill["tp=2,pp=4"].pipeline_utilization == pytest.approx(4 / 7)


def test_prefill_is_dispatched_by_high_throughput_kernels_unless_asked() -> None:
    def buffers(**asked: object) -> set[str]:
        found = found_of("DeepSeek-V3", 8, 141 * GB, phase="prefill", batch=8, **asked).candidates
        own = next(one for one in found if one.layout == Layout(dp=8, ep=8))
        return {part.name for part in own.memory.buffers}

    assert "deepep_low_latency" not in buffers()
    assert "deepep" in buffers()
    assert "deepep_low_latency" in buffers(expert_backend="deepep_low_latency")


def test_what_fits_nowhere_is_ranked_by_what_is_missing() -> None:
    found = found_of("Llama-3.1-405B", 8).candidates
    assert all(one.rounds == inf and one.max_requests == 0 for one in found)
    missing = [one.memory.missing_bytes for one in found]
    assert missing == sorted(missing)
    assert missing[0] > 0


@settings(max_examples=15, deadline=None)
@given(memory=st.integers(10, 200), more=st.integers(0, 100))
def test_more_memory_never_holds_less(memory: int, more: int) -> None:
    before = {one.layout: one for one in found_of("Llama-3.1-70B", 8, memory * GB).candidates}
    for one in found_of("Llama-3.1-70B", 8, (memory + more) * GB).candidates:
        assert one.max_requests >= before[one.layout].max_requests
        assert one.rounds <= before[one.layout].rounds
        assert one.tiers == before[one.layout].tiers


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_gpus": 0}, "the number of GPUs must be a whole number from 1 to 1024: 0"),
        ({"num_gpus": 4096}, "the number of GPUs"),
        ({"batch": 0}, "batch must be a whole number from 1: 0"),
        ({"gpu_memory_bytes": 0}, "the memory of a GPU must be positive: 0 bytes"),
        ({"utilization": 0.0}, "utilization must be above 0 and at most 1: 0"),
        ({"utilization": 1.5}, "utilization must be above 0 and at most 1: 1.5"),
        ({"utilization": float("nan")}, "utilization must be above 0"),
        ({"framework": "triton"}, "unknown framework: 'triton'"),
        ({"phase": "handoff"}, "a handoff is between two of them"),
        ({"weight_dtype": "fp3"}, "unknown weight dtype: 'fp3'"),
        ({"kv_dtype": "fp8_ds_mla"}, "layout of latent attention"),
    ],
    ids=lambda value: "",
)
def test_bad_input_is_refused_not_counted(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        found_of("Llama-3.1-8B", **{"num_gpus": 8, **asked})  # type: ignore[arg-type]


def test_degrees_are_those_that_the_enumerations_know() -> None:
    """A new degree of a layout must be varied too, or be left out on purpose."""
    varied = {"tp", "cp", "pp", "dp", "ep", "etp", "dcp", "moe_dp", "replicas"}
    assert {field.name for field in fields(Layout)} - varied == {"moe_cluster"}
