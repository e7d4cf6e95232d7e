"""What a model is fitted to and judged by, taken from the records of runs. Only records with status ``ok`` count."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crosstraffic.costmodel.model import Noise
from crosstraffic.costmodel.solo import Observation
from crosstraffic.results.record import Cadence, Mode
from crosstraffic.results.store import Run

_NORMAL_95 = 1.96
CADENCES: tuple[Cadence, ...] = ("isolated", "streaming")
ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One mix as measured: per stream (name, payload_bytes, time together, time alone in between or None), s."""

    mode: Mode
    parts: tuple[tuple[str, int, float, float | None], ...]
    deviation_log: float
    whole_s: float | None

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Streams with their sizes, as ``together_times`` takes them."""
        return tuple((name, payload_bytes) for name, payload_bytes, _, _ in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """One step as measured, s."""

    name: str
    time_s: float


def rows_of(frame: pd.DataFrame) -> list[Any]:
    """Return the rows as named tuples."""
    return list(frame.itertuples())


def visits_of(frame: pd.DataFrame) -> list[tuple[Any, Any, list[Any]]]:
    """Return (point, mode, rows) of each visit of a mix."""
    keys: Any = frame.groupby(["point", "mode", "repeat"], sort=False)
    return [(point, mode, rows_of(rows)) for (point, mode, _), rows in keys]


def usable(run: Run) -> pd.DataFrame:
    """Return the records that count: status ok, with a time."""
    frame = run.frame
    return frame[(frame["status"] == "ok") & frame["time_median_s"].notna()]


def deviation_log(row: Any) -> float:
    """Return the standard deviation of ln(median) that a record's 95 % interval stands for; 0 where it has none.

    >>> from types import SimpleNamespace as N
    >>> round(deviation_log(N(time_low_s=0.9608, time_high_s=1.0408)), 4)
    0.0204
    """
    low, high = row.time_low_s, row.time_high_s
    if low is None or high is None or not (np.isfinite(low) and np.isfinite(high)) or low <= 0 or high <= low:
        return 0.0
    return float(np.log(high / low) / (2 * _NORMAL_95))


def cadence_of(row: Any) -> Cadence | None:
    """Return an alone record's cadence; a baseline in a steady mix streams, one in a one-shot mix is isolated."""
    for cadence in CADENCES:
        if row.cadence == cadence:
            return cadence
    return {"steady": CADENCES[1], "one_shot": CADENCES[0]}.get(row.mode)


def alone_observations(runs: Sequence[Run]) -> dict[Cadence, list[Observation]]:
    """Return the times alone by cadence, those interleaved with mixes included."""
    found: dict[Cadence, list[Observation]] = {}
    for run in runs:
        frame = usable(run)
        for row in rows_of(frame[frame["kind"] == "alone"]):
            cadence = cadence_of(row)
            if cadence is not None:
                found.setdefault(cadence, []).append(
                    Observation(
                        stream=row.stream,
                        payload_bytes=int(row.payload_bytes),
                        time_s=float(row.time_median_s),
                        deviation_log=deviation_log(row),
                    )
                )
    return found


def mixes_of(runs: Sequence[Run]) -> list[Mix]:
    """Return the mixes that were measured whole."""
    found = []
    for run in runs:
        frame = usable(run)
        baselines = {
            (row.baseline_of, row.stream): float(row.time_median_s)
            for row in rows_of(frame[(frame["kind"] == "alone") & frame["baseline_of"].notna()])
        }
        together = frame[frame["kind"] == "together"]
        for point, mode, rows in visits_of(together):
            parts: list[tuple[str, int, float, float | None]] = []
            deviations, whole = [], None
            names: tuple[str, ...] = ()
            for row in rows:
                names = tuple(row.mix)
                if row.stream == ANY:
                    whole = float(row.time_median_s)
                    continue
                alone_s = baselines.get((point, row.stream))
                parts.append((row.stream, int(row.payload_bytes), float(row.time_median_s), alone_s))
                deviations.append(deviation_log(row))
            if {part[0] for part in parts} == set(names) and len(parts) > 1:
                found.append(
                    Mix(mode=mode, parts=tuple(parts), deviation_log=float(np.mean(deviations)), whole_s=whole)
                )
    return found


def steps_of(runs: Sequence[Run]) -> list[StepSeen]:
    """Return the steps that were measured."""
    found = []
    for run in runs:
        frame = usable(run)
        for row in rows_of(frame[frame["kind"] == "step"]):
            found.append(StepSeen(name=row.stream, time_s=float(row.time_median_s)))
    return found


def repeat_noise(runs: Sequence[Run]) -> Noise:
    """Compare visits of one point alone (stream, size, cadence) that follow each other in one run."""
    ratios: list[float] = []
    for run in runs:
        visits: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
        frame = usable(run)
        for row in rows_of(frame[frame["kind"] == "alone"]):
            cadence = cadence_of(row)
            if cadence is not None and row.time_median_s > 0:
                key = (row.stream, int(row.payload_bytes), cadence)
                visits.setdefault(key, []).append((float(row.started_s), float(np.log(row.time_median_s))))
        for seen in visits.values():
            logs = [log for _, log in sorted(seen)]
            ratios += [abs(right - left) for left, right in itertools.pairwise(logs)]
    if not ratios:
        return Noise(median_ape=None, p90_ape=None, num_points=0)
    median, p90 = np.quantile(ratios, [0.5, 0.9])
    return Noise(median_ape=float(median), p90_ape=float(p90), num_points=len(ratios))
