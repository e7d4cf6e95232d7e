"""The plan: what it covers, in which order, and that its keys say what a point is."""

import itertools
from collections import Counter

import pytest
from simulated_runs import STREAMS, file_of, scenario_of

from crosstraffic.bench.plan import Point, make_plan, mixes, sweep_sizes
from crosstraffic.bench.resolve import Scenario, resolve
from crosstraffic.bench.scenario import default_scenario


@pytest.fixture(scope="module", params=[2, 3, 4, 8])
def scenario(request: pytest.FixtureRequest) -> Scenario:
    return resolve(default_scenario(request.param), request.param)


def test_the_default_covers_what_it_must(scenario: Scenario) -> None:
    plan = make_plan(scenario)
    names = [stream.name for stream in scenario.streams]
    for stream in scenario.streams:
        for cadence in ("isolated", "streaming"):
            sizes = {
                point.streams[0][1]
                for point in plan
                if point.kind == "alone" and point.streams[0][0] == stream.name and point.cadence == cadence
            }
            assert len(sizes - set(scenario.real_sizes[stream.name])) + 1 >= 12
            assert set(scenario.real_sizes[stream.name]) <= sizes
    for mode in ("steady", "one_shot"):
        mixed = [{name for name, _ in point.streams} for point in plan if point.mode == mode]
        assert all(set(pair) in mixed for pair in itertools.combinations(names, 2))
    if scenario.model is not None:
        assert sum(point.kind == "step" for point in plan) == 3
        assert any(len(point.streams) == 3 for point in plan if point.kind == "together")


def test_keys_are_unique_and_stable(scenario: Scenario) -> None:
    plan = make_plan(scenario)
    keys = [point.key for point in plan]
    assert len(set(keys)) == len(keys)
    assert [point.key for point in make_plan(scenario)] == keys


def test_the_same_point_has_the_same_key_under_another_seed_and_budget() -> None:
    plans = [make_plan(scenario_of(seed=seed, budget_s=budget)) for seed, budget in ((1, 10.0), (2, 99.0))]
    assert {point.key for point in plans[0]} == {point.key for point in plans[1]}


@pytest.mark.parametrize(
    "change",
    [{"op": "all_gather"}, {"payload": 2**19}, {"groups": [[0, 1], [2, 3]]}, {"name": "other"}],
    ids=lambda change: next(iter(change)),
)
def test_another_communication_has_other_keys(change: dict[str, object]) -> None:
    measure = {"sizes": [4096], "steps": False}
    before = {point.key for point in make_plan(scenario_of(STREAMS[:1], **measure))}
    after = {point.key for point in make_plan(scenario_of([{**STREAMS[0], **change}], **measure))}
    assert not before & after


def test_the_order_is_shuffled_by_the_seed_and_repeats_come_last() -> None:
    plans = [make_plan(scenario_of(seed=seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]
    for plan in plans:
        repeats = [point.repeat for point in plan]
        assert repeats == sorted(repeats)
        sizes = [point.streams[0][1] for point in plan if point.kind == "alone" and point.repeat == 0]
        assert sizes != sorted(sizes)


def test_every_repeat_repeats_a_point() -> None:
    def what(point: Point) -> tuple[object, ...]:
        return point.kind, point.streams, point.cadence, point.mode

    visits = Counter((what(point), point.repeat) for point in make_plan(scenario_of()))
    assert set(visits.values()) == {1}
    again = [found for found, repeat in visits if repeat == 1]
    assert again
    assert all((found, 0) in visits for found in again)


def test_sizes_are_what_the_op_can_carry() -> None:
    scenario = scenario_of([{"name": "a", "op": "reduce_scatter", "payload": 1000}], 3, sizes=[1, 100, 13])
    assert sweep_sizes(scenario, scenario.streams[0]) == (12, 24, 108, 1008)


@pytest.mark.parametrize(
    ("together", "triples", "expected"),
    [
        ("none", 1, []),
        ("pairs", 0, [2] * 6),
        ("pairs", 2, [2] * 6 + [3] * 2),
        ("pairs", 9, [2] * 6 + [3] * 4),
        ("pairs", [["reduce", "ring", "pairs"]], [2] * 6 + [3]),
        ([["reduce", "ring"]], 1, [2]),
    ],
    ids=str,
)
def test_mixes(together: object, triples: object, expected: list[int]) -> None:
    assert list(map(len, mixes(scenario_of(together=together, triples=triples)))) == expected


@pytest.mark.parametrize(
    ("together", "message"),
    [
        ([["reduce", "nobody"]], r"names unknown streams \['nobody'\]; known: reduce, exchange, ring, pairs"),
        ([["reduce", "reduce"]], "needs at least two different streams"),
        ([["reduce"]], "needs at least two different streams"),
        ([["reduce", "ring"], ["reduce", "ring"]], "holds the same point twice: reduce \\+ ring"),
    ],
    ids=["unknown", "twice in a mix", "alone", "twice"],
)
def test_wrong_mixes_are_refused(together: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(scenario_of(together=together))


def test_a_mix_of_too_many_streams_is_refused() -> None:
    names = [f"s{number}" for number in range(33)]
    streams = [{"name": name, "op": "all_reduce", "payload": 64 * 2**i} for i, name in enumerate(names)]
    for stream, size in zip(streams, range(33), strict=True):
        stream["op"], stream["matrix"] = "send_recv", [[0, 1 + size], [2, 0]]
    with pytest.raises(ValueError, match="a mix can hold up to 32 streams, not 33"):
        make_plan(resolve(file_of(streams, together=[names]), 2))
