"""What engines refuse: one row for each rule, the engine's words and the values in the message."""

import re
from dataclasses import replace

import pytest

from crosstraffic.patterns.layout import Layout, check_layout, process_groups
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.placement import check_model
from crosstraffic.patterns.workload import Workload

DEGREES = [
    ("vllm", Layout(tp=3, dcp=2), "tp_size=3 must be divisible by dcp_size=2"),
    ("vllm", Layout(tp=4, cp=2, dcp=4), "TP=4, PCP=2, DCP=4; valid DCP sizes are [1, 2, 8]"),
    ("vllm", Layout(tp=4, cp=2, dcp=4), "DCP must be disabled, span the PCP axis, or span the full TP x PCP axis"),
    ("vllm", Layout(cp=2, dp=2), "PCP does not support data parallelism yet: cp=2, dp=2"),
    ("vllm", Layout(cp=2, pp=3), "MRV2 PCP does not support PP yet"),
    ("vllm", Layout(tp=8, dp=2, ep=8), "dp x cp x tp = 16, or 1 (off): ep=8"),
    ("vllm", Layout(tp=8, ep=8, etp=2), "experts are not cut when expert parallelism is on: etp=2"),
    ("vllm", Layout(tp=8, etp=2), "experts are cut over dp x cp x tp = 8 when expert parallelism is off: etp=2"),
    ("vllm", Layout(tp=4, moe_dp=2), "vLLM has no moe_dp: moe_dp=2"),
    ("vllm", Layout(tp=4, moe_cluster=2), "vLLM has no moe_cluster: moe_cluster=2"),
    ("sglang", Layout(tp=8, cp=3), "tp_size must be divisible by attn_cp_size: 8 over 3"),
    ("sglang", Layout(tp=8, dp=3), "tp_size must be divisible by dp_size * attn_cp_size: 8 over 3 * 1"),
    ("sglang", Layout(tp=8, dp=4, cp=4), "tp_size must be divisible by dp_size * attn_cp_size: 8 over 4 * 4"),
    ("sglang", Layout(tp=8, moe_dp=3, cp=1), "tp_size must be divisible by moe_dp_size: 8 over 3"),
    (
        "sglang",
        Layout(tp=8, ep=4, moe_dp=4),
        "ep_size * moe_dp_size must be less than or equal to tp_size: 4 * 4 and 8",
    ),
    ("sglang", Layout(tp=8, ep=2, moe_dp=2, cp=2), "ep_size * moe_dp_size must be equal to tp_size: 2 * 2 and 8"),
    ("sglang", Layout(tp=8, ep=3), "tp_size must be divisible by ep_size * moe_dp_size: 8 over 3 * 1"),
    (
        "sglang",
        Layout(tp=8, ep=4, moe_dp=2, cp=2, pp=2),
        "PP is not supported with context parallelism: moe_dp=2, pp=2",
    ),
    (
        "sglang",
        Layout(tp=8, ep=4, moe_dp=2, cp=4),
        "attn_cp_size != moe_dp_size is only supported when moe_dp_size == 1",
    ),
    (
        "sglang",
        Layout(tp=8, dcp=3),
        "tensor_model_parallel_size (8) must be divisible by decode_context_parallel_size (3)",
    ),
    ("sglang", Layout(tp=8, ep=4, etp=4), "moe_tp is tp / (ep * moe_dp) = 2: etp=4"),
    (
        "megatron",
        Layout(tp=2, dp=3, ep=4),
        "world_size (6) is not divisible by expert_tensor_model_pipeline_parallel size (4: etp 1 x ep 4 x pp 1)",
    ),
    ("megatron", Layout(tp=2, dcp=2), "Megatron-Core has no dcp: dcp=2"),
    (
        "tensorrt_llm",
        Layout(tp=8, ep=4, etp=4),
        "tp_size must equal to moe_tp_size * moe_ep_size * moe_cluster_size, but got 8 != 4 * 4 * 1",
    ),
    ("tensorrt_llm", Layout(tp=8, ep=3), "but got 8 != 2 * 3 * 1"),
    ("tensorrt_llm", Layout(tp=8, cp=2, ep=8), "CP don't support MoE tp/ep yet: cp=2, ep=8"),
    ("tensorrt_llm", Layout(tp=8, ep=4, moe_cluster=2), "moe_cluster_size > 1 needs moe_ep_size == 1"),
    ("tensorrt_llm", Layout(tp=8, dp=2), "attention data parallelism is off (dp=1) or over all of tp (dp=8): dp=2"),
]


