"""From tables or a model to what an exporter takes."""

import io
import json
from types import SimpleNamespace

import pandas as pd
import pytest
from made_cells import a_target, block, law

from crosstraffic.commands import export as command
from crosstraffic.costmodel.cells.model import CellModel, fit_cells
from crosstraffic.costmodel.export.aiconfigurator import to_aiconfigurator
from crosstraffic.costmodel.export.known import price
from crosstraffic.costmodel.export.source import known_of_model, known_of_tables
from crosstraffic.results.table import Table


def a_table(frame: pd.DataFrame, system: str = "made") -> Table:
    return Table(
        system=system, library="NCCL 2.99", source="x", kind="made", statistic="median", frame=frame, notes=("a note",)
    )


def test_tables_of_one_system_are_fitted_together():
    known = known_of_tables([a_table(block("all_reduce", (2, 4))), a_table(block("send_recv", (2,)))])
    assert (known.system, known.library) == ("made", "NCCL 2.99")
    assert len(known.cells) == 27
    between = known.cells.iloc[[0]].assign(payload_bytes=3000)
    (row,) = price(known, between).rows.itertuples()
    assert row.source == "model"
    assert row.low_s < row.time_s < row.high_s
    assert row.time_s == pytest.approx(law(between)[0], rel=0.2)


def test_tables_of_two_systems_are_refused():
    with pytest.raises(ValueError, match="of one system: made, other"):
        known_of_tables([a_table(block("all_reduce", (2,))), a_table(block("all_reduce", (2,)), "other")])
    with pytest.raises(ValueError, match="no tables were found"):
        known_of_tables([])


def test_a_curve_that_the_model_refuses_is_left_out():
    frame = pd.concat([block("all_reduce", (2, 4))] * 2, ignore_index=True)
    frame.loc[(frame.index >= len(frame) // 2) & (frame["num_ranks"] == 4), "time_s"] *= 40
    known = known_of_tables([a_table(frame)])
    priced = price(known, known.cells)
    assert set(priced.rows["num_ranks"]) == {2}
    assert sum(priced.left_out.values()) == 9


def test_measured_cells_alone_need_no_model():
    frame = pd.concat([block("all_reduce", (2, 8))] * 3, ignore_index=True)
    known = known_of_tables([a_table(frame)], measured_only=True)
    assert len(known.cells) == len(frame) / 3
    found = to_aiconfigurator(known, a_target(inter_node_bytes_per_s=5e10))
    rows = pd.read_parquet(io.BytesIO(found.files["data/made/comm/nccl/2.99/nccl_perf.parquet"]))
    assert set(rows["source"]) == {"measured"}
    assert len(rows) == len(known.cells)
    assert any("not measured, and nothing is predicted" in line for line in found.remarks)


def test_a_model_has_no_measured_cells_alone(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps({"schema_version": 1, "transport": "mpi"}))
    with pytest.raises(ValueError, match="takes tables or run folders"):
        command._read([tmp_path / "model.json"], None, True)


def test_times_that_are_none_are_not_measured_cells():
    frame = block("all_reduce", (2,))
    frame.loc[0, "time_s"] = -1.0
    frame.loc[1, "time_s"] = float("nan")
    assert len(known_of_tables([a_table(frame)], measured_only=True).cells) == len(frame) - 2


def test_a_model_gives_its_measured_cells():
    frame = block("all_reduce", (2, 4))
    fitted = CellModel.model_validate_json(fit_cells(a_table(frame)).model_dump_json())
    known = known_of_model(SimpleNamespace(cells=fitted, transport="gloo"), "mine")
    assert (known.system, known.library) == ("mine", "gloo")
    priced = price(known, frame)
    assert set(priced.rows["source"]) == {"measured"}
    assert priced.rows["time_s"].tolist() == frame["time_s"].tolist()


def test_a_model_is_told_from_a_table_in_json(tmp_path):
    for name, content, is_model in (
        ("model.json", json.dumps({"schema_version": 1, "transport": "mpi"}), True),
        ("p2p.json", json.dumps({"pp_size_2": 7.0}), False),
        ("list.json", "[1]", False),
        ("torn.json", "{", False),
        ("table.csv", "", False),
    ):
        (tmp_path / name).write_text(content)
        assert command._is_model(tmp_path / name) is is_model
    assert not command._is_model(tmp_path / "gone.json")
