"""Max-min speeds against brute force, and what must hold whatever the loads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.costmodel.contention import Job, Sharing, advance, make_job, max_min_speeds


def random_loads(seed, num_flows, num_resources):
    random = np.random.default_rng(seed)
    loads = random.uniform(0.1, 1.0, (num_resources, num_flows))
    loads[random.random(loads.shape) < 0.4] = 0.0
    return loads


@pytest.mark.parametrize("seed", range(20))
def test_speeds_are_those_of_brute_force(lab, seed):
    loads = random_loads(seed, num_flows=1 + seed % 5, num_resources=1 + seed % 4)
    speeds = max_min_speeds(loads, np.ones(loads.shape[1]), np.ones(len(loads)))
    flows = {
        flow: {row: loads[row, flow] for row in range(len(loads)) if loads[row, flow]} for flow in range(len(loads.T))
    }
    expected = lab.share(flows)
    assert speeds == pytest.approx([expected[flow] for flow in range(loads.shape[1])], rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 5))
def test_nothing_is_overloaded_and_nobody_could_go_faster(seed, num_flows, num_resources):
    loads = random_loads(seed, num_flows, num_resources)
    weights = np.random.default_rng(seed).uniform(0.2, 5.0, num_flows)
    speeds = max_min_speeds(loads, weights, np.ones(num_resources))
    used = loads @ speeds
    assert (used <= 1 + 1e-9).all()
    assert (speeds > 0).all()
    assert (speeds <= 1 + 1e-12).all()
    for flow in range(num_flows):
        full = [row for row in range(num_resources) if loads[row, flow] > 0 and used[row] >= 1 - 1e-9]
        bottlenecks = [
            row
            for row in full
            if all(
                speeds[flow] / weights[flow] >= speeds[other] / weights[other] - 1e-9
                for other in range(num_flows)
                if loads[row, other] > 0
            )
        ]
        assert speeds[flow] >= 1 - 1e-9 or bottlenecks


def test_a_flow_that_shares_nothing_runs_at_full_speed():
    speeds = max_min_speeds(np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), np.ones(3), np.ones(2))
    assert speeds.tolist() == [0.5, 0.5, 1.0]


def test_a_class_of_two_that_fill_a_card_alone_is_held_back():
    sharing = Sharing(loads=np.array([[0.0, 1.5]]), weights=np.ones(2), owner=(0, 0), is_host=np.zeros(1, dtype=bool))
    assert sharing.speeds((1,)) == pytest.approx((1 / 1.5,))


def test_work_is_conserved_with_unequal_starts_and_lengths():
    """Two transfers on one link: the link is never idle, so the last end is the sum of both, whatever the shares."""
    sharing = Sharing(
        loads=np.array([[0.0, 1.0, 0.0, 1.0]]), weights=np.array([1.0, 1.0, 3.0, 3.0]), owner=(0, 0, 1, 1),
        is_host=np.zeros(1, dtype=bool),
    )  # fmt: skip
    ends: dict[int, float] = {}

    def done(tags: list[int], now: float) -> list[Job]:
        ends.update(dict.fromkeys(tags, now))
        return []

    advance(sharing, [make_job(0, (0, 0.0), (1, 2.0)), make_job(1, (2, 1.0), (3, 5.0))], done)
    assert max(ends.values()) == pytest.approx(7.0)
    assert ends[0] == pytest.approx(1.0 + 1.0 / 0.25)  # alone for 1 s, then at a quarter of the link
