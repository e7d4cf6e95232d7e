"""Layout: the degrees of each parallelism, and the process groups that each engine makes of them, in its own order.

A degree means what the engine means by it. vLLM: world = dp x pp x cp x tp, ep = dp x cp x tp. Megatron-Core:
world = tp x cp x dp x pp = etp x ep x edp x pp. SGLang: world = tp x pp, and dp and cp (of attention), ep and moe_dp
lie inside tp. TensorRT-LLM: world = tp x cp x pp, and ep and etp lie inside tp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np

Groups = tuple[tuple[int, ...], ...]
MEGATRON_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees. ``etp`` None: what the engine derives (Megatron-Core: 1 with ep, else tp)."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    dcp: int = 1
    moe_dp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} must be a whole number from 1: {value!r}")

    def __str__(self) -> str:
        degrees = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ",".join(f"{name}={value}" for name, value in degrees if value not in (1, None)) or "tp=1"


def parse_layout(text: str, *, world: int | None = None, framework: str = "vllm") -> Layout:
    """Read ``tp=8,dp=2,ep=16``; degrees not named are 1, but dp is what fills ``world`` if that is given.

    >>> parse_layout("tp=2,cp=2,pp=2", world=16, framework="megatron").dp
    2

    Raises:
        ValueError: not a degree, named twice, or degrees that do not multiply to ``world``.
    """
    names = tuple(field.name for field in fields(Layout))
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in names or not equals:
            raise ValueError(f"not a degree: {part.strip()!r}; write tp=8,dp=2 with names from {', '.join(names)}")
        if name in degrees:
            raise ValueError(f"degree {name} is given twice: {text!r}")
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ValueError(f"{name} must be a whole number from 1: {value!r}")
        degrees[name] = int(value)
    layout = Layout(**degrees)
    if world is None:
        return layout
    if world < 1:
        raise ValueError(f"world must be a whole number from 1: {world}")
    if "dp" not in degrees and framework in ("vllm", "megatron"):
        if world % world_size(layout, framework):
            raise ValueError(f"world_size ({world}) is not divisible by the degrees of {layout}")
        layout = replace(layout, dp=world // world_size(layout, framework))
    if world_size(layout, framework) != world:
        raise ValueError(
            f"the degrees do not multiply to the world: {layout} is {world_size(layout, framework)} ranks in "
            f"{framework} ({WORLD_RULES[framework]}), the world is {world}"
        )
    return layout


WORLD_RULES: Mapping[str, str] = {
    "vllm": "dp x pp x cp x tp",
    "megatron": "tp x cp x dp x pp",
    "sglang": "tp x pp; dp, cp and ep lie inside tp",
    "tensorrt_llm": "tp x cp x pp; dp and ep lie inside tp",
}


def world_size(layout: Layout, framework: str = "vllm") -> int:
    """Return how many ranks a layout takes.

    >>> world_size(Layout(tp=8, dp=4, pp=2)), world_size(Layout(tp=8, dp=4, pp=2), "sglang")
    (64, 16)

    Raises:
        ValueError: unknown framework.
    """
    check_framework(framework)
    degrees = {
        "vllm": (layout.dp, layout.pp, layout.cp, layout.tp),
        "megatron": (layout.dp, layout.pp, layout.cp, layout.tp),
        "sglang": (layout.tp, layout.pp),
        "tensorrt_llm": (layout.tp, layout.cp, layout.pp),
    }
    return prod(degrees[framework])


def check_framework(framework: str) -> None:
    """Raise ValueError for a framework whose rank order is not known."""
    if framework not in WORLD_RULES:
        raise ValueError(f"unknown framework: {framework!r}; allowed: {', '.join(WORLD_RULES)}")


def expert_tp(layout: Layout, framework: str) -> int:
    """Return over how many ranks each expert is cut, as the engine derives it where it is not given."""
    if layout.etp is not None:
        return layout.etp
    if framework == "megatron":
        return 1 if layout.ep > 1 else layout.tp
    if framework == "vllm":
        return 1 if layout.ep > 1 else layout.dp * layout.cp * layout.tp
    return max(1, layout.tp // (layout.ep * layout.moe_dp))


def _tuples(ranks: np.ndarray[tuple[int, ...], np.dtype[np.int64]], size: int) -> Groups:
    return tuple(map(tuple, ranks.reshape(-1, size).tolist()))


def _vllm(layout: Layout, order: str | None) -> Mapping[str, Groups]:
    dp, pp, cp, tp, dcp = layout.dp, layout.pp, layout.cp, layout.tp, layout.dcp
    if cp == 1 and tp % dcp:
        raise ValueError(f"tp_size={tp} must be divisible by dcp_size={dcp}")
    if cp > 1 and dcp not in (1, cp, tp * cp):
        raise ValueError(
            f"vLLM with prefill context parallelism allows decode context parallelism of 1, cp or tp x cp: {layout}"
        )
    if cp > 1 and dp > 1:
        raise ValueError(f"vLLM's prefill context parallelism does not support data parallelism yet: {layout}")
    if cp > 1 and pp > 1:
        raise ValueError(f"vLLM's prefill context parallelism does not support pipeline parallelism yet: {layout}")
    if layout.ep not in (1, dp * cp * tp):
        raise ValueError(f"vLLM's expert parallel size is dp x cp x tp = {dp * cp * tp}, or 1 (off): ep={layout.ep}")
    if layout.ep > 1 and layout.etp not in (None, 1):
        raise ValueError(f"vLLM does not cut experts when expert parallelism is on: etp={layout.etp}")
    if layout.ep == 1 and layout.etp not in (None, dp * cp * tp):
        raise ValueError(f"vLLM cuts experts over dp x cp x tp = {dp * cp * tp} when ep is off: etp={layout.etp}")
    if layout.moe_dp != 1:
        raise ValueError(f"vLLM has no moe_dp: moe_dp={layout.moe_dp}")
    ranks = np.arange(dp * pp * cp * tp, dtype=np.int64).reshape(dp, pp, cp, tp)
    groups = {"tp": _tuples(ranks, tp)}
    if dcp > 1:
        groups["dcp"] = _tuples(ranks.swapaxes(2, 3), dcp)
    groups["cp"] = _tuples(ranks.swapaxes(2, 3), cp)
    groups["pp"] = _tuples(ranks.swapaxes(1, 3), pp)
    groups["dp"] = _tuples(ranks.swapaxes(0, 3), dp)
    groups["ep"] = _tuples(ranks.swapaxes(0, 1), dp * cp * tp)
    return groups


def grid_groups(sizes: Mapping[str, int], order: str, wanted: str) -> Groups:
    """Return Megatron-Core's groups of the dimensions ``wanted`` (``dp-cp``) on a grid, leftmost of ``order`` fastest.

    >>> grid_groups({"tp": 2, "pp": 2, "dp": 2}, "tp-dp-pp", "dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))

    Source: Megatron-LM @ d98e8a64ddf3, core/parallel_state.py, RankGenerator.
    """
    names = order.split("-")
    members = [name for name in names if name in wanted.split("-")]
    slow_first = names[::-1]
    ranks = np.arange(prod(sizes[name] for name in names), dtype=np.int64).reshape([sizes[name] for name in slow_first])
    axes = [slow_first.index(name) for name in slow_first if name not in members]
    axes += [slow_first.index(name) for name in members[::-1]]
    return _tuples(ranks.transpose(axes), prod(sizes[name] for name in members))


def _grid_order(sizes: Mapping[str, int], order: str) -> str:
    names = order.lower().split("-")
    if len(set(names)) != len(names) or not set(names) <= set(sizes):
        raise ValueError(f"order must name each of {', '.join(sizes)} at most once, joined by '-': {order!r}")
    for name, size in sizes.items():
        if name not in names and size != 1:
            raise ValueError(f"the size of ({name}) is ({size}), but the order ({order}) does not have it")
    return "-".join([*names, *(name for name in sizes if name not in names)])


def _megatron(layout: Layout, order: str | None) -> Mapping[str, Groups]:
    tp, cp, pp, dp, ep = layout.tp, layout.cp, layout.pp, layout.dp, layout.ep
    etp = expert_tp(layout, "megatron")
    world = tp * cp * pp * dp
    if world % (etp * ep * pp):
        raise ValueError(
            f"world_size ({world}) is not divisible by expert_tensor_model_pipeline_parallel size "
            f"(etp {etp} x ep {ep} x pp {pp})"
        )
    edp = world // (etp * ep * pp)
    if layout.dcp != 1 or layout.moe_dp != 1:
        raise ValueError(f"Megatron-Core has neither dcp nor moe_dp: {layout}")
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": edp, "pp": pp}
    order = _grid_order({name: max(dense[name], expert[name]) for name in dense}, order or MEGATRON_ORDER)
    pipeline = grid_groups(dense, order, "pp")
    if pipeline != grid_groups(expert, order, "pp"):
        rule = (
            "the data parallel size of the attention and moe layers must be the same when pp is not last in the order"
        )
        raise ValueError(f"{rule}: dp {dp}, edp {edp}, order {order}")
    return {
        "tp": grid_groups(dense, order, "tp"),
        "cp": grid_groups(dense, order, "cp"),
        "dp": grid_groups(dense, order, "dp"),
        "dp-cp": grid_groups(dense, order, "dp-cp"),
        "tp-cp": grid_groups(dense, order, "tp-cp"),
        "pp": pipeline,
        "ep": grid_groups(expert, order, "ep"),
        "etp": grid_groups(expert, order, "tp"),
        "etp-ep": grid_groups(expert, order, "tp-ep"),
        "edp": grid_groups(expert, order, "dp"),
    }


def _sglang(layout: Layout, order: str | None) -> Mapping[str, Groups]:
    tp, cp, pp, dp, ep, moe_dp = layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.moe_dp
    rules = (
        (tp % cp == 0, "tp_size must be divisible by attn_cp_size"),
        (tp % (dp * cp) == 0, "tp_size must be divisible by dp_size * attn_cp_size"),
        (tp % moe_dp == 0, "tp_size must be divisible by moe_dp_size"),
        (ep * moe_dp <= tp, "ep_size * moe_dp_size must be less than or equal to tp_size"),
        (tp % (ep * moe_dp) == 0, "tp_size must be divisible by ep_size * moe_dp_size"),
        (moe_dp == 1 or ep == 1 or ep * moe_dp == tp, "ep_size * moe_dp_size must be equal to tp_size"),
        (moe_dp == 1 or pp == 1, "PP is not supported with context parallelism"),
        (moe_dp == 1 or cp == moe_dp, "attn_cp_size != moe_dp_size is only supported when moe_dp_size == 1"),
        (tp % layout.dcp == 0, "tensor_model_parallel_size must be divisible by decode_context_parallel_size"),
        (layout.etp in (None, tp // (ep * moe_dp)), f"etp is tp / (ep * moe_dp) = {tp // (ep * moe_dp)}"),
    )
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"SGLang: {rule}: {layout}")
    attn_tp, moe_tp = tp // (dp * cp), tp // (ep * moe_dp)
    ranks = np.arange(pp * tp, dtype=np.int64)
    attention = ranks.reshape(pp, dp, cp, attn_tp)
    experts = ranks.reshape(pp, moe_dp, ep, moe_tp)
    groups = {"tp": _tuples(ranks, tp), "attn_tp": _tuples(attention, attn_tp)}
    groups["cp"] = _tuples(attention.swapaxes(2, 3), cp)
    groups["moe_dp"] = groups["cp"] if cp > moe_dp else _tuples(experts.transpose(0, 2, 3, 1), moe_dp)
    groups["ep"] = _tuples(experts.swapaxes(2, 3), ep)
    groups["etp"] = _tuples(experts, moe_tp)
    if layout.dcp > 1:
        groups["dcp"] = _tuples(ranks, layout.dcp)
    groups["pp"] = _tuples(ranks.reshape(pp, tp).T, pp)
    return groups


def _tensorrt_llm(layout: Layout, order: str | None) -> Mapping[str, Groups]:
    tp, cp, pp, ep = layout.tp, layout.cp, layout.pp, layout.ep
    moe_tp = expert_tp(layout, "tensorrt_llm")
    rules = (
        (moe_tp * ep == tp, f"tp_size must equal to moe_tp_size * moe_ep_size: {tp} is not {moe_tp} x {ep}"),
        (cp == 1 or ep == 1, "CP does not support MoE ep yet"),
        (layout.dp in (1, tp), "attention data parallelism is off (dp=1) or over all of tp (dp=tp)"),
        (layout.dcp == 1 and layout.moe_dp == 1, "there is neither dcp nor moe_dp"),
    )
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"TensorRT-LLM: {rule}: {layout}")
    ranks = np.arange(pp * cp * tp, dtype=np.int64).reshape(pp, cp, tp)
    experts = ranks.reshape(pp * cp, moe_tp, ep)
    return {
        "tp": _tuples(ranks, tp),
        "cp": _tuples(ranks.swapaxes(1, 2), cp),
        "pp": _tuples(ranks.transpose(1, 2, 0), pp),
        "etp": _tuples(experts.swapaxes(1, 2), moe_tp),
        "ep": _tuples(experts, ep),
    }


FRAMEWORKS: Mapping[str, Callable[[Layout, str | None], Mapping[str, Groups]]] = {
    "vllm": _vllm,
    "megatron": _megatron,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
}


def process_groups(layout: Layout, framework: str = "vllm", *, order: str | None = None) -> Mapping[str, Groups]:
    """Return the process groups of an engine by name, each in the order in which the engine lists its ranks.

    ``order`` is Megatron-Core's order string, leftmost fastest. ``ep`` of vLLM is the group that any model with
    experts gets, whether expert parallelism is on or not.

    >>> process_groups(Layout(tp=2, pp=2))["pp"]
    ((0, 2), (1, 3))

    Raises:
        ValueError: unknown framework, or a combination that the engine refuses.

    Source: vLLM @ 017e9f4448b7 distributed/parallel_state.py; Megatron-LM @ d98e8a64ddf3 core/parallel_state.py;
    SGLang @ 6ed5780c4fd3 distributed/parallel_state.py; TensorRT-LLM mapping.py.
    """
    check_framework(framework)
    if order is not None and framework != "megatron":
        raise ValueError(f"an order string belongs to megatron only: {order!r} with {framework}")
    return FRAMEWORKS[framework](layout, order)
