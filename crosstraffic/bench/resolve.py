"""What a scenario comes to on a number of ranks: distinct streams, their real sizes, whole steps. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crosstraffic.bench.scenario import HandoffSpec, MeasureSpec, PhaseSpec, RoutingSpec, ScenarioFile, StreamSpec
from crosstraffic.patterns.handoff import handoff, handoff_step
from crosstraffic.patterns.layout import Layout, parse_layout
from crosstraffic.patterns.matrix import ByteRule, Chain, Explicit, Ring
from crosstraffic.patterns.model import ModelShape, load_model
from crosstraffic.patterns.phase import control_streams, phase_step, phase_streams
from crosstraffic.patterns.routing import Routed, routing_fields
from crosstraffic.patterns.step import Block, Step, Task
from crosstraffic.patterns.stream import MATRIX_OPS, Phase, Stream, round_payload
from crosstraffic.patterns.workload import Workload

HANDOFF_WORK = {
    "batch",
    "context",
    "kv_dtype",
    "block_tokens",
    "kv_connector",
    "kv_schedule",
    "kv_direction",
    "chunk_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a scenario comes to on a number of ranks: distinct streams, their real sizes, whole steps.

    Streams that are one communication (same op and byte shape, on the same groups or on some of them) are measured
    once, under the name of the one that moves most; ``aliases`` maps the others, as ``phase.name``, to it, and
    ``real_sizes`` holds the bytes per call of all of them. A ring or chain of one rank sends nothing and is left out.
    """

    name: str
    model: str | None
    num_ranks: int
    streams: tuple[Stream, ...]
    aliases: Mapping[str, str]
    real_sizes: Mapping[str, tuple[int, ...]]
    steps: tuple[Step, ...]
    measure: MeasureSpec
    file: ScenarioFile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """The streams of one phase, and its step in their names."""

    name: Phase
    streams: tuple[Stream, ...]
    step: Step | None


def resolve(file: ScenarioFile, num_ranks: int) -> Scenario:
    """Work out streams, real sizes and steps on ``num_ranks`` ranks.

    Raises:
        ValueError: a layout, a rank or a stream does not fit the ranks or the model.
    """
    if file.ranks is not None and file.ranks != num_ranks:
        raise ValueError(f"scenario {file.name} is laid out for {file.ranks} ranks, not {num_ranks}")
    phases = _phases(file, num_ranks)
    by_hand = [stream for spec in file.stream if (stream := _by_hand(spec, num_ranks)).payload_bytes]
    every = [stream for phase in phases for stream in phase.streams] + by_hand
    if not every:
        raise ValueError(f"scenario {file.name} puts nothing on the wire with {num_ranks} rank(s)")
    names = [stream.name for stream in by_hand]
    if len(set(names)) != len(names):
        raise ValueError(f"scenario {file.name} names a stream twice: {', '.join(sorted(names))}")
    measured = _distinct(every)
    aliases: dict[str, str] = {}
    real_sizes: dict[str, list[int]] = {stream.name: [stream.payload_bytes] for stream in measured}
    for stream in every:
        home = _home(stream, measured)
        if stream.name != home.name:
            aliases[f"{stream.phase}.{stream.name}"] = home.name
        if stream.payload_bytes not in real_sizes[home.name]:
            real_sizes[home.name].append(stream.payload_bytes)
    steps: list[Step] = []
    for phase in phases:
        if phase.step is None:
            continue
        step = _in_measured_names(phase.step, phase.streams, measured)
        beside = next((other for other in steps if other.phase == "decode"), None)
        if phase.name == "handoff" and file.handoff is not None and file.handoff.beside_decode and beside is not None:
            step = replace(step, lanes=(*step.lanes, *beside.lanes))
        steps.append(step)
        for task in (task for lane in step.lanes for block in lane for task in block.tasks):
            if task.payload_bytes not in real_sizes[task.stream]:
                real_sizes[task.stream].append(task.payload_bytes)
    return Scenario(
        name=file.name,
        model=file.model,
        num_ranks=num_ranks,
        streams=tuple(measured),
        aliases=aliases,
        real_sizes={name: tuple(sizes) for name, sizes in real_sizes.items()},
        steps=tuple(steps),
        measure=file.measure,
        file=file,
    )


