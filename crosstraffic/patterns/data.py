"""Data parallelism: what replicas tell each other, and what engines gather whose attention is data parallel inside TP.

The replicas of a dense model are independent. Those of a model with experts meet in its layers (``ep.*`` streams), and
must agree on every step beforehand: that is control traffic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from crosstraffic.patterns.expert import expert_path
from crosstraffic.patterns.setting import Order, Setting, make_control, make_stream, step_tokens
from crosstraffic.patterns.stream import Stream

Padding = Literal["max_len", "sum_len"]
NOTHING = "replicas share no tensor in a forward pass"
COORDINATOR_STEPS = 32  # vLLM: steps between two questions whether any replica has work
CONSENSUS_STEPS = 20  # Megatron-Core: ep_consensus_interval
_SOURCE = "SGLang @ 6ed5780c4fd3 layers/dp_attention.py"
_VLLM = "vLLM @ 017e9f4448b7"
_MEGATRON = "Megatron-LM @ d98e8a64ddf3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasional:
    """A message that is not sent in every step: ``num_bytes`` of each rank, once in ``every_steps`` steps."""

    name: str
    op: str
    group: str
    num_bytes: int
    every_steps: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Something that crosses the network for data parallelism, and whether a forward pass waits for it."""

    what: str
    when: str
    carrier: str
    on_forward_path: bool


BACKGROUND: tuple[Background, ...] = (
    Background(
        what="requests and answers", when="each request, each token", carrier="HTTP, ZMQ", on_forward_path=False
    ),
    Background(what="load and wave numbers to the coordinator", when="each step", carrier="ZMQ", on_forward_path=False),
    Background(what="weights", when="start, and updates of them", carrier="file system, NCCL", on_forward_path=False),
    Background(what="LoRA adapters", when="a new adapter", carrier="file system", on_forward_path=False),
    Background(
        what="pages of a shared KV store", when="a prefix found there", carrier="RDMA, TCP", on_forward_path=False
    ),
    Background(what="metrics", when="each scrape", carrier="HTTP", on_forward_path=False),
)


def why_nothing(setting: Setting) -> str:
    """Say why data parallelism has no stream of its own in a step."""
    if setting.layout.dp * setting.layout.replicas == 1:
        return "dp=1: one replica"
    parts: list[str] = []
    if setting.layout.dp > 1 and expert_path(setting) in ("all_to_all", "gather_scatter"):
        parts.append("but those of the experts (ep.*)")
    if data_control(setting):
        parts.append("and agree on each step in control messages")
    if parts:
        return f"{NOTHING} {', '.join(parts)}"
    return f"{NOTHING}: {'they' if setting.shape.moe_layers else 'those of a dense model'} are independent"


def useful_fraction(tokens: Sequence[int]) -> float:
    """Return which part of the rows is real where all replicas are padded to the largest: sum / (DP * max).

    >>> useful_fraction((100, 50, 25, 25))
    0.5
    """
    if not tokens or max(tokens) == 0:
        raise ValueError(f"no replica has a token: {tuple(tokens)}")
    return sum(tokens) / (len(tokens) * max(tokens))


def padding_mode(tokens: Sequence[int], *, is_extend: bool) -> Padding:
    """Return how SGLang gathers the tokens of its replicas: padded to the largest, or as an all-reduce of the sum.

    A batch with a prompt in it, on several replicas: sum; otherwise what costs less, an all-gather of DP x max or an
    all-reduce (twice) of the sum: max where 2 * sum >= DP * max.

    >>> padding_mode((64, 64), is_extend=False), padding_mode((64, 0, 0), is_extend=False)
    ('max_len', 'sum_len')

    Source: SGLang @ 6ed5780c4fd3 layers/dp_attention.py DpPaddingMode.get_dp_padding_mode.
    """
    if is_extend and len(tokens) > 1:
        return "sum_len"
    return "max_len" if 2 * sum(tokens) >= max(tokens) * len(tokens) else "sum_len"


