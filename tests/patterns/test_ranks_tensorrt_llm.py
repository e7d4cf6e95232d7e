"""TensorRT-LLM's process groups: what its docstring lists, and its definition by coordinates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import FRAMEWORKS, Layout, expert_tp, process_groups

PAIRS_8 = [[0, 1], [2, 3], [4, 5], [6, 7]]
FOUR_APART_8 = [[0, 4], [1, 5], [2, 6], [3, 7]]
HALVES_8 = [[0, 1, 2, 3], [4, 5, 6, 7]]

ORACLES = [
    pytest.param(Layout(tp=8, etp=2, ep=4), {"etp": FOUR_APART_8, "ep": HALVES_8}, id="T1"),
    pytest.param(
        Layout(tp=2, cp=2, pp=2),
        {"tp": PAIRS_8, "cp": [[0, 2], [1, 3], [4, 6], [5, 7]], "pp": FOUR_APART_8},
        id="T2",
    ),
    pytest.param(Layout(tp=4, pp=2), {"tp": HALVES_8, "pp": FOUR_APART_8}, id="docstring tp 4 pp 2"),
    pytest.param(Layout(tp=4, cp=2), {"tp": HALVES_8, "cp": FOUR_APART_8}, id="docstring tp 4 cp 2"),
    pytest.param(
        Layout(tp=8, pp=2, ep=4),
        {
            "etp": [*FOUR_APART_8, [8, 12], [9, 13], [10, 14], [11, 15]],
            "ep": [*HALVES_8, [8, 9, 10, 11], [12, 13, 14, 15]],
            "pp": [[rank, rank + 8] for rank in range(8)],
        },
        id="docstring moe_tp 2 moe_ep 4 pp 2",
    ),
    pytest.param(
        Layout(tp=8, moe_cluster=4),
        {"etp": FOUR_APART_8, "moe_cluster": HALVES_8, "ep": [[rank] for rank in range(8)]},
        id="clusters in the place of ep",
    ),
    pytest.param(Layout(tp=4, replicas=2), {"tp": HALVES_8, "etp": HALVES_8}, id="replicas"),
]


@pytest.mark.parametrize(("layout", "expected"), ORACLES)
def test_groups_are_those_of_tensorrt_llm(layout, expected):
    found = process_groups(layout, "tensorrt_llm")
    assert {name: [list(group) for group in found[name]] for name in expected} == expected


@settings(max_examples=50, deadline=None)
@given(
    moe_tp=st.sampled_from([1, 2, 3]),
    ep=st.sampled_from([1, 2, 3, 5]),
    pp=st.sampled_from([1, 2, 3]),
    replicas=st.sampled_from([1, 2]),
)
def test_expert_groups_by_coordinates(moe_tp, ep, pp, replicas):
    layout = Layout(tp=moe_tp * ep, ep=ep, pp=pp, replicas=replicas)
    found = process_groups(layout, "tensorrt_llm")
    blocks = [block * moe_tp * ep for block in range(pp * replicas)]
    assert found["ep"] == tuple(
        tuple(start + place * ep + expert for expert in range(ep)) for start in blocks for place in range(moe_tp)
    )
    assert found["etp"] == tuple(
        tuple(start + place * ep + expert for place in range(moe_tp)) for start in blocks for expert in range(ep)
    )
    assert expert_tp(layout, "tensorrt_llm") == moe_tp


@settings(max_examples=50, deadline=None)
@given(tp=st.sampled_from([1, 2, 3, 5]), cp=st.sampled_from([1, 2, 3]), pp=st.sampled_from([1, 2, 3]))
def test_dense_groups_by_coordinates(tp, cp, pp):
    found = process_groups(Layout(tp=tp, cp=cp, pp=pp), "tensorrt_llm")
    stage = tp * cp
    assert found["tp"] == tuple(tuple(range(start, start + tp)) for start in range(0, stage * pp, tp))
    assert found["pp"] == tuple(tuple(range(rank, stage * pp, stage)) for rank in range(stage))
    assert found["cp"] == tuple(
        tuple(range(block * stage + rank, (block + 1) * stage, tp)) for block in range(pp) for rank in range(tp)
    )


def test_names_of_the_engine_cover_every_kind():
    found = process_groups(Layout(tp=4, moe_cluster=2), "tensorrt_llm")
    assert set(found) == set(FRAMEWORKS["tensorrt_llm"].names)
