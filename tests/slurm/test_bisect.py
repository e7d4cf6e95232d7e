"""The search for bad nodes and pairs, against an oracle that knows them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstraffic.slurm.bisect import MAX_CULPRITS, Culprit, OutOfTime, bisect


class Oracle:
    """Groups of a cluster fail where they hold a bad node (among ``at_least`` nodes) or both ends of a bad pair."""

    def __init__(self, bad=(), pairs=(), at_least=1):
        self.bad, self.pairs, self.at_least = {*bad}, [{*pair} for pair in pairs], at_least
        self.rounds = []

    def __call__(self, groups):
        seen = [node for group in groups for node in group]
        assert len(seen) == len({*seen}), "groups must be disjoint: they run at once"
        assert groups
        assert all(groups)
        self.rounds.append(groups)
        return [
            bool(self.bad & {*group} and len(group) >= self.at_least) or any(pair <= {*group} for pair in self.pairs)
            for group in groups
        ]


def named(finding):
    return {frozenset(culprit.nodes) for culprit in finding.culprits}


def truth(bad=(), pairs=()):
    return {frozenset({node}) for node in bad} | {frozenset(pair) for pair in pairs}


def cluster(size):
    return [f"n{index}" for index in range(size)]


@st.composite
def clusters(draw, least, num_chosen):
    nodes = cluster(draw(st.integers(least, 64)))
    return nodes, draw(st.permutations(nodes))[:num_chosen]


# One rank a node: it cannot be tested alone. A bad port: its node passes alone. A bad node: it fails alone.
WAYS = pytest.mark.parametrize(("alone", "at_least"), [(False, 2), (True, 2), (True, 1)], ids=["one", "port", "node"])


@WAYS
@given(data=st.data())
def test_a_bad_node_is_named_in_few_rounds(alone, at_least, data):
    nodes, bad = data.draw(clusters(1 if (alone, at_least) == (True, 1) else 3, 1))
    oracle = Oracle(bad, at_least=at_least)
    finding = bisect(nodes, oracle, alone=alone)
    assert named(finding) == truth(bad)
    assert finding.stopped is None
    assert finding.num_rounds == len(oracle.rounds) <= 2 * math.ceil(math.log2(len(nodes))) + 6
    assert finding.num_tests == sum(map(len, oracle.rounds))


@WAYS
@given(data=st.data())
def test_a_bad_pair_is_named_in_few_rounds(alone, at_least, data):
    nodes, pair = data.draw(clusters(4, 2))
    oracle = Oracle(pairs=[pair], at_least=at_least)
    finding = bisect(nodes, oracle, alone=alone)
    assert named(finding) == truth(pairs=[pair])
    assert all(culprit.is_sure for culprit in finding.culprits)
    assert len(oracle.rounds) <= 3 * math.ceil(math.log2(len(nodes))) + 8


@WAYS
@given(data=st.data())
def test_two_bad_nodes_are_named(alone, at_least, data):
    nodes, bad = data.draw(clusters(4, 2))
    assert named(bisect(nodes, Oracle(bad, at_least=at_least), alone=alone)) == truth(bad)


@WAYS
@given(data=st.data())
def test_a_bad_node_and_a_bad_pair_are_named(alone, at_least, data):
    nodes, (bad, *pair) = data.draw(clusters(5, 3))
    assert named(bisect(nodes, Oracle([bad], [pair], at_least), alone=alone)) == truth([bad], [pair])


@given(data=st.data())
def test_pairs_that_share_a_node_are_named(data):
    nodes, (one, two, three) = data.draw(clusters(6, 3))
    pairs = [(one, two), (one, three)]
    assert named(bisect(nodes, Oracle(pairs=pairs), alone=True)) == truth(pairs=pairs)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("size", [2, 3, 64])
def test_nodes_that_pass_are_tested_once(size, alone):
    finding = bisect(cluster(size), Oracle(), alone=alone)
    assert (finding.culprits, finding.num_tests, finding.came_back) == ((), 1, False)


def test_two_nodes_with_one_rank_each_cannot_be_told_apart():
    finding = bisect(["a", "b"], Oracle(["a"], at_least=2), alone=False)
    assert finding.culprits == (Culprit(nodes=("a", "b"), is_sure=False),)


def test_at_most_so_many_culprits_are_named_and_this_is_said():
    finding = bisect(cluster(64), Oracle(cluster(40)), alone=True)
    assert len(finding.culprits) == MAX_CULPRITS
    assert named(finding) <= truth(cluster(40))
    assert "there may be more" in finding.stopped


def test_a_failure_that_does_not_come_back_for_any_part_is_not_pinned_on_a_node():
    nodes = cluster(8)
    finding = bisect(nodes, lambda groups: [len(group) == 8 for group in groups], alone=True)
    assert finding.culprits == ()
    assert finding.came_back
    assert finding.stopped == "the failure came and went"
    assert finding.suspects


@given(size=st.integers(2, 64), share=st.floats(0, 1), seed=st.integers(0, 2**32), alone=st.booleans())
def test_a_failure_that_comes_and_goes_ends_in_bounded_rounds(size, share, seed, alone):
    chance = random.Random(seed)
    finding = bisect(cluster(size), lambda groups: [chance.random() < share for _ in groups], alone=alone)
    assert len(finding.culprits) <= MAX_CULPRITS
    assert finding.num_rounds <= (MAX_CULPRITS + 1) * (3 * math.ceil(math.log2(size)) + 8)


@pytest.mark.parametrize("rounds", range(6))
def test_when_time_runs_out_what_is_known_is_told(rounds):
    oracle = Oracle(["n3"])

    def fails(groups):
        if len(oracle.rounds) == rounds:
            raise OutOfTime("the job is about to end")
        return oracle(groups)

    finding = bisect(cluster(8), fails, alone=True)
    complete = rounds >= 5
    assert finding.stopped == (None if complete else "the job is about to end")
    assert named(finding) == (truth(["n3"]) if rounds >= 4 else set())
    assert ("n3" in finding.suspects) == (1 <= rounds <= 3)


@pytest.mark.parametrize(("nodes", "alone"), [([], True), (["a"], False), (["a", "a"], True)])
def test_too_few_nodes_are_refused(nodes, alone):
    with pytest.raises(ValueError, match="a search needs different nodes"):
        bisect(nodes, Oracle(), alone=alone)
