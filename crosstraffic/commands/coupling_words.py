"""Words for how groups lie and for what two parallelisms load."""

from collections.abc import Mapping

from crosstraffic.patterns.coupling import Pair

LIES: Mapping[str, str] = {
    "equal": "the same groups",
    "inside": "each group of {first} lies inside one of {second}",
    "around": "each group of {second} lies inside one of {first}",
    "one rank": "a group of {first} and one of {second} have one rank in common",
    "several ranks": "a group of {first} and one of {second} have up to {common} ranks in common",
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


def short(group: tuple[int, ...]) -> str:
    """Write a group, its middle left out where it is long."""
    if len(group) > 8:
        return f"[{group[0]} {group[1]} {group[2]} ... {group[-1]}]"
    return f"[{' '.join(map(str, group))}]"
