"""Whole tables that others measured come back: through the loader of AIConfigurator, and as Vidur has them."""

import io
from pathlib import Path

import pandas as pd
import pytest
from made_cells import a_target

from crosstraffic.costmodel.export.aiconfigurator import to_aiconfigurator
from crosstraffic.costmodel.export.files import write_export
from crosstraffic.costmodel.export.known import Known, median_cells
from crosstraffic.costmodel.export.source import known_of_tables, no_prediction
from crosstraffic.costmodel.export.vidur import to_vidur
from crosstraffic.results.table import Table, make_frame

SHARED = Path(__file__).parents[4] / "shared" / "data"
OPS = {"alltoall": "all_to_all"}
BYTES = {"half": 2, "int8": 1}


def read_nccl(path: Path) -> pd.DataFrame:
    rows = pd.read_parquet(path)
    return make_frame(
        op=rows["op_name"].replace(OPS),
        kernel="nccl",
        dtype=rows["nccl_dtype"],
        num_ranks=rows["num_gpus"],
        payload_bytes=rows["message_size"] * rows["nccl_dtype"].map(BYTES),
        time_s=rows["latency"] / 1e3,
    )


def read_custom(path: Path) -> pd.DataFrame:
    rows = pd.read_parquet(path)
    return make_frame(
        op="all_reduce",
        kernel="vllm_custom_all_reduce",
        dtype=rows["allreduce_dtype"],
        num_ranks=rows["num_gpus"],
        payload_bytes=rows["message_size"] * 2,
        time_s=rows["latency"] / 1e3,
        issue=rows["backend"].str.split("_").str[-1],
    )


def read_expert(path: Path) -> pd.DataFrame:
    rows = pd.read_parquet(path)
    return make_frame(
        op="ep_" + rows["phase"],
        kernel=rows["comm_backend"],
        dtype="",
        num_ranks=rows["ep_size"],
        num_nodes=rows["node_num"],
        payload_bytes=rows["num_tokens"] * rows["topk"] * rows["hidden_size"] * 2,
        time_s=rows["latency"] / 1e6,
        parameters=[
            f"experts={row.num_experts},hidden={row.hidden_size},sms={row.sms},top_k={row.topk}"
            for row in rows.itertuples()
        ],
    )


def test_whole_tables_come_back(tmp_path):
    core = pytest.importorskip("aiconfigurator_core")
    from aiconfigurator_core.sdk.common import CommQuantMode
    from aiconfigurator_core.sdk.operations.communication import NCCL, CustomAllReduce
    from aiconfigurator_core.sdk.operations.moe_comm import MoEAllToAll
    from aiconfigurator_core.sdk.perf_database import get_database

    comm = Path(core.__file__).parent / "systems" / "data" / "h100_sxm" / "comm"
    frames = (
        read_nccl(comm / "nccl" / "2.27.3" / "nccl_perf.parquet"),
        read_custom(comm / "vllm" / "0.24.0" / "custom_allreduce_perf.parquet"),
        read_expert(comm / "vllm" / "0.24.0" / "moe_a2a_perf.parquet"),
    )
    nccl, custom, expert = map(median_cells, frames)
    known = known_of_tables(
        [
            Table(system="h100", library="NCCL 2.27.3", source="", kind="", statistic="mean", frame=frame)
            for frame in frames
        ]
    )
    target = a_target(system="h100", nccl_version="2.27.3", inter_node_bytes_per_s=5e10)
    write_export(tmp_path / "root", to_aiconfigurator(known, target).files)
    database = get_database("h100", "vllm", "1.0.0", systems_paths=[str(tmp_path / "root")])

    NCCL.load_data(database)
    filled = database._nccl_data[CommQuantMode.half]["all_reduce"][6]
    two, six, eight = (database._nccl_data[CommQuantMode.half]["all_reduce"][count][2**24] for count in (2, 6, 8))
    assert two["latency"] < six["latency"] < eight["latency"]
    assert len(filled) > 21
    for row in nccl.itertuples():
        table = database._nccl_data[getattr(CommQuantMode, row.dtype)]
        op = {ours: theirs for theirs, ours in OPS.items()}.get(row.op, row.op)
        found = table[op][row.num_ranks][row.payload_bytes // BYTES[row.dtype]]["latency"]
        assert found == pytest.approx(row.time_s * 1e3, rel=1e-12)
    assert len(nccl) == 504

    CustomAllReduce.load_data(database)
    graph = custom[custom["issue"] == "graph"]
    (table,) = database._custom_allreduce_data.values()
    for row in graph.itertuples():
        (strategy,) = table[row.num_ranks].values()
        assert strategy[row.payload_bytes // 2]["latency"] == pytest.approx(row.time_s * 1e3, rel=1e-12)
    assert len(graph) == 69

    MoEAllToAll.load_data(database)
    for row in expert.itertuples():
        shape = dict(part.split("=") for part in row.parameters.split(","))
        table = database._moe_a2a_data[row.kernel][row.op.removeprefix("ep_")]["default"][row.num_ranks][row.num_nodes]
        hidden, top_k = int(shape["hidden"]), int(shape["top_k"])
        curve = table[hidden][top_k][int(shape["experts"])][int(shape["sms"])]
        found = curve[row.payload_bytes // (top_k * hidden * 2)]["latency"]
        assert found == pytest.approx(row.time_s * 1e3, rel=1e-12)
    assert len(expert) == 648


@pytest.mark.skipif(not (SHARED / "vidur").is_dir(), reason="tables of Vidur are not here")
@pytest.mark.parametrize("count", [2, 4, 8])
def test_vidur_s_own_all_reduces_come_back(count):
    rows = pd.read_csv(SHARED / "vidur" / "a100_dgx" / "all_reduce.csv", index_col=0)
    cells = make_frame(
        op="all_reduce",
        kernel="nccl",
        num_ranks=rows["num_workers"],
        num_nodes=rows["num_workers"] // rows["devices_per_node"],
        payload_bytes=rows["size"],
        time_s=rows["time_stats.all_reduce.median"] / 1e3,
    )
    medians = median_cells(cells)
    known = Known(system="a100", library="", cells=medians, predict=no_prediction(medians))
    written = pd.read_csv(
        io.BytesIO(to_vidur(known, a_target()).files["data/profiling/network/made/all_reduce.csv"]), index_col=0
    )
    assert set(rows.columns) <= set(written.columns)

    def loaded(frame: pd.DataFrame) -> pd.Series:
        kept = frame[(frame["num_workers"] == count) & (frame["devices_per_node"] == count)]
        return kept.groupby("size")["time_stats.all_reduce.median"].median()

    theirs = loaded(rows)
    ours = loaded(written[written["source"] == "measured"])
    assert ours.index.tolist() == theirs.index.tolist()
    assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-12)
    assert len(theirs) > 900
