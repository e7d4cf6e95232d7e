"""Data parallelism: nothing crosses in a forward pass, but for engines whose attention is data parallel inside TP."""

from crosstraffic.patterns.setting import Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

NOTHING = "replicas share no tensor in a forward pass"
_SOURCE = "SGLang @ 6ed5780c4fd3 layers/dp_attention.py"


def sums_tokens(setting: Setting) -> bool:
    """Tell whether tokens are gathered by an all-reduce of a zero-filled buffer (SGLang's SUM_LEN, used in prefill)."""
    return setting.framework == "sglang" and setting.workload.phase == "prefill"


def data_control(setting: Setting) -> tuple[Stream, ...]:
    """Return what replicas tell each other before a step."""
    return ()


def data_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the gather and scatter of all replicas' tokens around the layers that all TP ranks compute together."""
    replicas = setting.layout.dp * (setting.layout.cp if setting.workload.phase == "prefill" else 1)
    whole = replicas * setting.hidden_bytes
    everyone, own = setting.groups["tp"], setting.tensor_groups
    streams: list[Stream] = []
    if sums_tokens(setting):
        for name in ("dp.gather", "dp.mlp_output"):
            streams += make_stream(
                setting,
                order,
                name=name,
                op="all_reduce",
                groups=everyone,
                payload_bytes=whole,
                formula="sum of T over replicas * H * b",
                source=f"{_SOURCE} DpPaddingMode.SUM_LEN",
            )
    else:
        for name in ("dp.gather", "dp.scatter"):
            streams += make_stream(
                setting,
                order,
                name=name,
                op="all_gather" if name == "dp.gather" else "reduce_scatter",
                groups=everyone,
                payload_bytes=whole,
                formula="dp * T * H * b",
                source=f"{_SOURCE} DpPaddingMode.MAX_LEN",
            )
    for name in ("dp.attention_scatter", "dp.attention_gather"):
        streams += make_stream(
            setting,
            order,
            name=name,
            op="reduce_scatter" if name == "dp.attention_scatter" else "all_gather",
            groups=own,
            payload_bytes=setting.hidden_bytes,
            formula="T * H * b over the TP ranks of one replica",
            source=_SOURCE,
        )
    return tuple(streams)
