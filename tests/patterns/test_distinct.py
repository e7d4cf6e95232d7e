"""Distinct ranks and nodes of a token's experts: closed form, brute force over all subsets, sampling."""

from fractions import Fraction
from itertools import combinations
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.distinct import expected_distinct, expert_odds, hit_chances
from crosstraffic.patterns.loads import expert_shares, experts_per_rank
from crosstraffic.patterns.replicas import placement

PLACES = (2, 4, 8, 16, 32, 64, 128)
TABLE = {
    "DeepSeek-V3": (256, 8, (1.993, 3.614, 5.295, 6.523, 7.267, 7.676, 7.890)),
    "Kimi-K2": (384, 8, (1.993, 3.609, 5.280, 6.499, 7.237, 7.642, 7.855)),
    "DeepSeek-V4-Pro": (384, 6, (1.970, 3.297, 4.430, 5.166, 5.584, 5.807, 5.922)),
    "Qwen3 MoE": (128, 8, (1.994, 3.629, 5.339, 6.597, 7.359, 7.780, 8.000)),
    "gpt-oss-120b": (128, 4, (1.881, 2.754, 3.342, 3.680, 3.860, 3.953, 4.000)),
    "GLM-4.5": (160, 8, (1.993, 3.623, 5.321, 6.567, 7.322)),
    "Mixtral": (8, 2, (1.571, 1.857, 2.000)),
}
SKEWS = [("uniform", 0.0), ("power_law", 1.2), ("lognormal", 1.5), ("k_hot", 6)]


def places_of(num_experts, num_places):
    return np.repeat(np.arange(num_places), experts_per_rank(num_experts, num_places)).tolist()


def subsets(num_experts, top_k, num_groups, topk_groups):
    """Yield every pick of groups and of experts in them."""
    size = num_experts // num_groups
    for groups in combinations(range(num_groups), topk_groups):
        yield from combinations([group * size + index for group in groups for index in range(size)], top_k)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_places", "expected"),
    [
        pytest.param(experts, top_k, num_places, expected, id=f"{name} on {num_places}")
        for name, (experts, top_k, row) in TABLE.items()
        for num_places, expected in zip(PLACES, row, strict=False)
    ],
)
def test_distinct_destinations_of_uniform_routing(num_experts, top_k, num_places, expected):
    exact = expected_distinct(num_experts, top_k, num_places)
    per_place = Fraction(num_experts, num_places)
    assert exact == num_places * (1 - Fraction(comb(int(num_experts - per_place), top_k), comb(num_experts, top_k)))
    assert round(float(exact), 3) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("num_places", "expected"), [(2, 1.926), (4, 2.928), (8, 3.629), (32, 6.597), (64, 7.359)])
def test_distinct_destinations_of_node_limited_routing(num_places, expected):
    limited = float(expected_distinct(256, 8, num_places, num_groups=8, topk_groups=4))
    assert round(limited, 3) == pytest.approx(expected, abs=1e-9)
    assert limited < float(expected_distinct(256, 8, num_places))


