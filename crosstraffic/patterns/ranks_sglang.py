"""SGLang's rank order: pp x tp; attention cuts tp into dp x cp x attn_tp, experts cut it into moe_dp x ep x etp."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crosstraffic.patterns.rank_order import Engine, Groups, Ranks, Rules, cut

if TYPE_CHECKING:
    from crosstraffic.patterns.layout import Layout


def _rules(layout: "Layout", order: str | None) -> Rules:
    tp, cp, dp, ep, moe_dp, dcp = layout.tp, layout.cp, layout.dp, layout.ep, layout.moe_dp, layout.dcp
    pp, experts, moe_tp = layout.pp, f"{ep} * {moe_dp} and {tp}", tp // (ep * moe_dp)
    yield tp % cp == 0, f"tp_size must be divisible by attn_cp_size: {tp} over {cp}"
    yield tp % (dp * cp) == 0, f"tp_size must be divisible by dp_size * attn_cp_size: {tp} over {dp} * {cp}"
    yield tp % moe_dp == 0, f"tp_size must be divisible by moe_dp_size: {tp} over {moe_dp}"
    yield ep * moe_dp <= tp, f"ep_size * moe_dp_size must be less than or equal to tp_size: {experts}"
    yield moe_dp == 1 or pp == 1, f"PP is not supported with context parallelism: moe_dp={moe_dp}, pp={pp}"
    fills = moe_dp == 1 or ep == 1 or ep * moe_dp == tp
    yield fills, f"ep_size * moe_dp_size must be equal to tp_size: {experts}"
    yield tp % (ep * moe_dp) == 0, f"tp_size must be divisible by ep_size * moe_dp_size: {tp} over {ep} * {moe_dp}"
    only = "attn_cp_size != moe_dp_size is only supported when moe_dp_size == 1"
    yield moe_dp in (1, cp), f"{only}: attn_cp_size {cp}, moe_dp_size {moe_dp}"
    decode = f"tensor_model_parallel_size ({tp}) must be divisible by decode_context_parallel_size ({dcp})"
    yield tp % dcp == 0, decode
    yield layout.etp in (None, moe_tp), f"moe_tp is tp / (ep * moe_dp) = {moe_tp}: etp={layout.etp}"


def _groups(layout: "Layout", ranks: Ranks, order: str | None) -> Mapping[str, Groups]:
    tp, cp, dp, ep, moe_dp = layout.tp, layout.cp, layout.dp, layout.ep, layout.moe_dp
    attn_tp, moe_tp = tp // (dp * cp), tp // (ep * moe_dp)
    attention = ranks.reshape(-1, dp, cp, attn_tp)
    experts = ranks.reshape(-1, moe_dp, ep, moe_tp)
    context = cut(attention.swapaxes(2, 3), cp)
    dcp = {"dcp": cut(ranks, layout.dcp)} if layout.dcp > 1 else {}
    return {
        "tp": cut(ranks, tp),
        "attn_tp": cut(attention, attn_tp),
        "cp": context,
        # Ranks that share a prompt must share its tokens before the experts: cp's groups stand in for moe_dp's.
        "moe_dp": context if cp > moe_dp else cut(experts.transpose(0, 2, 3, 1), moe_dp),
        "ep": cut(experts.swapaxes(2, 3), ep),
        "etp": cut(experts, moe_tp),
        **dcp,
        "pp": cut(ranks.reshape(-1, layout.pp, tp).swapaxes(1, 2), layout.pp),
    }


SGLANG = Engine(
    title="SGLang",
    degrees=frozenset({"dcp", "moe_dp"}),
    world=lambda layout: layout.tp * layout.pp,
    world_rule="tp x pp; dp, cp and ep lie inside tp",
    world_refusal="world_size ({world}) is not equal to tensor_model_parallel_size ({tp}) x "
    "pipeline_model_parallel_size ({pp})",
    fills_dp=False,
    expert_tp=lambda layout: max(1, layout.tp // (layout.ep * layout.moe_dp)),
    rules=_rules,
    groups=_groups,
    names={
        "tp": "TP",
        "attn_tp": "ATTN_TP",
        "cp": "ATTN_CP",
        "moe_dp": "MOE_DP",
        "ep": "MOE_EP",
        "etp": "MOE_TP",
        "dcp": "DCP",
        "pp": "PP",
    },
    same_ranks={"pdmux_prefill_tp": "tp"},
    notes=lambda layout: (),
    source="SGLang @ 6ed5780c4fd3 srt/distributed/parallel_state.py initialize_model_parallel, srt/server_args.py",
)
