"""How long byte matrices of large expert-parallel groups take."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from crosstraffic.patterns import routing
from crosstraffic.patterns.matrix import Matrix
from crosstraffic.patterns.routing import Routed


@pytest.mark.parametrize("distribution", ["uniform", "power_law"])
@pytest.mark.parametrize("copies", ["expert", "rank"])
def test_matrix_of_256_ranks(benchmark: BenchmarkFixture, distribution: str, copies: routing.Copies) -> None:
    rule = Routed(
        num_tokens=777,
        top_k=8,
        num_experts=256,
        bytes_per_message=7408,
        distribution=distribution,
        parameter=1.01,
        copies=copies,
        num_groups=8,
        topk_groups=4,
    )

    def once() -> Matrix:
        routing._rank_loads.cache_clear()
        routing._rounded.cache_clear()
        return rule.matrix(256, 0)

    matrix = benchmark(once)
    assert matrix.shape == (256, 256)