def test_node_limited_routing_reaches_at_most_its_groups():
    assert expected_distinct(64, 8, 8, num_groups=8, topk_groups=2) <= 2
    assert expected_distinct(64, 8, 8, num_groups=8, topk_groups=8) == expected_distinct(64, 8, 8)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups"),
    [(8, 2, 1, 1), (8, 3, 4, 2), (12, 3, 3, 2), (12, 4, 4, 3), (9, 2, 3, 1), (10, 5, 5, 3), (7, 7, 1, 1), (6, 1, 2, 1)],
)
@pytest.mark.parametrize("num_places", [1, 2, 3, 5])
def test_distinct_destinations_by_brute_force(num_experts, top_k, num_groups, topk_groups, num_places):
    place = places_of(num_experts, num_places)
    found = [len({place[expert] for expert in pick}) for pick in subsets(num_experts, top_k, num_groups, topk_groups)]
    exact = expected_distinct(num_experts, top_k, num_places, num_groups=num_groups, topk_groups=topk_groups)
    assert exact == Fraction(sum(found), len(found))
    chances = hit_chances(
        np.full(num_experts, 1 / num_experts),
        placement(num_experts, num_places),
        top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    assert float(chances.sum()) == pytest.approx(float(exact), rel=1e-12)


def test_distinct_nodes_by_sampling():
    rng = np.random.default_rng(7)
    groups = rng.random((20_000, 8)).argsort(axis=1)[:, :4]
    own = rng.random((20_000, 128)).argsort(axis=1)[:, :8]  # of the 128 experts in the four groups
    nodes = np.take_along_axis(groups, own // 32, axis=1)
    distinct = np.array([len(set(row)) for row in nodes.tolist()])
    expected = float(expected_distinct(256, 8, 8, num_groups=8, topk_groups=4))
    assert distinct.mean() == pytest.approx(expected, abs=4 * distinct.std() / np.sqrt(distinct.size))


@settings(max_examples=50, deadline=None)
@given(
    skew=st.sampled_from(SKEWS),
    seed=st.integers(0, 20),
    num_places=st.sampled_from([1, 2, 3, 5]),
    num_redundant=st.sampled_from([0, 0, 1]),
)
def test_skewed_chances_by_brute_force(skew, seed, num_places, num_redundant):
    num_experts, top_k = 9, 3
    shares = expert_shares(
        num_experts=num_experts, top_k=top_k, num_tokens=100, distribution=skew[0], parameter=skew[1], seed=seed
    )
    if num_redundant and (num_experts + num_redundant) % num_places:
        num_redundant = 0
    parts = placement(num_experts, num_places, num_redundant=num_redundant, weights=shares)
    odds = expert_odds(shares, top_k)
    weight = {pick: prod(odds[list(pick)]) for pick in combinations(range(num_experts), top_k)}
    missed = sum(value * np.prod(1 - parts[list(pick)], axis=0) for pick, value in weight.items()) / sum(
        weight.values()
    )
    assert hit_chances(shares, parts, top_k) == pytest.approx(1 - missed, abs=1e-7)


@pytest.mark.parametrize(("distribution", "parameter"), [*SKEWS[:3], ("power_law", 1.9), ("k_hot", 8), ("k_hot", 20)])
@pytest.mark.parametrize(("num_experts", "top_k"), [(61, 4), (128, 8), (256, 8)])
def test_odds_give_the_loads(distribution, parameter, num_experts, top_k):
    shares = expert_shares(
        num_experts=num_experts, top_k=top_k, num_tokens=4096, distribution=distribution, parameter=parameter, seed=3
    )
    each = hit_chances(shares, np.eye(num_experts), top_k)
    assert each == pytest.approx(shares * top_k, abs=1e-6)
    assert each.sum() == pytest.approx(top_k, rel=1e-9)


def test_skewed_and_node_limited_by_brute_force():
    shares = np.array([6.0, 1, 2, 5, 1, 1, 3, 3]) / 22
    odds = expert_odds(shares, 2)
    picks = list(subsets(8, 2, 4, 2))
    weight = np.array([prod(odds[list(pick)]) for pick in picks])
    places = places_of(8, 4)
    hit = np.array([[place in {places[expert] for expert in pick} for place in range(4)] for pick in picks])
    found = hit_chances(shares, placement(8, 4), 2, num_groups=4, topk_groups=2)
    assert found == pytest.approx(weight @ hit / weight.sum(), abs=1e-9)


def test_hot_experts_in_too_many_groups_are_left_out_as_routing_leaves_them():
    shares = np.zeros(16)
    shares[[0, 4, 8, 12]] = 0.25  # one hot expert in each of four groups, two of which a token may use
    chances = hit_chances(shares, np.repeat(np.eye(4), 4, axis=0), 4, num_groups=4, topk_groups=2)
    assert chances == pytest.approx([0.5] * 4, abs=1e-6)


def test_skew_lowers_the_number_of_places():
    even, skewed = (
        hit_chances(
            expert_shares(num_experts=256, top_k=8, num_tokens=4096, distribution="power_law", parameter=alpha, seed=1),
            placement(256, 8),
            8,
        ).sum()
        for alpha in (0.0, 1.9)
    )
    assert skewed < even <= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_groups": 3}, "8 experts do not divide over 3 groups"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups must be from 1 to the 4 groups: 5"),
        ({"top_k": 3, "num_groups": 4, "topk_groups": 1}, "top_k must be from 1 to the experts of 1 groups: 3 of 8"),
        ({"top_k": 9}, "top_k must be from 1"),
    ],
)
def test_groups_that_cannot_be(arguments, message):
    fields = {"num_experts": 8, "top_k": 2, "num_places": 2} | arguments
    with pytest.raises(ValueError, match=message):
        expected_distinct(**fields)
