"""Times alone: dependent steps x latency + bytes on the busiest resource / its bandwidth, scaled by family.

One latency per tier and one bandwidth per link serve all streams; a factor of each family and a residual in log size
take what they leave over. Fitted on log time with a robust loss, all streams of a cadence together.
Source: Thakur, Rabenseifner and Gropp (2005) for the form; Gropp, Olson and Samfass (2016) for the shared card.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from crosstraffic.costmodel.links import LINKS, TIERS, TOPOLOGIES, Shape, family_of, footprint, shape_of
from crosstraffic.costmodel.model import Curve, Family, Link, Solo
from crosstraffic.costmodel.residual import Leftover, calibrate, fit_process, gather
from crosstraffic.patterns.stream import Stream

Floats = npt.NDArray[np.float64]

_LOG_LIMIT = 100.0  # keeps a wild trial of the solver within the range of floats
FORMULA_ERROR = 0.05  # what the formula cannot follow (log): keeps one precise point from ruling the fit
FAMILY_PRIOR = 0.15  # spread of family factors (log) around 1
CONTRADICTION = 10.0  # ratio between visits of one size
LINK_PENALTY = 1.0  # what a further kind of link must take off the cost of the fit
MIN_SIZES = 3  # distinct sizes; two numbers are fitted to a curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured time alone. ``deviation_log`` is that of its median, from the samples."""

    stream: str
    payload_bytes: int
    time_s: float
    deviation_log: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """Arrays over observations; what is not in use is left out of the parameters."""

    steps: Floats  # [n, shapes, 2]
    bytes: Floats  # [n, links]
    family: npt.NDArray[np.int64]
    log_time: Floats
    weight: Floats
    num_families: int
    tiers: tuple[int, ...]
    links: tuple[int, ...]

    def formula(self, parameters: Floats) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
        """Return latency and transfer time of each observation, and which link holds it back."""
        num_tiers, num_links = len(self.tiers), len(self.links)
        latency = np.zeros(2)
        latency[list(self.tiers)] = np.exp(parameters[:num_tiers])
        inverse = np.zeros(len(LINKS))
        inverse[list(self.links)] = np.exp(-np.maximum(parameters[num_tiers : num_tiers + num_links], -_LOG_LIMIT))
        scales = np.exp(parameters[num_tiers + num_links :].reshape(2, self.num_families))
        waits = (self.steps @ latency).max(axis=1) * scales[0][self.family]
        moves = self.bytes * inverse
        return waits, moves.max(axis=1) * scales[1][self.family], moves.argmax(axis=1)

    def errors(self, parameters: Floats) -> Floats:
        waits, moves, _ = self.formula(parameters)
        scales = parameters[len(self.tiers) + len(self.links) :]
        return np.concatenate(
            [(np.log(np.maximum(waits + moves, 1e-30)) - self.log_time) * self.weight, scales / FAMILY_PRIOR]
        )


def check_observations(observations: Sequence[Observation]) -> dict[str, str]:
    """Return streams that cannot be fitted, each with why.

    Raises:
        ValueError: a time is not a positive number.
    """
    refused: dict[str, str] = {}
    by_stream: dict[str, list[Observation]] = {}
    for seen in observations:
        if not (np.isfinite(seen.time_s) and seen.time_s > 0):
            raise ValueError(f"{seen.stream} at {seen.payload_bytes} bytes: a time must be positive: {seen.time_s} s")
        by_stream.setdefault(seen.stream, []).append(seen)
    for name, mine in by_stream.items():
        times: dict[int, list[float]] = {}
        for seen in mine:
            times.setdefault(seen.payload_bytes, []).append(seen.time_s)
        torn = {size: seen for size, seen in times.items() if _spread(seen) > CONTRADICTION}
        sizes = sorted(set(times) - set(torn))
        if len(sizes) < MIN_SIZES:
            listed = ", ".join(map(str, sizes)) or "none"
            refused[name] = f"{len(sizes)} distinct sizes ({listed}), but a curve of 2 numbers needs {MIN_SIZES}"
            if torn:
                widest = max(torn, key=lambda size: _spread(torn[size]))
                refused[name] += f"; contradictory times at {widest} bytes: "
                refused[name] += f"from {min(torn[widest]):.3g} s to {max(torn[widest]):.3g} s"
        elif np.median(times[sizes[-1]]) < 0.5 * np.median(times[sizes[0]]):
            refused[name] = (
                f"contradictory times: {np.median(times[sizes[-1]]):.3g} s at {sizes[-1]} bytes, "
                f"{np.median(times[sizes[0]]):.3g} s at {sizes[0]} bytes"
            )
    return refused


