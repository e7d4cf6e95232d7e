"""How long the guard of rank 0 takes to hear a beat of each of 4,096 ranks, and to judge them."""

from collections.abc import Mapping
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from crosstraffic.bench.failures import Outcome
from crosstraffic.bench.messages import Hello
from crosstraffic.bench.supervisor import SETTLE_S, Supervisor

NUM_RANKS = 4096


class Silent:
    """A guard that is told nothing here."""

    def say(self, message: Mapping[str, Any]) -> None:
        raise AssertionError(f"a run that goes well tells no guard anything: {message}")


@pytest.fixture
def world() -> Supervisor:
    found = Supervisor(range(NUM_RANKS))
    for rank in range(NUM_RANKS):
        facts = {"crosstraffic": "1", "Python": "3"}
        hello = Hello(key="k", rank=rank, world_size=NUM_RANKS, host=f"n{rank // 8}", pid=rank, facts=facts)
        assert found.join(Silent(), hello)
    hear_all(found, 1)
    return found


def hear_all(world: Supervisor, call: int) -> None:
    for rank in range(NUM_RANKS):
        world.hear(rank, {"beat": [rank, 1, 5, 0, call, 0.1, "S"]})


def judge(world: Supervisor) -> Outcome | None:
    return world.judge(lambda: ["tp"])


def test_a_beat_of_each(benchmark: BenchmarkFixture, world: Supervisor) -> None:
    benchmark.pedantic(hear_all, args=(world, 2), rounds=5)
    assert {found.beat.call for found in world.ranks.values() if found.beat is not None} == {2}


def test_a_judgement_while_all_goes_well(benchmark: BenchmarkFixture, world: Supervisor) -> None:
    assert benchmark(judge, world) is None


def test_a_judgement_when_half_of_them_have_ended(benchmark: BenchmarkFixture, world: Supervisor) -> None:
    for rank in range(0, NUM_RANKS, 2):
        world.hear(rank, {"end": [1, None], "last": ["x"]})
    assert judge(world) is None
    assert world._bad_s is not None
    world._bad_s -= SETTLE_S + 1
    outcome = benchmark(judge, world)
    assert outcome is not None
    assert len(outcome.failures) + len(outcome.followers) == NUM_RANKS // 2


def test_a_judgement_when_half_of_the_nodes_are_lost(benchmark: BenchmarkFixture, world: Supervisor) -> None:
    for rank in range(NUM_RANKS // 2):
        world.ranks[rank + NUM_RANKS // 2].heard_s -= 1000
    outcome = benchmark(judge, world)
    assert outcome is not None
    assert "node n256 (ranks 2048, 2049" in (outcome.why or "")
    assert "and 240 nodes more" in (outcome.why or "")
