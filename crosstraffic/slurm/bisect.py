"""Bisect: which node, or which pair of nodes, makes a set of nodes fail. Pure: who tests them is passed in.

A set that fails is halved, and both halves are tested at once. Where neither half fails, the culprit is a pair across
the cut: one side is shrunk, then the other, until a node of each is left. A node that was in a set of two or more that
passed is *cleared*: only a pair can make it fail. What fails with three cleared nodes, or with two where there are no
more, is a bad node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_CULPRITS = 8
CAME_AND_WENT = "the failure came and went"
ENOUGH = f"{MAX_CULPRITS} culprits are named: there may be more"
_MAX_PARTNERS = 4  # tests to tell a bad node from a bad pair

Nodes = tuple[str, ...]
Fails = Callable[[Sequence[Nodes]], Sequence[bool]]


class OutOfTime(Exception):
    """Raised by a tester that cannot test any more: the search ends with what it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One node, or two that fail together. ``is_sure``: False where no other node was there to tell node from pair."""

    nodes: Nodes
    is_sure: bool = True

    @property
    def kind(self) -> Literal["node", "pair"]:
        """What it is."""
        return "node" if len(self.nodes) == 1 else "pair"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a search found. ``suspects``: where it stopped early, the smallest set that failed and was not explained."""

    culprits: tuple[Culprit, ...]
    num_tests: int
    num_rounds: int
    stopped: str | None = None
    suspects: Nodes = ()

    @property
    def came_back(self) -> bool:
        """Tell whether anything failed."""
        return bool(self.culprits or self.suspects)


def bisect(nodes: Sequence[str], fails: Fails, *, alone: bool) -> Finding:
    """Search nodes for what makes them fail.

    ``fails`` gets disjoint groups of nodes, tests them at once, and tells of each whether it failed. ``alone``: a
    group may be a single node (it has several ranks). At most ``MAX_CULPRITS`` are named.

    >>> bisect("abcd", lambda groups: [{"a", "d"} <= {*group} for group in groups], alone=True).culprits
    (Culprit(nodes=('a', 'd'), is_sure=True),)

    Raises:
        ValueError: no node, a node twice, or fewer nodes than a test needs.
    """
    if len({*nodes}) != len(nodes) or len(nodes) < (1 if alone else 2):
        raise ValueError(f"a search needs different nodes, {1 if alone else 2} or more: {', '.join(nodes) or 'none'}")
    search = _Search(tuple(nodes), fails, alone)
    stopped = None
    try:
        stopped = search.run()
    except OutOfTime as error:
        stopped = str(error)
    return Finding(
        culprits=tuple(search.culprits),
        num_tests=search.num_tests,
        num_rounds=search.num_rounds,
        stopped=stopped,
        suspects=search.suspects if stopped else (),
    )


