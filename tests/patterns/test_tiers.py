"""Traffic of a step by tier, against a count of every call, group and pair of ranks."""

from collections import Counter

import pytest

from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.matrix import Explicit
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.step import Block, Step, Task
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.tiers import step_tiers
from crosstraffic.patterns.wire import traffic, wire_matrix
from crosstraffic.patterns.workload import Workload

CASES = [
    ("Llama-3.1-8B", Layout(tp=2, dp=4), "vllm", 8),
    ("Llama-3.1-70B", Layout(tp=8, pp=2), "vllm", 8),
    ("Llama-3.1-70B", Layout(tp=4, pp=2, dp=2), "vllm", 3),
    ("Llama-3.1-70B", Layout(tp=2, pp=5), "vllm", 4),
    ("DeepSeek-V3", Layout(dp=16, ep=16), "vllm", 8),
    ("DeepSeek-V3", Layout(tp=2, dp=3, ep=6, replicas=2), "vllm", 4),
    ("DeepSeek-V3", Layout(tp=8, dcp=4, pp=3), "vllm", 8),
    ("DeepSeek-V3", Layout(tp=16, dp=4, ep=8), "sglang", 8),
    ("Qwen3-30B-A3B", Layout(tp=4, dp=2, ep=8), "megatron", 5),
    ("Qwen3-30B-A3B", Layout(tp=8, dp=8, ep=8), "tensorrt_llm", 4),
    ("Qwen3-30B-A3B", Layout(dp=7, ep=7), "vllm", 2),
]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("model", "layout", "framework", "per_node"), CASES, ids=str)
def test_tiers_are_the_sum_of_all_calls(model: str, layout: Layout, framework: str, per_node: int, phase: str) -> None:
    if phase == "prefill" and layout.dcp > 1:
        layout = Layout(tp=8, pp=3)
    shape, workload = load_model(model), Workload(phase=phase, batch=5, context=32)  # type: ignore[arg-type]
    streams = phase_streams(shape, layout, workload, framework)
    step = phase_step(shape, layout, workload, framework, streams)
    nodes = [rank // per_node for rank in range(world_size(layout, framework))]
    by_name = {stream.name: stream for stream in streams}
    intra: Counter[int] = Counter()
    inter: Counter[int] = Counter()
    leaving: Counter[int] = Counter()
    for task in step.tasks(0):
        stream = by_name[task.stream]
        for index in range(len(stream.groups)) if task.groups is None else task.groups:
            matrix, ranks = wire_matrix(stream, index).tolist(), stream.groups[index]
            for i, source in enumerate(ranks):
                for j, destination in enumerate(ranks):
                    if task.edge is not None and task.edge != (i, j):
                        continue
                    tier = intra if nodes[source] == nodes[destination] else inter
                    tier[source] += matrix[i][j]
                    leaving[nodes[source]] += matrix[i][j] if tier is inter else 0
    found = step_tiers(streams, step, nodes)
    assert found.intra_node_bytes == max(intra.values(), default=0)
    assert found.inter_node_bytes == max(inter.values(), default=0)
    assert found.node_egress_bytes == max(leaving.values(), default=0)
    assert found.calls == len(step.tasks(0))
    assert [row.name for row in found.streams] == [stream.name for stream in streams]
    thrice = step_tiers(streams, step, nodes, 3)
    assert (thrice.intra_node_bytes, thrice.inter_node_bytes) == (
        3 * found.intra_node_bytes,
        3 * found.inter_node_bytes,
    )
    assert thrice.calls == found.calls


def test_one_stream_is_its_traffic() -> None:
    shape, layout, workload = load_model("Llama-3.1-70B"), Layout(tp=8), Workload(phase="decode", batch=64)
    streams = phase_streams(shape, layout, workload, "vllm")
    step = phase_step(shape, layout, workload, "vllm", streams)
    found = {row.name: row for row in step_tiers(streams, step, (0,) * 8).streams}
    for stream in streams:
        each = traffic(stream, (0,) * 8).bottleneck_bytes
        assert found[stream.name].intra_node_bytes == each * stream.calls_per_step
        assert found[stream.name].calls == stream.calls_per_step
    reduced = sum(row.intra_node_bytes for name, row in found.items() if name != "tp.logits")
    assert reduced == 295_436_288  # 161 all-reduces of 1 MiB over eight ranks, 1.75 MiB sent a rank in each


def test_groups_may_have_matrices_of_their_own() -> None:
    stream = Stream(
        name="x",
        pattern="pd",
        op="kv_transfer",
        phase="decode",
        groups=((0, 1), (2, 3)),
        payload_bytes=9,
        calls_per_step=1,
        dtype="uint8",
        formula="",
        source="",
        rule=Explicit(bytes=(((0, 5), (0, 0)), ((0, 0), (9, 0)))),
    )
    step = Step(name="decode", phase="decode", lanes=((Block(repeat=1, tasks=(Task(stream="x", payload_bytes=9),)),),))
    found = step_tiers([stream], step, (0, 1, 2, 2))
    assert (found.intra_node_bytes, found.inter_node_bytes, found.node_egress_bytes) == (9, 5, 5)
