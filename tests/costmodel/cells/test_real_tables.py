"""Cells of H200 from the wheel of AIConfigurator, held out: no constant was chosen on that system."""

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from crosstraffic.costmodel.cells.model import fit_cells, predict_cells
from crosstraffic.results.table import CURVE, make_frame
from tests.costmodel.cells.made import of_frame

WHEEL = importlib.util.find_spec("aiconfigurator_core")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="aiconfigurator-core is not installed")


@pytest.fixture(scope="module")
def cells() -> pd.DataFrame:
    assert WHEEL is not None
    assert WHEEL.origin is not None
    folder = Path(WHEEL.origin).parent / "systems/data/h200_sxm/comm/nccl/2.29.2"
    if not (folder / "nccl_perf.parquet").exists():
        pytest.skip("this version of the wheel holds no table of H200")
    rows = pd.read_parquet(folder / "nccl_perf.parquet")
    dtype = rows["nccl_dtype"].astype(str)
    return make_frame(
        op=rows["op_name"].astype(str).replace("alltoall", "all_to_all").to_numpy(),
        kernel=["nccl"] * len(rows),
        dtype=dtype.to_numpy(),
        num_ranks=rows["num_gpus"].to_numpy(),
        payload_bytes=(rows["message_size"] * dtype.map({"half": 2, "int8": 1})).to_numpy(),
        time_s=rows["latency"].to_numpy() * 1e-3,
    )


def _held_out(cells: pd.DataFrame, kind: str) -> pd.Series:
    place = cells.groupby(list(CURVE))["payload_bytes"].rank(method="first") - 1
    last = cells.groupby(list(CURVE))["payload_bytes"].transform("size") - 1
    rules = {"size": (place % 2 == 1) & (place < last), "range": place > last - 3, "group": cells["num_ranks"] == 8}
    return rules[kind]


@pytest.mark.parametrize(("kind", "median", "tail"), [("size", 0.03, 0.15), ("range", 0.08, 0.2), ("group", 0.1, 0.3)])
def test_errors_and_intervals_of_what_was_held_out(cells, kind, median, tail):
    out = _held_out(cells, kind)
    answer = predict_cells(fit_cells(of_frame(cells[~out])), cells[out])
    truth = cells[out]["time_s"]
    error = np.abs(answer["time_s"] / truth - 1)
    assert set(answer["kind"]) == {kind}
    assert error.median() < median
    assert error.quantile(0.9) < tail
    assert 0.8 <= ((answer["low_s"] <= truth) & (truth <= answer["high_s"])).mean() <= 1.0


def test_a_group_is_nearer_than_a_copy_of_the_nearest_one(cells):
    out = _held_out(cells, "group")
    ours = predict_cells(fit_cells(of_frame(cells[~out])), cells[out])["time_s"]
    one = cells[cells["num_ranks"] == 4]
    copied = predict_cells(fit_cells(of_frame(one)), cells[out])["time_s"]
    truth = cells[out]["time_s"]
    assert np.abs(ours / truth - 1).median() < 0.6 * np.abs(copied / truth - 1).median()
