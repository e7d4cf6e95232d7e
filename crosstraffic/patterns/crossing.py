"""Crossing: how two sets of process groups lie to each other, worked out from their ranks."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from crosstraffic.patterns.layout import Groups

Lie = Literal["equal", "inside", "around", "one rank", "several ranks", "disjoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How the groups of a first parallelism lie to those of a second one.

    ``lie``: the same groups; each of the first ``inside`` one of the second, or ``around`` those of the second; no two
    have more than ``one rank`` in common (they are orthogonal); some have ``several ranks`` in common; ``disjoint``.
    ``common`` is the most ranks that two groups share, ``example`` two groups that share that many, ``span`` the ranks
    of the largest set that both parallelisms together tie up.
    """

    lie: Lie
    common: int
    example: tuple[tuple[int, ...], tuple[int, ...]]
    span: int


def crossing(first: Groups, second: Groups) -> Crossing:
    """Compare two sets of groups; within each, a rank is in one group at most.

    >>> crossing(((0, 1), (2, 3)), ((0, 2), (1, 3))).lie, crossing(((0, 1), (2, 3)), ((0, 1, 2, 3),)).lie
    ('one rank', 'inside')
    >>> crossing(((0, 1, 2, 3),), ((0, 2), (1, 3))).lie, crossing(((0, 1),), ((1, 0),)).lie
    ('around', 'equal')
    """
    index_of = {rank: index for index, group in enumerate(second) for rank in group}
    met = [Counter(index_of[rank] for rank in group if rank in index_of) for group in first]
    best, example = 0, (first[0], second[0])
    covered: set[int] = set()
    inside = around = True
    for group, counts in zip(first, met, strict=True):
        inside &= len(counts) == 1 and counts.total() == len(group)
        for index, number in counts.items():
            around &= number == len(second[index])
            covered.add(index)
            if number > best:
                best, example = number, (group, second[index])
    around &= len(covered) == len(second)
    lie: Lie
    if best == 0:
        lie = "disjoint"
    elif inside and around:
        lie = "equal"
    elif inside or around:
        lie = "inside" if inside else "around"
    else:
        lie = "one rank" if best == 1 else "several ranks"
    return Crossing(lie=lie, common=best, example=example, span=max(map(len, tied([*first, *second]))))


def tied(groups: list[tuple[int, ...]]) -> tuple[frozenset[int], ...]:
    """Return the sets of ranks that groups tie together, directly or over others, by smallest rank.

    >>> [sorted(ranks) for ranks in tied([(0, 1), (1, 2), (3, 4)])]
    [[0, 1, 2], [3, 4]]
    """
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    for group in groups:
        for rank in group:
            low, high = sorted((find(group[0]), find(rank)))
            leader[high] = low
    sets: dict[int, set[int]] = {}
    for rank in sorted(leader):
        sets.setdefault(find(rank), set()).add(rank)
    return tuple(frozenset(ranks) for ranks in sets.values())
