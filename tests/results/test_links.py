"""The verdict on links: one fault of each kind, and two at once, are named exactly; healthy links are healthy."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.results.links import Floats, Gap, Links, Rates
from crosstraffic.results.links_summary import links_data, links_tables, verdict_lines
from crosstraffic.results.links_verdict import Verdict, reference_rate, verdict

RATE, LATENCY_S = 24e6, 50e-6
Told = list[tuple[str, tuple[str, ...]]]


def synthetic(factor: Floats, noise: float = 0.0, seed: int = 0, late: Floats | None = None) -> Links:
    """Return links at ``factor`` of the full rate and ``late`` times the usual latency, ``[n, n]``, with noise."""
    n = len(factor)
    rng = np.random.default_rng(seed)

    def noisy(*shape: int) -> Floats:
        return 1 + noise * rng.uniform(-1, 1, shape)

    def rates(middle: Floats) -> Rates:
        return Rates(median=middle, low=middle * 0.99, high=middle * 1.01)

    rate = RATE * factor * noisy(2, n, n)
    latency_s = LATENCY_S * (np.ones((n, n)) if late is None else late) * noisy(2, n, n)
    for matrix in (*rate, *latency_s):
        np.fill_diagonal(matrix, np.nan)
    best = rate.max(axis=0)
    others = [np.delete(best[:, node], node) for node in range(n)]
    incast = np.array([min(column.max(), (n - 1) * column.min()) for column in others])
    return Links(
        names=tuple(f"n{node}" for node in range(n)),
        rate=rates(rate),
        latency_s=latency_s,
        latency_p05_s=latency_s * 0.95,
        clock="synchronised",
        clock_error_s=1e-6,
        duplex=rates(rate),
        incast=rates(np.stack([incast, incast])),
        outcast=rates(np.stack([incast, incast])),
        incast_peer=best / (n - 1),
        outcast_peer=best / (n - 1),
        num_peers=n - 1,
    )


def with_fault(factor: Floats, kind: str, here: int, there: int, by: float) -> tuple[str, tuple[str, ...]]:
    """Slow down what a fault of a kind slows; return what the verdict must say."""
    if kind in ("slow_node", "slow_send"):
        factor[here] = np.minimum(factor[here], by)
    if kind in ("slow_node", "slow_receive"):
        factor[:, here] = np.minimum(factor[:, here], by)
    if kind in ("slow_pair", "slow_direction"):
        factor[here, there] = by
    if kind == "slow_pair":
        factor[there, here] = by
        here, there = min(here, there), max(here, there)
    nodes = (here, there) if kind in ("slow_pair", "slow_direction") else (here,)
    return kind, tuple(f"n{node}" for node in nodes)


def told(found: Verdict) -> Told:
    return [(finding.kind, finding.nodes) for finding in found.findings]


KINDS = ("slow_node", "slow_send", "slow_receive", "slow_pair", "slow_direction")
noises, seeds = st.floats(0, 0.05), st.integers(0, 10**6)


@settings(max_examples=300)
@given(n=st.integers(3, 40), noise=noises, seed=seeds)
def test_healthy_links_are_healthy(n: int, noise: float, seed: int) -> None:
    found = verdict(synthetic(np.ones((n, n)), noise, seed))
    assert (found.verdict, told(found)) == ("healthy", [])
    assert found.reference_bytes_per_s == pytest.approx(RATE, rel=0.06)


@settings(max_examples=300)
@given(data=st.data(), n=st.integers(3, 40), noise=noises, seed=seeds, kind=st.sampled_from(KINDS))
def test_one_fault_is_named(data: st.DataObject, n: int, noise: float, seed: int, kind: str) -> None:
    here, there = data.draw(st.permutations(range(n)))[:2]
    factor = np.ones((n, n))
    expected = with_fault(factor, kind, here, there, data.draw(st.floats(0.02, 0.7)))
    found = verdict(synthetic(factor, noise, seed))
    assert told(found) == [expected]
    assert found.verdict == "slow"


@settings(max_examples=300)
@given(
    data=st.data(),
    n=st.integers(6, 20),
    noise=noises,
    seed=seeds,
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
)
def test_two_faults_are_named(data: st.DataObject, n: int, noise: float, seed: int, kinds: tuple[str, str]) -> None:
    places = data.draw(st.permutations(range(n)))[:4]
    factor = np.ones((n, n))
    by = data.draw(st.floats(0.05, 0.7))
    expected = [with_fault(factor, kind, places[2 * i], places[2 * i + 1], by) for i, kind in enumerate(kinds)]
    assert sorted(told(verdict(synthetic(factor, noise, seed)))) == sorted(expected)


def test_half_of_the_nodes_slow() -> None:
    factor = np.ones((4, 4))
    expected = [with_fault(factor, "slow_node", node, node, 0.25) for node in (1, 3)]
    found = verdict(synthetic(factor, 0.03))
    assert told(found) == expected
    assert found.reference_bytes_per_s == pytest.approx(RATE, rel=0.05)


def test_a_pair_that_is_slower_still_than_its_slow_node() -> None:
    factor = np.ones((5, 5))
    expected = [with_fault(factor, "slow_node", 2, 2, 0.5), with_fault(factor, "slow_pair", 0, 2, 0.1)]
    assert told(verdict(synthetic(factor, 0.02))) == expected


def test_the_words_name_the_node_and_both_rates() -> None:
    factor = np.ones((4, 4))
    with_fault(factor, "slow_send", 2, 2, 0.25)
    links = synthetic(factor)
    found = verdict(links)
    assert found.findings[0].text == "slow direction: n2 sends at 6 MB/s, others 24 MB/s"
    assert verdict_lines(links, found)[0].startswith("links are not healthy: 4 end points, reference 24 MB/s")


def test_a_disturbance_in_one_visit_is_not_named() -> None:
    links = synthetic(np.ones((4, 4)))
    for rates in (links.rate.median, links.rate.low, links.rate.high):
        rates[0, 2] *= 0.2
    assert verdict(links).verdict == "healthy"


def test_a_wide_interval_is_not_named() -> None:
    links = synthetic(np.ones((4, 4)))
    links.rate.median[:, 2] *= 0.5
    links.rate.low[:, 2] *= 0.3
    assert told(verdict(links)) == []


def test_the_tolerance_is_kept() -> None:
    factor = np.ones((4, 4))
    expected = with_fault(factor, "slow_pair", 0, 1, 0.8)
    assert told(verdict(synthetic(factor))) == [expected]
    assert told(verdict(synthetic(factor), tolerance=0.3)) == []
    with pytest.raises(ValueError, match="tolerance must be between 0 and 1: 0"):
        verdict(synthetic(factor), tolerance=0)


@settings(max_examples=100)
@given(n=st.integers(3, 20), noise=noises, seed=seeds, node=st.integers(0, 2))
def test_a_late_node_is_named(n: int, noise: float, seed: int, node: int) -> None:
    late = np.ones((n, n))
    late[node] = late[:, node] = 4.0
    assert told(verdict(synthetic(np.ones((n, n)), noise, seed, late))) == [("high_latency", (f"n{node}",))]


def test_a_latency_within_the_clocks_error_is_not_named() -> None:
    late = np.ones((4, 4))
    late[0, 1] = 4.0
    links = synthetic(np.ones((4, 4)), late=late)
    assert told(verdict(links)) == [("high_latency", ("n0", "n1"))]
    assert told(verdict(replace(links, clock_error_s=200e-6))) == []
    assert told(verdict(replace(links, clock_error_s=200e-6, clock="local"))) == [("high_latency", ("n0", "n1"))]


def test_a_latency_that_varies_on_every_direction_is_not_named() -> None:
    late = np.ones((4, 4))
    late[0, 1] = 4.0
    links = synthetic(np.ones((4, 4)), late=late)
    links.latency_s[:] = 300e-6  # usual calls, where ranks wait for a processor; the fastest are as they were
    assert told(verdict(links)) == []


def test_an_incast_that_collapses_is_named_but_not_one_with_a_slow_sender() -> None:
    links = synthetic(np.ones((4, 4)))
    links.incast.median[:, 1] *= 0.4
    links.incast.high[:, 1] *= 0.4
    assert told(verdict(links)) == [("incast_collapse", ("n1",))]
    factor = np.ones((4, 4))
    expected = with_fault(factor, "slow_send", 2, 2, 0.05)
    assert told(verdict(synthetic(factor))) == [expected]


def test_two_end_points_have_only_each_other() -> None:
    factor = np.ones((2, 2))
    found = verdict(synthetic(factor))
    assert found.verdict == "healthy"
    assert "cannot be told" in (found.note or "")
    factor[1, 0] = 0.3
    assert told(verdict(synthetic(factor))) == [("slow_direction", ("n1", "n0"))]


@pytest.mark.parametrize("what", ["bandwidth", "latency"])
def test_what_was_not_measured_makes_the_verdict_incomplete(what: str) -> None:
    links = synthetic(np.ones((4, 4)))
    for matrix in (links.rate.median, links.rate.low, links.rate.high):
        matrix[:, 0, 3] = np.nan
    gap = Gap(links=((0, 3),), what=what, why="timeout: no answer")
    links = replace(links, gaps=(gap, gap))
    found = verdict(links)
    assert found.verdict == "incomplete"
    assert told(found) == [("not_measured", ("n0", "n3"))]
    assert found.findings[0].text == f"{what} not measured: n0 > n3 (timeout: no answer)"
    assert links_data(links, found)["bytes_per_s"][0][3] is None


def test_nothing_measured_is_incomplete_and_can_be_shown() -> None:
    links = synthetic(np.full((3, 3), np.nan))
    every = tuple(itertools.permutations(range(3), 2))
    links = replace(links, gaps=(Gap(links=every, what="bandwidth", why="no record of it"),))
    found = verdict(links)
    assert (found.verdict, found.reference_bytes_per_s) == ("incomplete", None)
    assert [cell for row in links_data(links, found)["bytes_per_s"] for cell in row] == [None] * 9
    assert len(list(links_tables(links, found))) == 3


def test_the_reference_holds_with_a_slow_node_of_three() -> None:
    rate = np.full((3, 3), RATE)
    rate[2] = rate[:, 2] = RATE / 4
    np.fill_diagonal(rate, np.nan)
    assert reference_rate(rate) == RATE


@pytest.mark.parametrize(("n", "num_tables"), [(16, 3), (17, 1)])
def test_large_clusters_show_the_culprits_only(n: int, num_tables: int) -> None:
    factor = np.ones((n, n))
    with_fault(factor, "slow_node", 5, 5, 0.3)
    links = synthetic(factor)
    tables: list[Any] = list(links_tables(links, verdict(links)))
    assert len(tables) == num_tables
    assert tables[-1].row_count == (n if n <= 16 else 1)
