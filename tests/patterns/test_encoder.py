"""Embeddings from encoders to the ranks that prefill."""

from dataclasses import replace

import pytest

from crosstraffic.patterns.encoder import embedding_bytes, encoder_handoff, encoder_streams
from crosstraffic.patterns.layout import Layout, process_groups, world_size
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.workload import Workload

ONE = {"num_tokens": 576, "hidden": 4096}


def test_each_rank_of_a_replica_gets_its_requests_whole():
    (stream,) = encoder_handoff(
        encoder_ranks=(0, 1, 2), prefill_ranks=range(3, 11), ranks_per_replica=4, num_requests=5, **ONE
    )
    matrix = stream.matrix()
    assert matrix[:3, 3:].sum() == matrix.sum() == 5 * 4 * 4_718_592
    assert (matrix.sum(axis=0)[3:] // 4_718_592).tolist() == [3] * 4 + [2] * 4
    assert stream.payload_bytes == matrix.sum(axis=1).max() == 2 * 4 * 4_718_592


def test_sglang_may_send_one_copy_and_broadcast_it():
    embeddings, broadcast = encoder_handoff(
        encoder_ranks=(0, 1), prefill_ranks=range(2, 10), ranks_per_replica=4, num_requests=5, framework="sglang",
        through_first=True, **ONE,
    )  # fmt: skip
    assert (embeddings.matrix().sum(axis=0) // 4_718_592).tolist() == [0, 0, 3, 0, 0, 0, 2, 0, 0, 0]
    assert (broadcast.op, broadcast.payload_bytes, broadcast.calls_per_step) == ("broadcast", 4_718_592, 3)
    assert broadcast.groups == ((2, 3, 4, 5), (6, 7, 8, 9))
    alone = encoder_handoff(
        encoder_ranks=(0,), prefill_ranks=(1, 2), ranks_per_replica=1, framework="sglang", through_first=True, **ONE
    )
    assert [stream.name for stream in alone] == ["epd.embeddings"]


def test_deepstack_layers_multiply():
    assert embedding_bytes(100, 10, "float8_e4m3", 3) == 4000
    assert encoder_handoff(encoder_ranks=(0,), prefill_ranks=(1,), ranks_per_replica=1, num_tokens=0, hidden=1) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"framework": "megatron"}, "allowed: vllm, sglang"),
        ({"ranks_per_replica": 3}, "4 prefill ranks make no replicas of 3"),
        ({"encoder_ranks": ()}, "there must be encoder ranks"),
        ({"encoder_ranks": (2,)}, "on both sides"),
        ({"through_first": True}, "in sglang only: vllm"),
        ({"num_requests": 0}, "num_requests must be"),
        ({"num_tokens": -1}, "num_tokens must not be negative"),
    ],
)
def test_bad_use_is_refused(change, message):
    asked = {"encoder_ranks": (0,), "prefill_ranks": (1, 2, 3, 4), "ranks_per_replica": 2, **ONE, **change}
    with pytest.raises(ValueError, match=message):
        encoder_handoff(**asked)


MAVERICK = load_model("Llama-4-Maverick")


def streams_of(layout, framework="vllm", *, shape=MAVERICK, instances=1, num_encoders=1, tokens=7, first=0, **options):
    size = instances * world_size(layout, framework)
    through_first = options.pop("through_first", False)
    return encoder_streams(
        shape,
        layout,
        Workload(phase="handoff", **options),
        num_tokens=tokens,
        encoder_ranks=range(1000, 1000 + num_encoders),
        prefill_ranks=range(first, first + size),
        framework=framework,
        prefill_instances=instances,
        through_first=through_first,
    )


@pytest.mark.parametrize(
    ("layout", "framework", "instances"),
    [
        pytest.param(Layout(tp=2), "vllm", 1, id="tp"),
        pytest.param(Layout(tp=2, pp=3), "vllm", 1, id="stages"),
        pytest.param(Layout(tp=2, dp=3), "vllm", 1, id="replicas"),
        pytest.param(Layout(tp=2, pp=2, dp=2), "vllm", 2, id="instances of replicas in stages"),
        pytest.param(Layout(tp=4, dp=2), "sglang", 1, id="attention replicas inside tp"),
        pytest.param(Layout(tp=4, dp=2, pp=2), "sglang", 3, id="the same in stages"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_first_stage_of_each_replica_gets_the_requests_that_it_prefills(layout, framework, instances, batch):
    (stream,) = streams_of(layout, framework, instances=instances, batch=batch, num_encoders=3, first=10)
    groups = process_groups(layout, framework)
    size = world_size(layout, framework)
    heads = [group[0] for group in groups["pp"]]
    first_stage = sorted(10 + instance * size + rank for instance in range(instances) for rank in heads)
    assert stream.groups[0][:3] == (1000, 1001, 1002)
    assert sorted(stream.groups[0][3:]) == first_stage
    received = stream.matrix().sum(axis=0)
    assert received[:3].tolist() == [0, 0, 0]
    assert received[3:].tolist() == [batch * 7 * 5120 * 2] * len(first_stage)


def test_one_copy_for_each_replica_and_a_broadcast_among_its_ranks():
    embeddings, broadcast = streams_of(Layout(tp=4, dp=2, pp=2), "sglang", batch=2, through_first=True)
    replicas = {tuple(sorted(group)) for group in broadcast.groups}
    assert replicas == {(0, 1), (2, 3)}
    assert broadcast.calls_per_step == 2
    assert embeddings.matrix().sum() == 2 * 2 * broadcast.payload_bytes


def test_embeddings_are_activations_and_deepstack_adds_to_them():
    (plain,) = streams_of(Layout(tp=2), kv_dtype="fp8")
    (wide,) = streams_of(Layout(tp=2), dtype="float32")
    (deep,) = streams_of(Layout(tp=2), shape=replace(MAVERICK, num_deepstack=3))
    assert (plain.payload_bytes, wide.payload_bytes) == (2 * 7 * 5120 * 2, 2 * 7 * 5120 * 4)
    assert deep.payload_bytes == 4 * plain.payload_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"shape": load_model("Llama-3.1-8B")}, "Llama-3.1-8B has no encoder", id="no encoder"),
        pytest.param({"tokens": 101, "context": 100}, "from 1 to its 100 tokens: 101", id="more than the prompt"),
        pytest.param({"tokens": 0}, "from 1 to its 4096 tokens: 0", id="none"),
        pytest.param({"framework": "megatron"}, "megatron has no encoder disaggregation", id="engine"),
        pytest.param({"first": 999}, "on both sides", id="an encoder in the pool"),
    ],
)
def test_what_encoders_cannot_do(change, message):
    with pytest.raises(ValueError, match=message):
        streams_of(Layout(tp=2), **change)


def test_ranks_that_do_not_fit_the_layout():
    with pytest.raises(ValueError, match="prefill: tp=2 takes 2 ranks, 3 are given"):
        encoder_streams(
            MAVERICK, Layout(tp=2), Workload(phase="handoff"), num_tokens=1, encoder_ranks=[9],
            prefill_ranks=range(3), framework="vllm",
        )  # fmt: skip
