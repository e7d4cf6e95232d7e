"""Every layout of a model on a number of GPUs that an engine accepts: does it fit, what does it send, which is first.

Ranked by, in this order:

1. rounds: how often the cache must be filled to serve the whole batch (1: all requests at once); what does not fit
   comes last, by what is missing;
2. whether one matrix is cut across nodes (TP, experts that are cut, decode context parallelism): every layer then
   waits for the network;
3. pipeline stages, fewest first. Bytes of a pipeline are few, but a token passes all its stages in turn, so that its
   time does not fall as with the other degrees, and stages idle with fewer micro-batches than stages (utilization
   min(1, m / pp)). So a pipeline is for what does not fit otherwise, or not into a node;
4. bytes that leave the busiest node, 5. bytes that the busiest rank sends inside its node, 6. calls in a row, of one
   step of the whole batch;
7. whole experts before cut ones, then the fewest ranks a replica.

All bytes are of one step in which each of ``batch`` requests takes part, divided over data-parallel replicas (rounded
up), so layouts do equal work. There is no time here: a layout with less traffic need not be faster.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from crosstraffic.patterns.degrees import combinations
from crosstraffic.patterns.expert import backend, expert_path
from crosstraffic.patterns.kv_cache import check_kv_dtype
from crosstraffic.patterns.layout import Layout, expert_tp
from crosstraffic.patterns.memory import Memory, formats, rank_memory
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.placed import PlacedCall, placed_calls
from crosstraffic.patterns.placement import check_model
from crosstraffic.patterns.schedule import bubble, decode_utilisation
from crosstraffic.patterns.setting import Setting, make_setting
from crosstraffic.patterns.tiers import NOTHING, Tiers, step_tiers
from crosstraffic.patterns.workload import Workload

MAX_GPUS = 1024
PREFILL_BACKEND = "deepep_high_throughput"  # buffers of the low-latency kernels grow with experts x tokens
REQUESTS_PER_GPU: Mapping[str, int] = {"decode": 16, "prefill": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout: what its fullest rank keeps, and what one step of the whole batch sends.

    ``num_passes`` batches go through the layers one behind the other; ``pipeline_utilization`` is the share of its
    time that a stage works meanwhile. ``experts_cut``: over how many ranks each expert is cut. ``calls`` are those of
    one pass, if asked for.
    """

    layout: Layout
    num_replicas: int
    num_passes: int
    memory: Memory
    tiers: Tiers
    crosses_nodes: bool
    experts_cut: int
    pipeline_utilization: float
    calls: tuple[PlacedCall, ...] = ()

    @property
    def max_requests(self) -> int:
        """Requests whose cache fits at once, all replicas together."""
        return self.num_replicas * self.memory.max_requests

    @property
    def rounds(self) -> float:
        """How often the cache must be filled to serve a replica's share of the batch; infinite if nothing fits."""
        most = self.memory.max_requests
        return -(-self.memory.num_requests // most) if most else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The layouts that an engine accepts, best first, and how often each rule refused one."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[tuple[str, int], ...]

    @property
    def num_refused(self) -> int:
        """Combinations of degrees that were refused."""
        return sum(count for _, count in self.refusals)


def rule_of(refusal: str) -> str:
    """Return the rule in a refusal: without the layout it was said of, numbers as #.

    >>> rule_of("vllm cannot run X as tp=64: Total number of heads (32) must be divisible by size (64).")
    'Total number of heads (#) must be divisible by size (#).'
    """
    bare = re.sub(r"^\w+ cannot run .*? as [a-z_=,0-9]+: ", "", refusal)
    bare = re.sub(r"( \(|: )[a-z_]+=\d+(,[a-z_]+=\d+)*\)?$", "", bare)
    return re.sub(r"(?<![A-Za-z])\d+", "#", bare)


def sort_key(candidate: Candidate) -> tuple[float, ...]:
    """Return what layouts are ranked by, smallest first; see the module."""
    memory, tiers, layout = candidate.memory, candidate.tiers, candidate.layout
    return (
        candidate.rounds,
        memory.missing_bytes,
        candidate.crosses_nodes,
        layout.pp,
        tiers.node_egress_bytes,
        tiers.intra_node_bytes,
        tiers.calls,
        candidate.experts_cut,
        layout.tp * layout.cp * layout.dp,
        layout.tp,
        layout.dcp * layout.moe_dp * layout.ep,
    )


def one_pass(workload: Workload, requests: int, num_stages: int) -> tuple[Workload, int]:
    """Return what one pass through the layers does for a replica with ``requests``, and how many passes a step takes.

    A prefill goes through in chunks of at most ``chunk_tokens`` tokens. In decode a pipeline keeps as many batches in
    flight as it has stages, or requests.

    >>> one, num_passes = one_pass(Workload(phase="decode"), 10, 4)
    >>> one.batch, num_passes
    (3, 4)

    Source: vLLM @ 017e9f4448b7 config/scheduler.py max_num_batched_tokens, config/vllm.py
    max_concurrent_batches.
    """
    if workload.phase == "decode":
        num_passes = min(num_stages, requests)
        return replace(workload, batch=-(-requests // num_passes)), num_passes
    tokens = requests * (workload.context - workload.cached_tokens)
    num_passes = -(-tokens // workload.chunk_tokens)
    return replace(workload, batch=-(-requests // num_passes), tokens=-(-tokens // num_passes)), num_passes


def is_low_latency(setting: Setting) -> bool:
    """Tell whether tokens are dispatched by DeepEP's low-latency kernels, which are made for decode."""
    return expert_path(setting) == "all_to_all" and backend(setting) == "deepep_low_latency"


def candidate_of(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    framework: str,
    *,
    batch: int,
    limit_bytes: int,
    weight_dtype: str | None = None,
    with_calls: bool = False,
) -> Candidate:
    """Work out one layout with ``batch`` requests over all its replicas; ``workload.batch`` is not looked at.

    Raises:
        ValueError: the engine cannot run the model that way.
    """
    num_replicas = layout.replicas * layout.dp
    requests = -(-batch // num_replicas)
    own, num_passes = one_pass(workload, requests, layout.pp)
    setting = make_setting(shape, layout, own, framework)
    if own.phase == "prefill" and own.expert_backend is None and is_low_latency(setting):
        own = replace(own, expert_backend=PREFILL_BACKEND)
        setting = replace(setting, workload=own)
    streams = phase_streams(shape, layout, own, framework)
    tiers = NOTHING
    calls: tuple[PlacedCall, ...] = ()
    if streams:
        step, nodes = phase_step(shape, layout, own, framework, streams), setting.nodes
        tiers = step_tiers(streams, step, nodes, num_passes)
        calls = placed_calls(streams, step, nodes, setting.stage_of_rank) if with_calls else ()
    used = decode_utilisation(layout.pp, num_passes)
    if own.phase == "prefill":
        used = 1 - bubble(layout.pp, num_passes)
    experts_cut = expert_tp(layout, framework) if shape.moe_layers else 1
    return Candidate(
        layout=layout,
        num_replicas=num_replicas,
        num_passes=num_passes,
        memory=rank_memory(setting, num_requests=requests, limit_bytes=limit_bytes, weight_dtype=weight_dtype),
        tiers=tiers,
        crosses_nodes=_crosses(setting, experts_cut),
        experts_cut=experts_cut,
        pipeline_utilization=float(used),
        calls=calls,
    )


def _crosses(setting: Setting, experts_cut: int) -> bool:
    """Tell whether ranks on different nodes hold parts of one matrix, or of one request's cache."""
    groups, is_moe, nodes = setting.groups, bool(setting.shape.moe_layers), setting.nodes
    shared = list(setting.tensor_groups)
    if is_moe and experts_cut > 1:
        shared += groups.get("etp", groups["ep"])
    if not is_moe and setting.tp < setting.layout.tp:
        shared += groups["tp"]
    if setting.layout.dcp > 1:
        shared += groups["dcp"]
    return any(len({nodes[rank] for rank in group}) > 1 for group in shared)


def find_layouts(
    shape: ModelShape,
    num_gpus: int,
    workload: Workload,
    framework: str,
    *,
    batch: int,
    gpu_memory_bytes: int,
    utilization: float = 0.9,
    weight_dtype: str | None = None,
    with_calls: bool = False,
) -> Found:
    """Return every layout that an engine accepts, ranked, with ``batch`` requests over all replicas.

    Raises:
        ValueError: a number out of range, an unknown dtype, or a phase that is neither prefill nor decode.
    """
    if workload.phase == "handoff":
        raise ValueError("layouts are compared in prefill or decode; a handoff is between two of them")
    if not 1 <= num_gpus <= MAX_GPUS:
        raise ValueError(f"the number of GPUs must be a whole number from 1 to {MAX_GPUS}: {num_gpus}")
    if batch < 1:
        raise ValueError(f"batch must be a whole number from 1: {batch}")
    if gpu_memory_bytes < 1:
        raise ValueError(f"the memory of a GPU must be positive: {gpu_memory_bytes} bytes")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization must be above 0 and at most 1: {utilization:g}")
    formats(shape, weight_dtype, workload.dtype or shape.dtype)
    check_kv_dtype(shape, workload.kv_dtype or workload.dtype or shape.dtype)
    limit_bytes = round(gpu_memory_bytes * utilization)
    found: list[Candidate] = []
    refusals: Counter[str] = Counter()
    for layout in combinations(num_gpus, shape, workload.phase, framework):
        try:
            check_model(shape, layout, framework)
            candidate = candidate_of(
                shape,
                layout,
                workload,
                framework,
                batch=batch,
                limit_bytes=limit_bytes,
                weight_dtype=weight_dtype,
                with_calls=with_calls,
            )
        except ValueError as error:
            refusals[rule_of(str(error))] += 1
        else:
            found.append(candidate)
    return Found(candidates=tuple(sorted(found, key=sort_key)), refusals=tuple(refusals.most_common()))
