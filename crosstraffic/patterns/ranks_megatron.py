"""Megatron-Core's rank order: an order string, leftmost fastest, and two grids over the same ranks.

The grid of dense layers has tp, cp, dp and pp; the grid of experts has etp, ep, edp and pp in the places of tp, ep, dp
and pp. So context parallelism is folded into the experts' grid: ranks that share a prompt hold different experts.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from crosstraffic.patterns.rank_grid import RankGrid, order_grid, ordered_names
from crosstraffic.patterns.rank_order import Engine, Groups, Ranks, Rules

if TYPE_CHECKING:
    from crosstraffic.patterns.layout import Layout

MEGATRON_ORDER = "tp-cp-ep-dp-pp"
# Our name, which grid, its dimensions (the experts' grid has etp in tp's place and edp in dp's), Megatron's name.
KINDS: tuple[tuple[str, str, str, str], ...] = (
    ("tp", "dense", "tp", "tp"),
    ("cp", "dense", "cp", "cp"),
    ("dp", "dense", "dp", "dp"),
    ("dp-cp", "dense", "dp-cp", "dp_cp"),
    ("tp-cp", "dense", "tp-cp", "tp_cp"),
    ("tp-dp", "dense", "tp-dp", "tp_dp"),
    ("tp-dp-cp", "dense", "tp-dp-cp", "tp_dp_cp"),
    ("tp-pp", "dense", "tp-pp", "mp"),
    ("pp", "dense", "pp", "pp"),
    ("ep", "expert", "ep", "ep"),
    ("etp", "expert", "tp", "ep_tp"),
    ("etp-ep", "expert", "tp-ep", "tp_ep_mp"),
    ("etp-ep-pp", "expert", "tp-ep-pp", "tp_ep_pp"),
    ("edp", "expert", "dp", "ep_dp"),
)


def _expert_tp(layout: "Layout") -> int:
    """Return etp where it is not given: 1 with ep, which its inference layers need; else tp.

    The engine's own default is tp in both cases: say etp=tp for it.

    Source: Megatron-LM @ d98e8a64ddf3 core/model_parallel_config.py (default), core/transformer/transformer_config.py
    (inference_optimized: no expert tensor parallelism).
    """
    return 1 if layout.ep > 1 else layout.tp


def _etp(layout: "Layout") -> int:
    return _expert_tp(layout) if layout.etp is None else layout.etp


def _sizes(layout: "Layout") -> Mapping[str, dict[str, int]]:
    etp, world = _etp(layout), layout.tp * layout.cp * layout.dp * layout.pp
    edp = world // (etp * layout.ep * layout.pp)
    return {
        "dense": {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp},
        "expert": {"tp": etp, "cp": 1, "ep": layout.ep, "dp": edp, "pp": layout.pp},
    }


def grids(layout: "Layout", order: str | None) -> Mapping[str, RankGrid]:
    """Return the grids of dense layers and of experts.

    Raises:
        ValueError: a wrong order.
    """
    sizes, said = _sizes(layout), MEGATRON_ORDER if order is None else order
    ordered_names({name: max(own[name] for own in sizes.values()) for name in sizes["dense"]}, said)
    return {name: order_grid(own, said) for name, own in sizes.items()}


def _rules(layout: "Layout", order: str | None) -> Rules:
    etp, ep, pp = _etp(layout), layout.ep, layout.pp
    world = layout.tp * layout.cp * layout.dp * pp
    product = f"expert_tensor_model_pipeline_parallel size ({etp * ep * pp}: etp {etp} x ep {ep} x pp {pp})"
    yield world % (etp * ep * pp) == 0, f"world_size ({world}) is not divisible by {product}"
    own = grids(layout, order)
    dense, expert = own["dense"], own["expert"]
    dp, edp = (grid.shape[grid.names.index("dp")] for grid in (dense, expert))
    said = (MEGATRON_ORDER if order is None else order).lower()
    same_dp = (
        "When not using pp-last rank ordering, the data parallel size of the attention and moe layers must be the same"
    )
    same_pp = "Pipeline parallel groups are expected to be the same for Non-Expert and Expert part"
    apart = f"stages {dense.stride('pp')} and {expert.stride('pp')} ranks apart"
    yield said.endswith("pp") or pp == 1 or dp == edp, f"{same_dp}: dp {dp}, edp {edp}, order {said}"
    yield pp == 1 or dense.stride("pp") == expert.stride("pp"), f"{same_pp}: {apart}, order {said}"


def _groups(layout: "Layout", ranks: Ranks, order: str | None) -> Mapping[str, Groups]:
    own = grids(layout, order)
    return {name: own[grid].groups(*wanted.split("-"), ranks=ranks) for name, grid, wanted, _ in KINDS}


def _notes(layout: "Layout") -> Iterator[str]:
    if layout.ep > 1 and layout.tp > 1 and layout.etp is None:
        yield f"etp is taken as 1; Megatron-Core's own default is tp: say etp={layout.tp} for it"


MEGATRON = Engine(
    title="Megatron-Core",
    degrees=frozenset(),
    world=lambda layout: layout.tp * layout.cp * layout.dp * layout.pp,
    world_rule="tp x cp x dp x pp",
    world_refusal="world_size ({world}) must be dp times {model} (tp {tp} x pp {pp} x cp {cp})",
    fills_dp=True,
    expert_tp=_expert_tp,
    rules=_rules,
    groups=_groups,
    names={name: own for name, _, _, own in KINDS},
    same_ranks={},
    notes=_notes,
    source="Megatron-LM @ d98e8a64ddf3 core/parallel_state.py RankGenerator, initialize_model_parallel",
)
