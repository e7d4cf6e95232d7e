"""Buffers of a rank: what is allocated where, against formulas written out and sizes of the engines."""

import pytest

from crosstraffic.patterns.buffers import MIB, rank_buffers
from crosstraffic.patterns.dispatch import low_latency_buffer_bytes
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.workload import Workload


def parts_of(model: str, layout: Layout, framework: str = "vllm", **fields: object) -> dict[str, int]:
    workload = Workload(**{"phase": "decode", "batch": 16, **fields})  # type: ignore[arg-type]
    setting = make_setting(load_model(model), layout, workload, framework)
    return {part.name: part.num_bytes for part in rank_buffers(setting)}


def test_workspace_and_logits_of_a_dense_model() -> None:
    found = parts_of("Llama-3.1-8B", Layout(tp=2))
    assert found["workspace"] == (2 * 16 * 4096 + 16 * 3 * 14336 // 2) * 2
    assert found["logits"] == 16 * 128_256 * (2 + 4)


def test_workspace_of_attention_where_it_is_widest() -> None:
    found = parts_of("Qwen3-30B-A3B", Layout(tp=1), batch=1)
    rows = 8 * (2 * 2048 + 3 * 768)
    assert found["workspace"] == (2 * 2048 + max((64 + 8) * 128, rows)) * 2


def test_rows_of_experts() -> None:
    """Low-latency dispatch pads for every expert; a gather brings everyone's tokens; TP computes them all."""
    inner, row = 3 * 2048, 2 * 7168
    residual = 2 * 16 * 7168
    found = {
        name: parts_of("DeepSeek-V3", layout, expert_backend=backend)["workspace"]
        for name, layout, backend in (
            ("low latency", Layout(dp=8, ep=8), "deepep_low_latency"),
            ("high throughput", Layout(dp=8, ep=8), "deepep_high_throughput"),
            ("gather", Layout(dp=8, ep=8), "allgather_reducescatter"),
            ("tp", Layout(tp=8), None),
        )
    }
    assert found["low latency"] == (residual + 256 * 16 * (row + inner)) * 2
    assert found["high throughput"] == (residual + 16 * 8 * (row + inner)) * 2
    assert found["gather"] == (residual + 16 * 8 * 8 // 8 * (row + inner)) * 2
    assert found["tp"] == (residual + 16 * 8 * (row + inner // 8)) * 2


@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_low_latency_buffer(tokens: int) -> None:
    """Two sends and two receives of 256 experts x tokens x 14,560 bytes, and two sets of flags of 1,024."""
    found = parts_of("DeepSeek-V3", Layout(dp=8, ep=8), batch=tokens, expert_backend="deepep_low_latency")
    assert found["deepep_low_latency"] == low_latency_buffer_bytes(256, tokens, 7168)
    assert found["deepep_low_latency"] == 4 * 256 * tokens * 14_560 + 2 * 1024
    assert found["deepep"] == 1024 * MIB


def test_high_throughput_buffers_are_two_across_nodes() -> None:
    backend = "deepep_high_throughput"
    inside = parts_of("DeepSeek-V3", Layout(dp=8, ep=8), expert_backend=backend)
    across = parts_of("DeepSeek-V3", Layout(dp=16, ep=16), expert_backend=backend)
    assert (inside["deepep"], across["deepep"]) == (1024 * MIB, 2048 * MIB)


@pytest.mark.parametrize(
    ("layout", "framework"),
    [(Layout(tp=8), "vllm"), (Layout(dp=8), "vllm"), (Layout(tp=8, ep=8), "vllm"), (Layout(dp=8, ep=8), "megatron")],
    ids=str,
)
def test_no_dispatch_buffer_without_a_dispatch_by_deepep(layout: Layout, framework: str) -> None:
    assert not [name for name in parts_of("DeepSeek-V3", layout, framework) if name.startswith("deepep")]


@pytest.mark.parametrize(
    ("layout", "framework", "num_bytes"),
    [
        (Layout(tp=8), "vllm", 64 * MIB + MIB // 4 + 24 * MIB),
        (Layout(tp=4), "vllm", 32 * MIB + 8 * MIB + 24 * MIB),
        (Layout(tp=1), "vllm", None),
        (Layout(tp=16), "vllm", None),  # across nodes: NCCL
        (Layout(tp=8), "sglang", 24 * MIB),
        (Layout(tp=8, dp=2), "sglang", None),  # attention's own group has no custom all-reduce
        (Layout(tp=8), "megatron", None),
    ],
    ids=str,
)
def test_all_reduce_buffers(layout: Layout, framework: str, num_bytes: int | None) -> None:
    assert parts_of("Llama-3.1-70B", layout, framework).get("all_reduce") == num_bytes