def _spread(times: Sequence[float]) -> float:
    """Return the ratio between visits of one size; of the middle half where there are enough."""
    if len(times) < 4:
        return max(times) / min(times)
    low, high = np.quantile(times, [0.25, 0.75])
    return float(high / low)


def fit_solo(observations: Sequence[Observation], streams: Mapping[str, Stream], nodes: tuple[int, ...]) -> Solo:
    """Fit the times alone of one cadence.

    Raises:
        ValueError: a time is not positive, or no stream has enough points; says which and why.
    """
    refused = check_observations(observations)
    shapes: dict[str, Shape] = {}
    for name in {seen.stream for seen in observations} - set(refused):
        shape = shape_of(streams[name], nodes)
        if not any(map(any, shape.steps)) or not any(shape.loads):
            refused[name] = "it puts nothing on the wire"
        else:
            shapes[name] = shape
    kept = [seen for seen in observations if seen.stream in shapes]
    if not kept:
        whys = "; ".join(f"{name}: {why}" for name, why in refused.items()) or "no times"
        raise ValueError(f"nothing to fit: {whys}")
    problem, families = _problem(kept, shapes)
    num_parameters = len(problem.tiers) + len({0, *problem.links} & {0, LINKS.index("nic")})
    if len(kept) < num_parameters:
        raise ValueError(f"fewer points than parameters: {len(kept)} points for {num_parameters}")
    problem, parameters = _choose(problem)
    return _collect(kept, shapes, families, problem, parameters, refused)


def _problem(kept: Sequence[Observation], shapes: Mapping[str, Shape]) -> tuple[_Problem, list[str]]:
    families = sorted({shape.family for shape in shapes.values()})
    depth = max(len(shape.steps) for shape in shapes.values())
    steps = np.zeros((len(kept), depth, 2))
    for row, seen in enumerate(kept):
        for column, pair in enumerate(shapes[seen.stream].steps):
            steps[row, column] = pair
    loads = np.array([[load * seen.payload_bytes for load in shapes[seen.stream].loads] for seen in kept])
    deviation = np.array([seen.deviation_log for seen in kept])
    problem = _Problem(
        steps=steps,
        bytes=loads,
        family=np.array([families.index(shapes[seen.stream].family) for seen in kept]),
        log_time=np.log([seen.time_s for seen in kept]),
        weight=1.0 / np.sqrt(deviation**2 + FORMULA_ERROR**2),
        num_families=len(families),
        tiers=tuple(tier for tier in range(2) if steps[:, :, tier].any()),
        links=tuple(link for link in range(len(LINKS)) if loads[:, link].any()),
    )
    return problem, families


def _choose(problem: _Problem) -> tuple[_Problem, Floats]:
    """Fit every topology that the data could tell apart; keep the best, and of equals the simplest."""
    best, found, best_score = problem, np.zeros(0), np.inf
    tried: set[tuple[str, ...]] = set()
    for topology in TOPOLOGIES:
        links = tuple(link for link in problem.links if LINKS[link] in topology)
        names = tuple(LINKS[link] for link in links)
        if names in tried or names in (("intra",), ("intra", "host")):  # within one node: the port by another name
            continue
        tried.add(names)
        candidate = replace(problem, links=links)
        parameters, cost = _solve(candidate)
        if cost + LINK_PENALTY * len(links) < best_score:
            best, found, best_score = candidate, parameters, cost + LINK_PENALTY * len(links)
    return best, found


def _solve(problem: _Problem) -> tuple[Floats, float]:
    """Start from bounds that the data give, one start per guess of which link is the narrow one; keep the best end."""
    time = np.exp(problem.log_time)
    total = problem.steps.sum(axis=2).max(axis=1)
    latency = [float(np.log((time / np.maximum(total, 1)).min()))] * len(problem.tiers)
    bound = [float(np.log((problem.bytes[:, link] / time).max())) for link in problem.links]
    coarse: list[tuple[float, int, Floats]] = []
    for wider in itertools.product((0.0, 1.2), repeat=len(bound)):
        if not all(wider):
            start = np.concatenate([latency, np.array(bound) + np.array(wider), np.zeros(2 * problem.num_families)])
            found = least_squares(problem.errors, start, loss="soft_l1", x_scale=0.3, max_nfev=40, ftol=1e-5)
            coarse.append((float(found.cost), len(coarse), found.x))
    best, best_cost = np.zeros(0), np.inf
    for _, _, start in sorted(coarse, key=lambda row: row[:2])[:2]:
        found = least_squares(problem.errors, start, loss="soft_l1", x_scale=0.3, max_nfev=200, xtol=1e-10, ftol=1e-12)
        if found.cost < best_cost * (1 - 1e-9):
            best, best_cost = found.x, float(found.cost)
    return best, best_cost