def _phases(file: ScenarioFile, num_ranks: int) -> list[_Phase]:
    if file.model is None:
        if file.prefill or file.decode or file.handoff:
            raise ValueError(f"scenario {file.name} has phases but names no model")
        return []
    try:
        shape = load_model(file.model)
    except ValueError as error:
        raise ValueError(f"model {file.model}: {error}") from error
    found = []
    forward: tuple[tuple[Phase, PhaseSpec | None], ...] = (("prefill", file.prefill), ("decode", file.decode))
    for phase, spec in forward:
        if spec is not None:
            found.append(_forward(shape, phase, spec, file, num_ranks))
    if file.handoff is not None:
        found.append(_handoff(shape, file.handoff, file, num_ranks))
    return found


def _forward(shape: ModelShape, phase: Phase, spec: PhaseSpec, file: ScenarioFile, num_ranks: int) -> _Phase:
    framework = spec.framework or file.framework
    layout = parse_layout(spec.layout, world=num_ranks, framework=framework)
    asked = spec.model_dump(exclude={"layout", "framework", "control"})
    if ":" in spec.routing:
        asked = {**asked, "routing_parameter": 0.0, **routing_fields(spec.routing)}
    workload = Workload(phase=phase, seed=file.measure.seed, **asked)
    streams = phase_streams(shape, layout, workload, framework)
    control = control_streams(shape, layout, workload, framework) if spec.control else ()
    step = phase_step(shape, layout, workload, framework, streams) if streams else None
    return _Phase(name=phase, streams=(*streams, *control), step=step)


def _handoff(shape: ModelShape, spec: HandoffSpec, file: ScenarioFile, num_ranks: int) -> _Phase:
    ranks = (*spec.prefill_ranks, *spec.decode_ranks)
    outside = [rank for rank in ranks if not 0 <= rank < num_ranks]
    if outside:
        raise ValueError(f"handoff ranks {outside} are outside the run's ranks 0..{num_ranks - 1}")
    framework = spec.framework or file.framework
    moved = handoff(
        shape,
        _pool_layout(spec.prefill_layout, spec.prefill_ranks, spec.prefill_instances, framework),
        _pool_layout(spec.decode_layout, spec.decode_ranks, spec.decode_instances, framework),
        Workload(phase="handoff", **spec.model_dump(include=HANDOFF_WORK)),
        prefill_ranks=spec.prefill_ranks,
        decode_ranks=spec.decode_ranks,
        framework=framework,
        prefill_instances=spec.prefill_instances,
        decode_instances=spec.decode_instances,
    )
    step = handoff_step(shape, moved.streams, None, moved.runs) if moved.streams else None
    return _Phase(name="handoff", streams=moved.streams, step=step)


