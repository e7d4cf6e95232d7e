"""Sharing of capacity against a brute-force water filling, its optimality certificate, and closed forms in time."""

import random
from collections.abc import Sequence

import pytest

from crosstraffic.bench.fluid import Fluid, allocate, footprint


def brute_force(utilisations: Sequence[dict[str, float]], steps: int = 20_000) -> list[float]:
    """Raise all speeds in tiny steps; stop each when a resource that it loads would overflow."""
    speeds = [0.0] * len(utilisations)
    rising = set(range(len(utilisations)))
    for step in range(1, steps + 1):
        for index in rising:
            speeds[index] = step / steps
        load: dict[str, float] = {}
        for index, utilisation in enumerate(utilisations):
            for resource, share in utilisation.items():
                load[resource] = load.get(resource, 0.0) + speeds[index] * share
        full = {resource for resource, total in load.items() if total >= 1}
        rising = {index for index in rising if not full & {r for r, share in utilisations[index].items() if share > 0}}
    return speeds


def random_case(seed: int) -> list[dict[str, float]]:
    rng = random.Random(seed)
    resources = "abcd"[: rng.randint(1, 4)]
    case = []
    for _ in range(rng.randint(1, 6)):
        used = {resource: rng.choice([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]) for resource in resources if rng.random() < 0.7}
        case.append(used)
    return case


@pytest.mark.parametrize("seed", range(60))
def test_speeds_equal_a_brute_force_water_filling(seed: int) -> None:
    case = random_case(seed)
    assert allocate(case) == pytest.approx(brute_force(case, 4000), abs=6e-3)


@pytest.mark.parametrize("seed", range(300))
def test_speeds_are_max_min_fair(seed: int) -> None:
    case = random_case(1000 + seed)
    speeds = allocate(case)
    load: dict[str, float] = {}
    for speed, utilisation in zip(speeds, case, strict=True):
        for resource, share in utilisation.items():
            load[resource] = load.get(resource, 0.0) + speed * share
    assert all(total <= 1 + 1e-9 for total in load.values())
    for index, speed in enumerate(speeds):
        assert 0 < speed <= 1
        if speed < 1:  # each slowed transfer has a full resource on which no other is faster
            assert any(
                load[resource] >= 1 - 1e-9
                and all(speeds[other] <= speed + 1e-9 for other, use in enumerate(case) if use.get(resource, 0) > 0)
                for resource, share in case[index].items()
                if share > 0
            )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_speeds_do_not_depend_on_order(order: tuple[int, ...]) -> None:
    case = [{"a": 1.0, "b": 0.2}, {"a": 0.7}, {"b": 1.0}]
    speeds = allocate(case)
    assert allocate([case[index] for index in order]) == pytest.approx([speeds[index] for index in order])


def test_nothing_in_progress() -> None:
    assert allocate([]) == ()
    fluid = Fluid()
    assert fluid.next_s() is None
    assert fluid.advance(3.0) == []


def run(arrivals: list[tuple[float, str, dict[str, float]]]) -> dict[str, float]:
    fluid, ends, waiting = Fluid(), {}, sorted(arrivals, key=lambda item: item[0])
    while waiting or fluid.next_s() is not None:
        next_s = fluid.next_s()
        if waiting and (next_s is None or waiting[0][0] < next_s):
            at_s, name, needs = waiting.pop(0)
            assert fluid.advance(at_s) == []
            fluid.add(name, footprint(needs))
        else:
            assert next_s is not None
            for tag in fluid.advance(next_s):
                ends[str(tag)] = next_s
    return ends


def test_alone_a_transfer_takes_its_own_time() -> None:
    assert run([(2.0, "x", {"port": 3.0, "nic": 1.0})]) == {"x": 5.0}


def test_two_equal_transfers_on_one_link_take_twice_as_long() -> None:
    assert run([(0.0, "x", {"nic": 1.0}), (0.0, "y", {"nic": 1.0})]) == {"x": 2.0, "y": 2.0}


def test_a_short_transfer_leaves_the_rest_to_the_long_one() -> None:
    assert run([(0.0, "x", {"nic": 1.0}), (0.0, "y", {"nic": 3.0})]) == pytest.approx({"x": 2.0, "y": 4.0})


def test_a_late_transfer_slows_only_what_is_left() -> None:
    ends = run([(0.0, "x", {"nic": 4.0}), (2.0, "y", {"nic": 1.0})])
    assert ends == pytest.approx({"y": 4.0, "x": 5.0})


def test_transfers_on_different_resources_do_not_meet() -> None:
    assert run([(0.0, "x", {"a": 1.0}), (0.0, "y", {"b": 2.0})]) == {"x": 1.0, "y": 2.0}


def test_tiny_transfers_end_late_in_a_long_run() -> None:
    arrivals = [(1e5 + index * 1e-7, f"x{index}", {"nic": 1e-7}) for index in range(50)]
    ends = run(arrivals)
    assert len(ends) == 50
    assert max(ends.values()) == pytest.approx(1e5 + 50e-7, abs=1e-8)
