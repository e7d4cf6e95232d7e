"""Buffers of a rank beside weights and cache: activations, logits, and what all-reduces and dispatchers allocate."""

from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.patterns.dispatch import low_latency_buffer_bytes, low_latency_width
from crosstraffic.patterns.expert import backend, expert_path, is_cut_over_tp
from crosstraffic.patterns.layout import expert_tp
from crosstraffic.patterns.setting import Setting
from crosstraffic.patterns.tensor import vocab_shard

MIB = 2**20
FLOAT_BYTES = 4  # logits are sampled in float32
DEEPEP_BYTES = 1024 * MIB  # VLLM_DEEPEP_BUFFER_SIZE_MB
SYMMETRIC_BYTES: Mapping[int, int] = {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB}  # sm90
CUSTOM_BYTES: Mapping[int, int] = {2: 8 * MIB, 4: 8 * MIB, 6: MIB // 2, 8: MIB // 4}  # sm90


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing in the memory of a rank."""

    name: str
    num_bytes: int
    formula: str
    source: str


def rank_buffers(setting: Setting) -> tuple[Part, ...]:
    """Return the buffers of a rank in one pass through the layers, the largest that any rank has."""
    return (_workspace(setting), _logits(setting), *_all_reduce_buffers(setting), *_expert_buffers(setting))


def _all_reduce_buffers(setting: Setting) -> tuple[Part, ...]:
    tp, nodes = setting.tp, setting.nodes
    if tp == 1 or any(len({nodes[rank] for rank in group}) > 1 for group in setting.tensor_groups):
        return ()
    if setting.framework == "vllm" and tp in SYMMETRIC_BYTES:
        return (
            Part(
                name="all_reduce",
                num_bytes=SYMMETRIC_BYTES[tp] + CUSTOM_BYTES[tp] + 16 * MIB + 8 * MIB,
                formula="symmetric memory of TP ranks (sm90) + custom all-reduce: bound + 16 MiB + 8 MiB",
                source="vLLM @ 017e9f4448b7 device_communicators/all_reduce_utils.py, custom_all_reduce.py",
            ),
        )
    if setting.framework == "sglang" and tp == setting.layout.tp and tp in (2, 4, 6, 8):
        return (
            Part(
                name="all_reduce",
                num_bytes=24 * MIB,
                formula="custom all-reduce: 3 * 8 MiB",
                source="SGLang @ 6ed5780c4fd3 device_communicators/custom_all_reduce.py",
            ),
        )
    return ()


def _expert_buffers(setting: Setting) -> tuple[Part, ...]:
    """Return what the dispatcher in use allocates, if tokens are dispatched at all."""
    if expert_path(setting) != "all_to_all":
        return ()
    shape, chosen = setting.shape, backend(setting)
    parts: list[Part] = []
    if chosen.startswith("deepep_low_latency"):
        parts.append(
            Part(
                name="deepep_low_latency",
                num_bytes=low_latency_buffer_bytes(
                    shape.num_experts + setting.workload.redundant_experts,
                    _dispatched_tokens(setting),
                    low_latency_width(shape.expert_row),
                ),
                formula="2 * (E * T * max(message) received + the same sent + 4 * E), T tokens of a rank",
                source="DeepEP @ dd758caf4518 csrc/legacy/config.hpp LowLatencyLayout",
            )
        )
    if chosen.startswith("deepep") and setting.framework == "vllm":
        node_of_rank = setting.nodes
        nodes = {node_of_rank[rank] for rank in setting.groups["ep"][0]}
        both = chosen.startswith("deepep_high_throughput") and len(nodes) > 1
        parts.append(
            Part(
                name="deepep",
                num_bytes=DEEPEP_BYTES * (2 if both else 1),
                formula="1024 MiB for NVLink" + (" + 1024 MiB for RDMA" if both else ""),
                source="vLLM @ 017e9f4448b7 device_communicators/all2all.py, VLLM_DEEPEP_BUFFER_SIZE_MB",
            )
        )
    return tuple(parts)


def _dispatched_tokens(setting: Setting) -> int:
    return -(-setting.local_tokens // (setting.tp if is_cut_over_tp(setting) else 1))


def _expert_rows(setting: Setting) -> int:
    """Return rows that the experts of one rank compute in one step, tokens routed evenly."""
    path, layout, shape = expert_path(setting), setting.layout, setting.shape
    tokens = _dispatched_tokens(setting)
    num_ranks = len(setting.groups["ep"][0])
    if path == "all_to_all":
        if backend(setting).startswith("deepep_low_latency"):
            return shape.num_experts * tokens  # [experts of the rank, T * ranks]: padded for the grouped GEMM
        return tokens * shape.top_k
    everyone = tokens * num_ranks if path == "gather_scatter" else setting.local_tokens
    if path == "gathered":
        everyone *= layout.dp * layout.cp
    return -(-everyone * shape.top_k // layout.ep)


def _workspace(setting: Setting) -> Part:
    """Estimate activations: the residual stream twice, and the widest of attention, dense MLP and experts."""
    shape, tokens, tp = setting.shape, setting.local_tokens, setting.tp
    heads, mla = shape.num_heads // tp, shape.mla
    if mla is not None:
        query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        width = (mla.q_lora_rank or 0) + mla.latent_dim + heads * (query + mla.v_head_dim)
    else:
        width = (2 * heads + 2 * max(1, shape.num_kv_heads // tp)) * shape.head_dim
    if shape.num_moe_layers < shape.num_layers:
        width = max(width, -(-3 * shape.intermediate // tp))
    elements = tokens * width
    if shape.moe_layers:
        inner = -(-3 * shape.moe_intermediate // expert_tp(setting.layout, setting.framework))
        elements = max(elements, _expert_rows(setting) * (2 * shape.expert_row + inner))
    return Part(
        name="workspace",
        num_bytes=(2 * tokens * shape.hidden * shape.residual_streams + elements) * setting.element_bytes,
        formula="(2 * T * H + max(T * attention, T * 3 * I / TP, R * (2 * H + 3 * I_moe / ETP))) * b, R: experts' rows",
        source="estimate: inputs and outputs of one layer's widest matrix products",
    )


def _logits(setting: Setting) -> Part:
    workload = setting.workload
    sampled = workload.num_tokens if workload.phase == "decode" else workload.pass_requests
    width = vocab_shard(setting.shape.vocab, setting.tp) * setting.tp
    return Part(
        name="logits",
        num_bytes=sampled * width * (setting.element_bytes + FLOAT_BYTES),
        formula="T_s * V * (b + 4): gathered on each TP rank, and once more in float32",
        source="vLLM @ 017e9f4448b7 layers/logits_processor.py, v1/sample/sampler.py",
    )
