"""SGLang's process groups: what its own code and docstring list, and its definition by coordinates."""

from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import FRAMEWORKS, Layout, process_groups

PAIRS_8 = [[0, 1], [2, 3], [4, 5], [6, 7]]
HALVES_8 = [[0, 1, 2, 3], [4, 5, 6, 7]]
FOUR_APART = [[0, 4], [1, 5], [2, 6], [3, 7]]

ORACLES = [
    pytest.param(Layout(tp=2, pp=4), {"tp": PAIRS_8, "pp": [[0, 2, 4, 6], [1, 3, 5, 7]]}, id="S1: docstring"),
    pytest.param(
        Layout(tp=8, dp=4, ep=4),
        {"attn_tp": PAIRS_8, "ep": [[0, 2, 4, 6], [1, 3, 5, 7]], "etp": PAIRS_8, "tp": [list(range(8))]},
        id="S2",
    ),
    # The docstring of S3 calls the groups of four tensor groups; the code's tensor group is all of tp.
    pytest.param(
        Layout(tp=8, cp=2, moe_dp=2, ep=4),
        {
            "cp": FOUR_APART,
            "moe_dp": FOUR_APART,
            "ep": HALVES_8,
            "etp": [[rank] for rank in range(8)],
            "attn_tp": HALVES_8,
            "tp": [list(range(8))],
        },
        id="S3",
    ),
    pytest.param(
        Layout(tp=8, cp=2, ep=8),
        {"cp": FOUR_APART, "moe_dp": FOUR_APART, "ep": [list(range(8))]},
        id="cp above moe_dp: its groups stand in",
    ),
    pytest.param(Layout(tp=4, pp=2, dcp=2), {"dcp": PAIRS_8, "pp": FOUR_APART, "tp": HALVES_8}, id="dcp"),
    pytest.param(
        Layout(tp=4, dp=2, replicas=2),
        {"tp": HALVES_8, "attn_tp": PAIRS_8, "pp": [[rank] for rank in range(8)]},
        id="servers behind a router",
    ),
]


@pytest.mark.parametrize(("layout", "expected"), ORACLES)
def test_groups_are_those_of_sglang(layout, expected):
    found = process_groups(layout, "sglang")
    assert {name: [list(group) for group in found[name]] for name in expected} == expected


def collect(sizes: dict[str, int], names: tuple[str, ...], outside: tuple[str, ...], inside: tuple[str, ...]):
    """Write every rank by the coordinates ``names``, the last fastest; list groups by ``outside``, slowest first."""
    groups = []
    for outer in product(*(range(sizes[name]) for name in outside)):
        members = []
        for inner in product(*(range(sizes[name]) for name in inside)):
            place = dict(zip(outside + inside, outer + inner, strict=True))
            rank = 0
            for name in names:
                rank = rank * sizes[name] + place[name]
            members.append(rank)
        groups.append(tuple(members))
    return tuple(groups)


DEGREE = st.sampled_from([1, 2, 3, 5])


@settings(max_examples=60, deadline=None)
@given(attention=st.tuples(DEGREE, DEGREE, DEGREE), ep=st.sampled_from([1, 2, 3, 4, 6]), pp=DEGREE)
def test_groups_by_coordinates(attention, ep, pp):
    dp, cp, attn_tp = attention
    tp = dp * cp * attn_tp
    assume(tp % ep == 0)
    found = process_groups(Layout(tp=tp, dp=dp, cp=cp, ep=ep, pp=pp), "sglang")
    sizes = {"pp": pp, "dp": dp, "cp": cp, "atp": attn_tp, "ep": ep, "mtp": tp // ep, "tp": tp}
    heads, experts = ("pp", "dp", "cp", "atp"), ("pp", "ep", "mtp")
    assert found["attn_tp"] == collect(sizes, heads, ("pp", "dp", "cp"), ("atp",))
    assert found["cp"] == collect(sizes, heads, ("pp", "dp", "atp"), ("cp",))
    assert found["ep"] == collect(sizes, experts, ("pp", "mtp"), ("ep",))
    assert found["etp"] == collect(sizes, experts, ("pp", "ep"), ("mtp",))
    assert found["tp"] == collect(sizes, ("pp", "tp"), ("pp",), ("tp",))
    assert found["pp"] == collect(sizes, ("pp", "tp"), ("tp",), ("pp",))
    assert found["moe_dp"] == (found["cp"] if cp > 1 else tuple((rank,) for rank in range(tp * pp)))


@pytest.mark.parametrize(("moe_dp", "ep"), [(2, 4), (2, 1), (4, 2), (8, 1), (3, 5)])
def test_expert_replicas_are_the_slowest_part_of_tp(moe_dp, ep):
    tp = 15 if moe_dp == 3 else 8
    found = process_groups(Layout(tp=tp, cp=moe_dp, moe_dp=moe_dp, ep=ep), "sglang")
    sizes = {"mdp": moe_dp, "ep": ep, "mtp": tp // (moe_dp * ep)}
    names = ("mdp", "ep", "mtp")
    assert found["moe_dp"] == collect(sizes, names, ("ep", "mtp"), ("mdp",))
    assert found["ep"] == collect(sizes, names, ("mdp", "mtp"), ("ep",))
    assert found["etp"] == collect(sizes, names, ("mdp", "ep"), ("mtp",))


def test_experts_nest_the_other_way_round_than_in_tensorrt_llm():
    ours = process_groups(Layout(tp=8, ep=4), "sglang")
    theirs = process_groups(Layout(tp=8, ep=4), "tensorrt_llm")
    assert ours["ep"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert ours["etp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert theirs["ep"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert theirs["etp"] == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_names_of_the_engine_cover_every_kind():
    found = process_groups(Layout(tp=4, dcp=2), "sglang")
    assert set(found) == set(FRAMEWORKS["sglang"].names)
