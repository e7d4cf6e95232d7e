"""Dispatchers of a mixture of experts: what one message of each backend is for, and its bytes there and back."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

SCALE_BLOCK = 128  # elements of a row that share one fp32 scale
HEADER_BYTES = 16  # of a low-latency message: where the token comes from
SOURCE_BYTES = 8  # of a high-throughput message: source node, and which ranks of the node want it
ROUTE_BYTES = 8  # expert index and weight of one (token, expert) pair
LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
COPY_BYTES = 512  # high-throughput kernels copy rows in pieces of 32 x 16 bytes
BUFFER_ALIGNMENT = 128
_DEEPEP = "DeepEP @ dd758caf4518 csrc"

Unit = Literal["expert", "rank", "node", "all"]
Size = Callable[[int, int, int], int]  # (elements of a row, top_k, bytes of an element) -> bytes of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes of one message there and back, and the formulas of a rank's total."""

    dispatch: Size
    combine: Size
    dispatch_formula: str
    combine_formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A dispatcher. A token is sent to each ``unit`` that its experts are in: expert, rank, node, or to all ranks.

    ``inside`` are the messages where all ranks of the group are on one node, if these differ (then one for each rank);
    ``width`` gives the elements of a row that are sent for a row of so many.
    """

    unit: Unit
    messages: Messages
    inside: Messages | None = None
    width: Callable[[int], int] = lambda width: width
    dispatch_dtype: str | None = None
    combine_dtype: str | None = None


def low_latency_width(width: int) -> int:
    """Return the next row width that DeepEP's low-latency kernels are compiled for.

    >>> low_latency_width(7168), low_latency_width(2880)
    (7168, 3072)

    Raises:
        ValueError: wider than any of them.

    Source: vLLM @ 017e9f4448b7 prepare_finalize/deepep_ll.py; DeepEP @ dd758caf4518 legacy/launch.cuh SWITCH_HIDDEN.
    """
    for supported in LOW_LATENCY_WIDTHS:
        if supported >= width:
            return supported
    raise ValueError(
        f"Hidden Size {width} is greater than the maximum supported hidden size {LOW_LATENCY_WIDTHS[-1]} of "
        f"DeepEP's low-latency kernels; allowed: up to {LOW_LATENCY_WIDTHS[-1]}"
    )


def high_throughput_width(width: int) -> int:
    """Return the row width that DeepEP's high-throughput kernels copy: a bf16 row in whole pieces of 512 bytes.

    >>> high_throughput_width(7168), high_throughput_width(2880)
    (7168, 3072)

    Source: vLLM @ 017e9f4448b7 prepare_finalize/deepep_ht.py maybe_roundup_layer_hidden_size.
    """
    return -(-2 * width // COPY_BYTES) * COPY_BYTES // 2


def scale_bytes(width: int) -> int:
    """Return bytes of the fp32 scales of one fp8 row.

    >>> scale_bytes(7168)
    224
    """
    return 4 * -(-width // SCALE_BLOCK)


def align(num_bytes: int, unit: int = 16) -> int:
    """Round bytes up to whole units."""
    return -(-num_bytes // unit) * unit


def _row(width: int, element: int) -> int:
    """Return bytes of a row that goes to experts: with its scales if elements are of one byte."""
    return width * element + (scale_bytes(width) if element == 1 else 0)


def _back(width: int, element: int) -> int:
    """Return bytes of a row that comes back: never in less than two bytes an element."""
    return width * max(2, element)


def _low_latency(dispatch: Size, dispatch_formula: str, dtype: str, is_logfmt: bool = False) -> Backend:
    return Backend(
        unit="expert",
        width=low_latency_width,
        dispatch_dtype=dtype,
        combine_dtype="logfmt10" if is_logfmt else "bfloat16",
        messages=Messages(
            dispatch=dispatch,
            combine=(lambda h, k, b: 5 * h // 4 + scale_bytes(h)) if is_logfmt else (lambda h, k, b: 2 * h),
            dispatch_formula=dispatch_formula,
            combine_formula="T * k * (1.25 * H + 4 * H / 128)" if is_logfmt else "T * k * 2 * H",
            source=f"{_DEEPEP}/legacy/config.hpp LowLatencyLayout"
            + (", kernels/legacy/internode_ll.cu logfmt_encode" if is_logfmt else ""),
        ),
    )


def _high_throughput(element: int, dtype: str) -> Backend:
    """Return the backend of ``element`` bytes; engines combine without weights, in bf16."""
    row = "H + 4 * H / 128" if element == 1 else "2 * H"
    return Backend(
        unit="node",
        width=high_throughput_width,
        dispatch_dtype=dtype,
        combine_dtype="bfloat16",
        messages=Messages(
            dispatch=lambda h, k, b: align(_row(h, element) + SOURCE_BYTES + ROUTE_BYTES * k),
            combine=lambda h, k, b: align(2 * h + SOURCE_BYTES),
            dispatch_formula=f"align16({row} + 8 + 4k + 4k)",
            combine_formula="align16(2 * H + 8)",
            source=f"{_DEEPEP}/kernels/legacy/internode.cu get_num_bytes_per_token",
        ),
        inside=Messages(
            dispatch=lambda h, k, b: _row(h, element) + 4 + 8 * k + 4 * k,
            combine=lambda h, k, b: 2 * h + 4,
            dispatch_formula=f"T * E[ranks] * ({row} + 4 + 8k + 4k)",
            combine_formula="T * E[ranks] * (2 * H + 4)",
            source=f"{_DEEPEP}/kernels/legacy/intranode.cu dispatch, combine",
        ),
    )


BACKENDS: Mapping[str, Backend] = {
    "deepep_low_latency": _low_latency(
        lambda h, k, b: HEADER_BYTES + _row(h, 1), "T * k * (16 + H + 4 * H / 128)", "float8_e4m3"
    ),
    "deepep_low_latency_bf16": _low_latency(lambda h, k, b: HEADER_BYTES + 2 * h, "T * k * (16 + 2 * H)", "bfloat16"),
    "deepep_low_latency_logfmt": _low_latency(
        lambda h, k, b: HEADER_BYTES + _row(h, 1), "T * k * (16 + H + 4 * H / 128)", "float8_e4m3", is_logfmt=True
    ),
    "deepep_high_throughput": _high_throughput(1, "float8_e4m3"),
    "deepep_high_throughput_bf16": _high_throughput(2, "bfloat16"),
    "flashinfer_one_sided": Backend(
        unit="rank",
        messages=Messages(
            dispatch=lambda h, k, b: _row(h, b) + ROUTE_BYTES * k,
            combine=lambda h, k, b: _back(h, b),
            dispatch_formula="T * E[ranks] * (H * b + scales + 8 * k)",
            combine_formula="T * E[ranks] * 2 * H",
            source="vLLM @ 017e9f4448b7 all2all.py FlashInferNVLinkOneSidedManager",
        ),
    ),
    "alltoall": Backend(
        unit="expert",
        messages=Messages(
            dispatch=lambda h, k, b: h * b + 4,
            combine=lambda h, k, b: h * b,
            dispatch_formula="T * k * (H * b + 4)",
            combine_formula="T * k * H * b",
            source="Megatron-LM @ d98e8a64ddf3 token_dispatcher.py MoEAlltoAllTokenDispatcher",
        ),
    ),
    "allgather_reducescatter": Backend(
        unit="all",
        messages=Messages(
            dispatch=lambda h, k, b: _row(h, b) + ROUTE_BYTES * k,
            combine=lambda h, k, b: _back(h, b),
            dispatch_formula="P * T * (H * b + 8 * k)",
            combine_formula="P * T * H * b",
            source="vLLM @ 017e9f4448b7 all2all.py AgRsAll2AllManager",
        ),
    ),
}


def is_all_to_all_smaller(num_ranks: int, top_k: int) -> bool:
    """Tell whether an all-to-all moves fewer bytes than all-gather and reduce-scatter: with more ranks than top_k.

    Gathering brings every rank the rows of all ranks, an all-to-all brings it ``top_k`` times its own share.

    >>> is_all_to_all_smaller(8, 8), is_all_to_all_smaller(16, 8)
    (False, True)

    Source: TensorRT-LLM blog 18: P * T * H against k * T * H.
    """
    return num_ranks > top_k


def exchange_floor_s(
    num_tokens: int,
    experts_per_token: int,
    hidden: int,
    bandwidth_bytes_per_s: float,
    *,
    dispatch_bytes: int = 1,
    combine_bytes: int = 2,
) -> float:
    """Return seconds that dispatch and combine of one layer take at the least, all messages over one rank's link.

    ``experts_per_token`` counts the shared expert where that is routed to as well.

    >>> round(exchange_floor_s(32, 9, 7000, 50e9) * 1e6, 2)
    120.96

    Raises:
        ValueError: a bandwidth that is not above 0.

    Source: Insights into DeepSeek-V3, arXiv 2505.09343 section 2.3.2.
    """
    if not bandwidth_bytes_per_s > 0:
        raise ValueError(f"bandwidth_bytes_per_s must be above 0: {bandwidth_bytes_per_s}")
    return (dispatch_bytes + combine_bytes) * num_tokens * experts_per_token * hidden / bandwidth_bytes_per_s


def low_latency_buffer_bytes(num_experts: int, max_tokens: int, hidden: int) -> int:
    """Return bytes of the RDMA buffer that DeepEP's low-latency kernels lay out on each rank.

    E * T_max messages of the largest kind, twice to send and twice to receive, and two sets of flags. The largest
    message is a combine with the scales of LogFMT, 2 * H + 4 * H / 128. DeepEP's size hint is 128 bytes more.

    >>> low_latency_buffer_bytes(288, 128, 7168)
    2146961664

    Source: DeepEP @ dd758caf4518 csrc/legacy/config.hpp LowLatencyLayout, get_low_latency_rdma_size_hint.
    """
    dispatch = HEADER_BYTES + max(2 * hidden, hidden + 4 * (hidden // SCALE_BLOCK))
    combine = 2 * hidden + 4 * (hidden // SCALE_BLOCK)
    messages = num_experts * max_tokens
    send = max(max_tokens * dispatch, messages * combine)
    receive = messages * max(dispatch, combine)
    return 2 * send + 2 * receive + 2 * align(4 * num_experts, BUFFER_ALIGNMENT)


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Return tokens that an expert takes before more are dropped: ceil(T * k / E * factor). Inference drops none.

    >>> expert_capacity(4096, 8, 256, 1.25)
    160

    Source: Megatron-LM @ d98e8a64ddf3 core/transformer/moe/moe_utils.py get_capacity.
    """
    return math.ceil(num_tokens * top_k / num_experts * capacity_factor)