@pytest.mark.parametrize(("framework", "layout", "message"), DEGREES, ids=lambda value: str(value)[:50])
def test_degrees_that_an_engine_refuses(framework, layout, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_layout(layout, framework)
    with pytest.raises(ValueError, match=re.escape(message)):
        process_groups(layout, framework)


@pytest.mark.parametrize(
    ("layout", "order", "message"),
    [
        pytest.param(
            Layout(tp=2, dp=4, pp=2, ep=4, etp=1),
            "tp-cp-ep-pp-dp",
            "the data parallel size of the attention and moe layers must be the same: dp 4, edp 2",
            id="dp and edp differ",
        ),
        pytest.param(
            Layout(tp=2, cp=2, dp=2, pp=2, etp=4),
            "tp-pp-cp-dp",
            "Pipeline parallel groups are expected to be the same for Non-Expert and Expert part",
            id="stages lie elsewhere",
        ),
        pytest.param(
            Layout(tp=2, pp=2), "tp-dp", "the size of (pp) is (2), but you haven't specified the order", id="order"
        ),
    ],
)
def test_orders_that_megatron_refuses(layout, order, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        process_groups(layout, "megatron", order=order)


def test_an_order_string_is_megatron_s_alone():
    with pytest.raises(ValueError, match="an order string belongs to megatron only: 'tp-dp' with vllm"):
        process_groups(Layout(tp=2), "vllm", order="tp-dp")


def test_an_engine_that_is_none():
    with pytest.raises(
        ValueError, match="unknown framework: 'elsewhere'; allowed: vllm, megatron, sglang, tensorrt_llm"
    ):
        process_groups(Layout(), "elsewhere")


MODELS = [
    (
        "Llama-3.1-8B",
        Layout(tp=3),
        "vllm",
        "Total number of attention heads (32) must be divisible by tensor parallel size (3).",
    ),
    ("Llama-3.1-8B", Layout(tp=12, dp=4), "sglang", "Total number of attention heads (32)"),
    ("Llama-3.1-8B", Layout(tp=5), "megatron", "num_attention_heads (32) must be a multiple of"),
    (
        "Qwen3-32B",
        Layout(tp=16, dcp=4),
        "vllm",
        "`--decode-context-parallel-size` (4) exceeds the maximum supported value (2) for `--tensor-parallel-size`",
    ),
    (
        "Llama-3.1-8B",
        Layout(tp=8, dcp=2),
        "vllm",
        "`--tensor-parallel-size` (8) to be greater than the model's total number of KV heads (8).",
    ),
    (
        "Llama-3.1-8B",
        Layout(cp=2),
        "vllm",
        "MRV2 PCP (prefill context parallelism) currently supports MLA models only.",
    ),
    ("Llama-3.1-8B", Layout(dp=2, ep=2), "vllm", "Number of experts in the model must be greater than 0 when expert"),
    ("Llama-3.1-8B", Layout(dp=2, ep=2), "megatron", "num_moe_experts must be non None to use expert-parallel"),
    ("Llama-3.1-8B", Layout(pp=33), "vllm", "more pipeline stages (33) than layers (32)"),
    ("DeepSeek-V3", Layout(pp=2), "megatron", "the number of layers (61) must be divisible by the pipeline stages (2)"),
    ("DeepSeek-V3", Layout(dp=512, ep=512), "vllm", "(512) is larger than the number of experts (256)"),
    (
        "Qwen3-30B-A3B",
        Layout(dp=3, ep=3),
        "megatron",
        "Number of experts should be a multiple of expert model parallel_size",
    ),
]


@pytest.mark.parametrize(
    ("model", "layout", "framework", "message"), MODELS, ids=lambda value: str(value).replace("::", "")[:40]
)
def test_layouts_that_cannot_run_a_model(model, layout, framework, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_model(load_model(model), layout, framework)


def test_query_heads_of_a_kv_head_must_divide_over_dcp():
    shape = load_model("Llama-3.1-8B")
    with pytest.raises(ValueError, match=r"query heads per KV head \(4\) must be divisible by .* \(3\) for GQA/MQA"):
        check_model(replace(shape, num_heads=24, num_kv_heads=6), Layout(tp=24, dcp=3), "vllm")


def test_kv_heads_and_megatron_s_tp_must_divide_one_another():
    shape = load_model("Llama-3.1-8B")
    with pytest.raises(ValueError, match=r"num_query_groups \(6\) must be a multiple or divisor of .* \(4\)"):
        check_model(replace(shape, num_heads=24, num_kv_heads=6), Layout(tp=4), "megatron")


WORKLOADS = [
    (
        "Llama-3.1-8B",
        Layout(dp=2),
        Workload(phase="decode", sequence_parallel=True),
        "megatron",
        "Cannot use sequence parallelism without tensor parallelism",
    ),
    (
        "DeepSeek-V3",
        Layout(tp=2, cp=2),
        Workload(phase="decode", num_speculative=1),
        "vllm",
        "MRV2 PCP does not support speculative decoding yet: cp=2, num_speculative=1",
    ),
    (
        "DeepSeek-V3",
        Layout(tp=4, dp=2),
        Workload(phase="decode", redundant_experts=32),
        "vllm",
        "enable_expert_parallel must be True to use EPLB",
    ),
    (
        "Llama-3.1-8B",
        Layout(tp=4),
        Workload(phase="decode", virtual_stages=2),
        "megatron",
        "pipeline-model-parallel size should be greater than 1 with interleaved schedule",
    ),
]


@pytest.mark.parametrize(("model", "layout", "workload", "framework", "message"), WORKLOADS, ids=lambda v: str(v)[:40])
def test_workloads_that_an_engine_refuses(model, layout, workload, framework, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        phase_streams(load_model(model), layout, workload, framework)


def test_what_is_no_error():
    """A dense model in replicas is independent worlds, whatever an engine's offline mode says of it."""
    assert phase_streams(load_model("Llama-3.1-8B"), Layout(dp=8), Workload(phase="decode"), "vllm") == ()
    check_model(load_model("DeepSeek-V3"), Layout(tp=4, cp=2, dcp=8), "vllm")
    check_layout(Layout(tp=2, cp=2, pp=2, dp=2, ep=4), "megatron")
