"""Predictions as tables and as JSON: records of a run, curves, mixes, steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from crosstraffic.costmodel.calls import Estimate, alone, pick_cadence
from crosstraffic.costmodel.model import Contention, Model
from crosstraffic.costmodel.observations import ANY, cadence_of, rows_of, usable, visits_of
from crosstraffic.costmodel.steps import calls_of, step_time, unmeasured_sizes
from crosstraffic.costmodel.together import CADENCE_OF_MODE, together_times
from crosstraffic.patterns.step import Step
from crosstraffic.results.record import Cadence, Mode
from crosstraffic.results.store import Run

RECORD_COLUMNS = (
    "kind", "stream", "mix", "payload_bytes", "cadence", "mode", "step", "measured_s", "predicted_s", "low_s", "high_s",
    "held_out",
)  # fmt: skip
CURVE_COLUMNS = ("stream", "cadence", "payload_bytes", "predicted_s", "low_s", "high_s")
STEP_CADENCE: Cadence = "streaming"
POINTS_PER_OCTAVE = 4


def predict_mix(
    model: Model, mix: Sequence[tuple[str, int]], mode: Mode, factors: Contention | None = None
) -> dict[str, Any]:
    """Predict streams running at the same time: the ``streams`` of ``predict --json``, and ``whole_s`` (one-shot).

    Raises:
        ValueError: an unknown or unfitted stream, or one named twice.
    """
    names = [name for name, _ in mix]
    if len({model.measured_name(name) for name in names}) < len(names):
        raise ValueError(f"each stream of a mix must be another communication: {', '.join(names)}")
    cadence = pick_cadence(model, CADENCE_OF_MODE[mode])
    estimates = [alone(model, name, payload_bytes, cadence) for name, payload_bytes in mix]
    single = len(mix) == 1
    times = [estimates[0].time_s] if single else together_times(model, mix, mode, factors=factors)
    sharing = 0.0 if single else model.contention.pair_error_log.get(mode, 0.1) * float(np.sqrt(len(mix) - 1))
    rows = []
    for name, estimate, time_s in zip(names, estimates, times, strict=True):
        spread = max(sharing, _spread(estimate))  # what pairs missed holds the error of their curves already
        rows.append(
            {
                "name": name,
                "alone_s": estimate.time_s,
                "together_s": time_s,
                "low_s": time_s * float(np.exp(-spread)),
                "high_s": time_s * float(np.exp(spread)),
                "slowdown": time_s / estimate.time_s,
                "valid": estimate.valid,
                "why": estimate.why,
            }
        )
    return {"streams": rows, "whole_s": max(times) if mode == "one_shot" else None}


def _spread(estimate: Estimate) -> float:
    return float(np.log(estimate.high_s / estimate.time_s))


def predict_step(model: Model, step: Step, factors: Contention | None = None) -> dict[str, Any]:
    """Predict a whole step: ``step_s``, its interval, and where it is out of range.

    Calls of a step follow each other, so the times alone are those back to back. The interval also spans what the
    isolated times would give: how much a call gains from its predecessor is not known for mixed calls.

    Raises:
        ValueError: a stream of the step is unknown or was not fitted.
    """
    cadence = pick_cadence(model, STEP_CADENCE)
    time_s = step_time(model, step, cadence, factors)
    others = [step_time(model, step, other, factors) for other in model.solo if other != cadence]
    total, square = 0.0, 0.0
    for (stream, payload_bytes), count in calls_of(step).items():
        estimate = alone(model, stream, payload_bytes, cadence)
        total += count * estimate.time_s
        square += count * estimate.time_s * _spread(estimate)
    spread = square / total if total > 0 else 0.0  # errors of one curve are the same in each of its calls
    if len(step.lanes) > 1:
        spread = float(np.hypot(spread, max(model.contention.pair_error_log.values(), default=0.1)))
    outside = unmeasured_sizes(model, step, cadence)
    return {
        "step_s": time_s,
        "low_s": min([time_s, *others]) * float(np.exp(-spread)),
        "high_s": max([time_s, *others]) * float(np.exp(spread)),
        "valid": not outside,
        "why": f"outside the measured sizes: {', '.join(outside)}" if outside else None,
    }


def predict_records(model: Model, run: Run) -> pd.DataFrame:
    """Predict every usable record of a run. ``held_out`` is True for what a model never sees: 3-way runs and steps."""
    rows: list[tuple[Any, ...]] = []
    frame = usable(run)
    for row in rows_of(frame[frame["kind"] == "alone"]):
        cadence = cadence_of(row)
        if cadence is None or cadence not in model.solo or row.stream not in model.solo[cadence].curves:
            continue
        size = int(row.payload_bytes)
        estimate = alone(model, row.stream, size, cadence)
        rows.append((
            "alone", row.stream, (row.stream,), size, cadence, row.mode, None, row.time_median_s,
            estimate.time_s, estimate.low_s, estimate.high_s, False,
        ))  # fmt: skip
    rows += _together_rows(model, frame[frame["kind"] == "together"])
    for row in rows_of(frame[frame["kind"] == "step"]):
        step = next((step for step in run.steps if step.name == row.stream), None)
        if step is None:
            continue
        try:
            found = predict_step(model, step)
        except ValueError:  # a stream of it was refused: the model's notes say so
            continue
        rows.append((
            "step", row.stream, step.streams, None, row.cadence, None, step.name, row.time_median_s, found["step_s"],
            found["low_s"], found["high_s"], True,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(RECORD_COLUMNS))


def _together_rows(model: Model, frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for _, mode, group in visits_of(frame):
        sizes = [(row.stream, int(row.payload_bytes)) for row in group if row.stream != ANY]
        names = tuple(group[0].mix)
        if {name for name, _ in sizes} != set(names) or len(sizes) < 2:
            continue
        try:
            found = predict_mix(model, sizes, mode)
        except ValueError:  # a stream of it was refused: the model's notes say so
            continue
        by_name = {row["name"]: row for row in found["streams"]}
        for row in group:
            if row.stream == ANY:
                if found["whole_s"] is None:
                    continue
                last = max(by_name.values(), key=lambda part: part["together_s"])
                size, value = None, last
            else:
                size, value = int(row.payload_bytes), by_name[row.stream]
            rows.append((
                "together", row.stream, names, size, None, mode, None, row.time_median_s, value["together_s"],
                value["low_s"], value["high_s"], len(names) > 2,
            ))  # fmt: skip
    return rows


def curves(model: Model, run: Run) -> pd.DataFrame:
    """Predict every fitted stream of a run over its measured sizes, four points an octave."""
    rows = []
    for cadence, solo in model.solo.items():
        for stream in run.streams:
            curve = solo.curves.get(stream.name)
            if curve is None:
                continue
            low, high = max(curve.min_payload_bytes, 1), max(curve.max_payload_bytes, 1)
            count = max(2, round(POINTS_PER_OCTAVE * float(np.log2(high / low))) + 1)
            for size in sorted({round(size) for size in np.geomspace(low, high, count)}):
                estimate = alone(model, stream.name, size, cadence)
                rows.append((stream.name, cadence, size, estimate.time_s, estimate.low_s, estimate.high_s))
    return pd.DataFrame(rows, columns=list(CURVE_COLUMNS))
