"""Tables derived from a run's records: what the report, the plots and the terminal summary show."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from crosstraffic.patterns.step import Task
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.wire import wire_matrix
from crosstraffic.results.store import Run

PATTERNS: Mapping[str, str] = {
    "tp": "tensor parallel",
    "sp": "sequence parallel",
    "cp": "context parallel",
    "pp": "pipeline parallel",
    "ep": "expert parallel",
    "pd": "prefill to decode handoff",
    "epd": "encoder to prefill handoff",
    "dp": "data parallel",
}


def pattern_of(run: Run, name: str) -> str:
    """Return the pattern of a stream or of an alias of one."""
    prefix = name.split(".")[0]
    if prefix in PATTERNS:
        return prefix
    measured = run.info.aliases.get(name, name)
    return next((stream.pattern for stream in run.streams if stream.name == measured), "other")


def ok_alone(run: Run) -> pd.DataFrame:
    """Return the good records of streams alone, without the baselines interleaved with mixes."""
    frame = run.frame
    return frame[(frame["kind"] == "alone") & (frame["status"] == "ok") & frame["baseline_of"].isna()]


def pairs(run: Run, mode: str) -> pd.DataFrame:
    """Return one row a stream of each pair in a mode: stream, other, slowdown (absent where invalid), status, why."""
    frame = run.frame[(run.frame["kind"] == "together") & (run.frame["mode"] == mode) & (run.frame["stream"] != "*")]
    frame = frame[frame["mix"].map(len) == 2]
    rows = [
        {
            "stream": row["stream"],
            "other": next((name for name in row["mix"] if name != row["stream"]), row["stream"]),
            "slowdown": row["slowdown"] if row["status"] == "ok" else np.nan,
            "time_median_s": row["time_median_s"],
            "overlap_fraction": row["overlap_fraction"],
            "status": row["status"],
            "why": row["why"],
        }
        for row in frame.to_dict("records")
    ]
    columns = ["stream", "other", "slowdown", "time_median_s", "overlap_fraction", "status", "why"]
    return pd.DataFrame(rows, columns=columns)


def slowdown_matrix(run: Run, mode: str) -> pd.DataFrame:
    """Return slowdowns, rows the slowed stream, columns the other one, in the run's order; NaN where not measured."""
    found = pairs(run, mode)
    present = {*found["stream"], *found["other"]}
    names = [stream.name for stream in run.streams if stream.name in present]
    matrix = pd.DataFrame(np.nan, index=names, columns=names, dtype=float)
    for row in found.to_dict("records"):
        if row["stream"] in matrix.index and row["other"] in matrix.columns:
            matrix.loc[row["stream"], row["other"]] = row["slowdown"]
    return matrix


def larger_mixes(run: Run) -> pd.DataFrame:
    """Return the rows of mixes of three and more streams."""
    frame = run.frame[(run.frame["kind"] == "together") & (run.frame["stream"] != "*")]
    return frame[frame["mix"].map(len) > 2]


def worst_pair(run: Run) -> dict[str, Any] | None:
    """Return the pair row with the largest slowdown, steady before one-shot; None where no pair was measured."""
    for mode in ("steady", "one_shot"):
        found = pairs(run, mode).dropna(subset=["slowdown"])
        if len(found):
            worst = found.sort_values("slowdown").iloc[-1].to_dict()
            return {str(key): value for key, value in worst.items()} | {"mode": mode}
    return None


def _calmest_first(visits: pd.DataFrame) -> pd.DataFrame:
    """Put the visit first during which other processes took least of the processors, then the earliest."""
    return visits.sort_values(["processor_share", "repeat"], ascending=[False, True], na_position="last")


def stream_table(run: Run) -> pd.DataFrame:
    """Return one row a stream at its real size: times alone, rate, worst slowdown and by whom."""
    alone = ok_alone(run)
    steady = pairs(run, "steady").dropna(subset=["slowdown"])
    if steady.empty:
        steady = pairs(run, "one_shot").dropna(subset=["slowdown"])
    rows = []
    for stream in run.streams:
        own = alone[(alone["stream"] == stream.name) & (alone["payload_bytes"] == stream.payload_bytes)]
        row: dict[str, Any] = {
            "stream": stream.name,
            "pattern": stream.pattern,
            "op": stream.op,
            "group_size": stream.group_size,
            "num_groups": len(stream.groups),
            "payload_bytes": stream.payload_bytes,
        }
        for cadence in ("isolated", "streaming"):
            visits = _calmest_first(own[own["cadence"] == cadence])
            for part in ("median", "low", "high"):
                row[f"{cadence}_{part}_s"] = visits[f"time_{part}_s"].iloc[0] if len(visits) else np.nan
        isolated = _calmest_first(own[own["cadence"] == "isolated"])  # the rate belongs to the time beside it
        rated = isolated if len(isolated) else _calmest_first(own)
        for field in ("busbw_bytes_per_s", "bottleneck_bytes_per_s"):
            row[field] = rated[field].iloc[0] if len(rated) else np.nan
        first = own["first_call_s"].dropna()
        row["first_call_s"] = first.iloc[0] if len(first) else np.nan
        felt = steady[steady["stream"] == stream.name]
        row["worst_slowdown"] = felt["slowdown"].max() if len(felt) else np.nan
        row["worst_by"] = felt.sort_values("slowdown")["other"].iloc[-1] if len(felt) else None
        rows.append(row)
    return pd.DataFrame(rows)