def _pool_layout(text: str, ranks: Sequence[int], instances: int, framework: str) -> Layout:
    if len(ranks) % instances:
        raise ValueError(f"{len(ranks)} ranks do not divide over {instances} instances of {text}")
    return parse_layout(text, world=len(ranks) // instances, framework=framework)


def _includes(big: Stream, small: Stream) -> bool:
    """Tell whether measuring ``big`` serves ``small`` too: the same communication, on all of its groups or on some."""
    if big.same_communication(small):
        return True
    return big.op == small.op and big.rule is None and small.rule is None and set(small.groups) <= set(big.groups)


def _distinct(streams: Sequence[Stream]) -> list[Stream]:
    """Keep one stream of each communication, the one that moves most, in order of appearance, under unique names."""
    most = sorted(streams, key=lambda one: (-len(one.groups), -one.calls_per_step * one.payload_bytes))
    kept: list[Stream] = []
    for stream in most:
        if not any(_includes(other, stream) for other in kept):
            kept.append(stream)
    kept.sort(key=lambda one: next(index for index, other in enumerate(streams) if _includes(one, other)))
    named: list[Stream] = []
    for stream in kept:
        taken = {other.name for other in named}
        named.append(replace(stream, name=f"{stream.phase}.{stream.name}") if stream.name in taken else stream)
    return named


def _home(stream: Stream, measured: Sequence[Stream]) -> Stream:
    return next(other for other in measured if _includes(other, stream))


def _in_measured_names(step: Step, streams: Sequence[Stream], measured: Sequence[Stream]) -> Step:
    """Write a step in the names and group indices of the streams that are measured."""
    by_name = {stream.name: stream for stream in streams}

    def task_of(task: Task) -> Task:
        own = by_name[task.stream]
        home = _home(own, measured)
        indices = range(len(own.groups)) if task.groups is None else task.groups
        groups = tuple(home.groups.index(own.groups[index]) for index in indices)
        everyone = len(groups) == len(home.groups)
        called = None if home.name == task.stream else task.stream
        return replace(task, stream=home.name, groups=None if everyone else groups, called=called)

    lanes = tuple(
        tuple(Block(repeat=block.repeat, tasks=tuple(map(task_of, block.tasks))) for block in lane)
        for lane in step.lanes
    )
    return replace(step, lanes=lanes)


def _by_hand(spec: StreamSpec, num_ranks: int) -> Stream:
    groups = (tuple(range(num_ranks)),) if spec.groups == "world" else spec.groups
    outside = sorted({rank for group in groups for rank in group if not 0 <= rank < num_ranks})
    if outside:
        raise ValueError(f"stream {spec.name}: ranks {outside} are outside the run's ranks 0..{num_ranks - 1}")
    if (spec.op in MATRIX_OPS) != (spec.matrix is not None):
        raise ValueError(f"stream {spec.name}: op {spec.op} {'needs' if spec.op in MATRIX_OPS else 'takes no'} matrix")
    rule = None if spec.matrix is None else _rule(spec, groups)
    payload = spec.payload if rule is None else _largest_row(rule, groups)
    if not payload and max(map(len, groups)) > 1:
        raise ValueError(f"stream {spec.name}: its matrix moves no bytes")
    return Stream(
        name=spec.name,
        pattern=spec.pattern,
        op=spec.op,
        phase="prefill",
        groups=groups,
        payload_bytes=round_payload(spec.op, payload, max(len(group) for group in groups)),
        calls_per_step=1,
        dtype="uint8",
        formula="as written in the scenario",
        source="scenario file",
        rule=rule,
    )


def _rule(spec: StreamSpec, groups: Sequence[tuple[int, ...]]) -> ByteRule:
    if spec.matrix == "ring":
        return Ring(num_bytes=spec.payload)
    if spec.matrix == "chain":
        return Chain(num_bytes=spec.payload)
    if spec.matrix == "halves":
        return Explicit(bytes=tuple(_halves(len(group), spec.payload) for group in groups))
    if isinstance(spec.matrix, RoutingSpec):
        per_token = 16
        return Routed(
            num_tokens=max(1, spec.payload // (per_token * spec.matrix.top_k)),
            top_k=spec.matrix.top_k,
            num_experts=spec.matrix.num_experts,
            bytes_per_message=per_token,
            distribution=spec.matrix.distribution,
            parameter=spec.matrix.parameter,
            seed=1,
            direction="dispatch",
        )
    rows = spec.matrix
    if rows is None or isinstance(rows, str) or any(len(group) != len(rows) for group in groups):
        raise ValueError(f"stream {spec.name}: the matrix must have one row for each rank of a group")
    return Explicit(bytes=(rows,))


def _halves(num_ranks: int, payload: int) -> tuple[tuple[int, ...], ...]:
    """The first half of a group sends to the second half, rank by rank: a KV handoff in its plainest form."""
    half = num_ranks // 2
    matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for source in range(half):
        matrix[source, half + source] = payload
    return tuple(tuple(int(cell) for cell in row) for row in matrix)


def _largest_row(rule: ByteRule, groups: Sequence[tuple[int, ...]]) -> int:
    return max(int(rule.matrix(len(group), index).sum(axis=1).max()) for index, group in enumerate(groups))
