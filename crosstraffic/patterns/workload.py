"""Workload: what one step has to do, and how the engine is asked to do it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from crosstraffic.patterns.model import KV_FORMATS, ModelShape, dtype_bytes
from crosstraffic.patterns.routing import Routed
from crosstraffic.patterns.stream import MAX_PAYLOAD_BYTES, Phase

ContextStyle = Literal["ring", "all_gather", "ulysses", "ulysses_ring", "pass_q"]
CHOICES: Mapping[str, tuple[str, ...]] = {
    "phase": ("prefill", "decode", "handoff"),
    "context_style": ("ring", "all_gather", "ulysses", "ulysses_ring", "pass_q"),
    "dcp_backend": ("ag_rs", "a2a"),
    "expert_backend": (
        "deepep_low_latency",
        "deepep_low_latency_bf16",
        "deepep_low_latency_logfmt",
        "deepep_high_throughput",
        "deepep_high_throughput_bf16",
        "flashinfer_one_sided",
        "alltoall",
        "allgather_reducescatter",
    ),
    "model_runner": ("v1", "v2"),
    "kv_connector": ("nixl", "nixl_push", "mooncake", "nccl", "ucx"),
    "kv_schedule": ("request", "layer", "chunk"),
    "kv_direction": ("pull", "push"),
}
PHASES = CHOICES["phase"]
CONTEXT_STYLES = CHOICES["context_style"]
EXPERT_BACKENDS = CHOICES["expert_backend"]
WHAT: Mapping[str, str] = {
    "context_style": "context style",
    "dcp_backend": "decode-context backend",
    "expert_backend": "expert backend",
    "model_runner": "model runner",
    "kv_connector": "KV connector",
    "kv_schedule": "KV schedule",
    "kv_direction": "direction of the handoff",
}
AT_LEAST: Mapping[str, int] = {
    "batch": 1,
    "context": 1,
    "cached_tokens": 0,
    "num_speculative": 0,
    "seed": 0,
    "ranks_per_node": 1,
    "num_micro_batches": 1,
    "virtual_stages": 1,
    "redundant_experts": 0,
    "block_tokens": 1,
    "chunk_tokens": 1,
}
STEP, HANDOFF = ("prefill", "decode"), ("handoff",)
# The phases in which a field has an effect; in another one a value of its own is refused. A decode step may repeat its
# tokens, which follow from its batch; layouts read pages of a cache in every phase, and chunks of a prefill.
EFFECT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch", "context", "tokens", "dtype", "kv_dtype", "block_tokens", "ranks_per_node"), PHASES),
    **dict.fromkeys(("replica_tokens", "padded", "num_speculative", "num_micro_batches"), STEP),
    **dict.fromkeys(("routing", "routing_parameter", "routing_weights", "routing_matrix", "seed"), STEP),
    **dict.fromkeys(("sequence_parallel", "quantized_all_reduce", "dcp_backend", "expert_backend"), STEP),
    **dict.fromkeys(("redundant_experts", "two_batch", "virtual_stages", "layer_partition", "model_runner"), STEP),
    **dict.fromkeys(("context_style", "ulysses_ranks"), ("prefill",)),
    **dict.fromkeys(("cached_tokens", "chunk_tokens"), ("prefill", "handoff")),
    **dict.fromkeys(("kv_connector", "kv_schedule", "kv_direction", "kv_split"), HANDOFF),
    **dict.fromkeys(("cross_layer_blocks", "contiguous_blocks"), HANDOFF),
}
MAX_SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step of one replica has to do, and how the engine is asked to do it.

    Work. ``batch`` is requests per data-parallel replica (handoff: per prefill replica), ``context`` tokens of each
    request, ``cached_tokens`` how many of these were in the cache before a prefill. ``tokens`` is the tokens that enter
    the step on one replica; if absent, batch x (context - cached_tokens) in prefill and handoff, batch x (1 +
    num_speculative) in decode: speculation multiplies tokens, it is no parallelism. ``replica_tokens`` gives them for
    each data-parallel replica where they differ, instead of ``tokens`` and of the batch of a decode step; ``padded``
    says that all are padded to the largest (CUDA graphs).

    Micro-batches. A step is ``num_micro_batches`` passes through all layers, one behind the other in a pipeline. A
    prefill is split: each pass has ceil(tokens / num_micro_batches) tokens of each replica. Decode batches are not:
    that many batches of ``batch`` requests are in flight, and the step gives each of their requests its next token.

    Experts. ``routing`` is a distribution of their loads with its ``routing_parameter``, explicit with a load for each
    expert in ``routing_weights``, or matrix with the bytes of a dispatch between the ranks of an expert-parallel group
    in ``routing_matrix`` (see ``routing.routing_fields``).

    Data. ``dtype`` is that of activations, ``kv_dtype`` of the cache; the model's own if absent. ``block_tokens`` is
    the page size of the cache; ``kv_split`` says that K and V lie apart. ``ranks_per_node`` places ranks on nodes in
    order.

    Engine. None is the engine's own choice. ``two_batch`` runs two half batches against each other (DBO, TBO);
    ``virtual_stages`` is chunks of layers per pipeline stage (interleaving); ``layer_partition`` the layers of each
    stage where they are named; ``model_runner`` is vLLM's (v1, v2); ``redundant_experts`` replicas of hot experts
    (EPLB); ``quantized_all_reduce`` the format on the wire of TP all-reduces.

    Handoff. ``kv_connector`` moves the cache, ``kv_schedule`` says when: a whole request, each layer, or each chunk of
    ``chunk_tokens``; ``kv_direction`` who moves it: decode ranks pull, or prefill ranks push. ``cross_layer_blocks``
    puts a page of all layers in one piece of memory; ``contiguous_blocks`` is how many pages lie in a row on both
    sides, None: all that go together.
    """

    phase: Phase
    batch: int = 1
    context: int = 4096
    cached_tokens: int = 0
    tokens: int | None = None
    replica_tokens: tuple[int, ...] = ()
    padded: bool = False
    num_speculative: int = 0
    num_micro_batches: int = 1
    dtype: str | None = None
    kv_dtype: str | None = None
    block_tokens: int = 16
    kv_split: bool = False
    ranks_per_node: int = 8
    routing: str = "uniform"
    routing_parameter: float = 0.0
    routing_weights: tuple[float, ...] = ()
    routing_matrix: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    sequence_parallel: bool = False
    quantized_all_reduce: str | None = None
    context_style: ContextStyle | None = None
    ulysses_ranks: int | None = None
    dcp_backend: str = "ag_rs"
    expert_backend: str | None = None
    redundant_experts: int = 0
    two_batch: bool = False
    virtual_stages: int = 1
    layer_partition: tuple[int, ...] = ()
    model_runner: str | None = None
    kv_connector: str | None = None
    kv_schedule: str | None = None
    kv_direction: str | None = None
    chunk_tokens: int = 8192
    cross_layer_blocks: bool = False
    contiguous_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"unknown phase: {self.phase!r}; allowed: {', '.join(PHASES)}")
        for field, least in AT_LEAST.items():
            if getattr(self, field) < least:
                rule = "must not be negative" if least == 0 else f"must be a whole number from {least}"
                raise ValueError(f"{field} {rule}: {getattr(self, field)}")
            if field != "seed":
                _check_size(field, getattr(self, field))
        for field in ("tokens", "ulysses_ranks", "contiguous_blocks"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be a whole number from 1: {value}")
            _check_size(field, value or 1)
        for field, what in WHAT.items():
            value = getattr(self, field)
            if value is not None and value not in CHOICES[field]:
                raise ValueError(f"unknown {what}: {value!r}; allowed: {', '.join(CHOICES[field])}")
        self._check_effect()
        self._check_tuples()
        _check_size("tokens of a step", self.num_tokens)
        if self.phase == "decode" and self.tokens not in (None, self.num_tokens):
            raise ValueError(
                f"a decode step has one token per request and speculated ones: batch {self.batch}, tokens {self.tokens}"
            )
        if self.cached_tokens >= self.context:
            raise ValueError(f"cached_tokens must be fewer than context: {self.cached_tokens} of {self.context}")
        if self.phase == "prefill" and self.num_micro_batches > self.num_tokens:
            raise ValueError(f"more micro-batches than tokens: {self.num_micro_batches} of {self.num_tokens} tokens")
        if self.ulysses_ranks is not None and self.context_style != "ulysses_ring":
            raise ValueError(
                f"ulysses_ranks goes with context_style ulysses_ring only: {self.ulysses_ranks} with "
                f"{self.context_style or 'none'}"
            )
        if (self.routing == "matrix") != bool(self.routing_matrix):
            raise ValueError(f"routing_matrix goes with routing matrix, and only with it: {self.routing}")
        for dtype in (self.dtype, self.kv_dtype):
            if dtype is not None and dtype not in KV_FORMATS:
                dtype_bytes(dtype)

    def _check_effect(self) -> None:
        """Raise ValueError for a field that has a value of its own and no effect in the phase."""
        for field, default in DEFAULTS.items():
            value, phases = getattr(self, field), EFFECT[field]
            if self.phase not in phases and value != default:
                raise ValueError(
                    f"{field} has an effect in {' and '.join(phases)} only, the phase is {self.phase}: {_shown(value)}"
                )

    def _check_tuples(self) -> None:
        """Raise ValueError for a bad entry of a field that has several, and for tokens that are said twice."""
        entries: Mapping[str, tuple[int, ...]] = {
            "replica_tokens": self.replica_tokens,
            "layer_partition": self.layer_partition,
            "routing_matrix": tuple(max(row, default=0) for row in self.routing_matrix),
        }
        for field, values in entries.items():
            _check_size(field, max(values, default=0))
        if not self.replica_tokens:
            return
        shown, most = _shown(self.replica_tokens), max(self.replica_tokens)
        if min(self.replica_tokens) < 0:
            raise ValueError(f"replica_tokens must not be negative: {shown}")
        if most == 0:
            raise ValueError(f"replica_tokens: no replica has a token: {shown}")
        if self.tokens is not None:
            raise ValueError(f"give tokens or replica_tokens, not both: {self.tokens} and {shown}")
        if self.phase == "decode" and self.batch not in (1, self.pass_requests):
            raise ValueError(
                f"batch must be the requests of the largest replica, {self.pass_requests}, or not be given with "
                f"replica_tokens: {self.batch} and {shown}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens that enter the step on one replica, the most of any where they differ."""
        if self.replica_tokens:
            return max(self.replica_tokens)
        if self.phase == "decode":
            return self.batch * (1 + self.num_speculative)
        return self.tokens if self.tokens is not None else self.batch * (self.context - self.cached_tokens)

    def pass_tokens(self, tokens: int) -> int:
        """Return how many of ``tokens`` of a replica one pass through the layers has: of a prefill, one micro-batch.

        >>> Workload(phase="prefill", tokens=10, num_micro_batches=4).pass_tokens(10)
        3
        """
        return -(-tokens // self.num_micro_batches) if self.phase == "prefill" else tokens

    @property
    def pass_requests(self) -> int:
        """Requests of one pass: each gets a token (a chunk of a prompt too, which the engine throws away)."""
        if self.phase == "decode":
            return -(-self.num_tokens // (1 + self.num_speculative))
        return self.pass_tokens(self.batch)

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
            redundant_experts=self.redundant_experts,
        )


DEFAULTS: Mapping[str, object] = {field.name: field.default for field in fields(Workload) if field.name != "phase"}


def _shown(value: object) -> str:
    """Write a value, however long, for an error."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _check_size(field: str, value: int) -> None:
    """Raise ValueError for a count above the bytes that a stream may have: sums stay within 64 bits."""
    if value > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{field} must be a whole number up to {MAX_PAYLOAD_BYTES}: {value}")
