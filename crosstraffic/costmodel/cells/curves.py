"""CellCurve: the sizes of one op, kernel, group and layout that were measured, with their median times."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from crosstraffic.results.table import COLUMNS, CURVE, Table, bad_rows

MIN_SIZES = 3  # distinct sizes; a knee takes three numbers
CONTRADICTION = 10.0  # ratio between repeats of one cell

Key = tuple[Any, ...]  # the values of results.table.CURVE, in its order


class CellCurve(BaseModel):
    """One curve; ``repeats_log`` are absolute differences (log) between repeats of a cell, with the cell's size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: tuple[str | int, ...]
    payload_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    repeats_log: tuple[tuple[int, float], ...] = ()

    def named(self) -> dict[str, Any]:
        """Return what defines the curve by name."""
        return dict(zip(CURVE, self.key, strict=True))


def describe(key: Key) -> str:
    """Name a curve in an error.

    >>> describe(("all_reduce", "nccl", "half", 8, 1, 8, "consecutive", 1, "", "", ""))
    'all_reduce nccl half, 8 ranks on 1 nodes'
    """
    named = dict(zip(CURVE, key, strict=True))
    head = " ".join(
        str(named[name]) for name in ("op", "kernel", "dtype", "issue", "cadence", "parameters") if named[name]
    )
    return f"{head}, {named['num_ranks']} ranks on {named['num_nodes']} nodes"


def gather(tables: Sequence[Table]) -> tuple[list[CellCurve], dict[Key, str]]:
    """Merge the rows of tables into curves; return those that can be fitted, and why the others cannot.

    Raises:
        ValueError: no rows, tables of several systems, or rows that no model may be fitted to.
    """
    systems = sorted({table.system for table in tables})
    if len(systems) != 1:
        raise ValueError(f"cells are fitted for one system at a time: {', '.join(systems) or 'no tables'}")
    frame = pd.concat([table.frame[list(COLUMNS)] for table in tables], ignore_index=True)
    bad = bad_rows(frame)
    if bad:
        checked = frame[~(frame["time_s"] > 0) | np.isinf(frame["time_s"])]
        where = f", first in {describe(tuple(checked.iloc[0][list(CURVE)]))}" if len(checked) else ""
        raise ValueError(f"rows that no model may be fitted to: {bad}{where}; leave them out or measure them again")
    if frame.empty:
        raise ValueError(f"no cells in the tables of {systems[0]}")
    curves: list[CellCurve] = []
    refused: dict[Key, str] = {}
    for key, rows in frame.groupby(list(CURVE), sort=True):
        curve, why = _curve(tuple(key), rows["payload_bytes"].to_numpy(), rows["time_s"].to_numpy())
        curves.append(curve)
        if why is not None:
            refused[curve.key] = why
    return curves, refused


def _curve(key: Key, sizes: Any, times: Any) -> tuple[CellCurve, str | None]:
    order = np.argsort(sizes, kind="stable")
    sizes, times = sizes[order], times[order]
    distinct, first = np.unique(sizes, return_index=True)
    groups = np.split(times, first[1:])
    medians = [float(np.median(group)) for group in groups]
    gaps: list[tuple[int, float]] = []
    why: str | None = None
    for size, group in zip(distinct, groups, strict=True):
        if len(group) > 1:
            gaps.append((int(size), abs(math.log(group[1] / group[0]))))
            if len(group) < 4 and group.max() > CONTRADICTION * group.min():
                why = f"contradictory times at {size} bytes: from {group.min():.3g} s to {group.max():.3g} s"
    if len(distinct) < MIN_SIZES:
        listed = ", ".join(str(size) for size in distinct)
        why = f"{len(distinct)} distinct sizes ({listed} bytes), but a curve needs {MIN_SIZES}"
    whole = tuple(value.item() if hasattr(value, "item") else value for value in key)
    curve = CellCurve(
        key=whole,
        payload_bytes=tuple(int(size) for size in distinct),
        time_s=tuple(medians),
        repeats_log=tuple(gaps),
    )
    return curve, None if why is None else f"{describe(whole)}: {why}"
