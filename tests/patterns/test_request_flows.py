"""Requests go round the replicas; their ranks are found at once, however many pairs there are."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.request_flows import replica_flows, request_counts
from crosstraffic.patterns.reshard import make_pool
from crosstraffic.patterns.workload import Workload


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(1, 7), tokens=st.integers(1, 40), prefill=st.integers(1, 5), decode=st.integers(1, 5))
def test_requests_go_round_one_by_one(batch, tokens, prefill, decode):
    workload = Workload(phase="handoff", batch=batch, tokens=tokens)
    expected: Counter[tuple[int, int, int]] = Counter()
    for request in range(batch * prefill):
        length = tokens // batch + (request // prefill < tokens % batch)
        if length:
            expected[length, request % prefill, request % decode] += 1
    found = request_counts(workload, prefill, decode)
    assert {
        (length, *map(int, pair)): int(counts[tuple(pair)])
        for length, counts in found.items()
        for pair in np.argwhere(counts)
    } == expected
    per_replica = sum(length * counts.sum(axis=1) for length, counts in found.items())
    assert per_replica.tolist() == [tokens] * prefill


def test_amounts_land_on_the_ranks_of_each_pair():
    shape = load_model("Llama-3.1-8B")
    pools = make_pool(shape, Layout(tp=2), "vllm", 3), make_pool(shape, Layout(tp=1), "vllm", 2)
    flows = replica_flows(np.array([[1, 0], [0, 2], [3, 0]]), *pools)
    sums, largest = np.zeros((6, 2), dtype=np.int64), np.full((6, 2), 7, dtype=np.int64)
    flows.add(sums, np.array([[10], [20]]))
    flows.raise_to(largest, np.array([[5], [9]]))
    assert sums.tolist() == [[10, 0], [20, 0], [0, 20], [0, 40], [30, 0], [60, 0]]
    assert largest.tolist() == [[7, 7], [9, 7], [7, 7], [7, 9], [7, 7], [9, 7]]


@pytest.mark.parametrize(("prefill", "decode"), [(5, 7), (1, 13), (13, 1)])
def test_instances_in_prime_numbers_share_the_requests(prefill, decode):
    """Each of P x D requests takes another way where P and D have no common factor."""
    found = handoff(
        load_model("Llama-3.1-8B"),
        Layout(),
        Layout(),
        Workload(phase="handoff", batch=decode, context=64),
        prefill_ranks=range(prefill),
        decode_ranks=range(prefill, prefill + decode),
        framework="vllm",
        prefill_instances=prefill,
        decode_instances=decode,
    )
    assert found.matrix.tolist() == [[64 * 131_072] * decode] * prefill
    assert len(found.streams[0].groups) == 1
