"""When a handoff sends what: a whole request, each layer or each chunk of a prompt; and what of it is not hidden.

Times here are bytes over bandwidth: no latency, no posting (see ``descriptors.posting_s``), no other traffic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosstraffic.patterns.workload import Workload

Runs = tuple[tuple[int, int], ...]  # (calls, bytes of each), in order
_SGLANG = "SGLang @ 6ed5780c4fd3 disaggregation/prefill.py send_kv_chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """How something that moves the cache does it by itself."""

    schedule: str
    direction: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """How a handoff is made: by what, when, by whom; ``is_asked`` tells whether the workload named the schedule."""

    connector: str
    schedule: str
    direction: str
    source: str
    is_asked: bool


# The first one is what the engine is set up with in its own documentation.
CONNECTORS: Mapping[str, Mapping[str, Connector]] = {
    "vllm": {
        "nixl": Connector(
            schedule="request", direction="pull", source="vLLM @ 017e9f4448b7 kv_connector/v1/nixl/pull_worker.py"
        ),
        "nixl_push": Connector(
            schedule="request", direction="push", source="vLLM @ 017e9f4448b7 kv_connector/v1/nixl/push_worker.py"
        ),
        "mooncake": Connector(
            schedule="request",
            direction="push",
            source="vLLM @ 017e9f4448b7 kv_connector/v1/mooncake/mooncake_connector.py",
        ),
    },
    "sglang": {
        "mooncake": Connector(schedule="chunk", direction="push", source=_SGLANG),
        "nixl": Connector(schedule="chunk", direction="push", source=_SGLANG),
    },
    "megatron": {
        "nixl": Connector(
            schedule="request",
            direction="pull",
            source="Megatron-LM @ d98e8a64ddf3 core/inference/disaggregation/transfer_backends/nixl.py",
        ),
        "nccl": Connector(
            schedule="request",
            direction="push",
            source="Megatron-LM @ d98e8a64ddf3 core/inference/disaggregation/transfer_backends/nccl.py",
        ),
    },
    "tensorrt_llm": {
        "ucx": Connector(schedule="request", direction="push", source="TensorRT-LLM cache transceiver (assumed)"),
        "nixl": Connector(schedule="request", direction="push", source="TensorRT-LLM cache transceiver (assumed)"),
    },
}


def transfer_plan(framework: str, workload: Workload) -> TransferPlan:
    """Return how an engine makes a handoff, with what the workload asks for instead.

    >>> plan = transfer_plan("sglang", Workload(phase="handoff"))
    >>> plan.connector, plan.schedule, plan.direction
    ('mooncake', 'chunk', 'push')

    Raises:
        ValueError: a connector that the engine does not have.
    """
    allowed = CONNECTORS[framework]
    name = workload.kv_connector or next(iter(allowed))
    if name not in allowed:
        raise ValueError(f"{framework} has no KV connector {name!r}; allowed: {', '.join(allowed)}")
    own = allowed[name]
    return TransferPlan(
        connector=name,
        schedule=workload.kv_schedule or own.schedule,
        direction=workload.kv_direction or own.direction,
        source=own.source,
        is_asked=workload.kv_schedule is not None,
    )


def num_calls(schedule: str, *, num_layers: int, num_tokens: int, chunk_tokens: int) -> int:
    """Return how many transfers a rank makes for the tokens of one handoff: 1, its layers L, or ceil(S / chunk).

    >>> [num_calls(name, num_layers=80, num_tokens=20_000, chunk_tokens=8192) for name in ("request", "layer", "chunk")]
    [1, 80, 3]

    Raises:
        ValueError: unknown schedule.
    """
    calls = {"request": 1, "layer": num_layers, "chunk": -(-num_tokens // chunk_tokens)}
    if schedule not in calls:
        raise ValueError(f"unknown KV schedule: {schedule!r}; allowed: {', '.join(calls)}")
    return calls[schedule]


def even_runs(num_bytes: int, calls: int) -> Runs:
    """Cut bytes into equal calls, the last of which takes what does not divide; calls without bytes are left out.

    >>> even_runs(10, 3), even_runs(9, 3), even_runs(1, 3)
    (((2, 3), (1, 4)), ((3, 3),), ((1, 1),))
    """
    each, rest = divmod(num_bytes, calls)
    runs = ((calls - 1, each), (1, each + rest)) if rest else ((calls, each),)
    return tuple(run for run in runs if all(run))


def run_lengths(sizes: Sequence[int]) -> Runs:
    """Write calls one after the other as runs of equal ones; calls without bytes are left out.

    >>> run_lengths([4, 4, 0, 2])
    ((2, 4), (1, 2))
    """
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + 1, size)
        elif size:
            runs.append((1, size))
    return tuple(runs)


def transfer_s(num_bytes: int, bytes_per_s: float) -> float:
    """Return the time of a whole transfer: S * kv_bytes_per_token / BW.

    >>> round(transfer_s(131_072 * 327_680, 87e9), 3), round(transfer_s(131_072 * 327_680, 190e9), 3)
    (0.494, 0.226)

    Source of the rates: Mooncake README (Transfer Engine, 40 GB over 4 x 200 Gb/s and 8 x 400 Gb/s RoCE).
    """
    if bytes_per_s <= 0:
        raise ValueError(f"bytes_per_s must be positive: {bytes_per_s}")
    return num_bytes / bytes_per_s


def exposed_s(num_bytes: int, bytes_per_s: float, *, calls: int, prefill_s: float) -> float:
    """Return how long a transfer in ``calls`` equal parts goes on after the prefill that it runs beside.

    One call (a whole request) starts when the prefill ends: all of it. Otherwise the last part comes after the end,
    and what the prefill was too short to hide: S * kvb / (L * BW) + max(0, S * kvb / BW - t_prefill).

    >>> exposed_s(800, 100.0, calls=1, prefill_s=5.0), exposed_s(800, 100.0, calls=80, prefill_s=5.0)
    (8.0, 3.1)

    Raises:
        ValueError: fewer than one call, a time below 0, or a rate that is not positive.
    """
    if calls < 1 or prefill_s < 0:
        raise ValueError(f"calls must be from 1, prefill_s from 0: {calls}, {prefill_s}")
    whole = transfer_s(num_bytes, bytes_per_s)
    return whole if calls == 1 else whole / calls + max(0.0, whole - prefill_s)


def demand_bytes_per_s(tokens_per_s: float, bytes_per_token: int) -> float:
    """Return the rate at which prefill makes KV: tokens/s * bytes/token.

    >>> round(demand_bytes_per_s(73_700, 70_272) / 1e9, 1)
    5.2

    Source of the rate: deepseek-ai/open-infra-index @ 56d86855 (73.7k input tokens/s of a node, cache hits included).
    """
    return tokens_per_s * bytes_per_token
