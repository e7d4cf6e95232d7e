"""Coupling: for each pair of parallelisms in use what they cut, how their groups lie, and what both load in a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Literal

from crosstraffic.patterns.crossing import Crossing, crossing, tied
from crosstraffic.patterns.handoff import handoff, on_ranks
from crosstraffic.patterns.layout import Groups, Layout, check_layout, expert_tp, world_size
from crosstraffic.patterns.load import Load, Shared, shared, step_load
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.parallelism import PARALLELISMS, DimensionRelation, dimension_relation
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.placement import check_model
from crosstraffic.patterns.setting import Setting, make_setting
from crosstraffic.patterns.step import Step
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.two_batch import split
from crosstraffic.patterns.workload import Workload

Verdict = Literal["natural", "coupled", "part of the other"]
Overlap = Literal["together", "replicas", "serial", "nothing"]
# Whose streams they are where an engine has the pattern without the degree: vLLM's experts without ep are cut over all
# ranks of dp, cp and tp; SGLang gathers the tokens of attention context parallelism as it does those of dp.
INSTEAD: Mapping[str, str] = {"ep": "etp", "dp": "cp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One parallelism in use: its degree, its groups, its streams, and what these load in one step.

    ``takes_ranks`` tells whether the world grows with the degree; a parallelism that takes none reuses others' ranks.
    """

    name: str
    degree: int
    groups: Groups
    streams: tuple[Stream, ...]
    takes_ranks: bool
    load: Load

    @property
    def cuts(self) -> tuple[str, ...]:
        """The dimensions that it cuts, names of ``DIMENSIONS``."""
        return PARALLELISMS[self.name].cuts if self.name in PARALLELISMS else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """How two parallelisms couple: dimensions, groups, resources that both load, time, and what follows."""

    first: Use
    second: Use
    dimensions: DimensionRelation
    crossing: Crossing
    shared: tuple[Shared, ...]
    overlap: Overlap
    when: str
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """All pairs of the parallelisms in use in one step; ``nodes`` is the node of each rank, both pools with PD."""

    setting: Setting
    nodes: tuple[int, ...]
    uses: tuple[Use, ...]
    pairs: tuple[Pair, ...]


def groups_in_use(setting: Setting) -> Mapping[str, tuple[int, Groups]]:
    """Return degree and groups of each parallelism with a degree over 1 and groups of more than one rank.

    Where an engine makes no groups for a degree (attention data parallelism, replicas) they are the ranks that hold the
    same part. ``etp`` is left out where the experts are cut as all else is, over the tensor-parallel group.
    """
    layout, groups = setting.layout, setting.groups
    found: dict[str, tuple[int, Groups]] = {}
    for field in fields(Layout):
        degree = getattr(layout, field.name) or 1
        if field.name == "etp":
            degree = expert_tp(layout, setting.framework) if setting.shape.moe_layers else 1
            name = "ep" if setting.framework == "vllm" else "etp"
            if {*map(frozenset, groups[name])} != {*map(frozenset, groups["tp"])}:
                found["etp"] = (degree, groups[name])
        elif field.name in groups:
            found[field.name] = (degree, groups[field.name])
        elif degree > 1:
            found[field.name] = (degree, _same_part(setting, field.name))
    if setting.workload.sequence_parallel:
        found["sp"] = (setting.tp, setting.tensor_groups)
    return {
        name: (degree, own)
        for name, (degree, own) in found.items()
        if degree > 1 and any(len(group) > 1 for group in own)
    }


