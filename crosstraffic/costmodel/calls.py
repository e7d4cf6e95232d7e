"""Calls as the sharing sees them: phases, and what each loads, from streams, sizes and the fitted model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstraffic.costmodel.contention import Sharing
from crosstraffic.costmodel.links import LINKS, shape_of
from crosstraffic.costmodel.model import Contention, Curve, Model, Solo
from crosstraffic.costmodel.residual import Leftover, Process, predict
from crosstraffic.costmodel.solo import group_terms
from crosstraffic.patterns.stream import Stream
from crosstraffic.results.record import Cadence

Resource = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted time alone, with its 90 % interval and whether the model may be trusted there."""

    time_s: float
    low_s: float
    high_s: float
    formula_s: float
    valid: bool
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One group's call of a stream at one size; ``load`` is its utilisation while it transfers alone."""

    stream: str
    ranks: tuple[int, ...]
    latency_s: float
    transfer_s: float
    message_bytes: float
    load: Mapping[Resource, float]


def pick_cadence(model: Model, wanted: Cadence) -> Cadence:
    """Return ``wanted``, or the other cadence where only that was measured.

    Raises:
        ValueError: the model holds neither.
    """
    if not model.solo:
        raise ValueError("the model holds no times alone: fit it again")
    return wanted if wanted in model.solo else next(iter(model.solo))


def curve_of(model: Model, cadence: Cadence, stream: str) -> tuple[Solo, Curve]:
    """Return the fit and the curve of a stream.

    Raises:
        ValueError: it was not fitted; says why.
    """
    name = model.measured_name(model.stream(stream).name)
    solo = model.solo[cadence]
    if name not in solo.curves:
        why = solo.refused.get(name, f"it was not measured alone ({cadence})")
        raise ValueError(f"no times for stream {stream}: {why}")
    return solo, solo.curves[name]


def _leftover(curve: Curve) -> Leftover:
    return Leftover(
        x=np.log2(np.array(curve.payload_bytes, dtype=np.float64)),
        y=np.array(curve.residual_log),
        within=np.array(curve.deviation_log),
        count=np.array(curve.num_visits, dtype=np.float64),
    )


def alone(model: Model, stream: str, payload_bytes: int, cadence: Cadence) -> Estimate:
    """Predict the time of one call alone.

    Raises:
        ValueError: unknown or unfitted stream, or a negative size.
    """
    if payload_bytes < 0:
        raise ValueError(f"{stream}: payload_bytes must not be negative: {payload_bytes}")
    solo, curve = curve_of(model, cadence, stream)
    formula = formula_s(solo, model.stream(stream), model.nodes, payload_bytes)
    process = Process(amplitude=solo.amplitude_log, length_octaves=solo.length_octaves, noise=solo.noise_log)
    mean, deviation = predict(process, _leftover(curve), np.array([np.log2(max(payload_bytes, 1))]))
    time_s = formula * float(np.exp(mean[0]))
    why = None
    if not curve.min_payload_bytes <= payload_bytes <= curve.max_payload_bytes:
        why = (
            f"{payload_bytes} bytes is outside the measured {curve.min_payload_bytes} to "
            f"{curve.max_payload_bytes} bytes"
        )
    outside = _octaves_outside(payload_bytes, curve)
    spread = solo.deviations_90 * float(deviation[0]) + solo.formula_error_log * (1.0 - 0.5**outside)
    return Estimate(
        time_s=time_s,
        low_s=time_s * float(np.exp(-spread)),
        high_s=time_s * float(np.exp(spread)),
        formula_s=formula,
        valid=why is None,
        why=why,
    )


def _octaves_outside(payload_bytes: int, curve: Curve) -> float:
    size = float(np.log2(max(payload_bytes, 1)))
    below = float(np.log2(max(curve.min_payload_bytes, 1))) - size
    above = size - float(np.log2(max(curve.max_payload_bytes, 1)))
    return max(below, above, 0.0)


def formula_s(solo: Solo, stream: Stream, nodes: tuple[int, ...], payload_bytes: int) -> float:
    """Return steps x latency + busiest bytes / bandwidth, with the factors of the family; all groups calling."""
    shape = shape_of(stream, nodes)
    family = solo.families[shape.family]
    latency = max(
        steps[0] * solo.latency_s.get("intra", 0.0) + steps[1] * solo.latency_s.get("inter", 0.0)
        for steps in shape.steps
    )
    per_byte = max(
        load / solo.links[link].bandwidth_bytes_per_s
        for link, load in zip(LINKS, shape.loads, strict=True)
        if load and link in solo.links
    )
    return latency * family.latency_scale + payload_bytes * per_byte * family.transfer_scale


