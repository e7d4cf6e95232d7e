"""Footprints against closed forms and against the traffic count of patterns."""

import pytest

from crosstraffic.costmodel.links import family_of, footprint, shape_of
from crosstraffic.patterns.matrix import Chain, Explicit, Ring
from crosstraffic.patterns.wire import traffic

GROUPS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3, 4), (0, 2, 4), (0, 1, 2, 3, 4, 5, 6)]
OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("nodes", [(0,) * 7, (0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_loads_are_the_bytes_that_patterns_count(lab, op, group, nodes):
    one = lab.stream("x", op, (group,))
    size = 4 * 60060 * len(group)
    counted = traffic(one, nodes, size)
    load = {key: value * size for key, value in footprint(one, nodes, 0).load.items()}
    for kind, expected in (
        ("port_egress", counted.egress_bytes),
        ("port_ingress", counted.ingress_bytes),
        ("nic_egress", counted.node_egress_bytes),
        ("nic_ingress", counted.node_ingress_bytes),
    ):
        found = {index: value for (name, index), value in load.items() if name == kind}
        assert found == pytest.approx(dict(expected), rel=1e-6)
    by_tier = {
        tier: sum(value for (name, _), value in load.items() if name == f"{tier}_egress") for tier in ("intra", "inter")
    }
    assert by_tier["intra"] == pytest.approx(counted.intra_node_bytes, rel=1e-6)
    assert by_tier["inter"] == pytest.approx(counted.inter_node_bytes, rel=1e-6)
    host = sum(value for (name, _), value in load.items() if name == "host_bytes")
    assert host == pytest.approx(counted.intra_node_bytes + 2 * counted.inter_node_bytes, rel=1e-6)


def test_sent_equals_received(lab):
    matrix = ((0, 5, 7), (1, 0, 0), (300, 2, 9))
    part = footprint(lab.stream("x", "all_to_all_v", ((0, 1, 2),), 311, Explicit(bytes=(matrix,))), (0, 1, 1), 0)
    totals = {}
    for (kind, _), value in part.load.items():
        totals[kind] = totals.get(kind, 0.0) + value
    for link in ("port", "intra", "inter", "nic"):
        assert totals[f"{link}_egress"] == pytest.approx(totals[f"{link}_ingress"])
    assert totals["port_egress"] * 311 == pytest.approx(315)  # the diagonal stays home


def test_groups_of_a_stream_add_up_on_a_shared_card(lab):
    one = lab.stream("x", "send_recv", ((0, 2), (1, 3)), 100, Ring(num_bytes=100))
    shape = shape_of(one, (0, 0, 1, 1))
    assert shape.loads == pytest.approx((1.0, 0.0, 1.0, 2.0, 4.0))
    assert shape.steps == ((0, 1),)


def test_one_edge_of_a_chain_loads_its_two_ranks_only(lab):
    one = lab.stream("x", "send_recv", ((4, 5, 6, 7),), 100, Chain(num_bytes=100))
    part = footprint(one, (0,) * 6 + (1,) * 2, 0, (0, 1))
    assert part.ranks == (4, 5)
    assert part.steps == (1, 0)
    assert {rank for (kind, rank) in part.load if kind.startswith("port")} == {4, 5}


def test_idle_ranks_of_a_transfer_are_not_waited_for(lab):
    matrix = ((0, 0, 8), (0, 0, 0), (0, 0, 0))
    part = footprint(lab.stream("x", "kv_transfer", ((0, 1, 2),), 8, Explicit(bytes=(matrix,))), (0, 0, 0), 0)
    assert part.ranks == (0, 2)


def test_family_tells_how_groups_lie(lab):
    one = lab.stream("x", "all_to_all", ((0, 1), (2, 3)))
    assert family_of(one, (0, 0, 1, 1)) == "all_to_all 2 groups of 2 in a node"
    assert family_of(one, (0, 1, 0, 1)) == "all_to_all 2 groups of 2 over 2 nodes"


def test_a_rank_without_a_place_is_refused(lab):
    with pytest.raises(ValueError, match="rank 3 has no place among 2 ranks"):
        footprint(lab.stream("x", "all_reduce", ((0, 3),)), (0, 0), 0)
