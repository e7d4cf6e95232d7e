"""One forward step: its streams, and the order in which the ranks of each pipeline stage call them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby

from crosstraffic.patterns.context import (
    attention_calls,
    context_streams,
    output_calls,
    style_note,
    why_no_context,
)
from crosstraffic.patterns.data import data_control, data_streams, sums_tokens, why_nothing
from crosstraffic.patterns.expert import exchange_calls, expert_path, expert_streams, is_cut_over_tp
from crosstraffic.patterns.expert_counts import expert_control
from crosstraffic.patterns.expert_tensor import partial_sum_calls, sums_apart
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.pipeline import pipeline_streams, receive_calls, sample_calls
from crosstraffic.patterns.pipeline_control import pipeline_control
from crosstraffic.patterns.schedule import schedule_note
from crosstraffic.patterns.sequence import sequence_note, sequence_streams
from crosstraffic.patterns.setting import BOUNDARY, Calls, Order, Setting, layer_calls, make_setting
from crosstraffic.patterns.step import Block, Step, Task
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.tensor import tensor_streams
from crosstraffic.patterns.two_batch import split, whole_streams
from crosstraffic.patterns.workload import Workload

PATTERNS: Mapping[str, Callable[[Setting, Order], tuple[Stream, ...]]] = {
    "tp": tensor_streams,
    "sp": sequence_streams,
    "cp": context_streams,
    "pp": pipeline_streams,
    "ep": expert_streams,
    "dp": data_streams,
}
CONTROL: Mapping[str, Callable[[Setting], tuple[Stream, ...]]] = {
    "pp": pipeline_control,
    "ep": expert_control,
    "dp": data_control,
}


def _dense_layer(setting: Setting) -> Calls:
    attention = attention_calls(setting)
    if setting.workload.sequence_parallel:
        gather, scatter = ("sp.all_gather", 1), ("sp.reduce_scatter", 1)
        return (gather, *attention, scatter, gather, scatter)
    if setting.tp == setting.layout.tp:
        return (*attention, ("tp.attention_output", 1), ("tp.mlp_output", 1))
    if sums_tokens(setting):
        return (*attention, ("dp.gather", 1), ("dp.mlp_output", 1))
    scatter, gather = ("dp.attention_scatter", 1), ("dp.attention_gather", 1)
    return (*attention, scatter, ("dp.gather", 1), ("dp.scatter", 1), gather)


def _moe_layer(setting: Setting) -> Calls:
    path = expert_path(setting)
    if path == "tensor" and sums_apart(setting):
        return (*attention_calls(setting), ("tp.attention_output", 1), *partial_sum_calls(setting))
    if path in ("tensor", "gathered"):
        return _dense_layer(setting)
    attention, is_sequence = attention_calls(setting), setting.workload.sequence_parallel
    exchange = exchange_calls(setting)
    if path == "all_to_all" and setting.framework in ("sglang", "tensorrt_llm"):
        return (*attention, ("dp.attention_scatter", 1), *exchange, ("dp.attention_gather", 1))
    before: Calls = (*attention, ("tp.attention_output", 1))
    if is_sequence:
        before = (("sp.all_gather", 1), *attention, ("sp.reduce_scatter", 1))
    whole_again: Calls = ()
    if setting.framework == "vllm" and is_cut_over_tp(setting) and not is_sequence:
        whole_again = (("tp.moe_gather", 1),)
    if path == "none":
        return before
    if path == "all_to_all" or setting.framework == "megatron" or setting.layout.ep > 1:
        return (*before, *exchange, *whole_again)
    if is_sequence:
        return (*before, ("sp.all_gather", 1), *exchange, ("sp.reduce_scatter", 1))
    return (*before, *exchange, ("tp.mlp_output", 1))


def step_order(setting: Setting) -> Order:
    """Return the streams of one step in the order in which a rank calls them."""
    first: Calls = (("tp.embedding", 1),)
    last: Calls = (*output_calls(setting), ("tp.sampled_rows", 1), ("tp.logits", 1), *sample_calls(setting))
    if setting.workload.sequence_parallel:
        first, last = (("sp.embedding", 1),), (("sp.output", 1), *last)
    moe_layer = _moe_layer(setting) if setting.shape.moe_layers else ()
    return Order(
        first=first, dense_layer=_dense_layer(setting), moe_layer=moe_layer, last=last, receive=receive_calls(setting)
    )


def phase_streams(shape: ModelShape, layout: Layout, workload: Workload, framework: str) -> tuple[Stream, ...]:
    """Return the streams of one prefill or decode step; those that only ever have groups of one rank are left out.

    Raises:
        ValueError: the engine cannot run the model that way, or the phase is handoff (see ``handoff``).
    """
    if workload.phase == "handoff":
        raise ValueError("a handoff is between two layouts: use handoff(), phases here are prefill and decode")
    setting = make_setting(shape, layout, workload, framework)
    half, _ = split(setting)
    order = step_order(setting)
    streams = {stream.name: stream for make in PATTERNS.values() for stream in make(half, order)}
    if half is not setting:
        unsplit, whole = whole_streams(order, framework), [make(setting, order) for make in PATTERNS.values()]
        streams |= {stream.name: stream for made in whole for stream in made if stream.name in unsplit}
    dense_layer = order.dense_layer if shape.num_moe_layers < shape.num_layers else ()
    chain = (*order.first, *order.receive, *dense_layer, *order.moe_layer, (BOUNDARY, 1), *order.last)
    names = list(dict.fromkeys(name for name, _ in chain if name in streams))
    before = dict(zip(names[1:], names, strict=False))
    return tuple(replace(streams[name], after=(before[name],) if name in before else ()) for name in names)


def control_streams(shape: ModelShape, layout: Layout, workload: Workload, framework: str) -> tuple[Stream, ...]:
    """Return the small messages beside the data of one step: counts, batch sizes, token ids; role ``control``."""
    setting = make_setting(shape, layout, workload, framework)
    half, _ = split(setting)
    return tuple(stream for name, make in CONTROL.items() for stream in make(half if name == "ep" else setting))


def notes(shape: ModelShape, layout: Layout, workload: Workload, framework: str) -> Mapping[str, str]:
    """Say what the streams alone do not tell: half batches or why not, vLLM's threshold, the bubble of a pipeline."""
    setting = make_setting(shape, layout, workload, framework)
    found = {
        "two_batch": split(setting)[1],
        "sequence_parallel": sequence_note(setting),
        "context_style": style_note(setting),
        "pipeline": schedule_note(setting),
    }
    return {name: text for name, text in found.items() if text is not None}