def _same_part(setting: Setting, name: str) -> Groups:
    """Return the ranks that hold the same heads, context and layers: one of each replica, or one of each engine."""
    engine = setting.num_ranks // setting.layout.replicas
    if name == "replicas":
        return tuple(tuple(range(rank, setting.num_ranks, engine)) for rank in range(engine))
    parts: dict[tuple[int, ...], list[int]] = {}
    places = [
        {rank: place for group in own for place, rank in enumerate(group)}
        for own in (setting.groups["pp"], setting.groups["cp"], setting.tensor_groups)
    ]
    for rank in range(setting.num_ranks):
        parts.setdefault((rank // engine, *(place[rank] for place in places)), []).append(rank)
    return tuple(map(tuple, parts.values()))


def takes_ranks(layout: Layout, framework: str, name: str) -> bool:
    """Tell whether the world is proportional to a degree: a factor of the world, no reuse of others' ranks.

    >>> [takes_ranks(Layout(tp=4, dp=2, ep=8), "vllm", name) for name in ("tp", "dp", "ep")]
    [True, True, False]
    """
    degree = getattr(layout, name, None)
    if degree is None:
        return name == "pd"
    world = world_size(layout, framework)
    return bool(world_size(replace(layout, **{name: degree + 1}), framework) * degree == world * (degree + 1))


def refusal(layout: Layout, framework: str) -> str | None:
    """Return what the engine says against degrees, None if it takes them."""
    try:
        check_layout(layout, framework)
    except ValueError as error:
        return str(error)
    return None


def degree_rule(layout: Layout, framework: str, first: str, second: str) -> str | None:
    """Return the engine's rule that ties two degrees to each other, None if each can grow without the other.

    One degree, two or three times as large, is refused; it is taken once the other grows as much, or is 1.

    >>> degree_rule(Layout(dp=2, ep=2), "vllm", "dp", "ep")
    'vLLM: expert parallel size is dp x cp x tp = 4, or 1 (off): ep=2 (dp=4,ep=2)'
    >>> degree_rule(Layout(tp=2, pp=2, ep=2), "vllm", "pp", "ep") is None
    True
    """
    for one, other in ((first, second), (second, first)):
        for times in (2, 3):
            if getattr(layout, one, None) is None or getattr(layout, other, None) is None:
                continue
            larger = replace(layout, **{one: getattr(layout, one) * times})
            said = refusal(larger, framework)
            both = replace(larger, **{other: getattr(layout, other) * times})
            if said and None in (refusal(both, framework), refusal(replace(larger, **{other: 1}), framework)):
                return said
    return None


def handoff_rule(shape: ModelShape, layout: Layout, decode_layout: Layout, framework: str, name: str) -> str | None:
    """Return what the engine says against a decode pool of another degree than the prefill pool's, None if nothing."""
    degree: int | None = getattr(decode_layout, name, None)
    if degree is None:
        return None
    for times in (2, 3):
        other = replace(decode_layout, **{name: degree * times}, etp=None)
        try:
            check_model(shape, other, framework)
        except ValueError:
            continue
        ranks = range(world_size(layout, framework)), range(world_size(other, framework))
        try:
            handoff(
                shape,
                layout,
                other,
                Workload(phase="handoff", context=1),
                prefill_ranks=ranks[0],
                decode_ranks=[len(ranks[0]) + rank for rank in ranks[1]],
                framework=framework,
            )
        except ValueError as error:
            return str(error)
    return None


def coupling(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    framework: str,
    *,
    decode_layout: Layout | None = None,
) -> Coupling:
    """Return how the parallelisms of one step couple.

    With ``decode_layout`` there are two pools, ranks of the prefill pool (``layout``) first, each pool on nodes of its
    own; the step is one of the pool of ``workload.phase``, and ``pd`` hands over one request of each prefill replica
    (decode), or what the step prefilled.

    Raises:
        ValueError: the engine refuses, or the phase is handoff.
    """
    if workload.phase == "handoff":
        raise ValueError("coupling is that of a prefill or decode step; a decode layout adds the handoff beside it")
    own = decode_layout if decode_layout is not None and workload.phase == "decode" else layout
    setting = make_setting(shape, own, workload, framework)
    streams = phase_streams(shape, own, workload, framework)
    calls = group_calls(phase_step(shape, own, workload, framework, streams), streams)
    nodes, groups = setting.nodes, dict(groups_in_use(setting))
    if decode_layout is not None:
        ranks = [world_size(pool, framework) for pool in (layout, decode_layout)]
        start = ranks[0] if workload.phase == "decode" else 0
        nodes = pool_nodes(ranks[0], ranks[1], workload.ranks_per_node)
        mine = range(start, start + setting.num_ranks)
        moved = _handoff_streams(shape, layout, decode_layout, workload, framework, ranks)
        streams = (*on_ranks(streams, mine), *moved)
        calls |= {stream.name: (stream.calls_per_step,) * len(stream.groups) for stream in moved}
        groups = {name: (degree, _moved(own_groups, start)) for name, (degree, own_groups) in groups.items()}
        groups["pd"] = (2, tuple(group for stream in moved for group in stream.groups))
    uses = _uses(setting, groups, streams, calls, nodes)
    timing = _Timing(nodes=nodes, setting=setting, streams=streams)

    def rule(first: str, second: str) -> str | None:
        if decode_layout is not None and "pd" in (first, second):
            return handoff_rule(shape, layout, decode_layout, framework, first if second == "pd" else second)
        return degree_rule(own, framework, first, second)

    pairs = tuple(_pair(first, second, timing, rule) for first, second in combinations(uses, 2))
    return Coupling(setting=setting, nodes=nodes, uses=uses, pairs=pairs)


def group_calls(step: Step, streams: Sequence[Stream]) -> dict[str, tuple[int, ...]]:
    """Return how often each group of each stream calls it in a step; a boundary counts where the first stage sends."""
    found = {stream.name: [0] * len(stream.groups) for stream in streams}
    for block in (block for lane in step.lanes for block in lane):
        for task in block.tasks:
            if task.edge is None or task.edge[0] == 0:
                own = found[task.stream]
                for index in range(len(own)) if task.groups is None else task.groups:
                    own[index] += block.repeat
    return {name: tuple(counts) for name, counts in found.items()}


def pool_nodes(num_prefill: int, num_decode: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the node of each rank of two pools, the decode pool on nodes of its own.

    >>> pool_nodes(3, 2, 2)
    (0, 0, 1, 2, 2)
    """
    first = -(-num_prefill // ranks_per_node)
    return tuple(
        [rank // ranks_per_node for rank in range(num_prefill)]
        + [first + rank // ranks_per_node for rank in range(num_decode)]
    )


def _moved(groups: Groups, start: int) -> Groups:
    return tuple(tuple(rank + start for rank in group) for group in groups)


def _handoff_streams(
    shape: ModelShape, layout: Layout, decode_layout: Layout, workload: Workload, framework: str, ranks: Sequence[int]
) -> tuple[Stream, ...]:
    is_prefill = workload.phase == "prefill"
    work = Workload(
        phase="handoff",
        batch=workload.batch if is_prefill else 1,
        context=workload.context,
        tokens=workload.tokens if is_prefill else None,
        kv_dtype=workload.kv_dtype,
        ranks_per_node=workload.ranks_per_node,
    )
    return handoff(
        shape,
        layout,
        decode_layout,
        work,
        prefill_ranks=range(ranks[0]),
        decode_ranks=range(ranks[0], sum(ranks)),
        framework=framework,
    ).streams


def _uses(
    setting: Setting,
    groups: Mapping[str, tuple[int, Groups]],
    streams: Sequence[Stream],
    calls: Mapping[str, Sequence[int]],
    nodes: Sequence[int],
) -> tuple[Use, ...]:
    """Give each parallelism in use its streams; one with streams and no degree of its own lends them (``INSTEAD``)."""
    own: dict[str, list[Stream]] = {name: [] for name in groups}
    for stream in streams:
        name = stream.pattern
        if name not in groups:
            name = INSTEAD.get(name, name)
        if name in groups:
            own[name].append(stream)
    order = [*PARALLELISMS, *(name for name in groups if name not in PARALLELISMS)]
    return tuple(
        Use(
            name=name,
            degree=groups[name][0],
            groups=groups[name][1],
            streams=tuple(own[name]),
            takes_ranks=takes_ranks(setting.layout, setting.framework, name),
            load=step_load([(stream, calls[stream.name]) for stream in own[name]], nodes),
        )
        for name in order
        if name in groups
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """What decides whether two streams are on the wire at the same time."""

    nodes: tuple[int, ...]
    setting: Setting
    streams: tuple[Stream, ...]

    def overlap(self, first: Use, second: Use) -> tuple[Overlap, str]:
        """Tell whether and when both are on the wire at once."""
        silent = [use.name for use in (first, second) if not use.streams]
        if silent:
            return "nothing", f"{' and '.join(silent)}: nothing on the wire in this step"
        if "pd" in (first.name, second.name):
            return "together", "the handoff goes on beside the step"
        if split(self.setting)[0].num_batches > 1:
            return "together", "half batches run against each other"
        if self.setting.layout.pp > 1 and self.setting.num_passes > 1:
            return "replicas", "stages work on different micro-batches at the same time"
        sets = tied([group for stream in self.streams for group in stream.groups])
        homes = [{self.nodes[rank] for rank in ranks} for ranks in sets]
        if sum(map(len, homes)) > len(set().union(*homes)):
            return "replicas", "one after the other on a rank; independent sets of ranks on one node meet"
        return "serial", "one after the other on every rank; only ranks that lag make them meet"


def _pair(first: Use, second: Use, timing: _Timing, rule: Callable[[str, str], str | None]) -> Pair:
    lies = crossing(first.groups, second.groups)
    dimensions = dimension_relation(first.cuts, second.cuts)
    overlap, when = timing.overlap(first, second)
    verdict, why = _verdict(first, second, lies, dimensions, rule)
    return Pair(
        first=first,
        second=second,
        dimensions=dimensions,
        crossing=lies,
        shared=shared(first.load, second.load),
        overlap=overlap,
        when=when,
        verdict=verdict,
        why=why,
    )


def _verdict(
    first: Use,
    second: Use,
    lies: Crossing,
    dimensions: DimensionRelation,
    rule: Callable[[str, str], str | None],
) -> tuple[Verdict, str]:
    """Judge a pair: groups that reuse the other's ranks, degrees that a rule ties, a dimension that both cut."""
    free = [use.name for use in (first, second) if not use.takes_ranks]
    if free and lies.lie in ("equal", "inside", "around"):
        inner, outer = (first, second) if lies.lie != "around" else (second, first)
        how = "the same as" if lies.lie == "equal" else "inside"
        return (
            "part of the other",
            f"no ranks of its own for {' and '.join(free)}; groups of {inner.name} are {how} those of {outer.name}",
        )
    tie = rule(first.name, second.name)
    if tie is not None:
        return "coupled", tie
    if dimensions == "same":
        both = ", ".join(sorted(set(first.cuts) & set(second.cuts)))
        return "coupled", f"both cut {both}: the second cuts what the first one left"
    if lies.lie == "several ranks":
        return "coupled", f"their groups have up to {lies.common} ranks in common"
    if "pd" in (first.name, second.name):
        return "natural", "each pool has its own degrees"
    return "natural", "independent factors of the world: any degree goes with any other"
