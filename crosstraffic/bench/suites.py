"""Suites: scenarios that are made from where the ranks run, not read from a file. ``links`` measures every link."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from crosstraffic.bench.scenario import MeasureSpec, ScenarioFile, StreamSpec
from crosstraffic.bench.simulated_truth import truth_from_dict
from crosstraffic.bench.tournament import tournament
from crosstraffic.errors import UsageError

LINKS = "links"
SUITES = (LINKS,)
MAX_END_POINTS = 512  # an end point opens up to 3 communicators a round, and MPI has about 2,000
MAX_DUPLEX = 64  # end points up to which both directions at once are measured too
MAX_FULL_FAN = 16  # end points up to which all others take part in an incast and an outcast
FAN = 8  # how many of the others do so beyond that
LATENCY_BYTES = 8
PAYLOAD_BYTES = 2**20  # where nothing is known of the links: ranks of one machine, and a simulated world
TARGET, MAX_CALLS = 0.02, 100
# Seconds that the time budget holds for a visit, by size; most visits end long before, after MAX_CALLS.
_LATENCY_VISIT_S, _PAYLOAD_VISIT_S, _OVERHEAD_S, _VISITS = 0.4, 2.0, 20.0, 2


def check_suite(name: str) -> None:
    """Refuse a suite that there is not.

    Raises:
        UsageError: an unknown name.
    """
    if name not in SUITES:
        raise UsageError(f"no such suite: {name!r}; there is: {', '.join(SUITES)}")


def end_points(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose links are measured: the first of each node, or all where there is but one node.

    >>> end_points([0, 0, 1, 1]), end_points([0, 0, 0])
    ((0, 2), (0, 1, 2))
    """
    first: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    return tuple(first.values()) if len(first) > 1 else tuple(range(len(nodes)))


def links_scenario(nodes: Sequence[int], *, payload_bytes: int, base: ScenarioFile | None) -> ScenarioFile:
    """Return the scenario that measures every link: a tournament of the end points, then incast and outcast at each.

    ``nodes`` holds the node of each rank. One call of any stream moves ``payload_bytes`` (an incast or outcast in
    total, shared by its peers), so that all of them take about as long. What ``base`` says of ``simulated`` and of how
    to measure (target, budget, seed and the like) is kept, its streams and phases are not.

    Raises:
        UsageError: fewer than two end points, or more than communicators can be opened for.
        ValueError: ``payload_bytes`` cannot be shared by the peers of an incast.
    """
    points = end_points(nodes)
    if len(points) < 2:
        raise UsageError(f"suite links needs at least 2 nodes, or 2 ranks on one node: {len(points)} rank given")
    if len(points) > MAX_END_POINTS:
        raise UsageError(
            f"suite links takes up to {MAX_END_POINTS} end points, as each pair of a round opens a communicator: "
            f"{len(points)} given; take a part of the nodes"
        )
    if payload_bytes < MAX_FULL_FAN:
        raise ValueError(f"payload_bytes must be at least {MAX_FULL_FAN}: {payload_bytes}")
    streams = [*_rounds(points, payload_bytes)]
    if len(points) > 2:
        named = points if len(set(nodes)) == 1 else [nodes[rank] for rank in points]
        for place, number in enumerate(named):
            streams += _fans(points, place, number, payload_bytes)
    return ScenarioFile(
        name=LINKS,
        ranks=len(nodes),
        stream=tuple(streams),
        measure=_measure(streams, None if base is None else base.measure),
        simulated=None if base is None else base.simulated,
    )


def suite_file(name: str, num_ranks: int, base: ScenarioFile | None, *, simulated: bool) -> ScenarioFile:
    """Return a suite's scenario for ranks of this machine, or of the simulated world that ``base`` describes.

    Raises:
        UsageError: an unknown suite, a number of ranks that it cannot take, or no simulated world.
    """
    check_suite(name)
    nodes = [0] * num_ranks
    if simulated:
        if base is None or base.simulated is None:
            raise UsageError(
                f"suite {name} over transport simulated needs a scenario with a [simulated] table: its known truth"
            )
        try:
            nodes = [truth_from_dict(base.simulated).node(rank) for rank in range(num_ranks)]
        except ValueError as error:
            raise UsageError(f"scenario {base.name}, [simulated]: {error}") from error
    return links_scenario(nodes, payload_bytes=PAYLOAD_BYTES, base=base)


def _rounds(points: Sequence[int], payload_bytes: int) -> Iterable[StreamSpec]:
    cells = {"out": ((0, payload_bytes), (0, 0)), "back": ((0, 0), (payload_bytes, 0))}
    latency, rate = (LATENCY_BYTES, "isolated"), (payload_bytes, "streaming")
    both = ((0, payload_bytes), (payload_bytes, 0))
    ranks = np.array(points)
    for number, pairs in enumerate(tournament(len(points)), start=1):
        groups = [tuple(pair) for pair in ranks[pairs].tolist()]
        for way, matrix in cells.items():
            yield _spec(f"link.round-{number:02d}.{way}", "link", groups, matrix, points=(latency, rate))
        if len(points) <= MAX_DUPLEX:
            yield _spec(f"link.round-{number:02d}.both", "link_both", groups, both, points=(rate,))


def _fans(points: Sequence[int], place: int, number: int, payload_bytes: int) -> Iterable[StreamSpec]:
    """Return incast and outcast at one end point; its peers are spread evenly over the others."""
    others = [points[(place + step) % len(points)] for step in range(1, len(points))]
    num_peers = len(others) if len(points) <= MAX_FULL_FAN else FAN
    peers = [others[index * len(others) // num_peers] for index in range(num_peers)]
    share, width = payload_bytes // num_peers, num_peers + 1
    group = (points[place], *peers)
    into = ((0,) * width, *[(share, *(0,) * num_peers)] * num_peers)
    out = ((0, *(share,) * num_peers), *[(0,) * width] * num_peers)
    # A matrix counts as large as its largest row: what one rank sends.
    yield _spec(f"incast.{number}", "incast", [group], into, points=((share, "streaming"),))
    yield _spec(f"outcast.{number}", "outcast", [group], out, points=((share * num_peers, "streaming"),))


def _spec(
    name: str, pattern: str, groups: Sequence[tuple[int, ...]], matrix: tuple[tuple[int, ...], ...], *, points: Any
) -> StreamSpec:
    payload = max(map(sum, matrix))
    return StreamSpec(
        name=name, op="send_recv", payload=payload, groups=tuple(groups), pattern=pattern, matrix=matrix, points=points
    )


def _measure(streams: Sequence[StreamSpec], asked: MeasureSpec | None) -> MeasureSpec:
    sizes = [size for spec in streams for size, _ in spec.points or ()]
    num_small = sizes.count(LATENCY_BYTES)
    visits_s = num_small * _LATENCY_VISIT_S + (len(sizes) - num_small) * _PAYLOAD_VISIT_S
    ours: dict[str, Any] = {
        "target": TARGET,
        "max_calls": MAX_CALLS,
        "budget_s": _OVERHEAD_S + _VISITS * visits_s,
    }
    if asked is not None:
        kept = ("target", "max_calls", "budget_s", "seed", "verify")
        ours |= {name: getattr(asked, name) for name in kept if name in asked.model_fields_set}
    return MeasureSpec(**ours, together="none", triples=0, steps=False)