def _collect(
    kept: Sequence[Observation],
    shapes: Mapping[str, Shape],
    families: Sequence[str],
    problem: _Problem,
    parameters: Floats,
    refused: dict[str, str],
) -> Solo:
    waits, moves, held_by = problem.formula(parameters)
    left_over = problem.log_time - np.log(waits + moves)
    counts = np.bincount(problem.family, minlength=len(families))
    num_tiers, num_links = len(problem.tiers), len(problem.links)
    scales = np.exp(parameters[num_tiers + num_links :].reshape(2, len(families)))
    links: dict[str, Link] = {}
    for place, link in enumerate(problem.links):
        holding = int(((held_by == link) & (moves > 0.2 * waits)).sum())
        bandwidth = float(np.exp(parameters[num_tiers + place]))
        links[LINKS[link]] = Link(bandwidth_bytes_per_s=bandwidth, measured=holding > 0, num_points=holding)
    rows: dict[str, list[int]] = {}
    for row, seen in enumerate(kept):
        rows.setdefault(seen.stream, []).append(row)
    leftovers = {name: _leftover(kept, left_over, mine) for name, mine in sorted(rows.items())}
    process, doubted = fit_process(list(leftovers.values()))
    curves = {name: _curve(shapes[name].family, leftover) for name, leftover in zip(leftovers, doubted, strict=True)}
    return Solo(
        latency_s={TIERS[tier]: float(np.exp(parameters[place])) for place, tier in enumerate(problem.tiers)},
        links=links,
        families={
            family: Family(
                latency_scale=float(scales[0, index]),
                transfer_scale=float(scales[1, index]),
                num_points=int(counts[index]),
            )
            for index, family in enumerate(families)
        },
        curves=curves,
        amplitude_log=process.amplitude,
        length_octaves=process.length_octaves,
        noise_log=process.noise,
        deviations_90=calibrate(process, doubted),
        formula_error_log=float(np.median(np.abs(left_over))),
        refused=refused,
    )


def _leftover(kept: Sequence[Observation], left_over: Floats, mine: Sequence[int]) -> Leftover:
    sizes = np.array([float(max(kept[row].payload_bytes, 1)) for row in mine])
    within = np.array([kept[row].deviation_log for row in mine])
    return gather(np.log2(sizes), left_over[list(mine)], within)


def _curve(family: str, leftover: Leftover) -> Curve:
    sizes = tuple(round(float(size)) for size in 2.0**leftover.x)
    return Curve(
        family=family,
        payload_bytes=sizes,
        residual_log=tuple(leftover.y.tolist()),
        deviation_log=tuple(leftover.within.tolist()),
        num_visits=tuple(int(count) for count in leftover.count),
        min_payload_bytes=sizes[0],
        max_payload_bytes=sizes[-1],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """What the formula says of one group's call, per its payload: seconds of latency, seconds per byte by resource."""

    ranks: tuple[int, ...]
    steps: int
    latency_s: float
    seconds_per_byte: Mapping[tuple[str, int], float]


def group_terms(
    solo: Solo, stream: Stream, nodes: tuple[int, ...], group_index: int, edge: tuple[int, int] | None = None
) -> Terms:
    """Work out the formula for one group (or one edge of it).

    Raises:
        ValueError: it needs a tier or link that no fitted stream used.
    """
    part = footprint(stream, nodes, group_index, edge)
    family = solo.families.get(family_of(stream, nodes), Family(latency_scale=1, transfer_scale=1, num_points=0))
    latency = 0.0
    for tier, count in zip(TIERS, part.steps, strict=True):
        if count and tier not in solo.latency_s:
            raise ValueError(f"{stream.name} crosses a tier that no fitted stream used: {tier}")
        latency += count * solo.latency_s.get(tier, 0.0)
    costs: dict[tuple[str, int], float] = {}
    held = False
    for (kind, index), amount in part.load.items():
        link = kind.partition("_")[0]
        if link not in solo.links:
            continue  # the machine has no such link of its own, as far as its times tell
        held = held or solo.links[link].measured
        costs[kind, index] = amount * family.transfer_scale / solo.links[link].bandwidth_bytes_per_s
    if held:  # a link that no time was held by has a bound for a bandwidth: beside one that was, it holds nobody
        costs = {key: cost for key, cost in costs.items() if solo.links[key[0].partition("_")[0]].measured}
    return Terms(
        ranks=part.ranks,
        steps=max(1, sum(part.steps)),
        latency_s=latency * family.latency_scale,
        seconds_per_byte=costs,
    )
