"""Scenario: what to measure, as a TOML file, and what it comes to on a number of ranks."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from crosstraffic.errors import UsageError
from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.layout import parse_layout
from crosstraffic.patterns.matrix import ByteRule, Chain, Explicit, Ring
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import Workload, handoff_step, phase_step, phase_streams
from crosstraffic.patterns.routing import Routed
from crosstraffic.patterns.step import Step
from crosstraffic.patterns.stream import MATRIX_OPS, Op, Stream, round_payload
from crosstraffic.units import parse_bytes

BUILT_IN = Path(__file__).parent / "scenarios"
Size = Annotated[int, BeforeValidator(parse_bytes)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PhaseSpec(_Spec):
    """A prefill or decode phase laid over all ranks of the run."""

    layout: str
    framework: str | None = None
    batch: int = Field(default=1, ge=1)
    context: int = Field(default=4096, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    sequence_parallel: bool = False
    context_style: Literal["ring", "all_gather"] = "ring"
    expert_backend: str | None = None
    routing: str = "uniform"
    routing_parameter: float | None = None


class HandoffSpec(_Spec):
    """KV of finished prompts moving from some ranks (prefill pool) to others (decode pool)."""

    prefill_layout: str
    decode_layout: str
    prefill_ranks: tuple[int, ...]
    decode_ranks: tuple[int, ...]
    framework: str | None = None
    batch: int = Field(default=1, ge=1)
    context: int = Field(default=4096, ge=1)
    beside_decode: bool = True


class RoutingSpec(_Spec):
    """Bytes of an all_to_all_v worked out by a routing distribution."""

    distribution: str
    parameter: float | None = None
    num_experts: int = Field(default=64, ge=1)
    top_k: int = Field(default=4, ge=1)


class StreamSpec(_Spec):
    """A stream written out by hand; ``groups = "world"`` is one group of all ranks."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.:-]+$")
    op: Op
    payload: Size
    groups: Literal["world"] | tuple[tuple[int, ...], ...] = "world"
    pattern: str = "custom"
    matrix: Literal["ring", "chain", "halves"] | RoutingSpec | tuple[tuple[int, ...], ...] | None = None


class MeasureSpec(_Spec):
    """How much to measure."""

    sizes: tuple[Size, ...] | None = None
    num_sizes: int = Field(default=13, ge=1)
    min_size: Size = 64
    max_size: Size = 2**24
    cadences: tuple[Literal["isolated", "streaming"], ...] = ("isolated", "streaming")
    together: Literal["pairs", "none"] | tuple[tuple[str, ...], ...] = "pairs"
    num_triples: int = Field(default=1, ge=0)
    modes: tuple[Literal["steady", "one_shot"], ...] = ("steady", "one_shot")
    steps: bool = True
    target: float = Field(default=0.04, gt=0, lt=1)
    max_calls: int = Field(default=300, ge=8)
    budget_s: float = Field(default=110.0, gt=0)
    seed: int = Field(default=1, ge=0)
    verify: bool = True


class ScenarioFile(_Spec):
    """One scenario as written in TOML."""

    name: str
    ranks: int | None = Field(default=None, ge=1)
    model: str | None = None
    framework: str = "vllm"
    prefill: PhaseSpec | None = None
    decode: PhaseSpec | None = None
    handoff: HandoffSpec | None = None
    stream: tuple[StreamSpec, ...] = ()
    measure: MeasureSpec = MeasureSpec()
    simulated: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a scenario comes to on a number of ranks: distinct streams, their real sizes, whole steps.

    Streams of several phases that are one communication (same op, groups and byte shape) are measured once, under the
    name of the first; ``aliases`` maps the others' names to it and ``real_sizes`` holds each one's bytes per call.
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


def read_scenario(name_or_path: str) -> ScenarioFile:
    """Read a built-in scenario by name, or a TOML file by path.

    Raises:
        UsageError: no such scenario, or a field is unknown or wrong.
    """
    path = Path(name_or_path)
    if not path.suffix:
        path = BUILT_IN / f"{name_or_path}.toml"
    if not path.is_file():
        names = ", ".join(sorted(entry.stem for entry in BUILT_IN.glob("*.toml")))
        raise UsageError(f"no such scenario: {name_or_path!r}; give a path to a .toml file or one of: {names}")
    try:
        return ScenarioFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"scenario {name_or_path} is not valid TOML: {error}") from error
    except ValidationError as error:
        lines = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']} (found {item['input']!r:.60})"
            for item in error.errors()
        )
        raise UsageError(f"scenario {name_or_path}: {lines}") from error


