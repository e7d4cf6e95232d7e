"""vLLM's rank order: replicas x dp x pp x cp x tp, tp fastest; dcp and ep reuse those ranks."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from crosstraffic.patterns.rank_order import Engine, Groups, Ranks, Rules, cut

if TYPE_CHECKING:
    from crosstraffic.patterns.layout import Layout


def _everyone(layout: "Layout") -> int:
    """Return the ranks that share the experts of one layer."""
    return layout.dp * layout.cp * layout.tp


def _rules(layout: "Layout", order: str | None) -> Rules:
    tp, cp, dcp, experts = layout.tp, layout.cp, layout.dcp, _everyone(layout)
    spans = (
        "When PCP is enabled, DCP must be disabled, span the PCP axis, or span the full TP x PCP axis "
        "(prefill context parallelism allows decode context parallelism of 1, cp or tp x cp)"
    )
    no_pp = "MRV2 PCP does not support PP yet (prefill context parallelism does not support pipeline parallelism)"
    valid = sorted({1, cp, tp * cp})
    yield cp > 1 or tp % dcp == 0, f"tp_size={tp} must be divisible by dcp_size={dcp}"
    yield cp == 1 or dcp in valid, f"{spans}: TP={tp}, PCP={cp}, DCP={dcp}; valid DCP sizes are {valid}"
    yield cp == 1 or layout.dp == 1, f"PCP does not support data parallelism yet: cp={cp}, dp={layout.dp}"
    yield cp == 1 or layout.pp == 1, f"{no_pp}: cp={cp}, pp={layout.pp}"
    whole, off = f"expert parallel size is dp x cp x tp = {experts}", f"experts are cut over dp x cp x tp = {experts}"
    yield layout.ep in (1, experts), f"{whole}, or 1 (off): ep={layout.ep}"
    is_whole = layout.ep == 1 or layout.etp in (None, 1)
    yield is_whole, f"experts are not cut when expert parallelism is on: etp={layout.etp}"
    yield layout.ep > 1 or layout.etp in (None, experts), f"{off} when expert parallelism is off: etp={layout.etp}"


def _groups(layout: "Layout", ranks: Ranks, order: str | None) -> Mapping[str, Groups]:
    grid = ranks.reshape(-1, layout.dp, layout.pp, layout.cp, layout.tp)
    dcp = {"dcp": cut(grid.swapaxes(3, 4), layout.dcp)} if layout.dcp > 1 else {}
    return {
        "tp": cut(grid, layout.tp),
        **dcp,
        "cp": cut(grid.swapaxes(3, 4), layout.cp),
        "pp": cut(grid.swapaxes(2, 4), layout.pp),
        "dp": cut(grid.swapaxes(1, 4), layout.dp),
        "ep": cut(grid.swapaxes(1, 2), _everyone(layout)),
    }


def _notes(layout: "Layout") -> Iterator[str]:
    if layout.dp > 1:
        yield "dp and ep are of models with experts; replicas of a dense one never talk"


VLLM = Engine(
    title="vLLM",
    degrees=frozenset({"dcp"}),
    world=lambda layout: layout.dp * layout.pp * layout.cp * layout.tp,
    world_rule="dp x pp x cp x tp",
    world_refusal="all ranks must reshape to (replicas, dp, pp, cp, tp)",
    fills_dp=True,
    expert_tp=lambda layout: 1 if layout.ep > 1 else _everyone(layout),
    rules=_rules,
    groups=_groups,
    names={"tp": "TP", "dcp": "DCP", "cp": "PCP", "pp": "PP", "dp": "DP", "ep": "EP"},
    same_ranks={"eplb": "ep"},
    notes=_notes,
    source="vLLM @ 017e9f4448b7 distributed/parallel_state.py initialize_model_parallel",
)
