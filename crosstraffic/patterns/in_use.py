"""In use: which parallelisms a setting has, with their groups, and which of them take ranks of their own."""

from collections.abc import Mapping
from dataclasses import fields, replace

from crosstraffic.patterns.layout import Groups, Layout, expert_tp, world_size
from crosstraffic.patterns.setting import Setting


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
