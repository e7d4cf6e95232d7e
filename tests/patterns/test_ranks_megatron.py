"""Megatron-Core's process groups: what its own code lists, any order string, and strides worked out by hand."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import FRAMEWORKS, Layout, expert_tp, process_groups
from crosstraffic.patterns.ranks_megatron import KINDS

PAIRS_16 = [[rank, rank + 1] for rank in range(0, 16, 2)]
FOURS_16 = [[rank, rank + 1, rank + 2, rank + 3] for rank in range(0, 16, 4)]
FOUR_APART = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]

ORACLES = [
    pytest.param(
        Layout(tp=2, cp=2, pp=2, dp=2, ep=4, etp=1),
        {
            "tp": PAIRS_16,
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            "dp": FOUR_APART,
            "dp-cp": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
            "tp-cp": FOURS_16,
            "tp-dp-cp": [list(range(8)), list(range(8, 16))],
            "tp-pp": [[first, first + 1, first + 8, first + 9] for first in (0, 2, 4, 6)],
            "pp": [[rank, rank + 8] for rank in range(8)],
            "ep": FOURS_16,
            "etp": [[rank] for rank in range(16)],
            "etp-ep": FOURS_16,
            "etp-ep-pp": [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
            "edp": FOUR_APART,
        },
        id="M1",
    ),
    pytest.param(
        Layout(tp=4, pp=2, dp=2, ep=4, etp=2),
        {
            "tp": FOURS_16,
            "dp": FOUR_APART,
            "pp": [[rank, rank + 8] for rank in range(8)],
            "etp": PAIRS_16,
            "ep": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
            "etp-ep": [list(range(8)), list(range(8, 16))],
            "edp": [[rank] for rank in range(16)],
        },
        id="M2",
    ),
    pytest.param(
        Layout(tp=2, dp=4, ep=8, etp=1),
        {"dp": [[0, 2, 4, 6], [1, 3, 5, 7]], "ep": [list(range(8))], "edp": [[rank] for rank in range(8)]},
        id="M3",
    ),
    pytest.param(
        Layout(tp=2, pp=4, dp=2),
        {
            "dp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            "pp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
            "tp": PAIRS_16,
        },
        id="M5",
    ),
]


@pytest.mark.parametrize(("layout", "expected"), ORACLES)
def test_groups_are_those_of_megatron(layout, expected):
    found = process_groups(layout, "megatron")
    assert {name: [list(group) for group in found[name]] for name in expected} == expected


@pytest.mark.parametrize("cp", [2, 3])
def test_m4_context_ranks_are_folded_into_the_grid_of_experts(cp):
    found = process_groups(Layout(tp=2, cp=cp, dp=2, pp=2, ep=2 * cp, etp=1), "megatron")
    assert found["ep"] == found["tp-cp"]
    experts_of = {rank: set(group) for group in found["ep"] for rank in group}
    assert all(set(context) <= experts_of[context[0]] for context in found["cp"])


def test_default_of_expert_tensor_parallelism():
    assert expert_tp(Layout(tp=4, dp=2, ep=8), "megatron") == 1
    assert expert_tp(Layout(tp=4, dp=2), "megatron") == 4
    assert expert_tp(Layout(tp=4, dp=2, ep=2, etp=4), "megatron") == 4
    assert process_groups(Layout(tp=4, dp=2, ep=2, etp=4), "megatron")["ep"] == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_order_with_the_pipeline_in_the_middle():
    found = process_groups(Layout(tp=2, pp=2, dp=2), "megatron", order="tp-pp-dp")
    assert found["dp"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["pp"] == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_order_with_context_first():
    found = process_groups(Layout(tp=2, cp=2, dp=2), "megatron", order="CP-TP-DP")
    assert found["cp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found["tp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert found["tp-cp"] == ((0, 1, 2, 3), (4, 5, 6, 7))


def by_strides(sizes: dict[str, int], order: list[str], wanted: set[str]) -> list[list[int]]:
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


DEGREE = st.sampled_from([1, 2, 3, 5])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.fixed_dictionaries(dict.fromkeys(("tp", "cp", "dp", "pp"), DEGREE)),
    cuts=st.tuples(DEGREE, DEGREE),
    replicas=st.sampled_from([1, 2]),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
)
def test_groups_of_both_grids_follow_any_order(sizes, cuts, replicas, order):
    ep, etp = cuts
    everyone = sizes["tp"] * sizes["cp"] * sizes["dp"]
    assume(everyone % (ep * etp) == 0)
    dense = {**sizes, "ep": 1, "replicas": replicas}
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": everyone // (ep * etp), "pp": sizes["pp"], "replicas": replicas}
    grids, slowest_last = {"dense": dense, "expert": expert}, [*order, "replicas"]
    same_pipeline = by_strides(dense, slowest_last, {"pp"}) == by_strides(expert, slowest_last, {"pp"})
    layout = Layout(**sizes, ep=ep, etp=etp, replicas=replicas)
    if not same_pipeline or (order[-1] != "pp" and sizes["pp"] > 1 and dense["dp"] != expert["dp"]):
        with pytest.raises(ValueError, match=r"must be the same|expected to be the same"):
            process_groups(layout, "megatron", order="-".join(order))
        return
    found = process_groups(layout, "megatron", order="-".join(order))
    for name, grid, wanted, _ in KINDS:
        listed = by_strides(grids[grid], slowest_last, set(wanted.split("-")))
        assert [list(group) for group in found[name]] == listed, name


@pytest.mark.parametrize(
    ("order", "message"),
    [
        pytest.param(
            "tp-dp", r"the size of \(pp\) is \(2\), but you haven't specified the order \(tp-dp\)", id="missing"
        ),
        pytest.param("tp-xx-pp", "order must name", id="unknown"),
        pytest.param("tp-tp-dp-pp", "order must name", id="twice"),
        pytest.param("", "order must name", id="empty"),
    ],
)
def test_order_must_name_what_is_used(order, message):
    with pytest.raises(ValueError, match=message):
        process_groups(Layout(tp=2, dp=2, pp=2), "megatron", order=order)


def test_names_of_the_engine_cover_every_kind():
    found = process_groups(Layout(tp=2), "megatron")
    assert set(found) == set(FRAMEWORKS["megatron"].names)
