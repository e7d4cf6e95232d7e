"""Fit the few factors of sharing from 2-way runs, each held to what physics says unless the runs say otherwise.

Without evidence every factor stays at the plain fluid answer: no stream loads the host, all pull equally.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from crosstraffic.costmodel.calls import Call, alone, make_call, make_sharing, pick_cadence, ranks_by_node
from crosstraffic.costmodel.model import Contention, Model
from crosstraffic.costmodel.observations import Mix
from crosstraffic.costmodel.together import CADENCE_OF_MODE, merge, one_shot_times, steady_times, together_times

Floats = npt.NDArray[np.float64]

SHARED = ("message_exponent", "thread_intensity", "crowding")
PRIOR = {"host": 3.0, "weight": 1.0, "message_exponent": 0.5, "thread_intensity": 1.5, "crowding": 0.25}
LIMITS = {
    "host": (0.0, 1.0),
    "weight": (-3.0, 3.0),
    "message_exponent": (-1.0, 1.0),
    "thread_intensity": (0.0, 1.0),
    "crowding": (0.0, 3.0),
}
MODEL_ERROR = 0.05  # of a slowdown (log): what no factor follows
FIT_EVENTS = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pair:
    """A 2-way run made ready: its calls at the times alone that were seen beside it, and the slowdowns seen."""

    mix: Mix
    calls: tuple[Call, ...]
    owner: tuple[int, ...]
    alone_s: Floats
    seen_log: Floats
    weight: float
    names: tuple[str, ...]

    def predicted_log(self, model: Model, factors: Contention) -> Floats:
        sharing = make_sharing(self.calls, model.nodes, factors, ranks_by_node(model, self.names))
        crowd = merge(self.calls, self.owner, sharing, len(self.names))
        if self.mix.mode == "one_shot":
            times = one_shot_times(crowd, len(self.names))
        else:
            times = steady_times(crowd, len(self.names), FIT_EVENTS)
        return np.log(np.array(times) / self.alone_s)


def fit_contention(model: Model, mixes: Sequence[Mix]) -> tuple[Contention, list[str]]:
    """Fit the factors to the 2-way runs among ``mixes``; return them and notes on what could not be used."""
    pairs, notes = _ready(model, [mix for mix in mixes if len(mix.parts) == 2])
    if not pairs:
        return Contention(), [*notes, "no 2-way runs: together-times are those of plain fluid sharing"]
    streams = sorted({name for pair in pairs for name in pair.names})
    keys = [f"host {name}" for name in streams] + [f"weight {name}" for name in streams] + list(SHARED)
    kinds = [key.split()[0] for key in keys]
    low = np.array([LIMITS[kind][0] for kind in kinds])
    high = np.array([LIMITS[kind][1] for kind in kinds])
    scale = np.array([PRIOR[kind] for kind in kinds])
    uses = [
        [index for index, key in enumerate(keys) if key in SHARED or key.split(" ", 1)[1] in pair.names]
        for pair in pairs
    ]

    def one(pair: _Pair, values: Floats) -> Floats:
        return (pair.predicted_log(model, _factors(streams, values)) - pair.seen_log) * pair.weight

    def errors(values: Floats) -> Floats:
        return np.concatenate([*(one(pair, values) for pair in pairs), values / scale])

    def slopes(values: Floats) -> Floats:
        blocks = []
        for pair, used in zip(pairs, uses, strict=True):
            here = one(pair, values)
            block = np.zeros((len(here), len(values)))
            for index in used:
                step = 0.02 if values[index] + 0.02 <= high[index] else -0.02
                moved = values.copy()
                moved[index] += step
                block[:, index] = (one(pair, moved) - here) / step
            blocks.append(block)
        return np.vstack([*blocks, np.diag(1.0 / scale)])

    best, best_cost = np.zeros(len(keys)), np.inf
    for start in _starts(len(streams), errors):
        found = least_squares(
            errors, np.clip(start, low, high), jac=slopes, bounds=(low - 1e-9, high + 1e-9), loss="soft_l1",
            x_scale=scale, max_nfev=15, xtol=1e-4, ftol=1e-4,
        )  # fmt: skip
        if found.cost < best_cost:
            best, best_cost = found.x, found.cost
    if _cost(errors(np.zeros(len(keys)))) <= best_cost:
        best = np.zeros(len(keys))
    fitted = _factors(streams, np.clip(best, low, high))
    return fitted.model_copy(update=_errors(model, pairs, fitted, len(keys))), notes


def _ready(model: Model, mixes: Sequence[Mix]) -> tuple[list[_Pair], list[str]]:
    pairs: list[_Pair] = []
    left_out: dict[str, int] = {}
    for mix in mixes:
        cadence = pick_cadence(model, CADENCE_OF_MODE[mix.mode])
        names = tuple(model.measured_name(name) for name, _, _, _ in mix.parts)
        calls, owner, times = [], [], []
        try:
            for index, (name, payload_bytes, _, seen_alone) in enumerate(mix.parts):
                alone_s = alone(model, name, payload_bytes, cadence).time_s if seen_alone is None else seen_alone
                times.append(alone_s)
                for group in range(len(model.stream(name).groups)):
                    calls.append(make_call(model, name, payload_bytes, cadence, group, alone_s=alone_s))
                    owner.append(index)
        except ValueError as error:
            left_out[str(error)] = left_out.get(str(error), 0) + 1
            continue
        together = np.array([part[2] for part in mix.parts])
        pairs.append(
            _Pair(
                mix=mix,
                calls=tuple(calls),
                owner=tuple(owner),
                alone_s=np.array(times),
                seen_log=np.log(together / np.array(times)),
                weight=1.0
                / float(np.sqrt(MODEL_ERROR**2 + mix.deviation_log**2 + 2 * model.solo[cadence].noise_log ** 2)),
                names=names,
            )
        )
    return pairs, [f"{count} 2-way runs left out: {why}" for why, count in left_out.items()]


def _factors(streams: Sequence[str], values: Floats) -> Contention:
    count = len(streams)
    hosts = np.clip(values[:count], 0.0, 1.0)
    shared = dict(zip(SHARED, (float(value) for value in values[2 * count :]), strict=True))
    return Contention(
        host_intensity={name: float(value) for name, value in zip(streams, hosts, strict=True)},
        weight={name: float(np.exp(value)) for name, value in zip(streams, values[count : 2 * count], strict=True)},
        message_exponent=shared["message_exponent"],
        thread_intensity=min(max(shared["thread_intensity"], 0.0), 1.0),
        crowding=max(shared["crowding"], 0.0),
    )


def _starts(count: int, errors: Callable[[Floats], Floats]) -> list[Floats]:
    """Return the best of a coarse grid: a factor at its plain value can have no slope."""
    grid: list[tuple[float, int, Floats]] = []
    for host, thread, exponent in itertools.product((0.0, 0.5, 0.9), (0.0, 0.5, 0.9), (0.0, 0.4)):
        values = np.zeros(2 * count + len(SHARED))
        values[:count] = host
        values[2 * count] = exponent
        values[2 * count + 1] = thread
        grid.append((_cost(errors(values)), len(grid), values))
    return [values for _, _, values in sorted(grid, key=lambda row: row[:2])[:2]]


def _cost(errors: Floats) -> float:
    """Return the robust cost that ``least_squares`` calls soft_l1."""
    return float((np.sqrt(1.0 + errors**2) - 1.0).sum())


def _errors(model: Model, pairs: Sequence[_Pair], fitted: Contention, num_factors: int) -> dict[str, object]:
    """Return the error of whole predictions by mode, grown by the freedom that the factors took from the points."""
    num_points = sum(len(pair.names) for pair in pairs)
    growth = float(np.sqrt(num_points / (num_points - num_factors))) if num_points > 2 * num_factors else 1.5
    by_mode: dict[str, list[float]] = {}
    for pair in pairs:
        times = together_times(model, pair.mix.sizes, pair.mix.mode, factors=fitted, max_events=FIT_EVENTS)
        seen = [time_s for _, _, time_s, _ in pair.mix.parts]
        by_mode.setdefault(pair.mix.mode, []).extend(np.abs(np.log(np.array(times) / np.array(seen))))
    return {
        "num_points": num_points,
        "pair_error_log": {mode: _quantile(np.array(found)) * growth for mode, found in by_mode.items()},
    }


def _quantile(scores: Floats) -> float:
    return float(np.quantile(scores, 0.9, method="higher"))
