"""Coupling: for each pair of parallelisms in use what they cut, how their groups lie, and what both load in a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from crosstraffic.patterns.crossing import Crossing, crossing, tied
from crosstraffic.patterns.degree_rules import degree_rule, handoff_rule
from crosstraffic.patterns.handoff import handoff, on_ranks
from crosstraffic.patterns.in_use import groups_in_use, takes_ranks
from crosstraffic.patterns.layout import Groups, Layout, world_size
from crosstraffic.patterns.load import Load, Shared, group_calls, shared, step_load
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.parallelism import PARALLELISMS, DimensionRelation, dimension_relation
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.setting import Setting, make_setting
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.two_batch import split
from crosstraffic.patterns.workload import Workload

Verdict = Literal["natural", "coupled", "part of the other"]
Overlap = Literal["together", "replicas", "serial", "nothing"]
# Whose streams they are where an engine has the pattern without the degree: vLLM's experts without ep are cut over all
# ranks of dp, cp and tp, and its prefill context parallelism is PCP; SGLang gathers the tokens of attention context
# parallelism as it does those of dp.
INSTEAD: Mapping[str, str] = {"ep": "etp", "dp": "cp", "pcp": "cp"}


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
    """Give each parallelism in use its streams (see ``INSTEAD``); a pattern of nobody's is in use on its own groups."""
    own: dict[str, list[Stream]] = {name: [] for name in groups}
    known = dict(groups)
    for stream in streams:
        name = stream.pattern if stream.pattern in groups else INSTEAD.get(stream.pattern, stream.pattern)
        if name not in groups:
            name = stream.pattern
            known.setdefault(name, (stream.group_size, stream.groups))
        own.setdefault(name, []).append(stream)
    order = [*PARALLELISMS, *(name for name in known if name not in PARALLELISMS)]
    return tuple(
        Use(
            name=name,
            degree=known[name][0],
            groups=known[name][1],
            streams=tuple(own[name]),
            takes_ranks=takes_ranks(setting.layout, setting.framework, name),
            load=step_load([(stream, calls[stream.name]) for stream in own[name]], nodes),
        )
        for name in order
        if name in known
    )


def silent_uses(setting: Setting) -> tuple[Use, ...]:
    """Return the parallelisms in use with their groups alone: no streams, nothing loaded."""
    return _uses(setting, groups_in_use(setting), (), {}, setting.nodes)


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
    overlap, when = timing.overlap(first, second)
    lies = crossing(first.groups, second.groups)
    verdict, why = judge(first, second, lies, rule)
    both_load = shared(first.load, second.load)
    if overlap == "together" and both_load and both_load[0].resource[0].startswith("nic"):
        why += "; but both load the network at the same time"
    return Pair(
        first=first,
        second=second,
        dimensions=dimension_relation(first.cuts, second.cuts),
        crossing=lies,
        shared=both_load,
        overlap=overlap,
        when=when,
        verdict=verdict,
        why=why,
    )


def judge(first: Use, second: Use, lies: Crossing, rule: Callable[[str, str], str | None]) -> tuple[Verdict, str]:
    """Judge a pair, and say why: groups that reuse the other's ranks, degrees that a rule ties, a dimension both cut.

    ``rule`` returns what the engine says that ties two degrees, by name, or None.
    """
    free = [use.name for use in (first, second) if not use.takes_ranks]
    if free and lies.lie in ("equal", "inside", "around"):
        inner, outer = (first, second) if lies.lie != "around" else (second, first)
        how = "the same as" if lies.lie == "equal" else "inside"
        takes = "take no ranks of their own" if len(free) > 1 else "takes no ranks of its own"
        return "part of the other", (
            f"{' and '.join(free)} {takes}: groups of {inner.name} are {how} those of {outer.name}; "
            f"{first.name} {first.degree} and {second.name} {second.degree} are on {lies.span} ranks, "
            f"not {first.degree * second.degree}"
        )
    tie = rule(first.name, second.name)
    if tie is not None:
        return "coupled", tie
    if set(first.cuts) & set(second.cuts):
        both = ", ".join(sorted(set(first.cuts) & set(second.cuts)))
        return "coupled", f"both cut {both}: the second cuts what the first one left"
    if lies.lie == "several ranks":
        return "coupled", f"their groups have up to {lies.common} ranks in common"
    if "pd" in (first.name, second.name):
        return "natural", "each pool has its own degrees and groups"
    if free:
        return "natural", f"no rule ties their degrees, and their groups meet in {lies.common} rank at most"
    return "natural", "independent factors of the world: any degree goes with any other"
