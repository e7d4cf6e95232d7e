"""From tables or a model to what an exporter takes, with a model of cells that is made here."""

import io
import json
from types import SimpleNamespace

import pandas as pd
import pytest
from made_cells import a_target, block, predictor

from crosstraffic.commands import export as command
from crosstraffic.costmodel.cells import model as cells_model
from crosstraffic.costmodel.export.aiconfigurator import to_aiconfigurator
from crosstraffic.costmodel.export.known import median_cells, price
from crosstraffic.costmodel.export.source import known_of_model, known_of_tables
from crosstraffic.results.table import CELL, Table


@pytest.fixture
def made_model(monkeypatch):
    """Stand in for the model of cells: a fit is the median cells, a prediction the law that made them."""
    fitted: list[pd.DataFrame] = []

    def fit_cells(tables):
        fitted.append(median_cells(pd.concat([table.frame for table in tables])))
        return fitted[-1]

    monkeypatch.setattr(cells_model, "fit_cells", fit_cells, raising=False)
    monkeypatch.setattr(cells_model, "measured_cells", lambda model: model, raising=False)
    monkeypatch.setattr(cells_model, "predict_cells", lambda model, cells: predictor(model)(cells))
    return fitted


def a_table(frame: pd.DataFrame, system: str = "made") -> Table:
    return Table(
        system=system, library="NCCL 2.99", source="x", kind="made", statistic="median", frame=frame, notes=("a note",)
    )


def test_tables_of_one_system_are_fitted_together(made_model):
    known = known_of_tables([a_table(block("all_reduce", (2, 4))), a_table(block("send_recv", (2,)))])
    assert (known.system, known.library) == ("made", "NCCL 2.99")
    assert len(known.cells) == len(made_model[0]) == 27
    between = known.cells.iloc[[0]].assign(payload_bytes=3000)
    assert price(known, between).rows["source"].tolist() == ["model"]


def test_tables_of_two_systems_are_refused(made_model):
    with pytest.raises(ValueError, match="of one system: made, other"):
        known_of_tables([a_table(block("all_reduce", (2,))), a_table(block("all_reduce", (2,)), "other")])
    with pytest.raises(ValueError, match="no tables were found"):
        known_of_tables([])


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


def test_times_that_are_none_are_not_measured_cells(made_model):
    frame = block("all_reduce", (2,))
    frame.loc[0, "time_s"] = -1.0
    frame.loc[1, "time_s"] = float("nan")
    assert len(known_of_tables([a_table(frame)]).cells) == len(frame) - 2


def test_a_model_gives_its_measured_cells(made_model):
    cells = median_cells(block("all_reduce", (2, 4)))
    known = known_of_model(SimpleNamespace(cells=cells, transport="gloo"), "mine")
    assert (known.system, known.library) == ("mine", "gloo")
    assert known.cells[[*CELL, "time_s"]].equals(cells[[*CELL, "time_s"]])


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
