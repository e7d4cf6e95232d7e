"""Legs of an expert exchange: which ranks a dispatcher's messages go between, on the way there and back."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from crosstraffic.patterns.dispatch import Backend, Messages
from crosstraffic.patterns.layout import Groups
from crosstraffic.patterns.routing import Copies, Routed
from crosstraffic.patterns.setting import Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One leg of dispatch and its way back: a pair of streams on the same groups."""

    dispatch: str
    combine: str
    groups: Groups
    copies: Copies
    messages: Messages
    times: str = ""  # how many messages a rank sends, where formulas do not say it


def exchange_legs(setting: Setting, groups: Groups, chosen: Backend) -> tuple[Leg, ...]:
    """Return the legs of an exchange: one, or over nodes and inside them where a token goes once to each node.

    Raises:
        ValueError: see ``spread``.
    """
    copies: Copies = "expert" if chosen.unit == "expert" else "rank"
    if chosen.unit != "node":
        return (
            Leg(dispatch="ep.dispatch", combine="ep.combine", groups=groups, copies=copies, messages=chosen.messages),
        )
    across, inside = spread(setting, groups)
    if len(across[0]) == 1:
        messages = chosen.inside or chosen.messages
        return (Leg(dispatch="ep.dispatch", combine="ep.combine", groups=groups, copies="rank", messages=messages),)
    return (
        Leg(
            dispatch="ep.dispatch",
            combine="ep.combine",
            groups=across,
            copies="node",
            messages=chosen.messages,
            times="T * E[nodes] * ",
        ),
        Leg(
            dispatch="ep.dispatch_fanout",
            combine="ep.combine_fanin",
            groups=inside,
            copies="fanout",
            messages=chosen.messages,
            times="T * E[ranks] * ",
        ),
    )


def spread(setting: Setting, groups: Groups) -> tuple[Groups, Groups]:
    """Return the ranks of each group with the same index on their node, and those on the same node.

    Raises:
        ValueError: a group with more ranks on one node than on another.

    Source: DeepEP @ dd758caf4518 csrc/legacy/config.hpp: num_ranks % LEGACY_NUM_MAX_NVL_PEERS == 0.
    """
    nodes = setting.nodes
    across: list[tuple[int, ...]] = []
    inside: list[tuple[int, ...]] = []
    for group in groups:
        by_node: dict[int, list[int]] = {}
        for rank in group:
            by_node.setdefault(nodes[rank], []).append(rank)
        sizes = {len(members) for members in by_node.values()}
        if len(sizes) > 1 or (across and (len(across[0]), len(inside[0])) != (len(by_node), *sizes)):
            raise ValueError(
                "DeepEP's high-throughput kernels need as many ranks of an expert-parallel group on each node: groups "
                f"of {len(group)} ranks have {sorted(map(len, by_node.values()))} on their nodes"
            )
        across += zip(*by_node.values(), strict=True)
        inside += map(tuple, by_node.values())
    return tuple(across), tuple(inside)


def leg_streams(
    setting: Setting, order: Order, leg: Leg, chosen: Backend, plain: Routed, ep_ranks: int
) -> tuple[Stream, ...]:
    """Return the two streams of a leg; ``plain`` is the rule of messages per (token, expert) over ``ep_ranks``."""
    shape = setting.shape
    num_bytes = message_bytes(setting, chosen, leg.messages)
    rule = replace(plain, bytes_per_message=num_bytes[0])
    if leg.copies != "expert":
        size = len(leg.groups[0])
        num_nodes = {"node": size, "fanout": ep_ranks // size}.get(leg.copies, plain.num_nodes)
        rule = replace(
            rule,
            copies=leg.copies,
            ep_ranks=ep_ranks if leg.copies in ("node", "fanout") else None,
            num_nodes=num_nodes,
            num_groups=shape.num_expert_groups,
            topk_groups=shape.topk_groups,
        )
    back = replace(rule, direction="combine", bytes_per_message=num_bytes[1])
    seen = range(len(leg.groups) if len(rule.source_tokens) > 1 else _num_different(leg, rule))
    largest = [max(_row_bytes(one, leg, index) for index in seen) for one in (rule, back)]
    if leg.copies == "expert":
        largest[0] = rule.num_tokens * rule.top_k * rule.bytes_per_message
    return (
        *make_stream(
            setting,
            order,
            name=leg.dispatch,
            op="all_to_all_v",
            groups=leg.groups,
            payload_bytes=largest[0],
            formula=f"{leg.times}{leg.messages.dispatch_formula}",
            source=leg.messages.source,
            rule=rule,
            dtype=chosen.dispatch_dtype,
        ),
        *make_stream(
            setting,
            order,
            name=leg.combine,
            op="all_to_all_v",
            groups=leg.groups,
            payload_bytes=largest[1],
            formula=f"{leg.times}{leg.messages.combine_formula}, all that a rank's experts got",
            source=leg.messages.source,
            rule=back,
            dtype=chosen.combine_dtype or ("bfloat16" if leg.copies == "rank" and setting.element_bytes == 1 else None),
        ),
    )


def message_bytes(setting: Setting, chosen: Backend, messages: Messages) -> tuple[int, int]:
    """Return bytes of one message there and back, in the row width that the backend sends."""
    sizes: tuple[Callable[[int, int, int], int], ...] = (messages.dispatch, messages.combine)
    width = chosen.width(setting.shape.expert_row)
    there, back = (size(width, setting.shape.top_k, setting.element_bytes) for size in sizes)
    return there, back


def _num_different(leg: Leg, rule: Routed) -> int:
    """Return how many of the first groups of a leg may differ in bytes, where all expert-parallel groups are alike."""
    if leg.copies == "fanout":
        return rule.num_nodes
    if leg.copies == "node" and rule.source_tokens:
        return (rule.ep_ranks or 0) // rule.num_nodes
    return 1


def _row_bytes(rule: Routed, leg: Leg, index: int) -> int:
    return int(rule.matrix(len(leg.groups[index]), index).sum(axis=1).max())