def default_scenario(num_ranks: int) -> ScenarioFile:
    """Return the shipped model scenario for this number of ranks, or plain collectives where no layout fits it."""
    name = f"default-{num_ranks}"
    return read_scenario(name if (BUILT_IN / f"{name}.toml").is_file() else "collectives")


def resolve(file: ScenarioFile, num_ranks: int) -> Scenario:
    """Work out streams, real sizes and steps on ``num_ranks`` ranks.

    Raises:
        ValueError: a layout, a rank or a stream does not fit the ranks or the model.
    """
    if file.ranks is not None and file.ranks != num_ranks:
        raise ValueError(f"scenario {file.name} is laid out for {file.ranks} ranks, not {num_ranks}")
    streams: list[Stream] = []
    aliases: dict[str, str] = {}
    real_sizes: dict[str, list[int]] = {}
    steps: list[Step] = []

    def merge(found: Iterable[Stream]) -> dict[str, str]:
        names: dict[str, str] = {}
        for stream in found:
            known = next((other for other in streams if other.same_communication(stream)), None)
            if known is None:
                taken = {other.name for other in streams} | set(aliases)
                known = replace(stream, name=f"{stream.phase}.{stream.name}") if stream.name in taken else stream
                streams.append(known)
            names[stream.name] = known.name
            if stream.name != known.name:
                aliases.setdefault(f"{stream.phase}.{stream.name}", known.name)
            sizes = real_sizes.setdefault(known.name, [])
            if stream.payload_bytes not in sizes:
                sizes.append(stream.payload_bytes)
        return names

    if (file.prefill or file.decode or file.handoff) and file.model is None:
        raise ValueError(f"scenario {file.name} has phases but names no model")
    decode_step: Step | None = None
    if file.model is not None:
        shape = load_model(file.model)
        for phase, spec in (("prefill", file.prefill), ("decode", file.decode)):
            if spec is None:
                continue
            layout = parse_layout(spec.layout)
            framework = spec.framework or file.framework
            if layout.world_size != num_ranks:
                raise ValueError(
                    f"{phase} layout {spec.layout} makes {layout.world_size} ranks, the run has {num_ranks}"
                )
            workload = _workload(phase, spec, file.measure.seed)
            found = phase_streams(shape, layout, workload, framework)
            names = merge(found)
            steps.append(_renamed(phase_step(shape, layout, workload, framework, found), names))
            if phase == "decode":
                decode_step = steps[-1]
        if file.handoff is not None:
            spec_h = file.handoff
            outside = [rank for rank in (*spec_h.prefill_ranks, *spec_h.decode_ranks) if rank >= num_ranks or rank < 0]
            if outside:
                raise ValueError(f"handoff ranks {outside} are outside the run's ranks 0..{num_ranks - 1}")
            moved = handoff(
                shape,
                parse_layout(spec_h.prefill_layout),
                parse_layout(spec_h.decode_layout),
                Workload(phase="handoff", batch=spec_h.batch, context=spec_h.context),
                prefill_ranks=spec_h.prefill_ranks,
                decode_ranks=spec_h.decode_ranks,
                framework=spec_h.framework or file.framework,
            )
            names = merge(moved.streams)
            step = _renamed(handoff_step(shape, moved.streams, None), names)
            if spec_h.beside_decode and decode_step is not None:
                step = replace(step, lanes=(*step.lanes, *decode_step.lanes))
            steps.append(step)
    merge(_by_hand(spec_s, num_ranks) for spec_s in file.stream)
    if not streams:
        raise ValueError(f"scenario {file.name} puts nothing on the wire with {num_ranks} rank(s)")
    return Scenario(
        name=file.name,
        model=file.model,
        num_ranks=num_ranks,
        streams=tuple(streams),
        aliases=aliases,
        real_sizes={name: tuple(sizes) for name, sizes in real_sizes.items()},
        steps=tuple(steps),
        measure=file.measure,
        file=file,
    )


def _workload(phase: Literal["prefill", "decode"] | str, spec: PhaseSpec, seed: int) -> Workload:
    return Workload(
        phase="prefill" if phase == "prefill" else "decode",
        batch=spec.batch,
        context=spec.context,
        tokens=spec.tokens,
        sequence_parallel=spec.sequence_parallel,
        context_style=spec.context_style,
        expert_backend=spec.expert_backend,
        routing=spec.routing,
        routing_parameter=spec.routing_parameter,
        seed=seed,
    )


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    lanes = tuple(
        tuple(
            replace(block, tasks=tuple(replace(task, stream=names[task.stream]) for task in block.tasks))
            for block in lane
        )
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
