"""How long groups of very many ranks and tables of their streams take, and that their memory grows with the ranks."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from crosstraffic.patterns import layout as layouts
from crosstraffic.patterns.layout import Layout, process_groups, world_size
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.stream import stream_to_dict
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

LARGE = [
    pytest.param("vllm", Layout(tp=8, pp=16, dp=1024), id="vllm"),
    pytest.param("megatron", Layout(tp=8, pp=16, dp=1024, ep=64), id="megatron"),
    pytest.param("sglang", Layout(tp=8192, pp=16, dp=1024, ep=64), id="sglang"),
    pytest.param("tensorrt_llm", Layout(tp=8192, pp=16, ep=64), id="tensorrt_llm"),
]
WIDE = [
    pytest.param("megatron", Layout(tp=8, dp=2048, ep=256, etp=1), id="megatron"),
    pytest.param("vllm", Layout(tp=8, pp=8, dp=256), id="vllm"),
    pytest.param("sglang", Layout(tp=16_384, dp=2048, ep=64), id="sglang"),
]
GROUP_BYTES, MEMBER_BYTES, INTEGER_BYTES = 56, 8, 32  # a tuple and the pointer to it, a pointer, a Python integer


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most memory that a call held at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("framework", "layout"), LARGE)
def test_groups_of_131072_ranks(benchmark: BenchmarkFixture, framework: str, layout: Layout) -> None:
    def written() -> str:
        layouts._groups.cache_clear()
        return json.dumps(process_groups(layout, framework))

    text = benchmark.pedantic(written, rounds=3, warmup_rounds=1)
    found = json.loads(text)
    assert {sum(map(len, groups)) for groups in found.values()} == {131_072}


@pytest.mark.parametrize(("framework", "layout"), LARGE)
def test_groups_share_their_integers(framework: str, layout: Layout) -> None:
    def made() -> None:
        layouts._groups.cache_clear()
        process_groups(layout, framework)

    found, num_ranks = process_groups(layout, framework), world_size(layout, framework)
    held = sum(GROUP_BYTES * len(groups) + MEMBER_BYTES * num_ranks for groups in found.values())
    in_the_making = (GROUP_BYTES + 3 * MEMBER_BYTES + INTEGER_BYTES) * num_ranks
    assert peak_bytes(made) < held + in_the_making


def table(framework: str, layout: Layout) -> list[dict[str, Any]]:
    """Return the streams of DeepSeek-V3 as JSON types, with the bytes that a rank sends."""
    layouts._groups.cache_clear()
    streams = phase_streams(load_model("DeepSeek-V3"), layout, Workload(phase="decode", batch=64), framework)
    return [{**stream_to_dict(stream), "wire_bytes_per_rank": wire_bytes_per_rank(stream)} for stream in streams]


@pytest.mark.parametrize(("framework", "layout"), WIDE)
def test_streams_of_deepseek_v3_on_16384_ranks(benchmark: BenchmarkFixture, framework: str, layout: Layout) -> None:
    rows = benchmark.pedantic(table, args=(framework, layout), rounds=3, warmup_rounds=1)
    assert world_size(layout, framework) == 16_384
    assert rows
    assert all(row["wire_bytes_per_rank"] > 0 for row in rows)


@pytest.mark.parametrize(("framework", "layout"), WIDE)
def test_streams_of_many_ranks_need_no_matrix_of_them(framework: str, layout: Layout) -> None:
    """A matrix of 16,384 x 16,384 ranks takes 2 GB; the whole table takes a few megabytes."""
    assert peak_bytes(lambda: table(framework, layout)) < 100 * 10**6