def sums_tokens(setting: Setting) -> bool:
    """Tell whether tokens are gathered by an all-reduce of a zero-filled buffer (SGLang's SUM_LEN).

    Prompts run without a CUDA graph; a graph of a decode step (``padded``) is always captured as MAX_LEN. The tokens
    of the whole step decide: two half batches are gathered in its mode, whatever their own tokens would say.

    Source: SGLang @ 6ed5780c4fd3 model_executor/forward_batch_info.py prepare_mlp_sync_batch,
    batch_overlap/two_batch_overlap.py filter_batch (copies dp_padding_mode).
    """
    if setting.framework != "sglang":
        return False
    is_extend = setting.workload.phase == "prefill"
    if setting.workload.padded and not is_extend:
        return False
    whole = step_tokens(setting.shape, setting.workload, setting.layout, setting.framework)
    return padding_mode([whole_shares(own, setting.tp) for own in whole], is_extend=is_extend) == "sum_len"


def whole_shares(tokens: int, attention_tp: int) -> int:
    """Return the tokens of a replica, padded so that its attention ranks can each take an equal share of them.

    >>> whole_shares(5, 2), whole_shares(0, 2)
    (6, 0)

    Source: SGLang @ 6ed5780c4fd3 model_executor/forward_batch_info.py prepare_mlp_sync_batch: before the mode is
    chosen and the buffer is sized.
    """
    return -(-tokens // attention_tp) * attention_tp


def gathered_rows(setting: Setting) -> int:
    """Return the rows of the buffer that holds the tokens of all replicas, of all shares of a prompt cut over ranks.

    SUM_LEN: the sum; MAX_LEN: DP x max; of tokens padded to a multiple of attention TP. TensorRT-LLM, whose attention
    ranks are replicas, gathers rows of different numbers: the sum.
    """
    shares = setting.layout.cp if setting.workload.phase == "prefill" else 1
    rows = [whole_shares(shares * own, setting.tp) for own in setting.replica_tokens]
    is_sum = sums_tokens(setting) or setting.framework == "tensorrt_llm"
    return sum(rows) if is_sum else len(rows) * max(rows)


def _vllm_control(setting: Setting) -> tuple[Stream, ...]:
    """All-reduce int32 [4, DP]: tokens, padded tokens, two batches or not, CUDA graph mode."""
    if setting.layout.dp == 1 or not setting.shape.moe_layers:
        return ()
    return make_control(
        setting,
        name="dp.batch_sync",
        op="all_reduce",
        groups=setting.groups["dp"],
        payload_bytes=4 * setting.layout.dp * 4,
        formula="4 * DP * 4 bytes: tokens, padded tokens, two batches, CUDA graph mode of each replica",
        source=f"{_VLLM} v1/worker/dp_utils.py _run_ar; Gloo on the host with asynchronous scheduling, else NCCL",
        dtype="int32",
        calls=setting.num_passes,
    )


def _sglang_control(setting: Setting) -> tuple[Stream, ...]:
    """All-gather 7 int64 of each rank of the TP group, whether its replica is idle or not."""
    if setting.layout.dp == 1 and expert_path(setting) != "all_to_all":
        return ()
    return make_control(
        setting,
        name="dp.batch_sync",
        op="all_gather",
        groups=setting.groups["tp"],
        payload_bytes=7 * 8 * setting.layout.tp,
        formula="7 * 8 bytes of each of dp * cp * attention tp ranks: tokens, forward mode, what may run",
        source="SGLang @ 6ed5780c4fd3 managers/scheduler_components/dp_attn.py MLPSyncBatchInfo; Gloo on the host",
        dtype="int64",
        calls=setting.num_passes,
    )


def _megatron_control(setting: Setting) -> tuple[Stream, ...]:
    """All-reduce (max) int32 [2] over the expert group: tokens, whether any rank has a prompt."""
    if setting.layout.ep == 1:
        return ()
    return make_control(
        setting,
        name="dp.batch_sync",
        op="all_reduce",
        groups=setting.groups["ep"],
        payload_bytes=2 * 4,
        formula="2 * 4 bytes: tokens, prompt or not; the largest of the expert group",
        source=f"{_MEGATRON} core/inference/batch_dimensions_utils.py adjust_batch_dims_for_expert_parallelism; "
        "ZMQ on the host, or NCCL",
        dtype="int32",
        calls=setting.num_passes,
    )


CONTROL: Mapping[str, Callable[[Setting], tuple[Stream, ...]]] = {
    "vllm": _vllm_control,
    "sglang": _sglang_control,
    "megatron": _megatron_control,
}


def data_control(setting: Setting) -> tuple[Stream, ...]:
    """Return what replicas tell each other before a step; nothing for replicas that are independent."""
    make = CONTROL.get(setting.framework)
    return make(setting) if make else ()


def occasional(setting: Setting) -> tuple[Occasional, ...]:
    """Return what replicas tell each other only once in a number of steps: no call of each step, so no stream.

    Source: vLLM @ 017e9f4448b7 v1/engine/core.py _has_global_unfinished_reqs, config/parallel.py sync_dp_state;
    Megatron-LM @ d98e8a64ddf3 core/inference/engines/dynamic_engine.py _ep_establish_consensus.
    """
    if setting.framework == "vllm" and setting.layout.dp > 1 and setting.shape.moe_layers:
        return (
            Occasional(
                name="dp.work_left",
                op="all_reduce",
                group="dp",
                num_bytes=2 * 4,
                every_steps=COORDINATOR_STEPS,
                formula="2 * 4 bytes: work left, pause asked for",
                source=f"{_VLLM} v1/engine/core.py _has_global_unfinished_reqs; Gloo on the host",
            ),
        )
    if setting.framework == "megatron" and setting.layout.ep > 1:
        return (
            Occasional(
                name="dp.work_left",
                op="all_reduce",
                group="ep",
                num_bytes=2 * 4,
                every_steps=CONSENSUS_STEPS,
                formula="2 * 4 bytes: most work of a rank, pause asked for; in each step while there is no work",
                source=f"{_MEGATRON} core/inference/engines/dynamic_engine.py _ep_establish_consensus; ZMQ",
            ),
        )
    return ()


def data_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the gather and scatter of all replicas' tokens around the layers that all TP ranks compute together.

    SUM_LEN: two all-reduces of the sum of the tokens; a replica's part of the result is copied, not sent. MAX_LEN: a
    reduce-scatter among the attention ranks of a replica, an all-gather of DP x max, and back.
    """
    row = setting.shape.hidden * setting.element_bytes
    whole, largest = gathered_rows(setting) * row, whole_shares(setting.local_tokens, setting.tp) * row
    padded = (
        ", T padded to a multiple of attention TP" if any(own % setting.tp for own in setting.replica_tokens) else ""
    )
    everyone, own = setting.groups["tp"], setting.tensor_groups
    is_trt = setting.framework == "tensorrt_llm"
    streams: list[Stream] = []
    if sums_tokens(setting):
        for name in ("dp.gather", "dp.mlp_output"):
            streams += make_stream(
                setting,
                order,
                name=name,
                op="all_reduce",
                groups=everyone,
                payload_bytes=whole,
                formula=f"sum of T over replicas * H * b{padded}",
                source=f"{_SOURCE} DpPaddingMode.SUM_LEN",
            )
    else:
        for name in ("dp.gather", "dp.scatter"):
            streams += make_stream(
                setting,
                order,
                name=name,
                op="all_gather" if name == "dp.gather" else "reduce_scatter",
                groups=everyone,
                payload_bytes=whole,
                formula=f"{'sum' if is_trt else 'dp * max'} of T over replicas * H * b{padded}",
                source="TensorRT-LLM attention data parallelism" if is_trt else f"{_SOURCE} DpPaddingMode.MAX_LEN",
            )
    for name in ("dp.attention_scatter", "dp.attention_gather"):
        streams += make_stream(
            setting,
            order,
            name=name,
            op="reduce_scatter" if name == "dp.attention_scatter" else "all_gather",
            groups=own,
            payload_bytes=largest,
            formula=f"T * H * b over the TP ranks of one replica{padded}",
            source=_SOURCE,
        )
    return tuple(streams)
