"""Suggested cells: none measured, no two alike, the widest first, and measuring them narrows the intervals."""

import numpy as np
import pandas as pd
import pytest

from crosstraffic.costmodel.cells.model import fit_cells, predict_cells
from crosstraffic.costmodel.cells.suggest import suggest_cells, untested
from crosstraffic.results.table import CELL
from tests.costmodel.cells.made import law, of_frame, table

COARSE = tuple(2**power for power in range(9, 28, 3))


def test_suggestions_are_new_cells_in_order():
    made = table(sizes=COARSE)
    chosen = suggest_cells(fit_cells(made), n=6)
    assert len(chosen) == 6
    assert not chosen.duplicated(list(CELL)).any()
    assert chosen["shrinks_log"].is_monotonic_decreasing
    assert chosen.merge(made.frame, on=list(CELL)).empty


def test_measuring_what_is_suggested_narrows_the_summed_interval():
    made = table(sizes=COARSE)
    model = fit_cells(made)
    chosen = suggest_cells(model, n=len(untested(model)))
    timed = chosen.assign(time_s=[law(row.op, row.num_ranks, row.payload_bytes) for row in chosen.itertuples()])
    joined = pd.concat([made.frame, timed.assign(repeat=0)], ignore_index=True)
    more = fit_cells(of_frame(joined.reindex(columns=made.frame.columns)))
    cells = untested(model)
    before, after = predict_cells(model, cells), predict_cells(more, cells)
    assert np.log(after["high_s"] / after["low_s"]).sum() < 0.7 * np.log(before["high_s"] / before["low_s"]).sum()


def test_a_cell_across_nodes_that_nothing_tells_about_comes_first():
    made = table()
    cells = made.frame[list(CELL)]
    given = pd.concat([cells.assign(payload_bytes=3000), cells.head(1).assign(num_nodes=2)])
    assert suggest_cells(fit_cells(made), given, 1)["num_nodes"].item() == 2


def test_none_is_no_number_of_suggestions():
    with pytest.raises(ValueError, match="at least 1: 0"):
        suggest_cells(fit_cells(table()), n=0)
