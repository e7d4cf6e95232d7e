"""Expert parallelism: dispatch and combine, and what engines do where no all-to-all exists."""

from dataclasses import replace
from typing import Literal

from crosstraffic.patterns.dispatch import BACKENDS
from crosstraffic.patterns.expert_legs import exchange_legs, leg_streams, message_bytes
from crosstraffic.patterns.expert_tensor import etp_calls, etp_streams, partial_sum_streams
from crosstraffic.patterns.layout import Groups, expert_tp
from crosstraffic.patterns.matrix import Explicit
from crosstraffic.patterns.routing import Routed
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

Path = Literal["none", "tensor", "gathered", "all_to_all", "gather_scatter"]


def backend(setting: Setting) -> str:
    """Return the dispatcher: what was asked, else the one that each engine uses for expert parallelism at scale.

    The low-latency dispatcher sends one message per (token, expert) in prefill too; nothing is de-duplicated. Ask for
    ``deepep_high_throughput`` where the groups lie evenly on nodes.
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
    is_exchange = BACKENDS[backend(setting)].unit != "all"
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


def source_tokens(setting: Setting, groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that each rank of each group dispatches; of one group, if all groups are alike."""
    cut = setting.tp if is_cut_over_tp(setting) else 1
    shares = [-(-tokens // cut) for tokens in setting.replica_tokens]
    if len(set(shares)) == 1:
        return ((shares[0],) * len(groups[0]),)
    replica = setting.replica_of_rank
    tokens = tuple(tuple(shares[replica[rank]] for rank in group) for group in groups)
    return tokens[:1] if len(set(tokens)) == 1 else tokens


def gathers_logits(setting: Setting) -> bool:
    """Tell whether ranks gather router logits, and pick experts after: context parallelism without a dispatcher.

    Source: vLLM @ 017e9f4448b7 layers/fused_moe/runner _maybe_dispatch (pcp_size > 1 and no all-to-all kernels).
    """
    layout = setting.layout
    return setting.framework == "vllm" and layout.ep == 1 and layout.dp == 1 and layout.cp > 1


def exchange_calls(setting: Setting) -> Calls:
    """Return what brings the tokens of one layer to their experts and back, in order."""
    path = expert_path(setting)
    if path == "gather_scatter":
        logits: Calls = (("ep.router_gather", 1),) if gathers_logits(setting) else ()
        return (("ep.all_gather", 1), *logits, ("ep.reduce_scatter", 1))
    if path != "all_to_all":
        return ()
    there: Calls = (("ep.dispatch", 1), ("ep.dispatch_fanout", 1))
    back: Calls = (("ep.combine_fanin", 1), ("ep.combine", 1))
    if BACKENDS[backend(setting)].unit != "node":
        there, back = there[:1], back[1:]
    return (*there, *etp_calls(setting), *back)


def expert_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return dispatch and combine, or gather and scatter, and what cuts experts over ranks adds.

    High-throughput dispatch over nodes is two streams: each token once to each node, to the rank there with the
    sender's index on its node, and from there to each rank of the node that wants it; combine is the way back.

    Raises:
        ValueError: an explicit matrix where nothing is dispatched, or one that does not fit; ranks of a group that are
            not spread evenly over nodes, where the backend needs it.
    """
    path = expert_path(setting)
    if setting.workload.routing_matrix and path != "all_to_all":
        raise ValueError(
            f"routing matrix: {setting.framework} dispatches nothing here ({path}), so that no stream has its bytes"
        )
    if path == "gather_scatter":
        return _gather_streams(setting, order)
    if path != "all_to_all":
        return partial_sum_streams(setting, order)
    groups = setting.calling_groups(order, "ep.dispatch", expert_groups(setting))
    if setting.workload.routing_matrix:
        return _matrix_streams(setting, order, groups)
    chosen, rule = BACKENDS[backend(setting)], _rule(setting, groups)
    streams: list[Stream] = []
    for leg in exchange_legs(setting, groups, chosen):
        streams += leg_streams(setting, order, leg, chosen, rule, len(groups[0]))
    if setting.framework == "megatron":
        streams += etp_streams(setting, order, _most_rows(rule, groups))
    return tuple(streams)


def _rule(setting: Setting, groups: Groups) -> Routed:
    """Return the rule of messages per (token, expert), without their bytes."""
    shape, tokens = setting.shape, source_tokens(setting, groups)
    rule = setting.workload.routed(shape, num_tokens=max(map(max, tokens)), bytes_per_message=0)
    if setting.workload.redundant_experts:
        num_nodes = len({setting.nodes[rank] for rank in groups[0]})
        rule = replace(
            rule,
            num_groups=shape.num_expert_groups,
            topk_groups=shape.topk_groups,
            num_nodes=1 if len(groups[0]) % num_nodes else num_nodes,
        )
    is_even = len(tokens) == 1 and len(set(tokens[0])) == 1
    return rule if is_even else replace(rule, source_tokens=tokens)


def _most_rows(rule: Routed, groups: Groups) -> int:
    """Return the most rows that a rank gets in a dispatch; T * k of each in uniform routing."""
    if rule.distribution == "uniform" and not rule.source_tokens:
        return rule.num_tokens * rule.top_k
    seen = range(len(rule.source_tokens) or 1)
    return max(int(rule.counts(len(groups[index]), index).sum(axis=0).max()) for index in seen)


def _matrix_streams(setting: Setting, order: Order, groups: Groups) -> tuple[Stream, ...]:
    """Return dispatch with the bytes of an explicit matrix, in every group, and combine as its way back."""
    rows = setting.workload.routing_matrix
    if any(len(group) != len(rows) for group in groups):
        raise ValueError(
            f"routing matrix of {len(rows)} ranks does not fit an expert-parallel group of {len(groups[0])} ranks"
        )
    streams: list[Stream] = []
    for name, matrix in (("ep.dispatch", rows), ("ep.combine", tuple(zip(*rows, strict=True)))):
        streams += make_stream(
            setting,
            order,
            name=name,
            op="all_to_all_v",
            groups=groups,
            payload_bytes=max(map(sum, matrix)),
            formula="bytes of the routing matrix" + ("" if name == "ep.dispatch" else ", the way back"),
            source="crosstraffic @ the matrix given",
            rule=Explicit(bytes=(matrix,)),
        )
    return tuple(streams)


def _gather_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    groups, chosen = expert_groups(setting), BACKENDS["allgather_reducescatter"]
    everyone = max(map(sum, source_tokens(setting, groups)))
    there, back = message_bytes(setting, chosen, chosen.messages)
    is_even = len(set(setting.replica_tokens)) == 1
    scales = " + scales" if setting.element_bytes == 1 else ""
    tokens = "P * T" if is_even else "sum of T over the ranks"
    row, source = f"(H * b{scales} + 8 * k)", chosen.messages.source
    if gathers_logits(setting):
        there, row = setting.shape.expert_row * setting.element_bytes, "H * b"
        source = "vLLM @ 017e9f4448b7 layers/fused_moe/runner _maybe_dispatch, _maybe_combine"
    return (
        *make_stream(
            setting,
            order,
            name="ep.all_gather",
            op="all_gather",
            groups=groups,
            payload_bytes=everyone * there,
            formula=f"{tokens} * {row}",
            source=source,
        ),
        *make_stream(
            setting,
            order,
            name="ep.router_gather",
            op="all_gather",
            groups=groups,
            payload_bytes=everyone * setting.shape.num_experts * setting.element_bytes,
            formula=f"{tokens} * E * b, the router's logits",
            source=source,
        ),
        *make_stream(
            setting,
            order,
            name="ep.reduce_scatter",
            op="reduce_scatter",
            groups=groups,
            payload_bytes=everyone * back,
            formula=f"{tokens} * H * {'2' if scales else 'b'}",
            source=source,
            dtype="bfloat16" if scales else None,
        ),
    )
