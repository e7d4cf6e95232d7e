"""Expert load: conservation, symmetry, known skews."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.matrix import rule_from_dict, rule_to_dict
from crosstraffic.patterns.loads import expert_shares, experts_per_rank
from crosstraffic.patterns.routing import Routed, imbalance, parse_routing

SKEWS = [("uniform", 0.0), ("power_law", 0.6), ("power_law", 1.0), ("power_law", 1.9), ("lognormal", 1.5), ("k_hot", 9)]


def routed(**changes):
    fields = {"num_tokens": 64, "top_k": 8, "num_experts": 256, "bytes_per_message": 10}
    return Routed(**(fields | changes))


@settings(max_examples=80, deadline=None)
@given(
    num_ranks=st.sampled_from([1, 2, 3, 5, 7, 8, 13, 32]),
    num_tokens=st.sampled_from([0, 1, 2, 7, 64, 1000]),
    top_k=st.sampled_from([1, 2, 8]),
    num_experts=st.sampled_from([32, 61, 256]),
    skew=st.sampled_from(SKEWS),
    seed=st.integers(0, 5),
)
def test_each_source_sends_all_its_messages(num_ranks, num_tokens, top_k, num_experts, skew, seed):
    rule = routed(
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        distribution=skew[0],
        parameter=skew[1],
        seed=seed,
    )
    counts = rule.counts(num_ranks)
    assert counts.dtype == np.int64
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == num_tokens * top_k).all()
    held = np.array(experts_per_rank(num_experts, num_ranks))
    assert (counts <= num_tokens * np.minimum(held, top_k) + 1).all()
    assert (rule.matrix(num_ranks, 0) == counts * 10).all()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16, 64])
def test_uniform_is_exactly_equal_where_it_can_be(num_ranks):
    matrix = routed(num_tokens=128).matrix(num_ranks, 0)
    assert (matrix == matrix[0, 0]).all()


@pytest.mark.parametrize("num_ranks", [3, 5, 8, 32, 64])
def test_uniform_remainders_do_not_pile_up(num_ranks):
    received = routed(num_tokens=1, num_experts=num_ranks * 4).counts(num_ranks).sum(axis=0)
    assert received.max() - received.min() <= 1


@pytest.mark.parametrize(("distribution", "parameter"), [*SKEWS, ("one_hot", 2)])
def test_combine_is_the_way_back(distribution, parameter):
    dispatch = routed(distribution=distribution, parameter=parameter)
    combine = routed(distribution=distribution, parameter=parameter, direction="combine", bytes_per_message=3)
    assert (combine.matrix(8, 0) * 10 == dispatch.matrix(8, 0).T * 3).all()


def test_same_seed_same_matrix_other_seed_other_matrix():
    first, again, other = (
        routed(distribution="power_law", parameter=1.2, seed=seed).matrix(8, 0) for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert not (first == other).all()


def test_one_hot_sends_all_to_one():
    matrix = routed(distribution="one_hot", parameter=3).matrix(5, 0)
    assert matrix.sum(axis=0).tolist() == [0, 0, 0, 64 * 8 * 10 * 5, 0]
    with pytest.raises(ValueError, match="rank 5 is not in a group of 5"):
        routed(distribution="one_hot", parameter=5).matrix(5, 0)


def test_no_expert_gets_a_token_twice():
    share = expert_shares(num_experts=64, top_k=8, num_tokens=4096, distribution="power_law", parameter=1.9)
    assert share.max() <= 1 / 8 + 1e-12
    assert share.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("alpha", "num_ranks", "expected"),
    [
        (0.6, 8, 1.25),
        (0.6, 64, 2.25),
        (1.01, 8, 1.47),
        (1.01, 64, 3.73),
        (1.2, 8, 1.69),
        (1.2, 32, 3.40),
    ],
)
def test_power_law_is_as_skewed_as_a_simulation_of_the_generator(alpha, num_ranks, expected):
    found = [
        imbalance(
            routed(num_tokens=4096 // num_ranks, distribution="power_law", parameter=alpha, seed=seed)
            .counts(num_ranks)
            .sum(axis=0)
        ).max_over_mean
        for seed in range(200)
    ]
    assert np.mean(found) == pytest.approx(expected, rel=0.06)


def test_explicit_weights_and_round_trip():
    rule = routed(num_experts=4, top_k=1, num_tokens=10, distribution="explicit", weights=(4.0, 3.0, 2.0, 1.0))
    assert rule.matrix(2, 0).tolist() == [[70, 30], [70, 30]]
    assert rule_from_dict(rule_to_dict(rule)) == rule


def test_imbalance_of_equal_loads():
    found = imbalance([5, 5, 5])
    assert (found.max_over_mean, found.cv, found.gini, found.zero_share) == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distribution": "zipf"}, "unknown routing: 'zipf'; allowed: uniform"),
        ({"top_k": 0}, "top_k must be between"),
        ({"top_k": 300}, "top_k must be between"),
        ({"num_tokens": -1}, "must not be negative"),
        ({"distribution": "k_hot", "parameter": 3}, "number of hot experts"),
        ({"distribution": "explicit"}, "weights go with"),
        ({"distribution": "explicit", "weights": (1.0,)}, "256 weights are needed"),
        ({"distribution": "one_hot", "parameter": 0.5}, "whole number"),
        ({"direction": "sideways"}, "unknown direction"),
    ],
)
def test_bad_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        routed(**changes)


def test_more_ranks_than_experts():
    with pytest.raises(ValueError, match="more ranks than experts: 9 ranks, 8 experts"):
        routed(num_experts=8).matrix(9, 0)


@pytest.mark.parametrize("text", ["zipf:1", "uniform:1", "power_law", "power_law:x", "explicit:1", ""])
def test_bad_routing_text(text):
    with pytest.raises(ValueError, match="routing"):
        parse_routing(text)
