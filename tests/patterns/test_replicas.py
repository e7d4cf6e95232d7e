"""Replicas of hot experts: the published example, conservation, and what a rebalance moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.replicas import (
    balanced_packing,
    balancedness,
    host_copy_bytes,
    placement,
    rebalance,
    rebalance_bytes,
    replicate_experts,
)

README_WEIGHTS = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)
README_SLOTS = (
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
)


@pytest.mark.parametrize(
    ("weights", "slots"), list(zip(README_WEIGHTS, README_SLOTS, strict=True)), ids=["N13 0", "N13 1"]
)
def test_n13_example_of_the_readme(weights, slots):
    assert rebalance(weights, num_slots=16, num_groups=4, num_nodes=2, num_ranks=8).tolist() == slots


@settings(max_examples=50, deadline=None)
@given(num_packs=st.integers(1, 7), room=st.integers(1, 6), seed=st.integers(0, 99))
def test_packs_have_equal_counts_and_near_equal_weights(num_packs, room, seed):
    weights = np.random.default_rng(seed).integers(0, 100, num_packs * room).astype(float)
    packs = balanced_packing(weights, num_packs)
    assert sorted(packs.ravel().tolist()) == list(range(num_packs * room))
    totals = weights[packs].sum(axis=1)
    assert totals.max() - totals.min() <= weights.max()


@settings(max_examples=50, deadline=None)
@given(num_experts=st.integers(1, 40), extra=st.integers(0, 20), seed=st.integers(0, 99))
def test_replicas_go_to_the_hottest(num_experts, extra, seed):
    weights = np.random.default_rng(seed).random(num_experts) + 0.01
    slots = replicate_experts(weights, num_experts + extra)
    count = np.bincount(slots, minlength=num_experts)
    assert count.min() >= 1
    per_replica = weights / count
    again = count > 1  # before its last replica came, such an expert was hotter than all are now
    assert (weights[again] / (count[again] - 1) >= per_replica.max() - 1e-12).all()


@settings(max_examples=50, deadline=None)
@given(
    groups_per_node=st.integers(1, 3),
    num_nodes=st.sampled_from([1, 2, 3]),
    per_node=st.sampled_from([1, 2, 4]),
    group_size=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_hierarchical_balance_keeps_groups_on_a_node(groups_per_node, num_nodes, per_node, group_size, seed):
    num_groups = groups_per_node * num_nodes
    num_experts = num_groups * group_size
    own = -(-(num_experts // num_nodes) // per_node) * per_node + per_node  # slots of a node
    weights = np.random.default_rng(seed).random(num_experts)
    slots = rebalance(
        weights, num_slots=own * num_nodes, num_groups=num_groups, num_nodes=num_nodes, num_ranks=per_node * num_nodes
    )
    assert set(slots.tolist()) == set(range(num_experts))
    node_of_group = {}
    for slot, expert in enumerate(slots.tolist()):
        node_of_group.setdefault(expert // group_size, set()).add(slot // own)
    assert all(len(nodes) == 1 for nodes in node_of_group.values())


@pytest.mark.parametrize(("num_ranks", "num_redundant"), [(32, 32), (144, 32), (288, 32), (7, 24)])
def test_redundant_experts_balance_ranks(num_ranks, num_redundant):
    weights = np.random.default_rng(5).pareto(1.5, 256) + 0.1
    parts = placement(256, num_ranks, num_redundant=num_redundant, weights=weights)
    assert parts.sum(axis=1) == pytest.approx(np.ones(256))
    balanced = balancedness(weights @ parts)
    if num_ranks <= 256:
        assert balanced > balancedness(weights @ placement(256, num_ranks))
    assert 0 < balanced <= 1


def test_replicas_of_one_rank_each_keep_their_order():
    assert balanced_packing([3, 1, 2], 3).tolist() == [[0], [1], [2]]


def test_groups_that_do_not_divide_over_nodes_are_balanced_globally():
    assert (
        rebalance(README_WEIGHTS[0], num_slots=16, num_groups=3, num_nodes=2, num_ranks=8).tolist()
        == rebalance(README_WEIGHTS[0], num_slots=16, num_ranks=8).tolist()
    )


def test_bytes_of_a_rebalance():
    shape = load_model("DeepSeek-V3")
    assert rebalance_bytes(shape, 1) == 58 * 44_040_192
    assert rebalance_bytes(shape, 9, num_layers=1, dtype="bf16") == 9 * 2 * 44_040_192
    assert rebalance_bytes(shape, 0) == 0


def test_n12_host_copy_of_all_experts():
    assert host_copy_bytes(58, 256, 24 * 2**20) == 348 * 2**30


def test_balancedness():
    assert balancedness([3, 3, 3]) == 1.0
    assert balancedness([0, 0]) == 1.0
    assert balancedness([4, 0, 0, 0]) == 0.25


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced_packing([1, 2, 3], 2), "3 items do not divide over 2 packs"),
        (lambda: replicate_experts([1, 2, 3], 2), "fewer slots than experts: 2 of 3"),
        (lambda: rebalance([1] * 8, num_slots=10, num_ranks=4), "10 slots do not divide over 4 ranks"),
        (lambda: rebalance([1] * 8, num_slots=8, num_groups=3, num_ranks=4), "8 experts do not divide over 3 groups"),
        (lambda: rebalance([1] * 8, num_slots=9, num_nodes=2, num_ranks=9), "9 ranks do not divide over 2 nodes"),
        (lambda: rebalance_bytes(load_model("DeepSeek-V3"), -1), "num_slots must not be negative: -1"),
        (lambda: rebalance_bytes(load_model("Llama-3.1-8B"), 1), "Llama-3.1-8B has no experts"),
    ],
)
def test_what_cannot_be_balanced(call, message):
    with pytest.raises(ValueError, match=message):
        call()
