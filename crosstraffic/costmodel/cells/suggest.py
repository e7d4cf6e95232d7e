"""suggest_cells: which cells to measure next, by how much of the summed interval each would take away."""

import itertools

import numpy as np
import pandas as pd

from crosstraffic.costmodel.cells.model import CellModel, measured_cells, predict_cells
from crosstraffic.results.table import CELL, CURVE

_REACH_OCTAVES = 2.0  # of size, within which a measurement helps its neighbours


def untested(model: CellModel) -> pd.DataFrame:
    """Return candidates around what was measured: sizes between and beyond those of each curve, and twice its ranks."""
    rows = []
    for curve in model.curves:
        sizes = curve.payload_bytes
        pairs = itertools.pairwise(sizes)
        middles = [round((max(low, 1) * high) ** 0.5) for low, high in pairs if high > 2 * max(low, 1)]
        new = [size for size in middles if size not in sizes] + [2 * sizes[-1]]
        rows += [curve.named() | {"payload_bytes": size} for size in new]
        named = curve.named()
        wider = named | {name: 2 * int(named[name]) for name in ("num_ranks", "ranks_per_node")}
        if named["num_nodes"] == 1:
            rows += [wider | {"payload_bytes": size} for size in sizes]
    frame = pd.DataFrame(rows).drop_duplicates(ignore_index=True)[list(CELL)]
    measured = measured_cells(model)[list(CELL)].assign(known=True)
    merged = frame.merge(measured, how="left", on=list(CELL))
    return frame[merged["known"].isna().to_numpy()].reset_index(drop=True)


def suggest_cells(model: CellModel, candidates: pd.DataFrame | None = None, n: int = 10) -> pd.DataFrame:
    """Return up to ``n`` candidates in the order in which to measure them, with ``shrinks_log`` of each.

    A measurement takes its own interval (log width beyond noise) away, and part of those of its curve nearby;
    candidates whose prediction has no time at all count as the widest.

    Raises:
        ValueError: ``n`` is below 1.
    """
    if n < 1:
        raise ValueError(f"the number of suggested cells must be at least 1: {n}")
    frame = (untested(model) if candidates is None else candidates[list(CELL)].drop_duplicates()).reset_index(drop=True)
    if frame.empty:
        return frame.assign(shrinks_log=pd.Series(dtype="float64"))
    answer = predict_cells(model, frame)
    width = np.log(answer["high_s"].to_numpy() / answer["low_s"].to_numpy())
    width = np.where(np.isfinite(width), width, np.nanmax(width, initial=1.0))
    width = np.where(answer["kind"] == "measured", 0.0, width)
    x = np.log2(np.maximum(frame["payload_bytes"].to_numpy(dtype=np.float64), 1.0))
    curve = frame.groupby(list(CURVE), sort=False).ngroup().to_numpy()
    members = [np.flatnonzero(curve == place) for place in range(curve.max() + 1)]
    near = [np.clip(1 - np.abs(x[rows][:, None] - x[rows][None, :]) / _REACH_OCTAVES, 0, 1) for rows in members]
    gains = [share @ width[rows] for rows, share in zip(members, near, strict=True)]
    chosen: list[int] = []
    shrinks: list[float] = []
    for _ in range(min(n, len(frame))):
        place = max(range(len(members)), key=lambda one: float(gains[one].max()))
        best = int(gains[place].argmax())
        if gains[place][best] <= 0:
            break
        chosen.append(int(members[place][best]))
        shrinks.append(float(gains[place][best]))
        width[members[place]] *= 1 - near[place][best]
        gains[place] = near[place] @ width[members[place]]
    return frame.iloc[chosen].assign(shrinks_log=shrinks).reset_index(drop=True)
