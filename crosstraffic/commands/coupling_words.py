"""Words for how groups lie and for what two parallelisms load."""

import re
import textwrap
from collections.abc import Mapping

from crosstraffic.patterns.coupling import Pair
from crosstraffic.units import format_bytes

LIES: Mapping[str, str] = {
    "equal": "the same groups",
    "inside": "each group of {first} lies inside one of {second}",
    "around": "each group of {second} lies inside one of {first}",
    "one rank": "a group of {first} and one of {second} have one rank in common",
    "several ranks": "a group of {first} and one of {second} have several ranks in common, up to {common}",
    "disjoint": "no rank in common",
}
RESOURCES: Mapping[str, str] = {
    "nic_egress": "what node {index} sends to other nodes",
    "nic_ingress": "what node {index} gets from other nodes",
    "port_egress": "what rank {index} sends",
    "port_ingress": "what rank {index} gets",
    "fabric": "what ranks of node {index} send each other",
}


def lies(pair: Pair) -> str:
    """Say how the groups of a pair lie, with an example."""
    lie = LIES[pair.crossing.lie].format(first=pair.first.name, second=pair.second.name, common=pair.crossing.common)
    examples = " and ".join(short(group) for group in pair.crossing.example)
    return f"{lie}, as {examples}"


DIMENSIONS: Mapping[str, str] = {
    "same": "the same dimension",
    "nested": "one a part of what the other cuts",
    "different": "different dimensions",
}
WIDTH = 80


def cuts(pair: Pair) -> str:
    """Say what each of a pair cuts, and how these dimensions relate."""
    each = (
        f"{use.name} cuts {' and '.join(use.cuts) or 'nothing that has a name'}" for use in (pair.first, pair.second)
    )
    return f"{', '.join(each)}: {DIMENSIONS[pair.dimensions]}"


def shares(pair: Pair) -> str | None:
    """Say which resource both load most, the scarcest kind first, and how many bytes of each; None if none."""
    if not pair.shared:
        return None
    kind, index = pair.shared[0].resource
    ours, theirs = (format_bytes(amount) for amount in pair.shared[0].num_bytes)
    return f"{RESOURCES[kind].format(index=index)}: {ours} of {pair.first.name} and {theirs} of {pair.second.name}"


def paragraph(text: str) -> str:
    """Wrap a line to the width of a terminal, indented; a list of ranks stays in one line."""
    kept = re.sub(r"\[[^\]]*\]", lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(kept, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def short(group: tuple[int, ...]) -> str:
    """Write a group, its middle left out where it is long."""
    if len(group) > 8:
        return f"[{group[0]} {group[1]} {group[2]} ... {group[-1]}]"
    return f"[{' '.join(map(str, group))}]"
