"""Where measured cells and what predicts the others come from: tables, or a fitted model."""

import importlib
from collections.abc import Sequence
from typing import Any

import pandas as pd

from crosstraffic.costmodel.export.known import Known, median_cells
from crosstraffic.costmodel.model import Model
from crosstraffic.results.table import CELL, Table

# fit_cells, predict_cells and measured_cells are reached by name: this module stands between exporters and the model.
_CELLS = "crosstraffic.costmodel.cells.model"


def known_of_tables(tables: Sequence[Table]) -> Known:
    """Fit a model to tables of one system and return it with their cells.

    Raises:
        ValueError: no tables, tables of several systems, or what no model can be fitted to.
    """
    systems = list(dict.fromkeys(table.system for table in tables))
    if len(systems) != 1:
        raise ValueError(f"an export is of one system: {', '.join(systems) or 'no tables were found'}")
    cells: Any = importlib.import_module(_CELLS)
    frame = pd.concat([table.frame for table in tables], ignore_index=True)
    return _known(
        systems[0],
        ", ".join(dict.fromkeys(table.library for table in tables)),
        median_cells(frame[frame["time_s"] > 0]),
        cells.fit_cells(tables),
    )


def known_of_model(model: Model, system: str | None) -> Known:
    """Return what a fitted model knows of cells.

    Raises:
        ValueError: it has none.
    """
    fitted = getattr(model, "cells", None)
    if fitted is None:
        raise ValueError("the model knows no cells: make one with `crosstraffic fit` of runs or tables")
    cells: Any = importlib.import_module(_CELLS)
    measured = cells.measured_cells(fitted)
    return _known(system or "crosstraffic", model.transport, measured[[*CELL, "time_s"]], fitted)


def _known(system: str, library: str, measured: pd.DataFrame, fitted: Any) -> Known:
    predict_cells: Any = importlib.import_module(_CELLS).predict_cells

    def predict(cells: pd.DataFrame) -> pd.DataFrame:
        answer: pd.DataFrame = predict_cells(fitted, cells)
        return answer

    return Known(system=system, library=library, cells=measured.reset_index(drop=True), predict=predict)