def left_out(
    shape: ModelShape, layout: Layout, workload: Workload, framework: str, streams: Sequence[Stream]
) -> Mapping[str, str]:
    """Say for each parallelism without any of ``streams``, those of the step, why it puts nothing on the wire."""
    setting = make_setting(shape, layout, workload, framework)
    present = {stream.pattern for stream in streams}
    reasons: dict[str, str] = {}
    if not present & {"tp", "sp"}:
        reasons["tp"] = f"attention tp={setting.tp}: its groups have one rank"
    elif "sp" not in present:
        reasons["sp"] = "not asked for: all-reduces instead"
    if not present & {"cp", "dcp"}:
        reasons["cp"] = why_no_context(setting)
    if "pp" not in present:
        reasons["pp"] = "pp=1: one stage, no boundary"
    if "ep" not in present:
        why = {
            "none": "no experts" if not shape.moe_layers else "every rank holds every expert",
            "tensor": f"{framework} makes no all-to-all here: tokens are on every TP rank, outputs are all-reduced",
            "gathered": f"{framework} gathers the tokens of all replicas instead (dp.gather)",
            "all_to_all": "its groups have one rank",
            "gather_scatter": "its groups have one rank",
        }
        reasons["ep"] = why[expert_path(setting)]
    if "dp" not in present:
        reasons["dp"] = why_nothing(setting)
    return reasons


def phase_step(
    shape: ModelShape, layout: Layout, workload: Workload, framework: str, streams: tuple[Stream, ...]
) -> Step:
    """Return one prefill or decode step in its real order: stage by stage, layer by layer, as calls of ``streams``.

    Micro-batches follow each other; a stage goes on with the next one while those behind it have the last. With
    interleaved chunks, as many micro-batches as stages go through one chunk of each before the next chunk.

    Raises:
        ValueError: see ``phase_streams``.
    """
    setting = make_setting(shape, layout, workload, framework)
    order, num_batches = step_order(setting), split(setting)[0].num_batches
    whole = whole_streams(order, framework)
    by_name = {stream.name: stream for stream in streams}
    homes = {stream.name: [setting.stage_of_rank[group[0]] for group in stream.groups] for stream in streams}

    @cache
    def tasks(calls: Calls, stage: int) -> tuple[Task, ...]:
        made: list[Task] = []
        for name, count in calls:
            stream = by_name.get(name)
            if stream is None:
                continue
            here = tuple(index for index, home in enumerate(homes[name]) if home == stage)
            if here:
                groups = None if len(here) == len(stream.groups) else here
                times = count if name in whole else count * num_batches
                made += [Task(stream=name, payload_bytes=stream.payload_bytes, groups=groups)] * times
        return tuple(made)

    boundary, num_stages = by_name.get(BOUNDARY), len(setting.stages)

    def pass_through(index: int) -> tuple[Block, ...]:
        stage = index % num_stages
        blocks: list[Block] = []
        if index and boundary is not None:
            edge = ((stage - 1) % num_stages, stage)
            task = Task(stream=boundary.name, payload_bytes=boundary.payload_bytes, edge=edge)
            blocks.append(Block(repeat=1, tasks=(task,)))
        blocks.append(Block(repeat=1, tasks=tasks(order.receive if index else order.first, stage)))
        for kind, layers in groupby(setting.layer_kinds(setting.chunks[index])):
            blocks.append(Block(repeat=len(tuple(layers)), tasks=tasks(layer_calls(order, kind), stage)))
        if index == len(setting.chunks) - 1:
            blocks.append(Block(repeat=1, tasks=tasks(order.last, stage)))
        return tuple(block for block in blocks if block.tasks)

    chunks = [pass_through(index) for index in range(len(setting.chunks))]
    rounds = [chunks[start : start + num_stages] for start in range(0, len(chunks), num_stages)]
    lane: list[Block] = []
    for start in range(0, setting.num_passes, num_stages):
        for one_round in rounds:
            once = [block for chunk in one_round for block in chunk]
            lane += once * min(num_stages, setting.num_passes - start)
    return Step(name=workload.phase, phase=workload.phase, lanes=(tuple(lane),))
