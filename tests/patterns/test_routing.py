"""Expert load: conservation, symmetry, known skews."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.loads import expert_shares, experts_per_rank
from crosstraffic.patterns.matrix import rule_from_dict, rule_to_dict
from crosstraffic.patterns.routing import Routed, imbalance, parse_routing, routing_fields

SKEWS = [("uniform", 0.0), ("power_law", 0.6), ("power_law", 1.0), ("power_law", 1.9), ("lognormal", 1.5), ("k_hot", 9)]


def routed(**changes):
    fields = {"num_tokens": 64, "top_k": 8, "num_experts": 256, "bytes_per_message": 10}
    return Routed(**(fields | changes))


@settings(max_examples=80, deadline=None)
@given(
    num_ranks=st.sampled_from([1, 2, 3, 5, 7, 8, 13, 32]),
    num_tokens=st.sampled_from([0, 1, 2, 7, 64, 1000]),
    top_k=st.sampled_from([1, 2, 8]),
    num_experts=st.sampled_from([32, 61, 256]),
    skew=st.sampled_from(SKEWS),
    seed=st.integers(0, 5),
)
def test_each_source_sends_all_its_messages(num_ranks, num_tokens, top_k, num_experts, skew, seed):
    rule = routed(
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        distribution=skew[0],
        parameter=skew[1],
        seed=seed,
    )
    counts = rule.counts(num_ranks)
    assert counts.dtype == np.int64
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == num_tokens * top_k).all()
    held = np.array(experts_per_rank(num_experts, num_ranks))
    assert (counts <= num_tokens * np.minimum(held, top_k) + 1).all()
    assert (rule.matrix(num_ranks, 0) == counts * 10).all()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16, 64])
def test_uniform_is_exactly_equal_where_it_can_be(num_ranks):
    matrix = routed(num_tokens=128).matrix(num_ranks, 0)
    assert (matrix == matrix[0, 0]).all()


@pytest.mark.parametrize("num_ranks", [3, 5, 8, 32, 64])
def test_uniform_remainders_do_not_pile_up(num_ranks):
    received = routed(num_tokens=1, num_experts=num_ranks * 4).counts(num_ranks).sum(axis=0)
    assert received.max() - received.min() <= 1


@pytest.mark.parametrize(("distribution", "parameter"), [*SKEWS, ("one_hot", 2)])
def test_combine_is_the_way_back(distribution, parameter):
    dispatch = routed(distribution=distribution, parameter=parameter)
    combine = routed(distribution=distribution, parameter=parameter, direction="combine", bytes_per_message=3)
    assert (combine.matrix(8, 0) * 10 == dispatch.matrix(8, 0).T * 3).all()


def test_same_seed_same_matrix_other_seed_other_matrix():
    first, again, other = (
        routed(distribution="power_law", parameter=1.2, seed=seed).matrix(8, 0) for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert not (first == other).all()


def test_one_hot_sends_all_to_one():
    matrix = routed(distribution="one_hot", parameter=3).matrix(5, 0)
    assert matrix.sum(axis=0).tolist() == [0, 0, 0, 64 * 8 * 10 * 5, 0]
    with pytest.raises(ValueError, match="rank 5 is not in a group of 5"):
        routed(distribution="one_hot", parameter=5).matrix(5, 0)


def test_no_expert_gets_a_token_twice():
    share = expert_shares(num_experts=64, top_k=8, num_tokens=4096, distribution="power_law", parameter=1.9)
    assert share.max() <= 1 / 8 + 1e-12
    assert share.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("alpha", "num_ranks", "expected"),
    [
        (0.6, 8, 1.25),
        (0.6, 64, 2.25),
        (1.01, 8, 1.47),
        (1.01, 64, 3.73),
        (1.2, 8, 1.69),
        (1.2, 32, 3.40),
    ],
)
def test_power_law_is_as_skewed_as_a_simulation_of_the_generator(alpha, num_ranks, expected):
    found = [
        imbalance(
            routed(num_tokens=4096 // num_ranks, distribution="power_law", parameter=alpha, seed=seed)
            .counts(num_ranks)
            .sum(axis=0)
        ).max_over_mean
        for seed in range(200)
    ]
    assert np.mean(found) == pytest.approx(expected, rel=0.06)


def test_explicit_weights_and_round_trip():
    rule = routed(num_experts=4, top_k=1, num_tokens=10, distribution="explicit", weights=(4.0, 3.0, 2.0, 1.0))
    assert rule.matrix(2, 0).tolist() == [[70, 30], [70, 30]]
    assert rule_from_dict(rule_to_dict(rule)) == rule


def test_imbalance_of_equal_loads():
    found = imbalance([5, 5, 5])
    assert (found.max_over_mean, found.cv, found.gini, found.zero_share) == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distribution": "zipf"}, "unknown routing: 'zipf'; allowed: uniform"),
        ({"top_k": 0}, "top_k must be between"),
        ({"top_k": 300}, "top_k must be between"),
        ({"num_tokens": -1}, "must not be negative"),
        ({"distribution": "k_hot", "parameter": 3}, "number of hot experts"),
        ({"distribution": "explicit"}, "weights go with"),
        ({"distribution": "explicit", "weights": (1.0,)}, "256 weights are needed"),
        ({"distribution": "one_hot", "parameter": 0.5}, "whole number"),
        ({"direction": "sideways"}, "unknown direction"),
    ],
)
def test_bad_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        routed(**changes)


def test_more_ranks_than_experts():
    with pytest.raises(ValueError, match="more ranks than experts: 9 ranks, 8 experts"):
        routed(num_experts=8).matrix(9, 0)


@pytest.mark.parametrize("text", ["zipf:1", "uniform:1", "power_law", "power_law:x", "explicit:1", ""])
def test_bad_routing_text(text):
    with pytest.raises(ValueError, match="routing"):
        parse_routing(text)


@settings(max_examples=50, deadline=None)
@given(
    num_nodes=st.sampled_from([1, 2, 3, 4]),
    per_node=st.sampled_from([1, 2, 5, 8]),
    top_k=st.sampled_from([1, 3, 8]),
    skew=st.sampled_from([*SKEWS[:2], ("lognormal", 1.5), ("k_hot", 9)]),
    data=st.data(),
)
def test_deduplicated_legs_carry_what_is_needed(num_nodes, per_node, top_k, skew, data):
    num_ranks = num_nodes * per_node
    tokens = tuple(data.draw(st.lists(st.integers(0, 50), min_size=num_ranks, max_size=num_ranks)))
    rule = routed(
        num_tokens=max(tokens),
        top_k=top_k,
        num_experts=61,
        distribution=skew[0],
        parameter=skew[1],
        source_tokens=(tokens,),
    )
    sent = np.array(tokens)
    plain = rule.counts(num_ranks)
    assert (plain.sum(axis=1) == sent * top_k).all()
    ranks = replace(rule, copies="rank").counts(num_ranks)
    assert (ranks <= sent[:, None]).all()
    assert (ranks.sum(axis=1) <= sent * min(top_k, num_ranks) + 1).all()
    assert (ranks.sum(axis=1) >= sent - 1).all()
    across = replace(rule, copies="node", ep_ranks=num_ranks, num_nodes=num_nodes)
    nodes = [across.counts(num_nodes, index) for index in range(per_node)]
    for index, matrix in enumerate(nodes):
        assert (matrix <= sent.reshape(num_nodes, per_node)[:, index, None]).all()
    inside = replace(across, copies="fanout")
    received = sent.reshape(num_nodes, per_node).sum(axis=0)
    final = np.concatenate([inside.counts(per_node, node).sum(axis=0) for node in range(num_nodes)])
    assert all((inside.counts(per_node, node) <= received[:, None]).all() for node in range(num_nodes))
    assert final == pytest.approx(ranks.sum(axis=0), abs=2 + per_node)  # both are sums of the same chances, rounded


@pytest.mark.parametrize("copies", ["rank", "node", "fanout"])
def test_one_hot_rank_gets_each_token_once(copies):
    whole = None if copies == "rank" else 8
    rule = routed(distribution="one_hot", parameter=5, copies=copies, num_tokens=7, num_nodes=2, ep_ranks=whole)
    if copies == "rank":
        assert rule.counts(8).sum(axis=0).tolist() == [0, 0, 0, 0, 0, 56, 0, 0]
        return
    if copies == "node":
        assert rule.counts(2, 3).tolist() == [[0, 7], [0, 7]]
        return
    assert rule.counts(4, 0).sum() == 0
    assert rule.counts(4, 1).tolist() == [[0, 14, 0, 0]] * 4


def test_n15_high_throughput_dispatch_over_eight_nodes():
    rule = Routed(
        num_tokens=4096,
        top_k=8,
        num_experts=256,
        bytes_per_message=7472,
        copies="node",
        ep_ranks=64,
        num_nodes=8,
        num_groups=8,
        topk_groups=4,
    )
    rows = rule.matrix(8, 0).sum(axis=1)
    assert rows == pytest.approx([111.1e6] * 8, rel=1e-3)
    assert rows.max() - rows.min() <= 7472
    assert rows.sum() % 7472 == 0


def routed_ep288(**changes):
    return routed(num_tokens=128, redundant_experts=32, **changes)


def test_more_ranks_than_experts_with_redundant_ones():
    counts = routed_ep288().counts(288)
    assert (counts.sum(axis=1) == 1024).all()
    load = counts.sum(axis=0)
    assert set(np.round(load / load.max(), 2).tolist()) == {0.5, 1.0}  # 32 experts have two replicas
    assert (load < 0.75 * load.max()).sum() == 64
    with pytest.raises(ValueError, match="more ranks than experts: 289 ranks, 288 experts"):
        routed_ep288().counts(289)


def test_redundant_experts_even_out_a_skew():
    skew = {"distribution": "power_law", "parameter": 1.2, "seed": 4, "num_tokens": 256}
    plain, balanced = (
        imbalance(routed(redundant_experts=count, **skew).counts(32).sum(axis=0)).max_over_mean for count in (0, 32)
    )
    assert balanced < 1.1 < plain


def test_source_tokens_of_each_group():
    rule = routed(num_tokens=3, source_tokens=((1, 2), (3, 0)), num_experts=8)
    assert rule.counts(2, 0).sum(axis=1).tolist() == [8, 16]
    assert rule.counts(2, 1).sum(axis=1).tolist() == [24, 0]
    with pytest.raises(ValueError, match="source_tokens of 2 ranks do not fit a group of 4"):
        rule.counts(4, 0)


@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(64, 4096), (256, 100)])
def test_large_groups_keep_their_sums(num_ranks, num_tokens):
    counts = routed(num_tokens=num_tokens, distribution="power_law", parameter=1.01).counts(num_ranks)
    assert (counts.sum(axis=1) == num_tokens * 8).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"copies": "everyone"}, "unknown copies: 'everyone'; allowed: expert, rank, node, fanout"),
        ({"copies": "node"}, "ep_ranks goes with copies node and fanout"),
        ({"ep_ranks": 8}, "ep_ranks goes with copies node and fanout"),
        ({"redundant_experts": -1}, "must not be negative"),
        ({"source_tokens": ((1, -1),)}, "source_tokens must not be negative"),
        ({"num_groups": 3}, "256 experts do not divide over 3 groups"),
    ],
)
def test_bad_rules_of_copies(changes, message):
    with pytest.raises(ValueError, match=message):
        routed(**changes)


def test_a_leg_of_another_size():
    rule = routed(copies="node", ep_ranks=8, num_nodes=2)
    with pytest.raises(ValueError, match="a group of 4 ranks is no part of 8 ranks on 2 nodes: node"):
        rule.counts(4, 0)


def test_routing_fields_of_files(tmp_path):
    matrix, counts = tmp_path / "matrix.txt", tmp_path / "counts.csv"
    matrix.write_text("0 1K\n2K 0\n", encoding="utf-8")
    counts.write_text("1,2,3\n3,2,1\n", encoding="utf-8")
    assert routing_fields("power_law:1.2") == {"routing": "power_law", "routing_parameter": 1.2}
    assert routing_fields(f"matrix:{matrix}") == {"routing": "matrix", "routing_matrix": ((0, 1024), (2048, 0))}
    assert routing_fields(f"counts:{counts}") == {"routing": "explicit", "routing_weights": (4.0, 4.0, 4.0)}
    assert routing_fields(f"counts:{counts}#1")["routing_weights"] == (3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matrix:", "routing matrix takes a file: 'matrix:'"),
        ("counts", "routing counts takes a file"),
        ("counts:file#x", "the layer must be a whole number from 0: 'x'"),
        ("zipf:1", "unknown routing: 'zipf:1'; allowed: uniform, .*counts:FILE, counts:FILE#LAYER, matrix:FILE"),
        ("matrix:/does/not/exist", "cannot be read"),
    ],
)
def test_bad_routing_files(text, message):
    with pytest.raises(ValueError, match=message):
        routing_fields(text)


def test_loads_of_experts_add_up_to_those_of_ranks():
    rule = routed(num_tokens=4096, distribution="power_law", parameter=1.2)
    loads = rule.expert_loads(8)
    assert loads.reshape(8, 32).sum(axis=1) == pytest.approx(rule.counts(8).sum(axis=0) / (8 * 4096 * 8), abs=1e-4)
    assert imbalance(loads).max_over_mean > imbalance(loads.reshape(8, 32).sum(axis=1)).max_over_mean
    with pytest.raises(ValueError, match="no expert shares for distribution: 'one_hot'"):
        routed(distribution="one_hot", parameter=1).expert_loads(8)


def test_load_of_ranks_does_not_depend_on_what_is_sent_once():
    rule = routed(num_tokens=64, distribution="lognormal", parameter=1.0)
    across = replace(rule, copies="node", ep_ranks=8, num_nodes=2)
    assert across.rank_loads(8).tolist() == rule.rank_loads(8).tolist() == rule.counts(8).sum(axis=0).tolist()
    assert rule.rank_loads(8).sum() == 8 * 64 * 8
