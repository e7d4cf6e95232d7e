"""How long the tournament of a large cluster takes to draw up."""

from pytest_benchmark.fixture import BenchmarkFixture

from crosstraffic.bench.tournament import tournament


def test_tournament_of_1024_nodes(benchmark: BenchmarkFixture) -> None:
    assert benchmark(tournament, 1024).shape == (1023, 512, 2)
