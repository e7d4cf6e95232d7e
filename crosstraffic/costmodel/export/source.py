"""Where measured cells and what predicts the others come from: tables, or a fitted model."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from crosstraffic.costmodel.cells.model import CellModel, fit_cells, measured_cells, predict_cells
from crosstraffic.costmodel.export.known import Known, Predict, median_cells
from crosstraffic.costmodel.model import Model
from crosstraffic.results.table import CELL, Table


def known_of_tables(tables: Sequence[Table], *, measured_only: bool = False) -> Known:
    """Fit a model to tables of one system and return it with their cells; with ``measured_only`` none is fitted.

    Raises:
        ValueError: no tables, tables of several systems, or what no model can be fitted to.
    """
    systems = list(dict.fromkeys(table.system for table in tables))
    if len(systems) != 1:
        raise ValueError(f"an export is of one system: {', '.join(systems) or 'no tables were found'}")
    frame = pd.concat([table.frame for table in tables], ignore_index=True)
    library = ", ".join(dict.fromkeys(table.library for table in tables))
    measured = median_cells(frame[frame["time_s"] > 0])
    if measured_only:
        return Known(system=systems[0], library=library, cells=measured, predict=no_prediction(measured))
    return _known(systems[0], library, measured, fit_cells(tables))


def known_of_model(model: Model, system: str | None) -> Known:
    """Return what a fitted model knows of cells.

    Raises:
        ValueError: it has none.
    """
    fitted: CellModel | None = getattr(model, "cells", None)
    if fitted is None:
        raise ValueError("the model knows no cells: make one with `crosstraffic fit` of runs or tables")
    return _known(system or fitted.system, model.transport, measured_cells(fitted), fitted)


def no_prediction(measured: pd.DataFrame) -> Predict:
    """Return what answers for measured cells only, without an interval."""
    times = measured.set_index(list(CELL))["time_s"]

    def predict(cells: pd.DataFrame) -> pd.DataFrame:
        time_s = times.reindex(pd.MultiIndex.from_frame(cells[list(CELL)])).to_numpy()
        seen = ~np.isnan(time_s)
        return pd.DataFrame(
            {
                "time_s": time_s,
                "low_s": np.nan,
                "high_s": np.nan,
                "source": np.where(seen, "measured", "model"),
                "kind": np.where(seen, "measured", "none"),
                "valid": seen,
                "why": [None if one else "not measured, and nothing is predicted, as asked for" for one in seen],
            },
            index=cells.index,
        )

    return predict


def _known(system: str, library: str, measured: pd.DataFrame, fitted: CellModel) -> Known:
    cells = measured.reset_index(drop=True)
    return Known(system=system, library=library, cells=cells, predict=partial(predict_cells, fitted))
