"""Cells: the measured exactly, the others near a known law and within their interval, what cannot be known refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from crosstraffic.costmodel.cells.model import CellModel, fit_cells, measured_cells, predict_cells
from crosstraffic.results.table import CELL
from tests.costmodel.cells.made import SIZES, law, of_frame, table


def _asked(**changes) -> pd.DataFrame:
    made = table(ops=("all_reduce",), ranks=(changes.pop("num_ranks", 4),), sizes=changes.pop("sizes", (3000,)))
    return made.frame[list(CELL)].assign(**changes)


def _truth(frame: pd.DataFrame) -> np.ndarray:
    return np.array([law(row.op, row.num_ranks, row.payload_bytes) for row in frame.itertuples()])


def test_a_measured_cell_is_the_median_of_its_repeats_exactly():
    made = table(repeats=3, noise=0.05)
    cells = made.frame[list(CELL)].drop_duplicates()
    answer = predict_cells(fit_cells(made), cells)
    medians = made.frame.groupby(list(CELL), sort=False)["time_s"].median()
    assert (answer["time_s"].to_numpy() == medians.to_numpy()).all()
    assert set(answer["source"]) == {"measured"}
    assert set(answer["kind"]) == {"measured"}
    assert answer["valid"].all()
    assert (answer["low_s"] < answer["time_s"]).all()
    assert (answer["time_s"] < answer["high_s"]).all()


@pytest.mark.parametrize(
    ("asked", "kind", "error"),
    [
        ({"sizes": (1500, 3 * 2**20)}, "size", 0.03),
        ({"sizes": (2**28, 2**30)}, "range", 0.03),
        ({"num_ranks": 8, "sizes": SIZES}, "group", 0.30),
        ({"num_ranks": 3, "sizes": SIZES}, "group", 0.15),
    ],
    ids=["between sizes", "beyond sizes", "twice the ranks", "ranks between"],
)
def test_what_was_not_measured_is_near_the_law_and_within_its_interval(asked, kind, error):
    cells = _asked(**asked)
    answer = predict_cells(fit_cells(table()), cells)
    truth = _truth(cells)
    assert set(answer["kind"]) == {kind}
    assert set(answer["source"]) == {"model"}
    assert answer["valid"].all()
    assert np.abs(answer["time_s"] / truth - 1).max() < error
    assert ((answer["low_s"] <= truth) & (truth <= answer["high_s"])).mean() >= 0.9


def test_the_interval_holds_nine_in_ten_new_measurements_between_sizes():
    made = table(noise=0.05, repeats=3, ranks=(2, 4, 8))
    frame = made.frame
    out = frame["payload_bytes"].isin(SIZES[1:-1:2])
    answer = predict_cells(fit_cells(replace(made, frame=frame[~out])), frame[out])
    held = (frame[out]["time_s"] >= answer["low_s"]) & (frame[out]["time_s"] <= answer["high_s"])
    assert 0.8 <= held.mean() <= 1.0


def test_an_interval_widens_with_distance():
    answer = predict_cells(fit_cells(table(noise=0.03)), _asked(sizes=(2**26, 2**28, 2**29, 2**31)))
    width = (answer["high_s"] / answer["low_s"]).to_numpy()
    assert (np.diff(width) > 0).all()


def test_a_larger_group_on_links_as_slow_as_pcie_has_a_wider_interval():
    asked = _asked(num_ranks=8)
    slow = table()
    slow.frame["time_s"] *= 10
    widths = [
        np.log(answer["high_s"] / answer["low_s"]).item()
        for answer in (predict_cells(fit_cells(made), asked) for made in (table(), slow))
    ]
    assert widths[1] > 1.5 * widths[0]


def test_a_size_far_beyond_is_flagged():
    answer = predict_cells(fit_cells(table()), _asked(sizes=(2**40,)))
    assert not answer["valid"].item()
    assert "octaves beyond" in answer["why"].item()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_nodes": 2, "ranks_per_node": 2}, "a new tier"),
        ({"op": "broadcast"}, "no measured curve is like broadcast"),
        ({"kernel": "mpi"}, "no measured curve is like all_reduce mpi"),
    ],
    ids=["first time across nodes", "op", "kernel"],
)
def test_what_no_curve_tells_about_is_refused(changes, words):
    answer = predict_cells(fit_cells(table()), _asked(**changes))
    assert np.isnan(answer["time_s"].item())
    assert not answer["valid"].item()
    assert words in answer["why"].item()


def test_a_layout_with_few_sizes_takes_its_shape_from_another_layout():
    dense = table(ops=("all_reduce",), ranks=(8,), num_nodes=2, ranks_per_node=4).frame
    slower = dense.assign(num_ranks=16, ranks_per_node=8, time_s=dense["time_s"] * 1.7)
    kept = slower.iloc[[0, 9, 18]]
    answer = predict_cells(fit_cells(of_frame(pd.concat([dense, kept], ignore_index=True))), slower)
    assert np.abs(answer["time_s"].to_numpy() / slower["time_s"].to_numpy() - 1).max() < 1e-6


def test_a_layout_that_was_not_measured_is_a_layout_and_wide():
    two = table(ops=("all_reduce",), ranks=(8,), num_nodes=2, ranks_per_node=4).frame
    answer = predict_cells(fit_cells(of_frame(two)), two.assign(num_ranks=16, num_nodes=4))
    assert set(answer["kind"]) == {"layout"}
    assert (answer["high_s"] > 2 * answer["low_s"]).all()


@pytest.mark.parametrize("time", [-1e-5, 0.0, np.nan, np.inf], ids=str)
def test_a_time_that_is_none_is_refused(time):
    made = table()
    made.frame.loc[3, "time_s"] = time
    with pytest.raises(ValueError, match=r"no model may be fitted to: .*time is .*all_reduce nccl half, 2 ranks"):
        fit_cells(made)


def test_one_size_is_refused_by_name():
    with pytest.raises(ValueError, match=r"all_reduce nccl half, 2 ranks on 1 nodes: 1 distinct sizes \(512 bytes\)"):
        fit_cells(table(sizes=(512,)))


def test_contradictory_repeats_refuse_their_curve_only():
    made = table(repeats=2)
    made.frame.loc[0, "time_s"] *= 12
    model = fit_cells(made)
    answer = predict_cells(model, made.frame[list(CELL)])
    bad = (made.frame["op"] == "all_reduce") & (made.frame["num_ranks"] == 2)
    assert answer[bad]["time_s"].isna().all()
    assert answer[bad]["why"].str.contains("contradictory times at 512").all()
    assert answer[~bad]["valid"].all()


def test_several_systems_are_refused():
    with pytest.raises(ValueError, match="one system at a time: a, b"):
        fit_cells([table(system="a"), table(system="b")])


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="lack the columns placement"):
        predict_cells(fit_cells(table()), _asked().drop(columns="placement"))


def test_a_model_comes_back_from_json_and_predicts_the_same():
    model = fit_cells(table(noise=0.05))
    again = CellModel.model_validate_json(model.model_dump_json())
    cells = _asked(sizes=(700, 2**22 + 8, 2**29))
    pd.testing.assert_frame_equal(predict_cells(model, cells), predict_cells(again, cells))


def test_the_index_and_the_order_of_the_question_stay():
    model = fit_cells(table())
    cells = _asked(sizes=(700, 900, 1100)).set_index(pd.Index([7, 3, 5])).iloc[[2, 0, 1]]
    answer = predict_cells(model, cells)
    assert answer.index.tolist() == [5, 7, 3]
    assert answer["time_s"].loc[[7, 3, 5]].is_monotonic_increasing


def test_measured_cells_are_those_of_the_table():
    made = table()
    answer = measured_cells(fit_cells(made))
    merged = made.frame.merge(answer, on=list(CELL))
    assert len(merged) == len(made.frame)
    assert (merged["time_s_x"] == merged["time_s_y"]).all()
