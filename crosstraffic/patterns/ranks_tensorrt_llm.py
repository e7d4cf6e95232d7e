"""TensorRT-LLM's rank order: pp x cp x tp; experts cut tp into etp x moe_cluster x ep, ep fastest."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crosstraffic.patterns.rank_order import Engine, Groups, Ranks, Rules, cut

if TYPE_CHECKING:
    from crosstraffic.patterns.layout import Layout


def _expert_tp(layout: "Layout") -> int:
    return max(1, layout.tp // (layout.ep * layout.moe_cluster))


def _rules(layout: "Layout", order: str | None) -> Rules:
    tp, cp, ep, cluster = layout.tp, layout.cp, layout.ep, layout.moe_cluster
    moe_tp = _expert_tp(layout) if layout.etp is None else layout.etp
    product = f"tp_size must equal to moe_tp_size * moe_ep_size * moe_cluster_size, but got {tp} != "
    yield moe_tp * ep * cluster == tp, f"{product}{moe_tp} * {ep} * {cluster}"
    yield cp == 1 or ep == 1, f"CP don't support MoE tp/ep yet: cp={cp}, ep={ep}"
    yield cluster == 1 or ep == 1, f"moe_cluster_size > 1 needs moe_ep_size == 1: moe_cluster={cluster}, ep={ep}"
    yield layout.dp in (1, tp), f"attention data parallelism is off (dp=1) or over all of tp (dp={tp}): dp={layout.dp}"


def _groups(layout: "Layout", ranks: Ranks, order: str | None) -> Mapping[str, Groups]:
    tp, cp, pp, ep, cluster = layout.tp, layout.cp, layout.pp, layout.ep, layout.moe_cluster
    moe_tp = tp // (ep * cluster)
    grid = ranks.reshape(-1, pp, cp, tp)
    experts = ranks.reshape(-1, moe_tp, cluster * ep)
    clusters = {"moe_cluster": cut(experts, cluster)} if cluster > 1 else {}
    return {
        "tp": cut(grid, tp),
        "cp": cut(grid.swapaxes(2, 3), cp),
        "pp": cut(grid.transpose(0, 2, 3, 1), pp),
        "etp": cut(experts.swapaxes(1, 2), moe_tp),
        **clusters,
        "ep": cut(experts, ep),
    }


TENSORRT_LLM = Engine(
    title="TensorRT-LLM",
    degrees=frozenset({"moe_cluster"}),
    world=lambda layout: layout.tp * layout.cp * layout.pp,
    world_rule="tp x cp x pp; dp and ep lie inside tp",
    world_refusal="world_size must equal to tp_size * pp_size * cp_size, but got {world} != {tp} * {pp} * {cp}",
    fills_dp=False,
    expert_tp=_expert_tp,
    rules=_rules,
    groups=_groups,
    names={"tp": "tp", "cp": "cp", "pp": "pp", "etp": "moe_tp", "moe_cluster": "moe_cluster", "ep": "moe_ep"},
    same_ranks={},
    notes=lambda layout: (),
    source="TensorRT-LLM mapping.py Mapping",
)
