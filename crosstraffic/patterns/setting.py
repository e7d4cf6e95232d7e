"""Setting: a workload on a model, a layout and an engine, and what follows; streams are made of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle

from crosstraffic.patterns.layout import Groups, Layout, process_groups
from crosstraffic.patterns.matrix import ByteRule
from crosstraffic.patterns.model import ModelShape, dtype_bytes, dtype_name
from crosstraffic.patterns.placement import attention_tp, check_model
from crosstraffic.patterns.stages import interleaved_stages, model_chunks
from crosstraffic.patterns.stream import Op, Role, Stream
from crosstraffic.patterns.workload import Workload
from crosstraffic.patterns.zigzag import local_rows

Calls = tuple[tuple[str, int], ...]
LayerKind = tuple[bool, bool]  # has experts, has a cache that grows with tokens
CONTEXT = ("cp.", "dcp.")  # streams of context parallelism in a layer
BOUNDARY = "pp.activation"  # the one stream between pipeline stages


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


def layer_calls(order: Order, kind: LayerKind) -> Calls:
    """Return the calls of a layer; one with linear attention has no keys and values to bring together."""
    has_experts, has_cache = kind
    calls = order.moe_layer if has_experts else order.dense_layer
    return calls if has_cache else tuple(call for call in calls if not call[0].startswith(CONTEXT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A workload on a model, a layout and an engine.

    ``local_tokens``: tokens that a rank holds, after context cuts; the most of any replica. ``replica_tokens`` are
    those of a rank of each data-parallel replica, padded where the engine pads. ``num_batches`` is 2 where a step runs
    as two half batches: then tokens are those of one half, and all calls count twice. Where a prefill is split into
    micro-batches, tokens are those of one. ``stages`` are the layers of each pipeline stage, ``chunks`` those between
    two boundaries: the same, but where a stage has several (interleaving).
    """

    shape: ModelShape
    layout: Layout
    workload: Workload
    framework: str
    groups: Mapping[str, Groups]
    stages: tuple[tuple[int, ...], ...]
    chunks: tuple[range, ...]
    stage_of_rank: Mapping[int, int]
    dtype: str
    tp: int
    local_tokens: int
    replica_tokens: tuple[int, ...]
    num_batches: int = 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return dtype_bytes(self.dtype)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a rank's tokens: M = T * H * b."""
        return self.local_tokens * self.shape.hidden * self.element_bytes

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout."""
        return len(self.stage_of_rank)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank, ranks placed on nodes in order."""
        return tuple(rank // self.workload.ranks_per_node for rank in range(self.num_ranks))

    @property
    def replica_of_rank(self) -> Mapping[int, int]:
        """The data-parallel replica that each rank belongs to."""
        if "dp" in self.groups:
            return {rank: replica for group in self.groups["dp"] for replica, rank in enumerate(group)}
        per_replica = self.layout.tp // self.layout.dp
        return {rank: rank % self.layout.tp // per_replica for rank in range(self.num_ranks)}

    @property
    def tensor_groups(self) -> Groups:
        """The groups over which the heads of one replica are cut."""
        if self.framework == "sglang":
            return self.groups["attn_tp"]
        if self.tp == self.layout.tp:
            return self.groups["tp"]
        return tuple((rank,) for group in self.groups["tp"] for rank in group)

    @property
    def num_passes(self) -> int:
        """How often the layers are run in one step: for each micro-batch, and each half batch of it."""
        return self.num_batches * self.workload.num_micro_batches

    @property
    def boundary_calls(self) -> int:
        """How often the boundary behind a stage is crossed in one step: in each pass, by each chunk of the stage."""
        return self.num_passes * (len(self.chunks) // len(self.stages))

    def stage_calls(self, order: Order, name: str) -> tuple[int, ...]:
        """Return how often a group of each pipeline stage calls a stream in one step."""
        ends = [sum(times for own, times in calls if own == name) for calls in (order.first, order.receive, order.last)]
        stages = _kinds_of_stages(self.stages, self.shape.moe_layers, self.shape.linear_layers)
        of_kind = {
            kind: sum(times for own, times in layer_calls(order, kind) if own == name)
            for kind in dict.fromkeys(kind for kinds in stages for kind, _ in kinds)
        }
        found: list[int] = []
        for index, kinds in enumerate(stages):
            is_first, is_last = int(index == 0), int(index == len(stages) - 1)
            num_inputs = len(self.chunks) // len(stages) - is_first
            inside = sum(of_kind[kind] * count for kind, count in kinds)
            found.append(inside + ends[0] * is_first + ends[1] * num_inputs + ends[2] * is_last)
        return tuple(count * self.num_passes for count in found)

    def layer_kinds(self, layers: Sequence[int]) -> tuple[LayerKind, ...]:
        """Return of each layer what decides on its calls: whether it has experts, and a cache that grows."""
        return _layer_kinds(layers, self.shape.moe_layers, self.shape.linear_layers)

    def calling_groups(self, order: Order, name: str, groups: Groups) -> Groups:
        """Return the groups that call a stream: those of the pipeline stages that have it."""
        calls = self.stage_calls(order, name) if name != BOUNDARY else (1,) * len(self.stages)
        return groups if all(calls) else tuple(group for group in groups if calls[self.stage_of_rank[group[0]]])


def _layer_kinds(
    layers: Sequence[int], moe_layers: Sequence[int], linear_layers: Sequence[int]
) -> tuple[LayerKind, ...]:
    experts, linear = set(moe_layers), set(linear_layers)
    return tuple((layer in experts, layer not in linear) for layer in layers)


@lru_cache(maxsize=1024)
def _kinds_of_stages(
    stages: tuple[tuple[int, ...], ...], moe_layers: tuple[int, ...], linear_layers: tuple[int, ...]
) -> tuple[tuple[tuple[LayerKind, int], ...], ...]:
    """Return the kinds of layers of each stage, and how many layers of each: of a model and a cut, once."""
    return tuple(tuple(Counter(_layer_kinds(layers, moe_layers, linear_layers)).items()) for layers in stages)


def held_tokens(workload: Workload, layout: Layout, tp: int, tokens: int, framework: str) -> int:
    """Return how many of a replica's tokens each of its ranks holds.

    Context parallelism cuts each prompt as the engine does, padding included (see ``zigzag``); sequence parallelism
    pads to a multiple of TP.
    """
    if workload.phase == "prefill":
        tokens = local_rows(tokens, -(-workload.batch // workload.num_micro_batches), layout.cp, framework)
    return -(-tokens // tp) * tp if workload.sequence_parallel else tokens


def step_tokens(shape: ModelShape, workload: Workload, layout: Layout, framework: str) -> tuple[int, ...]:
    """Return the tokens that each data-parallel replica runs at once, padded to the largest if so asked.

    They are all that enter the step, or of a prefill in micro-batches one of these. A replica without any runs a dummy
    batch where the others wait for it in layers with experts: vLLM one decode step, Megatron-Core one token; SGLang an
    empty one.

    Raises:
        ValueError: not one number for each replica.

    Source: vLLM @ 017e9f4448b7 v1/worker/dp_utils.py _post_process_dp_padding, v1/worker/gpu_worker.py
    execute_dummy_batch; Megatron-LM @ d98e8a64ddf3 text_generation_controller.py dummy_forward.
    """
    asked = workload.replica_tokens or (workload.num_tokens,) * layout.dp
    if len(asked) != layout.dp:
        raise ValueError(
            f"replica_tokens must name each of the {layout.dp} data-parallel replicas: {len(asked)} given, {asked}"
        )
    idle = {"vllm": 1 + workload.num_speculative, "sglang": 0}.get(framework, 1) if shape.moe_layers else 0
    tokens = tuple(workload.pass_tokens(own) if own else idle for own in asked)
    return (max(tokens),) * layout.dp if workload.padded else tokens


def make_setting(shape: ModelShape, layout: Layout, workload: Workload, framework: str) -> Setting:
    """Work out what follows from a workload on a model, a layout and an engine.

    Raises:
        ValueError: the engine cannot run the model that way, or sequence parallelism without tensor parallelism.
    """
    check_model(shape, layout, framework, workload.redundant_experts)
    groups = process_groups(layout, framework)
    tp = attention_tp(layout, framework)
    if workload.sequence_parallel and tp == 1:
        raise ValueError("Cannot use sequence parallelism without tensor parallelism: tp=1")
    if workload.sequence_parallel and framework in ("sglang", "tensorrt_llm"):
        raise ValueError(f"sequence parallelism is described for megatron and vllm only: {framework}")
    if framework == "vllm" and layout.cp > 1 and workload.num_speculative:
        raise ValueError(
            "MRV2 PCP does not support speculative decoding yet: "
            f"cp={layout.cp}, num_speculative={workload.num_speculative}"
        )
    if workload.model_runner is not None and framework != "vllm":
        raise ValueError(f"{framework} has one model runner: model_runner={workload.model_runner} is vllm's")
    chunks = model_chunks(
        shape.num_layers,
        layout,
        framework,
        virtual_stages=workload.virtual_stages,
        partition=workload.layer_partition,
    )
    tokens = step_tokens(shape, workload, layout, framework)
    held = tuple(held_tokens(workload, layout, tp, own, framework) for own in tokens)
    return Setting(
        shape=shape,
        layout=layout,
        workload=workload,
        framework=framework,
        groups=groups,
        stages=interleaved_stages(chunks, layout.pp),
        chunks=chunks,
        stage_of_rank=dict(zip(chain.from_iterable(groups["pp"]), cycle(range(layout.pp)), strict=False)),
        dtype=dtype_name(workload.dtype or shape.dtype),
        tp=tp,
        local_tokens=max(held),
        replica_tokens=held,
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
    between two stages is crossed once in each pass, by each chunk of layers.
    """
    if payload_bytes == 0 or all(len(group) == 1 for group in groups):
        return ()
    calling = setting.calling_groups(order, name, groups)
    calls = setting.boundary_calls if name == BOUNDARY else max(setting.stage_calls(order, name))
    return _stream_of(
        setting,
        name=name,
        op=op,
        groups=calling,
        payload_bytes=payload_bytes,
        calls=calls,
        dtype=dtype or setting.dtype,
        formula=formula,
        source=source,
        rule=rule,
        role="data",
    )


def make_control(
    setting: Setting,
    *,
    name: str,
    op: Op,
    groups: Groups,
    payload_bytes: int,
    formula: str,
    source: str,
    dtype: str,
    calls: int = 1,
    rule: ByteRule | None = None,
) -> tuple[Stream, ...]:
    """Return a stream of control traffic: small messages of the scheduler, ``calls`` a step, on all of ``groups``.

    Nothing is returned if there is nothing to send or its groups have one rank.
    """
    return _stream_of(
        setting,
        name=name,
        op=op,
        groups=groups,
        payload_bytes=payload_bytes,
        calls=calls,
        dtype=dtype,
        formula=formula,
        source=source,
        rule=rule,
        role="control",
    )


def _stream_of(
    setting: Setting,
    *,
    name: str,
    op: Op,
    groups: Groups,
    payload_bytes: int,
    calls: int,
    dtype: str,
    formula: str,
    source: str,
    rule: ByteRule | None,
    role: Role,
) -> tuple[Stream, ...]:
    """Return the stream if anything crosses: bytes, calls, and a group of more than one rank."""
    if payload_bytes == 0 or calls == 0 or all(len(group) == 1 for group in groups):
        return ()
    return (
        Stream(
            name=name,
            pattern=name.split(".", maxsplit=1)[0],
            op=op,
            phase=setting.workload.phase,
            groups=groups,
            payload_bytes=payload_bytes,
            calls_per_step=calls,
            dtype=dtype,
            formula=formula,
            source=source,
            rule=rule,
            role=role,
        ),
    )
