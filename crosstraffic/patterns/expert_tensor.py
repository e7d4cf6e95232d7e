"""Expert tensor parallelism: experts that are cut over ranks, and what sums their parts.

Megatron-Core exchanges tokens over EP, gathers them over the ranks of each expert (ETP, fastest), and scatters the sums
before the way back. SGLang (moe_tp fastest) and TensorRT-LLM (moe_ep fastest) have every token on every rank and
all-reduce the output. vLLM cuts experts only where expert parallelism is off, over all ranks.
"""

from crosstraffic.patterns.layout import expert_tp
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

# Families whose models in SGLang sum over the experts' ranks, then over the ranks of an expert; others over TP at once.
SUMS_APART = ("qwen", "hunyuan")
_SGLANG = "SGLang @ 6ed5780c4fd3 models/qwen3_moe.py forward_normal"


def etp_calls(setting: Setting) -> Calls:
    """Return what is called between dispatch and combine."""
    return (("etp.all_gather", 1), ("etp.reduce_scatter", 1)) if setting.framework == "megatron" else ()


def etp_streams(setting: Setting, order: Order, rows: int) -> tuple[Stream, ...]:
    """Return Megatron-Core's gather of the rows that the ranks of an expert got, and the scatter of their sums.

    ``rows`` is the most that a rank gets from dispatch: T * k in uniform routing. The router's weights of the rows, 4
    bytes each, are gathered beside them and not counted.
    """
    etp = expert_tp(setting.layout, "megatron")
    streams: list[Stream] = []
    for name in ("etp.all_gather", "etp.reduce_scatter"):
        streams += make_stream(
            setting,
            order,
            name=name,
            op="all_gather" if name == "etp.all_gather" else "reduce_scatter",
            groups=setting.groups["etp"],
            payload_bytes=etp * rows * setting.shape.expert_row * setting.element_bytes,
            formula="ETP * R * H * b, R = T * k rows received (uniform routing)",
            source="Megatron-LM @ d98e8a64ddf3 token_dispatcher.py MoEAlltoAllTokenDispatcher",
        )
    return tuple(streams)


def sums_apart(setting: Setting) -> bool:
    """Tell whether partial sums of experts are all-reduced over EP and then over ETP, not over TP at once.

    Source: SGLang @ 6ed5780c4fd3 models/qwen3_moe.py, models/qwen2_moe.py, models/hunyuan_v3.py; models/deepseek_v2.py
    and most others call tensor_model_parallel_all_reduce.
    """
    layout = setting.layout
    return (
        setting.framework == "sglang"
        and setting.tp == layout.tp
        and layout.ep > 1
        and expert_tp(layout, "sglang") > 1
        and setting.shape.name.lower().startswith(SUMS_APART)
    )


def partial_sum_calls(setting: Setting) -> Calls:
    """Return what sums the parts of the experts' output, where every rank has every token."""
    return (("ep.all_reduce", 1), ("etp.all_reduce", 1)) if sums_apart(setting) else (("tp.mlp_output", 1),)


def partial_sum_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the two all-reduces of the models that sum apart."""
    if not sums_apart(setting):
        return ()
    streams: list[Stream] = []
    for group in ("ep", "etp"):
        streams += make_stream(
            setting,
            order,
            name=f"{group}.all_reduce",
            op="all_reduce",
            groups=setting.groups[group],
            payload_bytes=setting.hidden_bytes,
            formula="T * H * b: output of the experts of a rank" + (", of its part of them" if group == "etp" else ""),
            source=_SGLANG,
        )
    return tuple(streams)
