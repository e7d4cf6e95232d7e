"""What ``crosstraffic traffic --json`` prints, as JSON types; field names are stable within a schema version."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from crosstraffic.commands.traffic_handoff import Encoders, Planned
from crosstraffic.patterns.all_reduce import all_reduce_algorithm
from crosstraffic.patterns.all_reduce_call import architecture
from crosstraffic.patterns.data import BACKGROUND, occasional
from crosstraffic.patterns.handoff import Handoff
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.routing import Routed, imbalance
from crosstraffic.patterns.setting import Setting
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.wire import wire_bytes_per_rank

SCHEMA_VERSION = 1


def degrees(layout: Layout) -> dict[str, int]:
    """Return the degrees that a layout names."""
    return {name: value for name, value in asdict(layout).items() if value is not None}


def group_nodes(stream: Stream, ranks_per_node: int) -> int:
    """Return over how many nodes the widest group of a stream lies."""
    return max(len({rank // ranks_per_node for rank in group}) for group in stream.groups)


def traffic_data(
    shape: ModelShape,
    layout: Layout,
    phase: str,
    framework: str,
    streams: Sequence[Stream],
    ranks_per_node: int,
) -> dict[str, Any]:
    """Return what ``traffic --json`` prints of any phase."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": shape.name,
        "layout": degrees(layout),
        "phase": phase,
        "framework": framework,
        "streams": [
            {
                "name": stream.name,
                "pattern": stream.pattern,
                "role": stream.role,
                "op": stream.op,
                "groups": stream.groups,
                "group_size": stream.group_size,
                "group_nodes": group_nodes(stream, ranks_per_node),
                "payload_bytes": stream.payload_bytes,
                "wire_bytes_per_rank": wire_bytes_per_rank(stream),
                "calls_per_step": stream.calls_per_step,
                "dtype": stream.dtype,
                "formula": stream.formula,
                "source": stream.source,
            }
            for stream in streams
        ],
    }


def algorithms(streams: Sequence[Stream], framework: str, gpu: str, ranks_per_node: int) -> dict[str, dict[str, str]]:
    """Return for each all-reduce what the engine would run on a GPU, and why.

    Raises:
        ValueError: unknown GPU, or an engine that is not described on it.
    """
    architecture(gpu)
    found = {}
    for stream in streams:
        if stream.op == "all_reduce" and stream.role == "data":
            choice = all_reduce_algorithm(
                framework,
                gpu,
                stream.group_size,
                stream.payload_bytes,
                group=stream.pattern,
                dtype=stream.dtype,
                num_nodes=group_nodes(stream, ranks_per_node),
            )
            found[stream.name] = {"algorithm": choice.algorithm, "kernel": choice.kernel or "", "why": choice.why}
    return found


def handoff_data(moved: Handoff) -> dict[str, Any]:
    """Return what a handoff adds: bytes and descriptors between prefill and decode ranks."""
    found = moved.descriptors
    plan = moved.plan
    return {
        "connector": plan.connector,
        "schedule": plan.schedule,
        "direction": plan.direction,
        "matrix_bytes": moved.matrix_bytes,
        "descriptors": {
            "block_tokens": found.block_tokens,
            "count": found.count,
            "bytes": found.bytes,
            "max_count_per_rank": found.max_count_per_rank,
            "total": found.total,
            "posting_s": found.posting_s,
            "source": found.source,
        },
    }


def encoder_data(shape: ModelShape, planned: Planned, asked: Encoders) -> dict[str, Any]:
    """Return what encoders add to a handoff: who sends how many embeddings; or why none do, of a model that has any."""
    if asked.tokens is None:
        why = {"epd": "no image and no audio in the requests: --encoder-tokens says how many embeddings they have"}
        return {"left_out": why} if shape.has_encoder else {}
    return {
        "encoder": {
            "ranks": planned.encoder_ranks,
            "tokens_per_request": asked.tokens,
            "num_deepstack": shape.num_deepstack,
        }
    }


def replica_data(setting: Setting) -> dict[str, Any]:
    """Return what replicas tell each other in some steps only, and what crosses the network beside the steps."""
    is_alone = setting.layout.dp * setting.layout.replicas == 1
    return {
        "occasional": [asdict(message) for message in occasional(setting)],
        "background": [] if is_alone else [asdict(entry) for entry in BACKGROUND],
    }


def routing_data(streams: Sequence[Stream]) -> dict[str, Any] | None:
    """Return how even the load of the experts' ranks came out, if tokens are dispatched."""
    for stream in streams:
        if stream.name == "ep.dispatch" and isinstance(stream.rule, Routed):
            rule = stream.rule
            return {
                "distribution": rule.distribution,
                "parameter": rule.parameter,
                "seed": rule.seed,
                "rank_load": asdict(imbalance(rule.rank_loads(rule.ep_ranks or stream.group_size))),
            }
    return None