def make_call(
    model: Model,
    stream: str,
    payload_bytes: int,
    cadence: Cadence,
    group_index: int,
    *,
    edge: tuple[int, int] | None = None,
    alone_s: float | None = None,
) -> Call:
    """Return one group's call, scaled so that the whole stream alone takes ``alone_s`` (or what its curve says)."""
    [call] = make_calls(model, stream, payload_bytes, cadence, (group_index,), edge=edge, alone_s=alone_s)
    return call


def make_calls(
    model: Model,
    stream: str,
    payload_bytes: int,
    cadence: Cadence,
    group_indices: Sequence[int],
    *,
    edge: tuple[int, int] | None = None,
    alone_s: float | None = None,
) -> list[Call]:
    """Return the calls of several groups of a stream: its curve is asked once for all of them."""
    found, name = model.stream(stream), model.measured_name(stream)
    scale: float | None = None
    solo: Solo | None = None
    calls: list[Call] = []
    for group_index in group_indices:
        if len(found.groups[group_index]) == 1:  # nobody to talk to
            ranks = found.groups[group_index]
            calls.append(Call(stream=name, ranks=ranks, latency_s=0.0, transfer_s=0.0, message_bytes=0.0, load={}))
            continue
        if solo is None or scale is None:
            solo, _ = curve_of(model, cadence, stream)
            formula = formula_s(solo, found, model.nodes, payload_bytes)
            time_s = alone(model, stream, payload_bytes, cadence).time_s if alone_s is None else alone_s
            scale = time_s / formula
        terms = group_terms(solo, found, model.nodes, group_index, edge)
        seconds = {resource: cost * payload_bytes for resource, cost in terms.seconds_per_byte.items()}
        longest = max(seconds.values(), default=0.0)
        calls.append(
            Call(
                stream=name,
                ranks=terms.ranks,
                latency_s=terms.latency_s * scale,
                transfer_s=longest * scale,
                message_bytes=payload_bytes / terms.steps,
                load={resource: cost / longest for resource, cost in seconds.items()} if longest > 0 else {},
            )
        )
    return calls


RanksByNode = Mapping[str, Mapping[int, int]]


def ranks_by_node(model: Model, streams: Sequence[str]) -> RanksByNode:
    """Return how many ranks of each stream lie on each node, by the name under which it was measured."""
    return {
        model.measured_name(name): Counter(model.nodes[rank] for group in model.stream(name).groups for rank in group)
        for name in streams
    }


def make_sharing(calls: Sequence[Call], nodes: tuple[int, ...], factors: Contention, ranks: RanksByNode) -> Sharing:
    """Lay out the loads of calls; call i has columns 2i (latency) and 2i + 1 (transfer)."""
    owners = {name: index for index, name in enumerate(dict.fromkeys(call.stream for call in calls))}
    rows: dict[Resource, int] = {}
    cells: list[tuple[int, int, float]] = []
    weights = np.ones(2 * len(calls))
    for index, call in enumerate(calls):
        for resource, load in call.load.items():
            cells.append((rows.setdefault(resource, len(rows)), 2 * index + 1, load))
        for resource, load in _host_loads(call, nodes, factors, ranks[call.stream]):
            row = rows.setdefault(resource, len(rows))
            cells += [(row, 2 * index, load), (row, 2 * index + 1, load)]
        pull = factors.weight.get(call.stream, 1.0) * max(call.message_bytes, 1.0) ** factors.message_exponent
        weights[2 * index : 2 * index + 2] = pull
    loads = np.zeros((max(len(rows), 1), 2 * len(calls)))
    for row, column, load in cells:
        loads[row, column] += load
    is_host = np.zeros(len(loads), dtype=bool)
    for (kind, _), row in rows.items():
        is_host[row] = kind in ("host", "thread")
    return Sharing(
        loads=loads,
        weights=weights / weights.max(),
        owner=tuple(owners[calls[column // 2].stream] for column in range(2 * len(calls))),
        is_host=is_host,
        crowding=factors.crowding,
    )


def _host_loads(
    call: Call, nodes: tuple[int, ...], factors: Contention, ranks: Mapping[int, int]
) -> list[tuple[Resource, float]]:
    """A group's share of what its stream takes of each host, and of its ranks' threads; the same in both phases."""
    loads: list[tuple[Resource, float]] = []
    intensity = factors.host_intensity.get(call.stream, 0.0)
    if intensity > 0:
        here = Counter(nodes[rank] for rank in call.ranks)
        loads += [(("host", node), intensity * count / ranks[node]) for node, count in here.items()]
    if factors.thread_intensity > 0:
        loads += [(("thread", rank), factors.thread_intensity) for rank in call.ranks]
    return loads
