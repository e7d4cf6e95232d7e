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
