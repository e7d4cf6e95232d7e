"""How long predictions take: streams together on many ranks, whole steps, layouts with their cost."""

import numpy as np
import pandas as pd
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from crosstraffic.costmodel.layout_cost import price_layouts
from crosstraffic.costmodel.links import _like_group, family_of, shape_of
from crosstraffic.costmodel.model import Curve, Family, Link, Model, Noise, Solo
from crosstraffic.costmodel.predict import predict_step
from crosstraffic.costmodel.together import together_times
from crosstraffic.patterns.layouts import find_layouts
from crosstraffic.patterns.matrix import Chain
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.step import Block, Step, Task, step_to_dict
from crosstraffic.patterns.stream import Op, Stream, stream_to_dict
from crosstraffic.patterns.workload import Workload
from crosstraffic.results.table import CURVE, make_frame

RANKS_PER_NODE = 8
SIZES = (2**12, 2**16, 2**20, 2**24)
Groups = tuple[tuple[int, ...], ...]


def in_a_row(num_ranks: int, size: int) -> Groups:
    return tuple(tuple(range(first, first + size)) for first in range(0, num_ranks, size))


def strided(num_ranks: int, size: int) -> Groups:
    stride = num_ranks // size
    return tuple(tuple(range(first, num_ranks, stride)) for first in range(stride))


def stream(name: str, op: Op, groups: Groups) -> Stream:
    return Stream(
        name=name,
        pattern=name,
        op=op,
        phase="decode",
        groups=groups,
        payload_bytes=2**20,
        calls_per_step=1,
        dtype="bfloat16",
        formula="",
        source="",
        rule=Chain(num_bytes=2**20) if op == "send_recv" else None,
    )


def model_of(num_ranks: int) -> Model:
    """Return a model of eight streams whose times follow their formula exactly: nothing is fitted or measured."""
    nodes = tuple(rank // RANKS_PER_NODE for rank in range(num_ranks))
    streams = (
        stream("tp", "all_reduce", in_a_row(num_ranks, 8)),
        stream("sp", "all_gather", in_a_row(num_ranks, 8)),
        stream("etp", "reduce_scatter", in_a_row(num_ranks, 4)),
        stream("ep", "all_to_all", in_a_row(num_ranks, 64)),
        stream("cp", "all_gather", in_a_row(num_ranks, 16)),
        stream("pp", "send_recv", strided(num_ranks, 8)),
        stream("dp", "all_reduce", strided(num_ranks, 16)),
        stream("edp", "all_gather", strided(num_ranks, 4)),
    )
    tasks = tuple(Task(stream=one.name, payload_bytes=2**20) for one in streams[:4])
    step = Step(name="decode", phase="decode", lanes=((Block(repeat=10, tasks=tasks),),))
    link = Link(bandwidth_bytes_per_s=4e11, measured=True, num_points=9)
    card = Link(bandwidth_bytes_per_s=4e10, measured=True, num_points=9)
    curves = {
        one.name: Curve(
            family=family_of(one, nodes),
            payload_bytes=SIZES,
            residual_log=(0.0,) * 4,
            deviation_log=(0.01,) * 4,
            num_visits=(3,) * 4,
            min_payload_bytes=SIZES[0],
            max_payload_bytes=SIZES[-1],
        )
        for one in streams
    }
    solo = Solo(
        latency_s={"intra": 2e-6, "inter": 9e-6},
        links={"intra": link, "inter": card, "nic": card},
        families={curve.family: Family(latency_scale=1, transfer_scale=1, num_points=4) for curve in curves.values()},
        curves=curves,
        amplitude_log=0.05,
        length_octaves=4.0,
        noise_log=0.01,
        deviations_90=1.6,
        formula_error_log=0.05,
    )
    return Model(
        crosstraffic="0",
        run_ids=(),
        transport="none",
        nodes=nodes,
        streams=tuple(stream_to_dict(one) for one in streams),
        steps=(step_to_dict(step),),
        solo={"streaming": solo, "isolated": solo},
        noise=Noise(median_ape=None, p90_ape=None, num_points=0),
    )


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(1024)


@pytest.fixture
def cold() -> None:
    forget()


def forget() -> None:
    _like_group.cache_clear()
    shape_of.cache_clear()


@pytest.mark.parametrize("mode", ["steady", "one_shot"])
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_eight_streams_on_1024_ranks(benchmark: BenchmarkFixture, model: Model, mode: str, start: str) -> None:
    mix = [(str(data["name"]), 2**20) for data in model.streams]
    setup = forget if start == "cold" else None
    times = benchmark.pedantic(
        together_times, args=(model, mix, mode), setup=setup, rounds=2, warmup_rounds=int(start == "warm")
    )
    assert len(times) == 8
    assert min(times) > 0


def test_a_step_of_16384_ranks(benchmark: BenchmarkFixture, cold: None) -> None:
    large = model_of(16384)
    found = benchmark.pedantic(predict_step, args=(large, large.step("decode")), rounds=1)
    assert found["low_s"] <= found["step_s"] <= found["high_s"]


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_layouts_of_1024_gpus_with_cost(benchmark: BenchmarkFixture, framework: str) -> None:
    shape = load_model("DeepSeek-V3")
    ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "send_recv"]
    curves = make_frame(op=ops, kernel="nccl", dtype="half", num_ranks=8, payload_bytes=8, time_s=1e-5)[list(CURVE)]

    def line(cells: pd.DataFrame) -> pd.DataFrame:
        time_s = 1e-5 + cells["payload_bytes"] / np.where(cells["num_nodes"] > 1, 4e10, 4e11)
        bounds = {"time_s": time_s, "low_s": time_s * 0.9, "high_s": time_s * 1.1}
        return pd.DataFrame({**bounds, "source": "model", "kind": "size", "valid": True, "why": None})

    def search() -> int:
        found = find_layouts(
            shape,
            1024,
            Workload(phase="decode"),
            framework,
            batch=16384,
            gpu_memory_bytes=2**60,
            with_calls=True,
        )
        return sum(cost.valid for cost in price_layouts(found.candidates, curves, line, shape, "decode"))

    assert benchmark.pedantic(search, rounds=1) > 100
