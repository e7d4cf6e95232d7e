"""CellModel: what a fit knows of cells (op, group, size), measured and predicted; part of model.json."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from crosstraffic.costmodel.cells.curves import CellCurve, Key, describe, gather
from crosstraffic.costmodel.cells.experts import Floats
from crosstraffic.costmodel.cells.intervals import Widths, half_width, widths_of
from crosstraffic.costmodel.cells.reach import Curves, reach
from crosstraffic.results.table import CELL, CURVE, Table

FARTHEST_OCTAVES = 5.0  # beyond the sizes of a curve: further out a prediction is not valid
FARTHEST_APART = 2.0  # octaves of ranks or layout


class Refusal(BaseModel):
    """A curve that cannot be fitted, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: tuple[str | int, ...]
    why: str


class CellModel(BaseModel):
    """Everything that ``predict_cells`` needs; of one system."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str
    curves: tuple[CellCurve, ...]
    refused: tuple[Refusal, ...] = ()
    widths: Widths


def fit_cells(tables: Table | Sequence[Table]) -> CellModel:
    """Fit cells of one system; curves that cannot be fitted are kept with the reason and never predicted.

    Raises:
        ValueError: no rows, several systems, times that are negative or missing, or no curve that can be fitted.
    """
    curves, refused = gather((tables,) if isinstance(tables, Table) else tables)
    good = [curve for curve in curves if curve.key not in refused]
    if not good:
        whys = list(refused.values())
        rest = f"; and {len(whys) - 3} more" if len(whys) > 3 else ""
        raise ValueError(f"nothing to fit: {'; '.join(whys[:3])}{rest}")
    return CellModel(
        system=tables.system if isinstance(tables, Table) else tables[0].system,
        curves=tuple(good),
        refused=tuple(Refusal(key=key, why=why) for key, why in refused.items()),
        widths=widths_of(good),
    )


def measured_cells(model: CellModel) -> pd.DataFrame:
    """Return the measured cells of fitted curves: the columns ``results.table.CELL`` and ``time_s``."""
    lengths = [len(curve.payload_bytes) for curve in model.curves]
    columns = {
        name: np.repeat(np.array([curve.key[place] for curve in model.curves], dtype=object), lengths)
        for place, name in enumerate(CURVE)
    }
    frame = pd.DataFrame(columns)
    frame["payload_bytes"] = [size for curve in model.curves for size in curve.payload_bytes]
    frame["time_s"] = [time for curve in model.curves for time in curve.time_s]
    return frame.astype({name: "int64" for name, default in CURVE.items() if isinstance(default, int)})


def predict_cells(model: CellModel, cells: pd.DataFrame) -> pd.DataFrame:
    """Predict cells; ``cells`` has the columns ``results.table.CELL``, the answer the same index.

    Returns:
        Columns ``time_s``, ``low_s``, ``high_s`` (90 % interval of a new measurement), ``source`` (``measured`` where
        the very cell was measured: then ``time_s`` is the median of its repeats exactly; ``model`` elsewhere),
        ``kind`` (``measured``, ``size``, ``range``, ``group``, ``layout``: what had to be extrapolated), ``valid`` and
        ``why`` (None, or what is out of range: a new tier, an op that no curve tells about; then times may be NaN).

    Raises:
        ValueError: a column is missing.
    """
    missing = [name for name in CELL if name not in cells]
    if missing:
        raise ValueError(f"cells to predict lack the columns {', '.join(missing)}; they need {', '.join(CELL)}")
    curves = Curves(model.curves)
    refused = {refusal.key: refusal.why for refusal in model.refused}
    sizes = cells["payload_bytes"].to_numpy(dtype=np.float64)
    answer = _Answer(len(cells))
    groups: dict[Any, Any] = dict(cells.groupby(list(CURVE), sort=False).indices)
    for key, rows in groups.items():
        _predict_curve(model, curves, refused, tuple(key), sizes, np.asarray(rows), answer)
    return answer.frame(cells.index)


class _Answer:
    """Columns under construction."""

    def __init__(self, length: int) -> None:
        self.time: Floats = np.full(length, np.nan)
        self.width: Floats = np.full(length, np.nan)
        self.kind = np.full(length, "size", dtype=object)
        self.why = np.full(length, None, dtype=object)

    def frame(self, index: pd.Index) -> pd.DataFrame:
        measured = self.kind == "measured"
        columns = {
            "time_s": self.time,
            "low_s": self.time * np.exp(-self.width),
            "high_s": self.time * np.exp(self.width),
            "source": np.where(measured, "measured", "model"),
            "kind": self.kind,
            "valid": np.array([why is None for why in self.why], dtype=bool),
            "why": pd.Series(self.why, index=index, dtype=object),
        }
        return pd.DataFrame(columns, index=index)


def _predict_curve(
    model: CellModel,
    curves: Curves,
    refused: dict[Key, str],
    key: Key,
    sizes: Floats,
    rows: np.typing.NDArray[np.intp],
    answer: _Answer,
) -> None:
    wanted = sizes[rows]
    reached = refused[key] if key in refused else reach(curves, key, wanted)
    if isinstance(reached, str):
        answer.why[rows] = reached
        if key not in curves.arrays and key not in refused:
            answer.kind[rows] = "layout" if "tier" in reached else "group"
        return
    if (wanted < 0).any():
        raise ValueError(f"payload_bytes must be at least 0: {int(wanted.min())}")
    answer.time[rows] = np.exp(reached.log_time)
    answer.width[rows] = half_width(model.widths, reached.kind, wanted, reached)
    answer.kind[rows] = np.where((reached.beyond > 0) & (reached.kind == "size"), "range", reached.kind)
    too_far = reached.beyond > FARTHEST_OCTAVES
    if too_far.any():
        answer.why[rows[too_far]] = (
            f"{describe(key)}: more than {FARTHEST_OCTAVES:g} octaves beyond the sizes that were measured"
        )
    if reached.apart > FARTHEST_APART:
        answer.why[rows] = (
            f"{describe(key)}: {reached.apart:.1f} octaves of ranks from what was measured; at most {FARTHEST_APART:g}"
        )
    if key in curves.arrays:
        own_sizes, own_times = curves.arrays[key]
        place = np.minimum(np.searchsorted(own_sizes, wanted), len(own_sizes) - 1)
        exact = own_sizes[place] == wanted
        answer.time[rows[exact]] = own_times[place[exact]]
        noise = half_width(model.widths, "measured", wanted, reached)
        answer.width[rows[exact]] = noise[exact]
        answer.kind[rows[exact]] = "measured"