class _Search:
    """One search under way: what was tested, who is cleared, who is named."""

    def __init__(self, nodes: Nodes, fails: Fails, alone: bool) -> None:
        self.nodes, self.alone = nodes, alone
        self._fails = fails
        self._place = {node: place for place, node in enumerate(nodes)}
        self._passed: set[Nodes] = set()
        self.num_tests = self.num_rounds = 0
        self.culprits: list[Culprit] = []
        self.suspects: Nodes = ()
        self.cleared: set[str] = set()
        self.failed_with: dict[str, set[str]] = {node: set() for node in nodes}

    def run(self) -> str | None:
        """Search; return why it stopped early, if it did."""
        rest, failing = self.nodes, list[Nodes]()
        while len(self.culprits) < MAX_CULPRITS:
            if not failing:
                if not self._can_test(rest) or not self._test(rest)[0]:
                    return self._put_back(rest)
                failing.append(rest)
            self.suspects = failing.pop()
            found = self._narrow(self.suspects, failing)
            if not found:
                return CAME_AND_WENT
            self.culprits += found[: MAX_CULPRITS - len(self.culprits)]
            named = {node for culprit in found for node in culprit.nodes}
            rest = tuple(node for node in rest if node not in named)
            self.suspects = ()
        return ENOUGH

    def _can_test(self, group: Nodes) -> bool:
        return len(group) >= (1 if self.alone else 2)

    def _test(self, *groups: Nodes) -> list[bool]:
        """Test disjoint groups at once; one that is too small to be tested, or has passed before, counts as passing."""
        groups = tuple(tuple(sorted(group, key=self._place.__getitem__)) for group in groups)
        testable = [group for group in groups if self._can_test(group) and group not in self._passed]
        failed = dict(zip(testable, self._fails(testable) if testable else (), strict=True))
        self.num_tests, self.num_rounds = self.num_tests + len(testable), self.num_rounds + bool(testable)
        for group, has_failed in failed.items():
            if not has_failed:
                self._passed.add(group)
                self.cleared |= {*group} if len(group) > 1 else set()
            if has_failed and len(group) == 2:
                self.failed_with[group[0]].add(group[1])
                self.failed_with[group[1]].add(group[0])
        return [failed.get(group, False) for group in groups]

    def _narrow(self, group: Nodes, failing: list[Nodes]) -> list[Culprit]:
        """Return the culprit in a group that fails; what else is found to fail is added to ``failing``."""
        while len(group) > (1 if self.alone else 2):
            left, right = group[: len(group) // 2], group[len(group) // 2 :]
            fails_left, fails_right = self._test(left, right)
            if fails_left and fails_right:
                failing.append(right)
            if not (fails_left or fails_right):
                return self._across(left, right)
            group = self.suspects = left if fails_left else right
        return [Culprit(nodes=group)] if len(group) == 1 else self._tell(*group)

    def _across(self, left: Nodes, right: Nodes) -> list[Culprit]:
        """Return the culprit of two sets that pass and fail together: a node of each."""
        one = self._shrink(left, right)
        two = self._shrink(right, (one,))
        return self._tell(one, two) if self._fail_together(one, two) else []

    def _fail_together(self, one: str, two: str) -> bool:
        """Confirm two nodes that were found by leaving others out."""
        return two in self.failed_with[one] or self._test((one, two))[0]

    def _shrink(self, side: Nodes, other: Nodes) -> str:
        """Return the node of one side that fails with the other."""
        while len(side) > 1:
            half, rest = side[: len(side) // 2], side[len(side) // 2 :]
            side = half if self._test((*half, *other))[0] else rest
            self.suspects = (*side, *other)
        return side[0]

    def _tell(self, one: str, two: str) -> list[Culprit]:
        """Tell whether two nodes that fail together are a pair, or which of them is bad: try them with others."""
        self.suspects = (one, two)
        tried = {one: {two}, two: {one}}
        for _ in range(_MAX_PARTNERS):
            groups: list[Nodes] = []
            for node in (one, two):
                partner = self._partner(node, {*tried[node], *(name for group in groups for name in group), one, two})
                if node not in self.cleared and not self._is_bad(node, 3) and partner is not None:
                    tried[node].add(partner)
                    groups.append((node, partner))
            if not groups:
                break
            self._test(*groups)
        bad = [node for node in (one, two) if self._is_bad(node, 2)]
        if bad:
            return [Culprit(nodes=(node,)) for node in bad]
        return [Culprit(nodes=(one, two), is_sure={one, two} <= self.cleared)]

    def _partner(self, node: str, tried: set[str]) -> str | None:
        """Return a node to try one with: a cleared one, else any that is not named."""
        named = {name for culprit in self.culprits for name in culprit.nodes}
        free = [other for other in self.nodes if other not in tried | named | self.failed_with[node]]
        return next((other for other in free if other in self.cleared), free[0] if free else None)

    def _is_bad(self, node: str, num_cleared: int) -> bool:
        """Tell whether a node failed with so many cleared ones; with two it may still be in two bad pairs."""
        return node not in self.cleared and len(self.failed_with[node] & self.cleared) >= num_cleared

    def _put_back(self, clean: Nodes) -> str | None:
        """Put the ends of each pair back, one by one, among the nodes that pass: an end may be in further pairs."""
        pairs = [culprit for culprit in self.culprits if culprit.kind == "pair" and culprit.is_sure]
        for end in (node for pair in pairs for node in pair.nodes):
            others = clean
            while others and self._test((*others, end))[0]:
                if len(self.culprits) >= MAX_CULPRITS:
                    return ENOUGH
                self.suspects = (*others, end)
                other = self._shrink(others, (end,))
                if not self._fail_together(end, other):
                    return CAME_AND_WENT
                self.culprits.append(Culprit(nodes=(end, other), is_sure={end, other} <= self.cleared))
                others = tuple(node for node in others if node != other)
        return None
