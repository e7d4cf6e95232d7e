"""A simulated truth is written, read back, and refused where it is wrong."""

import json

import pytest

from crosstraffic.bench.simulated_truth import SimulatedTruth, Tier, truth_from_dict, truth_to_dict

TIER = Tier(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
TRUTH = SimulatedTruth(ranks_per_node=2, intra=TIER, inter=TIER)


def test_a_truth_survives_json() -> None:
    known = SimulatedTruth(
        ranks_per_node=2,
        intra=TIER,
        inter=TIER,
        host_bytes_per_s=1e10,
        clock_offset_s={1: 5e-3},
        clock_drift={2: 5e-5},
        straggler_s={3: 1e-3},
        ping_jitter_s=(1e-6, 2e-6),
    )
    assert truth_from_dict(json.loads(json.dumps(truth_to_dict(known)))) == known
    assert truth_from_dict(truth_to_dict(TRUTH)) == TRUTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node must be at least 1: 0"),
        ({"noise_sigma": -1.0}, "noise_sigma must not be negative"),
        ({"poll_s": 0.0}, "poll_s must be positive"),
        ({"intra": {"latency_s": -1, "bandwidth_bytes_per_s": 1}}, "latency_s must not be negative: -1"),
        ({"bandwidth": 1}, "unknown in a simulated truth: bandwidth; allowed: ranks_per_node"),
        ({"intra": {}}, "not a simulated truth"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_truth_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        truth_from_dict({**truth_to_dict(TRUTH), **changes})


@pytest.mark.parametrize("link", ["", "n2", "2=", "0--3", "0-", "-3", "0>3>1"])
def test_a_slow_link_that_is_none_is_refused(link: str) -> None:
    with pytest.raises(ValueError, match="not a link"):
        truth_from_dict({**truth_to_dict(TRUTH), "slow_bytes_per_s": {link: 1e9}})


def test_slow_links_are_those_named() -> None:
    slow = {"2": 5e8, "1>": 4e8, "0-3": 3e8, "3>0": 2e8}
    truth = truth_from_dict({**truth_to_dict(TRUTH), "slow_bytes_per_s": slow})
    assert [truth.nic_bytes_per_s(node, ">") for node in range(4)] == [1e9, 4e8, 5e8, 1e9]
    assert [truth.nic_bytes_per_s(node, "<") for node in range(4)] == [1e9, 1e9, 5e8, 1e9]
    assert (truth.pair_bytes_per_s(0, 3), truth.pair_bytes_per_s(3, 0)) == (3e8, 2e8)
    assert truth.pair_bytes_per_s(1, 2) == float("inf")
    assert truth_from_dict(truth_to_dict(truth)) == truth
