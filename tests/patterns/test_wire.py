"""Bytes that a rank sends: closed forms against the matrices, exact at any size."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.matrix import Chain, Explicit, Ring
from crosstraffic.patterns.routing import Routed
from crosstraffic.patterns.stream import MAX_PAYLOAD_BYTES, Stream
from crosstraffic.patterns.wire import largest_send, ring_bytes, wire_bytes_per_rank, wire_matrix

BASE = Stream(
    name="x",
    pattern="tp",
    op="all_reduce",
    phase="decode",
    groups=((0, 1),),
    payload_bytes=400,
    calls_per_step=1,
    dtype="bfloat16",
    formula="",
    source="",
)
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


def of(num_ranks, **changes):
    return replace(BASE, groups=(tuple(range(num_ranks)),), **changes)


@pytest.mark.parametrize("op", COLLECTIVES)
@settings(max_examples=50, deadline=None)
@given(num_ranks=st.sampled_from([1, 2, 3, 5, 7, 8, 16]), payload=st.integers(0, MAX_PAYLOAD_BYTES))
def test_closed_forms_of_collectives_are_the_matrix(op, num_ranks, payload):
    stream = of(num_ranks, op=op, payload_bytes=payload)
    assert largest_send(stream) == int(wire_matrix(stream).sum(axis=1).max())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "rule",
    [
        Ring(num_bytes=77),
        Chain(num_bytes=77),
        Routed(num_tokens=5, top_k=2, num_experts=8, bytes_per_message=10, distribution="power_law", parameter=1.2),
    ],
    ids=lambda rule: rule.kind,
)
def test_closed_forms_of_rules_are_the_matrix(num_ranks, rule):
    op = "all_to_all_v" if isinstance(rule, Routed) else "send_recv"
    stream = of(num_ranks, op=op, rule=rule, payload_bytes=100)
    assert largest_send(stream) == int(wire_matrix(stream).sum(axis=1).max())


def test_groups_whose_matrices_differ_all_count():
    small, large = ((0, 5), (0, 0)), ((0, 9), (0, 0))
    for pair in ((small, large), (large, small)):
        rule = Explicit(bytes=pair)
        stream = replace(BASE, op="send_recv", rule=rule, groups=((0, 1), (2, 3)), payload_bytes=9)
        assert wire_bytes_per_rank(stream) == 9


def test_the_group_that_sends_most_counts():
    stream = replace(BASE, op="all_gather", groups=((0,), (1, 2), (3, 4, 5, 6)), payload_bytes=400)
    assert wire_bytes_per_rank(stream) == 300


@given(num_ranks=st.integers(2, 2**20), payload=st.integers(0, MAX_PAYLOAD_BYTES))
@settings(max_examples=50, deadline=None)
def test_rings_are_exact(num_ranks, payload):
    """Within half a byte of the fraction, where a float would be off by several."""
    sent = ring_bytes("all_gather", num_ranks, payload)
    assert abs(2 * (sent * num_ranks - (num_ranks - 1) * payload)) <= num_ranks
    twice = ring_bytes("all_reduce", num_ranks, payload)
    assert abs(2 * (twice * num_ranks - 2 * (num_ranks - 1) * payload)) <= num_ranks


def test_a_large_group_needs_no_matrix():
    stream = of(2**18, op="all_gather", payload_bytes=2**18)
    assert wire_bytes_per_rank(stream) == 2**18 - 1
    chain = of(2**18, op="send_recv", rule=Chain(num_bytes=8), payload_bytes=8)
    assert wire_bytes_per_rank(chain) == 8


def test_diagonal_is_kept():
    matrix = np.array([[3, 4], [5, 6]])
    rule = Explicit(bytes=(tuple(map(tuple, matrix.tolist())),))
    stream = of(2, op="all_to_all_v", rule=rule, payload_bytes=11)
    assert wire_bytes_per_rank(stream) == 5
