"""Workload: what one step has to do; Setting: a workload on a model, a layout and an engine, and what follows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from crosstraffic.patterns.layout import Groups, Layout, process_groups
from crosstraffic.patterns.matrix import ByteRule
from crosstraffic.patterns.model import ModelShape, dtype_bytes, dtype_name
from crosstraffic.patterns.placement import attention_tp, check_model, stage_layers
from crosstraffic.patterns.routing import Routed
from crosstraffic.patterns.stream import Op, Phase, Stream

ContextStyle = Literal["ring", "all_gather"]
PHASES: tuple[str, ...] = ("prefill", "decode", "handoff")
CONTEXT_STYLES: tuple[str, ...] = ("ring", "all_gather")
EXPERT_BACKENDS: tuple[str, ...] = (
    "deepep_low_latency",
    "deepep_low_latency_bf16",
    "alltoall",
    "allgather_reducescatter",
)
Calls = tuple[tuple[str, int], ...]
BOUNDARY = "pp.activation"  # the one stream between pipeline stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step of one replica has to do.

    ``batch`` is requests per data-parallel replica (handoff: per prefill replica), ``context`` tokens of each request.
    ``tokens`` is the tokens that enter the step on one replica; if absent, batch x context in prefill and handoff,
    batch x (1 + num_speculative) in decode. ``dtype`` is that of activations, ``kv_dtype`` of the cache; the model's
    own if absent. ``block_tokens`` is the page size of the cache; ``kv_split`` says that K and V lie apart.
    """

    phase: Phase
    batch: int = 1
    context: int = 4096
    tokens: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    sequence_parallel: bool = False
    context_style: ContextStyle | None = None
    expert_backend: str | None = None
    routing: str = "uniform"
    routing_parameter: float = 0.0
    routing_weights: tuple[float, ...] = ()
    seed: int = 0
    num_speculative: int = 0
    block_tokens: int = 16
    kv_split: bool = False

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"unknown phase: {self.phase!r}; allowed: {', '.join(PHASES)}")
        for field in ("batch", "context", "block_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be a whole number from 1: {getattr(self, field)}")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens must be a whole number from 1: {self.tokens}")
        if self.num_speculative < 0:
            raise ValueError(f"num_speculative must not be negative: {self.num_speculative}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative: {self.seed}")
        if self.phase == "decode" and self.tokens not in (None, self.num_tokens):
            raise ValueError(
                f"a decode step has one token per request and speculated ones: batch {self.batch}, tokens {self.tokens}"
            )
        if self.context_style not in (None, *CONTEXT_STYLES):
            raise ValueError(f"unknown context style: {self.context_style!r}; allowed: {', '.join(CONTEXT_STYLES)}")
        if self.expert_backend not in (None, *EXPERT_BACKENDS):
            raise ValueError(f"unknown expert backend: {self.expert_backend!r}; allowed: {', '.join(EXPERT_BACKENDS)}")
        for dtype in (self.dtype, self.kv_dtype):
            if dtype is not None:
                dtype_bytes(dtype)

    @property
    def num_tokens(self) -> int:
        """Tokens that enter the step on one replica."""
        if self.phase == "decode":
            return self.batch * (1 + self.num_speculative)
        return self.tokens if self.tokens is not None else self.batch * self.context

    def routed(self, shape: ModelShape, *, num_tokens: int, bytes_per_message: int) -> Routed:
        """Return the byte rule of a dispatch in which each rank routes ``num_tokens``."""
        return Routed(
            num_tokens=num_tokens,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            bytes_per_message=bytes_per_message,
            distribution=self.routing,
            parameter=self.routing_parameter,
            seed=self.seed,
            weights=self.routing_weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Streams by name and number of calls, in the order in which a rank makes them.

    ``first`` and ``last`` are made on the first and last pipeline stage, ``receive`` after a stage got its input.
    """

    first: Calls
    dense_layer: Calls
    moe_layer: Calls
    last: Calls
    receive: Calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A workload on a model, a layout and an engine. ``local_tokens``: tokens that a rank holds, after context cuts."""

    shape: ModelShape
    layout: Layout
    workload: Workload
    framework: str
    groups: Mapping[str, Groups]
    stages: tuple[range, ...]
    stage_of_rank: Mapping[int, int]
    dtype: str
    tp: int
    local_tokens: int

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return dtype_bytes(self.dtype)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a rank's tokens: M = T * H * b."""
        return self.local_tokens * self.shape.hidden * self.element_bytes

    @property
    def tensor_groups(self) -> Groups:
        """The groups over which the heads of one replica are cut."""
        if self.framework == "sglang":
            return self.groups["attn_tp"]
        if self.tp == self.layout.tp:
            return self.groups["tp"]
        return tuple((rank,) for group in self.groups["tp"] for rank in group)

    def stage_calls(self, order: Order, name: str) -> tuple[int, ...]:
        """Return how often a group of each pipeline stage calls a stream in one step."""
        found: list[int] = []
        experts = set(self.shape.moe_layers)
        for index, layers in enumerate(self.stages):
            num_moe = sum(layer in experts for layer in layers)
            parts = [(order.dense_layer, len(layers) - num_moe), (order.moe_layer, num_moe)]
            parts += [(order.first, int(index == 0)), (order.receive, int(index > 0))]
            parts += [(order.last, int(index == len(self.stages) - 1))]
            found.append(sum(times * count for calls, times in parts for own, count in calls if own == name))
        return tuple(found)


def make_setting(shape: ModelShape, layout: Layout, workload: Workload, framework: str) -> Setting:
    """Work out what follows from a workload on a model, a layout and an engine.

    Raises:
        ValueError: the engine cannot run the model that way, or sequence parallelism without tensor parallelism.
    """
    check_model(shape, layout, framework)
    groups = process_groups(layout, framework)
    tp = attention_tp(layout, framework)
    if workload.sequence_parallel and tp == 1:
        raise ValueError("Cannot use sequence parallelism without tensor parallelism: tp=1")
    if workload.sequence_parallel and framework in ("sglang", "tensorrt_llm"):
        raise ValueError(f"sequence parallelism is described for megatron and vllm only: {framework}")
    tokens = workload.num_tokens
    if workload.phase == "prefill":
        tokens = -(-tokens // layout.cp)
    if workload.sequence_parallel:
        tokens = -(-tokens // tp) * tp
    return Setting(
        shape=shape,
        layout=layout,
        workload=workload,
        framework=framework,
        groups=groups,
        stages=stage_layers(shape.num_layers, layout, framework),
        stage_of_rank={rank: stage for group in groups["pp"] for stage, rank in enumerate(group)},
        dtype=dtype_name(workload.dtype or shape.dtype),
        tp=tp,
        local_tokens=tokens,
    )


def make_stream(
    setting: Setting,
    order: Order,
    *,
    name: str,
    op: Op,
    groups: Groups,
    payload_bytes: int,
    formula: str,
    source: str,
    rule: ByteRule | None = None,
    dtype: str | None = None,
) -> tuple[Stream, ...]:
    """Return the stream with the groups that call it, and the calls of the one that does most.

    Nothing is returned if it is never called or its groups have one rank: then nothing crosses. The boundary
    between two stages is crossed once.
    """
    calls = setting.stage_calls(order, name) if name != BOUNDARY else (1,) * len(setting.stages)
    calling = tuple(group for group in groups if calls[setting.stage_of_rank[group[0]]])
    if payload_bytes == 0 or all(len(group) == 1 for group in calling):
        return ()
    return (
        Stream(
            name=name,
            pattern=name.split(".", maxsplit=1)[0],
            op=op,
            phase=setting.workload.phase,
            groups=calling,
            payload_bytes=payload_bytes,
            calls_per_step=max(calls),
            dtype=dtype or setting.dtype,
            formula=formula,
            source=source,
            rule=rule,
        ),
    )
