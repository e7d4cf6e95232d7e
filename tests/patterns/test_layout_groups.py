"""Layouts: how they are read, how many ranks they take, and what holds for the groups of every engine."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.layout import (
    FRAMEWORKS,
    MAX_RANKS,
    Layout,
    check_layout,
    parse_layout,
    process_groups,
    world_size,
)
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.workload import Workload

SIZES = {
    "tp": [1, 2, 3, 4, 6],
    "cp": [1, 2, 3],
    "pp": [1, 2, 5],
    "dp": [1, 2, 3],
    "ep": [1, 2, 6],
    "replicas": [1, 2],
}


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
@settings(max_examples=60, deadline=None)
@given(degrees=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SIZES.items()}))
def test_every_kind_of_group_partitions_the_ranks(framework, degrees):
    layout = Layout(**degrees)
    try:
        found = process_groups(layout, framework)
    except ValueError:
        with pytest.raises(ValueError, match=FRAMEWORKS[framework].title):
            check_layout(layout, framework)
        return
    for groups in found.values():
        assert sorted(rank for group in groups for rank in group) == list(range(world_size(layout, framework)))
        assert len({len(group) for group in groups}) == 1


@pytest.mark.parametrize(
    ("framework", "layout"),
    [
        ("vllm", Layout(tp=2, pp=3, dp=2)),
        ("megatron", Layout(tp=2, cp=3, dp=2, ep=4)),
        ("sglang", Layout(tp=6, dp=3, ep=2, pp=2)),
        ("tensorrt_llm", Layout(tp=6, ep=3, pp=2)),
    ],
)
def test_replicas_are_the_same_world_again(framework, layout):
    one = process_groups(layout, framework)
    three = process_groups(replace(layout, replicas=3), framework)
    size = world_size(layout, framework)
    for name, groups in one.items():
        assert three[name] == tuple(
            tuple(rank + size * replica for rank in group) for replica in range(3) for group in groups
        )


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_asking_twice_gives_what_may_be_changed(framework):
    layout = Layout(tp=4)
    found = process_groups(layout, framework)
    found.clear()
    assert process_groups(layout, framework)["tp"] == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    "text", ["tp", "tp=0", "tp=-2", "tp=x", "tp=2,tp=4", "foo=2", "", "tp=2,,dp=2", "tp=²", "tp=00"]
)
def test_degrees_that_are_none(text):
    with pytest.raises(ValueError, match=r"degree|whole number|twice"):
        parse_layout(text)


@pytest.mark.parametrize("degree", [0, -1, True, 2.0, "2", None])
def test_degrees_of_a_wrong_kind(degree):
    with pytest.raises(ValueError, match="tp must be a whole number from 1"):
        Layout(tp=degree)


@pytest.mark.parametrize("text", ["tp=3", "tp=8,dp=4", "tp=32"])
def test_degrees_must_multiply_to_the_world(text):
    with pytest.raises(ValueError, match="16"):
        parse_layout(text, world=16)


@pytest.mark.parametrize(
    ("text", "world", "framework", "message"),
    [
        pytest.param("tp=3", 16, "megatron", r"world_size \(16\) is not divisible by", id="megatron divisible"),
        pytest.param("tp=2,cp=2,dp=2", 16, "megatron", r"times 4 \(tp 2 x pp 1 x cp 2\)", id="megatron dp"),
        pytest.param(
            "tp=4,pp=2",
            16,
            "sglang",
            r"world_size \(16\) is not equal to tensor_model_parallel_size \(4\) x pipeline_model_parallel_size \(2\)",
            id="sglang",
        ),
        pytest.param(
            "tp=4,cp=2",
            16,
            "tensorrt_llm",
            r"world_size must equal to tp_size \* pp_size \* cp_size, but got 16 != 4 \* 1 \* 2",
            id="tensorrt_llm",
        ),
        pytest.param("tp=4,dp=2,replicas=3", 16, "vllm", "is 24 ranks in vllm", id="replicas count"),
    ],
)
def test_worlds_that_do_not_fit_are_refused_in_the_engine_s_words(text, world, framework, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(text, world=world, framework=framework)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        Layout,
        **dict.fromkeys(("tp", "cp", "pp", "dp", "ep", "dcp", "moe_dp", "moe_cluster", "replicas"), st.integers(1, 9)),
        etp=st.none() | st.integers(1, 3),
    )
)
def test_layout_reads_back_from_its_text(layout):
    assert parse_layout(str(layout)) == layout


def test_layout_is_written_without_what_goes_without_saying():
    assert str(Layout(tp=8, dp=2, ep=16)) == "tp=8,dp=2,ep=16"
    assert str(Layout(tp=8, moe_cluster=2, replicas=3)) == "tp=8,moe_cluster=2,replicas=3"
    assert str(Layout(tp=4, etp=1)) == "tp=4,etp=1"
    assert str(Layout()) == "tp=1"


def test_dp_fills_the_world():
    assert parse_layout("tp=4", world=16).dp == 4
    assert parse_layout("tp=4,replicas=2", world=16).dp == 2
    assert parse_layout("tp=4,dp=4", world=16) == Layout(tp=4, dp=4)


@pytest.mark.parametrize(
    "text",
    ["tp=100000000000000", "tp=1048577", "pp=1048576,tp=1048576", "tp=2000,pp=2000,cp=8", "tp=" + "9" * 5000],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_more_ranks_than_any_machine_has_are_refused(text, framework):
    with pytest.raises(ValueError, match=f"at most {MAX_RANKS}") as caught:
        process_groups(parse_layout(text), framework)
    assert len(str(caught.value)) < 200


def test_a_world_of_more_ranks_than_any_machine_has_is_refused():
    with pytest.raises(ValueError, match="world must be a whole number from 1 to 1048576"):
        parse_layout("tp=8", world=10**14)


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_groups_of_131072_ranks(framework):
    layout = Layout(tp=8192, pp=16) if framework in ("sglang", "tensorrt_llm") else Layout(tp=8, pp=16, dp=1024)
    found = process_groups(layout, framework)
    assert {sum(map(len, groups)) for groups in found.values()} == {131_072}
    assert found["pp"][0][1] - found["pp"][0][0] in (8, 8192)


def test_ranks_of_all_kinds_are_the_same_integers():
    found = process_groups(Layout(tp=8, dp=1024))
    assert found["tp"][1000][0] is found["ep"][0][8000]


def test_replicas_hand_over_as_many_pools_do():
    shape, workload = load_model("Llama-3.1-8B"), Workload(phase="handoff", batch=2, context=64)
    one = handoff(
        shape, Layout(tp=2), Layout(tp=2), workload, prefill_ranks=[0, 1], decode_ranks=[2, 3], framework="vllm"
    )
    two = handoff(
        shape,
        Layout(tp=2, replicas=2),
        Layout(tp=2, replicas=2),
        workload,
        prefill_ranks=range(4),
        decode_ranks=range(4, 8),
        framework="vllm",
    )
    block, matrix = np.array(one.matrix_bytes), np.array(two.matrix_bytes)
    assert np.array_equal(matrix, np.kron(np.eye(2, dtype=np.int64), block))
    assert block.any()


def test_replicas_put_the_same_streams_on_more_groups():
    shape, workload = load_model("Llama-3.1-8B"), Workload(phase="decode", batch=4)
    one = phase_streams(shape, Layout(tp=2, pp=2), workload, "vllm")
    two = phase_streams(shape, Layout(tp=2, pp=2, replicas=2), workload, "vllm")
    assert [(stream.name, stream.payload_bytes, stream.calls_per_step) for stream in one] == [
        (stream.name, stream.payload_bytes, stream.calls_per_step) for stream in two
    ]
    for ours, theirs in zip(one, two, strict=True):
        assert len(theirs.groups) == 2 * len(ours.groups)
        assert theirs.groups[: len(ours.groups)] == ours.groups
