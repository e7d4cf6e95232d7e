"""Process groups against what the engines' own code lists."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import FRAMEWORKS, Layout, parse_layout, process_groups, world_size
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.placement import check_model, stage_layers

PAIRS_8 = [[0, 1], [2, 3], [4, 5], [6, 7]]
PAIRS_16 = [[rank, rank + 1] for rank in range(0, 16, 2)]
FOURS_16 = [[rank, rank + 1, rank + 2, rank + 3] for rank in range(0, 16, 4)]

ORACLES = [
    pytest.param(
        "vllm",
        Layout(dp=2, pp=2, tp=2, dcp=2),
        {
            "tp": PAIRS_8,
            "dcp": PAIRS_8,
            "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0, 4], [2, 6], [1, 5], [3, 7]],
            "ep": [[0, 1, 4, 5], [2, 3, 6, 7]],
        },
        id="V1",
    ),
    pytest.param(
        "vllm",
        Layout(dp=2, pp=2, tp=4, dcp=2),
        {
            "dcp": PAIRS_16,
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
            "dp": [[0, 8], [4, 12], [1, 9], [5, 13], [2, 10], [6, 14], [3, 11], [7, 15]],
            "ep": [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
        },
        id="V2",
    ),
    pytest.param(
        "vllm",
        Layout(dp=4, tp=4, ep=16),
        {"dp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]], "ep": [list(range(16))]},
        id="V3",
    ),
    pytest.param(
        "vllm",
        Layout(cp=2, tp=4, dcp=8),
        {"dcp": [[0, 4, 1, 5, 2, 6, 3, 7]], "cp": [[0, 4], [1, 5], [2, 6], [3, 7]], "ep": [list(range(8))]},
        id="V4",
    ),
    pytest.param("vllm", Layout(tp=2, pp=4), {"tp": PAIRS_8, "pp": [[0, 2, 4, 6], [1, 3, 5, 7]]}, id="V6"),
    pytest.param(
        "megatron",
        Layout(tp=2, cp=2, pp=2, dp=2, ep=4, etp=1),
        {
            "tp": PAIRS_16,
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
            "dp-cp": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
            "tp-cp": FOURS_16,
            "pp": [[rank, rank + 8] for rank in range(8)],
            "ep": FOURS_16,
            "edp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        },
        id="M1",
    ),
    pytest.param(
        "megatron",
        Layout(tp=4, pp=2, dp=2, ep=4, etp=2),
        {
            "tp": FOURS_16,
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
            "pp": [[rank, rank + 8] for rank in range(8)],
            "etp": PAIRS_16,
            "ep": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
            "etp-ep": [list(range(8)), list(range(8, 16))],
            "edp": [[rank] for rank in range(16)],
        },
        id="M2",
    ),
    pytest.param(
        "megatron",
        Layout(tp=2, dp=4, ep=8, etp=1),
        {"dp": [[0, 2, 4, 6], [1, 3, 5, 7]], "ep": [list(range(8))], "edp": [[rank] for rank in range(8)]},
        id="M3",
    ),
    pytest.param(
        "megatron",
        Layout(tp=2, pp=4, dp=2),
        {
            "dp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            "pp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
        },
        id="M5",
    ),
    pytest.param(
        "sglang",
        Layout(tp=8, dp=4, ep=4),
        {"attn_tp": PAIRS_8, "ep": [[0, 2, 4, 6], [1, 3, 5, 7]], "etp": PAIRS_8, "tp": [list(range(8))]},
        id="S2",
    ),
    pytest.param(
        "sglang",
        Layout(tp=8, cp=2, moe_dp=2, ep=4),
        {
            "cp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "moe_dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "tp": [list(range(8))],
        },
        id="S3",
    ),
    pytest.param(
        "tensorrt_llm",
        Layout(tp=8, etp=2, ep=4),
        {"etp": [[0, 4], [1, 5], [2, 6], [3, 7]], "ep": [[0, 1, 2, 3], [4, 5, 6, 7]]},
        id="T1",
    ),
    pytest.param(
        "tensorrt_llm",
        Layout(tp=2, cp=2, pp=2),
        {
            "tp": PAIRS_8,
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        },
        id="T2",
    ),
]


@pytest.mark.parametrize(("framework", "layout", "expected"), ORACLES)
def test_groups_are_those_of_the_engine(framework, layout, expected):
    found = process_groups(layout, framework)
    assert {name: [list(group) for group in found[name]] for name in expected} == expected


def reference_grid(sizes: dict[str, int], order: list[str], wanted: set[str]) -> list[list[int]]:
    """Enumerate by hand: strides from the order, leftmost fastest, in groups and among groups."""
    strides, stride = {}, 1
    for name in order:
        strides[name], stride = stride, stride * sizes[name]

    def offsets(names: list[str]) -> list[int]:
        spans = [range(sizes[name]) for name in reversed(names)]
        return [
            sum(place * strides[name] for place, name in zip(places, reversed(names), strict=True))
            for places in itertools.product(*spans)
        ]

    inside, outside = [name for name in order if name in wanted], [name for name in order if name not in wanted]
    return [[base + offset for offset in offsets(inside)] for base in offsets(outside)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.fixed_dictionaries({name: st.sampled_from([1, 2, 3, 5]) for name in ("tp", "cp", "dp", "pp")}),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
)
def test_megatron_groups_follow_any_order(sizes, order):
    layout = Layout(**sizes, etp=sizes["tp"] * sizes["cp"])
    if order[-1] != "pp" and sizes["cp"] > 1:
        return
    found = process_groups(layout, "megatron", order="-".join(order))
    sizes = {**sizes, "ep": 1}
    for name in ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp"):
        assert [list(group) for group in found[name]] == reference_grid(sizes, order, set(name.split("-")))


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
@settings(max_examples=40, deadline=None)
@given(degrees=st.fixed_dictionaries({name: st.sampled_from([1, 2, 3, 4, 5]) for name in ("tp", "cp", "pp", "dp")}))
def test_every_kind_of_group_partitions_the_ranks(framework, degrees):
    layout = Layout(**degrees)
    try:
        found = process_groups(layout, framework)
    except ValueError:
        return
    for groups in found.values():
        assert sorted(rank for group in groups for rank in group) == list(range(world_size(layout, framework)))
        assert len({len(group) for group in groups}) == 1


@pytest.mark.parametrize(
    ("framework", "layout", "message"),
    [
        pytest.param("vllm", Layout(tp=3, dcp=2), "tp_size=3 must be divisible by dcp_size=2", id="vllm dcp"),
        pytest.param("vllm", Layout(tp=4, cp=2, dcp=4), "prefill context parallelism allows", id="vllm pcp dcp"),
        pytest.param("vllm", Layout(cp=2, dp=2), "does not support data parallelism yet", id="vllm pcp dp"),
        pytest.param("vllm", Layout(cp=2, pp=2), "does not support pipeline", id="vllm pcp pp"),
        pytest.param("vllm", Layout(tp=8, dp=2, ep=8), "dp x cp x tp = 16", id="vllm ep"),
        pytest.param("megatron", Layout(tp=2, dp=3, ep=4), "is not divisible by expert_tensor", id="megatron ep"),
        pytest.param("sglang", Layout(tp=8, dp=3), r"dp_size \* attn_cp_size", id="sglang dp"),
        pytest.param("sglang", Layout(tp=8, ep=4, moe_dp=4), "less than or equal to tp_size", id="sglang moe_dp"),
        pytest.param("sglang", Layout(tp=8, ep=2, moe_dp=2, cp=2), "must be equal to tp_size", id="sglang ep moe_dp"),
        pytest.param("tensorrt_llm", Layout(tp=8, ep=4, etp=4), "moe_tp_size", id="trt moe"),
        pytest.param("tensorrt_llm", Layout(tp=8, cp=2, ep=8), "CP does not support MoE", id="trt cp ep"),
        pytest.param("elsewhere", Layout(), "unknown framework: 'elsewhere'; allowed: vllm", id="framework"),
    ],
)
def test_what_an_engine_refuses_is_refused_with_its_rule(framework, layout, message):
    with pytest.raises(ValueError, match=message):
        process_groups(layout, framework)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        pytest.param("tp-dp", r"the size of \(pp\) is \(2\)", id="missing"),
        pytest.param("tp-xx-pp", "order must name", id="unknown"),
        pytest.param("tp-tp-dp-pp", "order must name", id="twice"),
    ],
)
def test_megatron_order_must_name_what_is_used(order, message):
    with pytest.raises(ValueError, match=message):
        process_groups(Layout(tp=2, dp=2, pp=2), "megatron", order=order)


def test_megatron_grids_must_agree_on_the_pipeline():
    layout = Layout(tp=2, dp=4, pp=2, ep=4, etp=1)
    with pytest.raises(ValueError, match="data parallel size of the attention and moe layers must be the same"):
        process_groups(layout, "megatron", order="tp-cp-ep-pp-dp")


@pytest.mark.parametrize(
    ("model", "layout", "framework", "message"),
    [
        pytest.param("Llama-3.1-8B", Layout(tp=3), "vllm", "attention heads", id="heads"),
        pytest.param("Qwen3-8B", Layout(tp=16, dcp=4), "vllm", "exceeds", id="gqa dcp"),
        pytest.param("Llama-3.1-8B", Layout(tp=8, dcp=2), "vllm", "GQA/MQA", id="gqa dcp tp"),
        pytest.param("Llama-3.1-8B", Layout(cp=2), "vllm", "MLA models only", id="pcp needs mla"),
        pytest.param("Llama-3.1-8B", Layout(dp=2, ep=2), "vllm", "greater than 0 when expert", id="dense ep"),
        pytest.param("Llama-3.1-8B", Layout(pp=33), "vllm", "pipeline stages", id="stages"),
        pytest.param("DeepSeek-V3", Layout(pp=2), "megatron", "divisible by the pipeline", id="megatron stages"),
        pytest.param("DeepSeek-V3", Layout(dp=512, ep=512), "vllm", "larger than the number of experts", id="experts"),
        pytest.param("Qwen3-30B-A3B", Layout(dp=3, ep=3), "megatron", "must be divisible by expert", id="uneven"),
    ],
)
def test_layouts_that_cannot_run_a_model(model, layout, framework, message):
    with pytest.raises(ValueError, match=message):
        check_model(load_model(model), layout, framework)


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=-2", "tp=x", "tp=2,tp=4", "foo=2", "", "tp=2,,dp=2", "tp=²"])
def test_degrees_that_are_none(text):
    with pytest.raises(ValueError, match=r"degree|whole number|twice"):
        parse_layout(text)


@pytest.mark.parametrize("text", ["tp=3", "tp=8,dp=4", "tp=32"])
def test_degrees_must_multiply_to_the_world(text):
    with pytest.raises(ValueError, match="16"):
        parse_layout(text, world=16)


def test_layout_reads_back_from_its_text():
    layout = Layout(tp=8, dp=2, ep=16)
    assert str(layout) == "tp=8,dp=2,ep=16"
    assert parse_layout(str(layout)) == layout
    assert parse_layout("tp=4", world=16).dp == 4


@pytest.mark.parametrize("framework", ["vllm", "sglang", "tensorrt_llm"])
@pytest.mark.parametrize(("num_layers", "pp"), [(61, 2), (61, 4), (7, 7), (80, 3), (5, 3)])
def test_stages_hold_each_layer_once(framework, num_layers, pp):
    stages = stage_layers(num_layers, Layout(pp=pp), framework)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = np.array([len(stage) for stage in stages])
    assert sizes.max() - sizes.min() <= 1


def test_groups_of_a_large_world():
    found = process_groups(Layout(tp=8, pp=16, dp=1024, ep=64, etp=1), "megatron")
    assert sum(map(len, found["ep"])) == 131_072
