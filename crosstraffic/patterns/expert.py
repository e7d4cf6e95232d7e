"""Expert parallelism: dispatch and combine, and what engines do where no all-to-all exists."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from crosstraffic.patterns.layout import Groups, expert_tp
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

Path = Literal["none", "tensor", "gathered", "all_to_all", "gather_scatter"]
SCALE_BLOCK = 128
HEADER_BYTES = 16
ROUTE_BYTES = 8  # expert index and weight of one (token, expert) pair
_DEEPEP = "DeepEP @ dd758caf4518 csrc/legacy/config.hpp LowLatencyLayout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes of one (token, expert) message there and back, as functions of the hidden size and element bytes."""

    dispatch: Callable[[int, int], int]
    combine: Callable[[int, int], int]
    dispatch_formula: str
    combine_formula: str
    dispatch_dtype: str | None
    combine_dtype: str | None
    source: str


BACKENDS: Mapping[str, Messages] = {
    "deepep_low_latency": Messages(
        dispatch=lambda hidden, element: HEADER_BYTES + hidden + 4 * hidden // SCALE_BLOCK,
        combine=lambda hidden, element: 2 * hidden,
        dispatch_formula="T * k * (16 + H + 4 * H / 128)",
        combine_formula="T * k * 2 * H",
        dispatch_dtype="float8_e4m3",
        combine_dtype="bfloat16",
        source=_DEEPEP,
    ),
    "deepep_low_latency_bf16": Messages(
        dispatch=lambda hidden, element: HEADER_BYTES + 2 * hidden,
        combine=lambda hidden, element: 2 * hidden,
        dispatch_formula="T * k * (16 + 2 * H)",
        combine_formula="T * k * 2 * H",
        dispatch_dtype="bfloat16",
        combine_dtype="bfloat16",
        source=_DEEPEP,
    ),
    "alltoall": Messages(
        dispatch=lambda hidden, element: hidden * element + 4,
        combine=lambda hidden, element: hidden * element,
        dispatch_formula="T * k * (H * b + 4)",
        combine_formula="T * k * H * b",
        dispatch_dtype=None,
        combine_dtype=None,
        source="Megatron-LM @ d98e8a64ddf3 token_dispatcher.py MoEAlltoAllTokenDispatcher",
    ),
}


def backend(setting: Setting) -> str:
    """Return the dispatcher: what was asked, else the one that each engine uses for expert parallelism at scale.

    The low-latency dispatcher sends one message per (token, expert) in prefill too; nothing is de-duplicated.
    """
    if setting.workload.expert_backend is not None:
        return setting.workload.expert_backend
    if setting.framework in ("megatron", "tensorrt_llm"):
        return "alltoall"
    if setting.framework == "sglang" and (setting.layout.ep != setting.layout.tp or setting.layout.dp == 1):
        return "allgather_reducescatter"
    return "deepep_low_latency" if setting.layout.ep > 1 else "allgather_reducescatter"


def expert_path(setting: Setting) -> Path:
    """Return how the tokens of a layer with experts reach them.

    tensor: every TP rank has every token, partial sums are all-reduced. gathered: as tensor, after all replicas'
    tokens were gathered. all_to_all: dispatch and combine. gather_scatter: all tokens to all ranks of the group.

    Source: vLLM @ 017e9f4448b7 FusedMoEParallelConfig (use_all2all needs dp > 1, or ep and pcp > 1); SGLang
    @ 6ed5780c4fd3 layers/dp_attention.py; Megatron-LM @ d98e8a64ddf3 token_dispatcher.py.
    """
    layout, framework = setting.layout, setting.framework
    is_exchange = backend(setting) != "allgather_reducescatter"
    if not setting.shape.moe_layers:
        return "none"
    if framework == "megatron":
        if layout.ep > 1:
            return "all_to_all" if is_exchange else "gather_scatter"
        if expert_tp(layout, framework) not in (1, layout.tp):
            raise ValueError(f"Megatron-Core without ep: etp must be 1 or tp: {layout}")
        return "tensor" if expert_tp(layout, framework) > 1 else "none"
    if framework == "vllm":
        if layout.dp == 1 and (layout.cp == 1 or setting.workload.phase == "decode"):
            return "tensor"
        return "all_to_all" if layout.ep > 1 and is_exchange else "gather_scatter"
    asked = setting.workload.expert_backend is not None
    if layout.ep > 1 and is_exchange and (layout.dp > 1 or asked):
        if layout.ep != layout.tp:
            raise ValueError(f"{framework}: an all-to-all backend needs ep = tp: {layout}")
        return "all_to_all"
    return "gathered" if setting.tp < layout.tp else "tensor"


