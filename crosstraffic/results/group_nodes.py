"""Process groups against nodes: which kinds are the same, which groups leave a node, which nodes are worth showing."""

from collections.abc import Mapping
from math import ceil

from crosstraffic.patterns.layout import Groups

MAX_PEER_NODES = 4  # nodes shown for each kind because rank 0 has a peer there


def num_ranks_of(found: Mapping[str, Groups]) -> int:
    """Return how many ranks there are: every kind of group has them all."""
    return sum(map(len, next(iter(found.values()))))


def kinds_by_groups(found: Mapping[str, Groups]) -> Mapping[Groups, tuple[str, ...]]:
    """Return groups of more than one rank with the names of all kinds that have the same ones.

    >>> list(kinds_by_groups({"tp": ((0, 1),), "cp": ((0,), (1,)), "ep": ((0, 1),)}).values())
    [('tp', 'ep')]
    """
    names: dict[Groups, tuple[str, ...]] = {}
    for name, groups in found.items():
        if len(groups[0]) > 1:
            names[groups] = (*names.get(groups, ()), name)
    return names


def crossing(groups: Groups, ranks_per_node: int) -> int:
    """Count the groups whose ranks lie on more than one node, ranks placed on nodes in order.

    >>> crossing(((0, 1), (7, 8)), 8)
    1
    """
    return sum(min(group) // ranks_per_node != max(group) // ranks_per_node for group in groups)


def shown_nodes(found: Mapping[str, Groups], ranks_per_node: int, max_ranks: int) -> tuple[int, ...]:
    """Return the nodes to show: all if they fit, else those of rank 0's nearest peers of each kind, and the first ones.

    >>> shown_nodes({"dp": tuple((rank, rank + 32) for rank in range(32))}, 8, 32)
    (0, 1, 2, 4)
    """
    num_nodes, most = ceil(num_ranks_of(found) / ranks_per_node), max(1, max_ranks // ranks_per_node)
    if num_nodes <= most:
        return tuple(range(num_nodes))
    own = [next(group for group in groups if 0 in group) for groups in kinds_by_groups(found)]
    nodes = [list(dict.fromkeys(rank // ranks_per_node for rank in group)) for group in sorted(own, key=len)]
    peers = [row[place] for place in range(MAX_PEER_NODES) for row in nodes if place < len(row)]
    chosen = list(dict.fromkeys((0, *peers)))[:most]
    chosen += [node for node in range(most) if node not in chosen][: most - len(chosen)]
    return tuple(sorted(chosen))
