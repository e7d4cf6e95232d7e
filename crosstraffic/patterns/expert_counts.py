"""Counts: how many tokens go where, told before a dispatch so that receivers know their sizes."""

from crosstraffic.patterns.dispatch import BACKENDS
from crosstraffic.patterns.expert import backend, expert_groups, expert_path
from crosstraffic.patterns.expert_legs import spread
from crosstraffic.patterns.layout import Groups
from crosstraffic.patterns.setting import Setting, make_control
from crosstraffic.patterns.stream import Stream

_MEGATRON = "Megatron-LM @ d98e8a64ddf3 token_dispatcher.py MoEAlltoAllTokenDispatcher.preprocess"
_DEEPEP = "DeepEP @ dd758caf4518 csrc/kernels/legacy"


def expert_control(setting: Setting) -> tuple[Stream, ...]:
    """Return the exchange of counts before a dispatch, for each layer with experts.

    Megatron-Core gathers int64 counts per expert from all ranks (8 * E bytes of each; the host waits for the sizes).
    DeepEP's high-throughput kernels send int32 counts per rank and expert ahead, and the host waits as well. Counts
    of low-latency messages ride on their flags, those of FlashInfer lie in its workspace, and gathering needs only the
    tokens of each replica: none of these has a message of its own.
    """
    if expert_path(setting) != "all_to_all":
        return ()
    chosen = backend(setting)
    if chosen == "alltoall":
        return _gathered_counts(setting)
    return _notified_counts(setting) if BACKENDS[chosen].unit == "node" else ()


def _layers(setting: Setting) -> int:
    """Return how often the stage with most layers of experts runs one."""
    experts = set(setting.shape.moe_layers)
    return setting.num_passes * max(sum(layer in experts for layer in stage) for stage in setting.stages)


def _groups(setting: Setting, groups: Groups) -> Groups:
    """Keep the groups of stages that have layers with experts."""
    experts = set(setting.shape.moe_layers)
    has_experts = [any(layer in experts for layer in stage) for stage in setting.stages]
    return tuple(group for group in groups if has_experts[setting.stage_of_rank[group[0]]])


def _gathered_counts(setting: Setting) -> tuple[Stream, ...]:
    groups = _groups(setting, setting.groups["etp-ep"] if setting.framework == "megatron" else expert_groups(setting))
    return make_control(
        setting,
        name="ep.counts",
        op="all_gather",
        groups=groups,
        payload_bytes=8 * setting.shape.num_experts * len(groups[0]),
        formula="8 * E bytes of each rank: tokens for each expert",
        source=_MEGATRON,
        dtype="int64",
        calls=_layers(setting),
    )


def _notified_counts(setting: Setting) -> tuple[Stream, ...]:
    """Return DeepEP's notify_dispatch: over nodes, then inside them; inside one node in one go."""
    experts = setting.shape.num_experts + setting.workload.redundant_experts
    groups = _groups(setting, expert_groups(setting))
    across, inside = spread(setting, groups)
    num_ranks, num_nodes, members = len(groups[0]), len(across[0]), len(inside[0])
    if num_nodes == 1:
        return make_control(
            setting,
            name="ep.counts",
            op="all_to_all",
            groups=groups,
            payload_bytes=4 * (num_ranks + experts),
            formula="4 * (P + E): to each rank its tokens, and those of each of its experts",
            source=f"{_DEEPEP}/intranode.cu notify_dispatch",
            dtype="int32",
            calls=_layers(setting),
        )
    return (
        *make_control(
            setting,
            name="ep.counts",
            op="all_to_all",
            groups=across,
            payload_bytes=4 * num_nodes * (members + experts // num_nodes + 1),
            formula="4 * nodes * (ranks of a node + E / nodes + 1): tokens of each rank, of each expert, of the node",
            source=f"{_DEEPEP}/internode.cu notify_dispatch",
            dtype="int32",
            calls=_layers(setting),
        ),
        *make_control(
            setting,
            name="ep.counts_fanout",
            op="all_to_all",
            groups=inside,
            payload_bytes=4 * members * (num_nodes + experts // num_ranks),
            formula="4 * ranks of a node * (nodes + E / P): tokens from each node, for each expert of a rank",
            source=f"{_DEEPEP}/internode.cu notify_dispatch",
            dtype="int32",
            calls=_layers(setting),
        ),
    )