def expert_groups(setting: Setting) -> Groups:
    """Return the groups of dispatch and combine, or of gather and scatter."""
    if setting.framework == "vllm" and setting.layout.ep == 1:
        return setting.groups["dp" if setting.layout.dp > 1 else "cp"]
    return setting.groups["ep"]


def is_cut_over_tp(setting: Setting) -> bool:
    """Tell whether each TP rank dispatches its own share of the tokens (else each dispatches all of them)."""
    if setting.tp == 1:
        return False
    if setting.framework == "vllm":
        return setting.layout.ep > 1 and setting.layout.dp > 1
    return setting.framework == "sglang" or setting.workload.sequence_parallel


def exchange_calls(setting: Setting) -> Calls:
    """Return what brings the tokens of one layer to their experts and back, in order."""
    path = expert_path(setting)
    if path == "gather_scatter":
        return (("ep.all_gather", 1), ("ep.reduce_scatter", 1))
    if path != "all_to_all":
        return ()
    inside: Calls = (("etp.all_gather", 1), ("etp.reduce_scatter", 1)) if setting.framework == "megatron" else ()
    return (("ep.dispatch", 1), *inside, ("ep.combine", 1))


def expert_control(setting: Setting) -> tuple[Stream, ...]:
    """Return the exchange of counts before a dispatch."""
    return ()


def expert_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return dispatch and combine, or gather and scatter, and Megatron-Core's exchange inside an expert's TP group."""
    path, shape = expert_path(setting), setting.shape
    tokens = -(-setting.local_tokens // (setting.tp if is_cut_over_tp(setting) else 1))
    if path == "gather_scatter":
        return _gather_streams(setting, order, tokens)
    if path != "all_to_all":
        return ()
    groups, messages = expert_groups(setting), BACKENDS[backend(setting)]
    rule = setting.workload.routed(
        shape, num_tokens=tokens, bytes_per_message=messages.dispatch(shape.hidden, setting.element_bytes)
    )
    back = replace(rule, direction="combine", bytes_per_message=messages.combine(shape.hidden, setting.element_bytes))
    largest = int(back.matrix(len(groups[0]), 0).sum(axis=1).max())
    streams = [
        *make_stream(
            setting,
            order,
            name="ep.dispatch",
            op="all_to_all_v",
            groups=groups,
            payload_bytes=tokens * shape.top_k * rule.bytes_per_message,
            formula=messages.dispatch_formula,
            source=messages.source,
            rule=rule,
            dtype=messages.dispatch_dtype,
        ),
        *make_stream(
            setting,
            order,
            name="ep.combine",
            op="all_to_all_v",
            groups=groups,
            payload_bytes=largest,
            formula=f"{messages.combine_formula}, all that a rank's experts got",
            source=messages.source,
            rule=back,
            dtype=messages.combine_dtype,
        ),
    ]
    if setting.framework == "megatron":
        etp = expert_tp(setting.layout, "megatron")
        for name in ("etp.all_gather", "etp.reduce_scatter"):
            streams += make_stream(
                setting,
                order,
                name=name,
                op="all_gather" if name == "etp.all_gather" else "reduce_scatter",
                groups=setting.groups["etp"],
                payload_bytes=etp * tokens * shape.top_k * shape.hidden * setting.element_bytes,
                formula="ETP * R * H * b, R = T * k rows received (uniform routing)",
                source="Megatron-LM @ d98e8a64ddf3 token_dispatcher.py MoEAlltoAllTokenDispatcher",
            )
    return tuple(streams)


def _gather_streams(setting: Setting, order: Order, tokens: int) -> tuple[Stream, ...]:
    groups, shape = expert_groups(setting), setting.shape
    everyone = len(groups[0]) * tokens
    source = "vLLM @ 017e9f4448b7 all2all.py AgRsAll2AllManager"
    row = shape.hidden * setting.element_bytes
    return (
        *make_stream(
            setting,
            order,
            name="ep.all_gather",
            op="all_gather",
            groups=groups,
            payload_bytes=everyone * (row + ROUTE_BYTES * shape.top_k),
            formula="P * T * (H * b + 8 * k)",
            source=source,
        ),
        *make_stream(
            setting,
            order,
            name="ep.reduce_scatter",
            op="reduce_scatter",
            groups=groups,
            payload_bytes=everyone * row,
            formula="P * T * H * b",
            source=source,
        ),
    )