def _task_bytes(run: Run, stream: Stream, task: Task) -> int:
    total = 0
    for index in range(len(stream.groups)) if task.groups is None else task.groups:
        matrix = wire_matrix(stream, index, task.payload_bytes)
        total += int(matrix[task.edge]) if task.edge is not None else int(matrix.sum())
    return total


def step_bytes(run: Run) -> pd.DataFrame:
    """Return bytes sent between ranks in one whole step: step, lane, stream, pattern, num_calls, wire_bytes."""
    by_name = {stream.name: stream for stream in run.streams}
    known: dict[tuple[str, Task], int] = {}
    rows: dict[tuple[str, int, str], list[int]] = {}
    for step in run.steps:
        for lane in range(len(step.lanes)):
            for block in step.lanes[lane]:
                for task in block.tasks:
                    stream = by_name[run.info.aliases.get(task.stream, task.stream)]
                    if (stream.name, task) not in known:
                        known[stream.name, task] = _task_bytes(run, stream, task)
                    cell = rows.setdefault((step.name, lane, task.called or task.stream), [0, 0])
                    cell[0] += block.repeat
                    cell[1] += block.repeat * known[stream.name, task]
    return pd.DataFrame(
        [
            {"step": step, "lane": lane, "stream": name, "pattern": pattern_of(run, name)}
            | {"num_calls": calls, "wire_bytes": wire}
            for (step, lane, name), (calls, wire) in rows.items()
        ],
        columns=["step", "lane", "stream", "pattern", "num_calls", "wire_bytes"],
    )


def alone_time_s(run: Run, name: str, payload_bytes: int, cadence: str = "isolated") -> float | None:
    """Return the measured time of a stream alone, between the two nearest sizes on logarithms; None outside them."""
    alone = ok_alone(run)
    own = alone[(alone["stream"] == name) & (alone["cadence"] == cadence) & (alone["payload_bytes"] > 0)]
    if own.empty or payload_bytes <= 0:
        return None
    medians = own.groupby("payload_bytes")["time_median_s"].median().dropna()
    sizes = medians.index.to_numpy(dtype=float)
    if not sizes.size or not sizes[0] <= payload_bytes <= sizes[-1]:
        return None
    return float(np.exp(np.interp(np.log(payload_bytes), np.log(sizes), np.log(medians.to_numpy(dtype=float)))))


def step_lanes(run: Run) -> pd.DataFrame:
    """Return what each stream would take in a step if every call ran alone: step, lane, stream, pattern, alone_s."""
    rows: dict[tuple[str, int, str], float] = {}
    known: dict[tuple[str, int], float | None] = {}
    for step in run.steps:
        for lane, blocks in enumerate(step.lanes):
            for block in blocks:
                for task in block.tasks:
                    name = run.info.aliases.get(task.stream, task.stream)
                    if (name, task.payload_bytes) not in known:
                        known[name, task.payload_bytes] = alone_time_s(run, name, task.payload_bytes)
                    time_s = known[name, task.payload_bytes]
                    key = (step.name, lane, task.called or task.stream)
                    rows[key] = rows.get(key, 0.0) + block.repeat * (np.nan if time_s is None else time_s)
    return pd.DataFrame(
        [
            {"step": step, "lane": lane, "stream": name, "pattern": pattern_of(run, name), "alone_s": time_s}
            for (step, lane, name), time_s in rows.items()
        ],
        columns=["step", "lane", "stream", "pattern", "alone_s"],
    )


def step_table(run: Run, predictions: pd.DataFrame | None) -> pd.DataFrame:
    """Return one row a step: measured median and interval, the sum of the longest lane alone, and the prediction."""
    lanes = step_lanes(run)
    frame = run.frame[run.frame["kind"] == "step"]
    rows = []
    for step in run.steps:
        seen = frame[frame["stream"] == step.name]
        good = seen[seen["status"] == "ok"]
        alone = lanes[lanes["step"] == step.name].groupby("lane")["alone_s"].sum(min_count=1)
        row: dict[str, Any] = {"step": step.name, "phase": step.phase, "num_lanes": len(step.lanes)}
        for part in ("median", "low", "high"):
            row[f"measured_{part}_s"] = good[f"time_{part}_s"].iloc[-1] if len(good) else np.nan
        row["num_samples"] = int(good["num_samples"].iloc[-1]) if len(good) else 0
        row["alone_s"] = alone.max() if len(alone) else np.nan
        guess = None if predictions is None else predictions[predictions["step"] == step.name]
        for name in ("predicted_s", "low_s", "high_s"):
            row[name] = guess[name].iloc[0] if guess is not None and len(guess) else np.nan
        row["status"] = seen["status"].iloc[-1] if len(seen) else "not measured"
        row["why"] = seen["why"].iloc[-1] if len(seen) else None
        rows.append(row)
    return pd.DataFrame(rows)
