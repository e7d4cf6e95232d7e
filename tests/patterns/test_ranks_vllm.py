"""vLLM's process groups: what its own code lists, and its definition by coordinates."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import FRAMEWORKS, Layout, process_groups, world_size

PAIRS_8 = [[0, 1], [2, 3], [4, 5], [6, 7]]
PAIRS_16 = [[rank, rank + 1] for rank in range(0, 16, 2)]

ORACLES = [
    pytest.param(
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
        Layout(dp=4, tp=4, ep=16),
        {"dp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]], "ep": [list(range(16))]},
        id="V3",
    ),
    pytest.param(
        Layout(cp=2, tp=4, dcp=8),
        {"dcp": [[0, 4, 1, 5, 2, 6, 3, 7]], "cp": [[0, 4], [1, 5], [2, 6], [3, 7]], "ep": [list(range(8))]},
        id="V4",
    ),
    pytest.param(
        Layout(cp=2, tp=4, dcp=2),
        {
            "dcp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "cp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "tp": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
        id="V5: dcp spans the axis of cp",
    ),
    pytest.param(Layout(tp=2, pp=4), {"tp": PAIRS_8, "pp": [[0, 2, 4, 6], [1, 3, 5, 7]]}, id="V6"),
    pytest.param(
        Layout(tp=2, pp=2, replicas=2),
        {"tp": PAIRS_8, "pp": [[0, 2], [1, 3], [4, 6], [5, 7]], "ep": PAIRS_8, "dp": [[rank] for rank in (0, 2, 1, 3)]},
        id="replicas are worlds behind each other",
    ),
]


@pytest.mark.parametrize(("layout", "expected"), ORACLES)
def test_groups_are_those_of_vllm(layout, expected):
    found = process_groups(layout)
    if layout.replicas > 1:
        expected = {**expected, "dp": [[rank + 4 * (index // 4)] for index, (rank,) in enumerate(2 * expected["dp"])]}
    assert {name: [list(group) for group in found[name]] for name in expected} == expected


# The slowest axis of the listing comes first, the axes within a group last: what the transposes of the engine give.
AXES = {
    "tp": (("replica", "dp", "pp", "cp"), ("tp",)),
    "cp": (("replica", "dp", "pp", "tp"), ("cp",)),
    "pp": (("replica", "dp", "tp", "cp"), ("pp",)),
    "dp": (("replica", "tp", "pp", "cp"), ("dp",)),
    "ep": (("replica", "pp"), ("dp", "cp", "tp")),
}


def by_coordinates(layout: Layout, outside: tuple[str, ...], inside: tuple[str, ...]) -> list[list[int]]:
    """Write every rank as replica, dp, pp, cp, tp, the last fastest, and collect what differs inside only."""
    sizes = {"replica": layout.replicas, "dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}

    def rank(place: dict[str, int]) -> int:
        found = 0
        for name, size in sizes.items():
            found = found * size + place[name]
        return found

    def places(names: tuple[str, ...]) -> list[dict[str, int]]:
        spans = [range(sizes[name]) for name in names]
        return [dict(zip(names, corner, strict=True)) for corner in product(*spans)]

    return [[rank({**outer, **inner}) for inner in places(inside)] for outer in places(outside)]


DEGREE = st.sampled_from([1, 2, 3, 4, 5])


@settings(max_examples=50, deadline=None)
@given(tp=DEGREE, pp=DEGREE, dp=DEGREE, replicas=st.sampled_from([1, 2, 3]))
def test_groups_by_coordinates(tp, pp, dp, replicas):
    layout = Layout(tp=tp, pp=pp, dp=dp, replicas=replicas)
    found = process_groups(layout)
    for name, (outside, inside) in AXES.items():
        assert [list(group) for group in found[name]] == by_coordinates(layout, outside, inside), name


@settings(max_examples=50, deadline=None)
@given(tp=DEGREE, cp=st.sampled_from([2, 3, 5]), kind=st.sampled_from(["cp", "whole"]))
def test_decode_context_groups_go_along_cp_first(tp, cp, kind):
    layout = Layout(tp=tp, cp=cp, dcp=cp if kind == "cp" else tp * cp)
    found = process_groups(layout)
    walk = [place * tp + column for column in range(tp) for place in range(cp)]
    assert [rank for group in found["dcp"] for rank in group] == walk
    assert {len(group) for group in found["dcp"]} == {layout.dcp}
    for name, (outside, inside) in AXES.items():
        assert [list(group) for group in found[name]] == by_coordinates(layout, outside, inside), name


@pytest.mark.parametrize(("tp", "dcp"), [(4, 2), (6, 3), (8, 8), (9, 3)])
def test_decode_context_groups_cut_tp_groups(tp, dcp):
    found = process_groups(Layout(tp=tp, dp=2, dcp=dcp))
    assert [rank for group in found["dcp"] for rank in group] == list(range(2 * tp))
    assert all(any(set(group) <= set(whole) for whole in found["tp"]) for group in found["dcp"])
    assert world_size(Layout(tp=tp, dp=2, dcp=dcp)) == 2 * tp


def test_expert_balancing_has_a_communicator_of_its_own_over_the_ranks_of_ep():
    assert FRAMEWORKS["vllm"].same_ranks == {"eplb": "ep"}
    assert "eplb" not in process_groups(Layout(tp=2, dp=2, ep=4))
