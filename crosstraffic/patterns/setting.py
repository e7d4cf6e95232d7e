"""Setting: a workload on a model, a layout and an engine, and what follows; streams are made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, cycle

from crosstraffic.patterns.layout import Groups, Layout, process_groups
from crosstraffic.patterns.matrix import ByteRule
from crosstraffic.patterns.model import ModelShape, dtype_bytes, dtype_name
from crosstraffic.patterns.placement import attention_tp, check_model, stage_layers
from crosstraffic.patterns.stream import Op, Stream
from crosstraffic.patterns.workload import Workload

Calls = tuple[tuple[str, int], ...]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A workload on a model, a layout and an engine.

    ``local_tokens``: tokens that a rank holds, after context cuts; the most of any replica. ``replica_tokens`` are
    those of a rank of each data-parallel replica, padded where the engine pads. ``num_batches`` is 2 where a step runs
    as two half batches: then tokens are those of one half, and all calls count twice.
    """

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
        return tuple(count * self.num_batches for count in found)

    def calling_groups(self, order: Order, name: str, groups: Groups) -> Groups:
        """Return the groups that call a stream: those of the pipeline stages that have it."""
        calls = self.stage_calls(order, name) if name != BOUNDARY else (1,) * len(self.stages)
        return groups if all(calls) else tuple(group for group in groups if calls[self.stage_of_rank[group[0]]])


def held_tokens(workload: Workload, layout: Layout, tp: int, tokens: int) -> int:
    """Return how many of a replica's tokens each of its ranks holds.

    Context parallelism cuts prompts; sequence parallelism pads to a multiple of TP.
    """
    if workload.phase == "prefill":
        tokens = -(-tokens // layout.cp)
    return -(-tokens // tp) * tp if workload.sequence_parallel else tokens


def replica_tokens(workload: Workload, layout: Layout) -> tuple[int, ...]:
    """Return the tokens that enter the step on each data-parallel replica, padded to the largest if so asked.

    >>> replica_tokens(Workload(phase="decode", replica_tokens=(3, 5), padded=True), Layout(dp=2))
    (5, 5)

    Raises:
        ValueError: not one number for each replica, or no tokens at all.

    Source: vLLM @ 017e9f4448b7 v1/worker/dp_utils.py _post_process_dp_padding.
    """
    tokens = workload.replica_tokens or (workload.num_tokens,) * layout.dp
    if len(tokens) != layout.dp:
        raise ValueError(
            f"replica_tokens must name each of the {layout.dp} data-parallel replicas: {len(tokens)} given, {tokens}"
        )
    if not any(tokens):
        raise ValueError(f"replica_tokens: no replica has a token: {tokens}")
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
    held = tuple(held_tokens(workload, layout, tp, tokens) for tokens in replica_tokens(workload, layout))
    return Setting(
        shape=shape,
        layout=layout,
        workload=workload,
        framework=framework,
        groups=groups,
        stages=stage_layers(shape.num_layers, layout, framework),
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
    between two stages is crossed once.
    """
    calling = setting.calling_groups(order, name, groups)
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
            calls_per_step=1 if name == BOUNDARY else max(setting.stage_calls(order, name)),
            dtype=dtype or setting.dtype,
            formula=formula,
            source=source,
            rule=rule,
        ),
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
            role="control",
        ),
    )
