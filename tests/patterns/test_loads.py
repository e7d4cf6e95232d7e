"""Loads of experts: known skews of the generators, shares that add up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.loads import LOADS, expert_shares, experts_per_rank
from crosstraffic.patterns.replicas import placement
from crosstraffic.patterns.routing import imbalance

RANKS = (8, 16, 32, 64, 128)
# Mean of max / mean load of ranks, and of experts, simulated with aiconfigurator's generator: E 256, k 8, T 4096.
SIMULATED = {
    0.6: ((1.25, 1.46, 1.78, 2.25, 2.93), 3.4),
    1.01: ((1.47, 1.88, 2.55, 3.73, 5.73), 8.2),
    1.2: ((1.69, 2.32, 3.40, 5.32, 8.90), 15.3),
}
SMALL = {4: 1.47, 8: 2.01, 16: 2.92, 32: 4.62}  # E 128, alpha 1.2
TOLERANCE = 0.07  # both are means over seeds, of draws whose largest decides


def shares(seed, num_experts=256, distribution="power_law", parameter=0.0):
    return expert_shares(
        num_experts=num_experts, top_k=8, num_tokens=4096, distribution=distribution, parameter=parameter, seed=seed
    )


@pytest.mark.parametrize("alpha", SIMULATED)
def test_power_law_is_as_skewed_as_a_simulation(alpha):
    of_ranks, of_experts = SIMULATED[alpha]
    drawn = [shares(seed, parameter=alpha) for seed in range(300)]
    for num_ranks, expected in zip(RANKS, of_ranks, strict=True):
        parts = placement(256, num_ranks)
        found = np.mean([imbalance(one @ parts).max_over_mean for one in drawn])
        assert found == pytest.approx(expected, rel=TOLERANCE), num_ranks
    assert np.mean([imbalance(one).max_over_mean for one in drawn]) == pytest.approx(of_experts, rel=TOLERANCE)


@pytest.mark.parametrize("num_ranks", SMALL)
def test_power_law_of_fewer_experts(num_ranks):
    parts = placement(128, num_ranks)
    found = np.mean([imbalance(shares(seed, 128, parameter=1.2) @ parts).max_over_mean for seed in range(300)])
    assert found == pytest.approx(SMALL[num_ranks], rel=TOLERANCE)


def test_the_seed_permutes_the_experts():
    hottest = {int(shares(seed, parameter=1.2).argmax()) for seed in range(30)}
    assert len(hottest) > 20


@settings(max_examples=50, deadline=None)
@given(
    distribution=st.sampled_from(sorted(LOADS)),
    num_experts=st.sampled_from([8, 61, 256]),
    top_k=st.sampled_from([1, 2, 8]),
    parameter=st.sampled_from([8, 8.0]) | st.floats(0, 2.5),
    seed=st.integers(0, 9),
)
def test_shares_add_up_and_no_expert_gets_a_token_twice(distribution, num_experts, top_k, parameter, seed):
    if distribution == "k_hot":
        parameter = max(8.0, parameter)
    found = expert_shares(
        num_experts=num_experts, top_k=top_k, num_tokens=512, distribution=distribution, parameter=parameter, seed=seed
    )
    assert found.sum() == pytest.approx(1)
    assert found.min() >= 0
    assert found.max() <= 1 / top_k + 1e-12


def test_recorded_counts_are_weights():
    found = expert_shares(num_experts=4, top_k=1, num_tokens=1, distribution="explicit", weights=(1, 2, 3, 4))
    assert found.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"distribution": "one_hot"}, "no expert shares for distribution: 'one_hot'; allowed: uniform"),
        ({"distribution": "explicit", "weights": (1.0, 0, 0, 0)}, "fewer experts with load than top_k: 1 of 2"),
    ],
)
def test_loads_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        expert_shares(num_experts=4, top_k=2, num_tokens=8, **fields)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 3), (61, 7), (256, 256), (5, 5), (7, 1)])
def test_experts_lie_in_order(num_experts, num_ranks):
    held = experts_per_rank(num_experts, num_ranks)
    assert sum(held) == num_experts
    assert sorted(held, reverse=True) == list(held)
    assert max(held) - min(held) <= 1
