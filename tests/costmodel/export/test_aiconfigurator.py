"""AIConfigurator's own loader reads what is exported, and gives each measured cell back."""

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from made_cells import PARAMETERS, a_target, block, everything, known_of, token_sizes

from crosstraffic.costmodel.export.aiconfigurator import counts_between, to_aiconfigurator
from crosstraffic.costmodel.export.files import write_export
from crosstraffic.costmodel.export.known import Known, median_cells

NCCL = "data/made/comm/nccl/2.99/nccl_perf.parquet"
CUSTOM = "data/made/comm/vllm/1.0.0/custom_allreduce_perf.parquet"
EXPERT = "data/made/comm/vllm/1.0.0/moe_a2a_perf.parquet"
EXACT = 1e-12  # of a time that went from seconds to ms or us and back


def table(export, name: str) -> pd.DataFrame:
    return pd.read_parquet(io.BytesIO(export.files[name]))


@pytest.fixture(scope="module")
def known() -> Known:
    return everything()


@pytest.fixture(scope="module")
def exported(known):
    return to_aiconfigurator(known, a_target(ranks=(24,)))


class Planner:
    """AIConfigurator on a private systems folder; ``ms`` gives its times, of ops that differ in their names."""

    def __init__(self, root: Path, system: str = "made", framework: str = "vllm", version: str = "1.0.0") -> None:
        perf = pytest.importorskip("aiconfigurator_core.sdk.perf_database")
        from aiconfigurator_core.sdk.engine import EngineHandle

        self._handle = EngineHandle.for_database(
            perf.get_database(system, framework, version, systems_paths=[str(root)]), systems_path=str(root)
        )

    def ms(self, ops, x: int) -> list[float]:
        from aiconfigurator_core.sdk.engine import build_ops_json

        ops = list(ops)
        found = self._handle.evaluate_ops_json(build_ops_json(ops), is_context=True, batch_size=1, s=1, x=x)
        assert len(found) == len(ops)
        return [row[1] for row in found]


@pytest.fixture(scope="module")
def planner(exported, tmp_path_factory) -> Planner:
    root = tmp_path_factory.mktemp("systems") / "root"
    write_export(root, exported.files)
    return Planner(root)


def width(dtype: str) -> int:
    return 1 if dtype == "int8" else 2


def nccl_times(planner: Planner, cells: pd.DataFrame) -> list[float]:
    """Ask for each cell: elements of a token times one token."""
    from aiconfigurator_core.sdk.common import CommQuantMode
    from aiconfigurator_core.sdk.operations import communication

    names = {"all_to_all": "alltoall"}
    ops = [
        communication.NCCL(
            str(index), 1.0, names.get(row.op, row.op), row.payload_bytes / width(row.dtype), row.num_ranks,
            CommQuantMode.int8 if row.dtype == "int8" else CommQuantMode.half,
        )
        for index, row in enumerate(cells.itertuples())
    ]  # fmt: skip
    return planner.ms(ops, 1)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_each_measured_collective_comes_back(planner, known, op):
    cells = known.cells.query("op == @op and kernel == 'nccl' and placement == 'consecutive'")
    assert len(cells) >= 36
    assert nccl_times(planner, cells) == pytest.approx((cells["time_s"] * 1e3).tolist(), rel=EXACT)


def test_custom_all_reduce_comes_back_from_the_graph(planner, known):
    from aiconfigurator_core.sdk.operations.communication import CustomAllReduce

    cells = known.cells.query("kernel == 'vllm_custom_all_reduce' and issue == 'graph'")
    ops = [CustomAllReduce(str(row.Index), 1.0, row.payload_bytes // 2, row.num_ranks) for row in cells.itertuples()]
    assert planner.ms(ops, 1) == pytest.approx((cells["time_s"] * 1e3).tolist(), rel=EXACT)


@pytest.mark.parametrize("op", ["ep_dispatch", "ep_combine"])
@pytest.mark.parametrize("kernel", ["deepep_ll", "deepep_ht"])
def test_expert_traffic_comes_back(planner, known, op, kernel):
    from aiconfigurator_core.sdk.operations.moe_comm import MoEAllToAll

    for tokens in (16, 64, 100):
        mine = known.cells[known.cells["payload_bytes"] == token_sizes(tokens)[0]]
        for count, nodes in ((8, 1), (16, 2)):
            (cell,) = mine.query("op == @op and kernel == @kernel and num_ranks == @count").itertuples()
            asked = MoEAllToAll(
                "op", 1.0, phase=op.removeprefix("ep_"), comm_backend=kernel, hidden_size=7168, topk=8,
                num_experts=256, moe_ep_size=count, node_num=nodes, sms=20,
            )  # fmt: skip
            assert planner.ms([asked], tokens) == pytest.approx([cell.time_s * 1e3], rel=EXACT)


def test_sends_are_the_line_between_nodes(planner, known):
    from aiconfigurator_core.sdk.operations.communication import P2P

    cells = known.cells.query("op == 'send_recv' and num_nodes == 2")
    ops = [P2P(str(row.Index), 1.0, row.payload_bytes // 2, 2) for row in cells.itertuples()]
    assert planner.ms(ops, 1) == pytest.approx((cells["time_s"] * 1e3).tolist(), rel=1e-3)


def test_a_missing_group_and_sizes_outside_are_filled_from_the_model(planner, exported):
    from aiconfigurator_core.sdk.common import CommQuantMode
    from aiconfigurator_core.sdk.operations import communication

    rows = table(exported, NCCL).query("op_name == 'all_reduce' and nccl_dtype == 'half'")
    assert set(rows["num_gpus"]) == {2, 3, 4, 5, 6, 7, 8, 16}
    assert set(rows.loc[~rows["num_gpus"].isin([2, 4, 8, 16]), "source"]) == {"model"}
    six = planner.ms([communication.NCCL("op", 1.0, "all_reduce", 4096.0, 6, CommQuantMode.half)], 1)
    assert six == pytest.approx(rows.query("num_gpus == 6 and message_size == 4096")["latency"].tolist(), rel=EXACT)
    own = rows[rows["num_gpus"] == 8]
    assert own["message_size"].min() == 1
    assert own["message_size"].max() == (2**25 << 3) // 2
    assert set(own.loc[own["message_size"] < 256, "source"]) == {"model"}
    assert (own["source"] == "measured").sum() == 9


def test_a_group_beyond_what_was_measured_is_left_out_and_counted(exported):
    assert 24 not in set(table(exported, NCCL)["num_gpus"])
    assert any("cells left out: a new tier" in line for line in exported.remarks)


def test_the_loader_has_nothing_to_complain_of(exported, tmp_path, capfd, caplog):
    write_export(tmp_path / "root", exported.files)
    Planner(tmp_path / "root")
    assert "collection_meta" not in capfd.readouterr().err + caplog.text
    for path in (tmp_path / "root").rglob("collection_meta.yaml"):
        path.unlink()
    perf = pytest.importorskip("aiconfigurator_core.sdk.perf_database")
    perf.databases_cache.clear()
    (tmp_path / "root").rename(tmp_path / "bare")
    Planner(tmp_path / "bare")
    assert "collection_meta" in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp8", 1.0), ("nvfp4", 0.5), ("bfloat16", 2.0)])
def test_tokens_of_narrow_types(dtype, element_bytes):
    sizes = tuple(int(tokens * 8 * 7168 * element_bytes) for tokens in (16, 64))
    expert = block("ep_dispatch", (8,), kernel="deepep_ll", parameters=PARAMETERS, dtype=dtype, sizes=sizes)
    found = to_aiconfigurator(known_of(block("all_reduce", (2, 8)), block("send_recv", (2,)), expert), a_target())
    rows = table(found, EXPERT)
    assert rows.loc[rows["source"] == "measured", "num_tokens"].tolist() == [16, 64]
    assert rows["num_tokens"].tolist() == [1, 2, 4, 8, 16, 64, 128, 256, 512]
    assert set(rows["comm_dtype"]) == {dtype}


def test_a_part_of_a_token_is_refused():
    expert = block("ep_dispatch", (8,), kernel="deepep_ll", parameters=PARAMETERS, sizes=(1000, 2000))
    with pytest.raises(ValueError, match="whole tokens of 114688 bytes"):
        to_aiconfigurator(known_of(block("all_reduce", (2, 8)), block("send_recv", (2,)), expert), a_target())


def test_types_are_those_that_the_loader_takes(exported):
    for name in (NCCL, CUSTOM, EXPERT):
        kinds = set(map(str, table(exported, name).select_dtypes("number").dtypes))
        assert kinds == {"int64", "float64"}


def test_a_narrow_type_is_refused_by_the_loader(exported, tmp_path):
    """The fault that the types guard against: without it the test above would prove nothing."""
    core = pytest.importorskip("aiconfigurator_core.sdk.common")
    from aiconfigurator_core.sdk.operations import communication

    write_export(tmp_path / "root", exported.files)
    narrow = table(exported, NCCL).astype({"num_gpus": "int32"})
    narrow.to_parquet(tmp_path / "root" / NCCL, index=False)
    with pytest.raises(Exception, match=r"OneCCL|not available|num_gpus|int64"):
        Planner(tmp_path / "root").ms(
            [communication.NCCL("op", 1.0, "all_reduce", 2048.0, 8, core.CommQuantMode.half)], 1
        )


def test_what_has_no_room_is_said(exported):
    text = "\n".join(exported.remarks)
    assert "54 measured cells have no room: other placements" in text
    assert "p2p_latency and inter_node_bw from send_recv between nodes" in text


def test_without_sends_a_bandwidth_must_be_given():
    known = known_of(block("all_reduce", (2, 4, 8)))
    with pytest.raises(ValueError, match="measure send_recv, or give --inter-node-bandwidth"):
        to_aiconfigurator(known, a_target())
    given = to_aiconfigurator(known, a_target(inter_node_bytes_per_s=5e10))
    system = given.files["made.yaml"].decode()
    assert "inter_node_bw: 50000000000.0" in system
    assert "p2p_latency" not in system.split("node:")[1]
    assert "mem_bw: .nan" in system


def test_nothing_to_export_says_what_to_measure():
    with pytest.raises(ValueError, match="no measured cells of all_reduce or all_gather"):
        to_aiconfigurator(known_of(block("send_recv", (2,))), a_target())
    with pytest.raises(ValueError, match="other types: float32"):
        to_aiconfigurator(known_of(block("all_reduce", (2,), dtype="float32")), a_target())


def test_uneven_expert_traffic_is_not_passed_off_as_even(known):
    skewed = block(
        "ep_dispatch", (8,), kernel="deepep_ll", parameters=PARAMETERS.replace("sms", "skew=2.0,sms"), dtype="",
        sizes=token_sizes(16, 64),
    )  # fmt: skip
    found = to_aiconfigurator(known_of(block("all_reduce", (2, 8)), block("send_recv", (2,)), skewed), a_target())
    assert EXPERT not in found.files
    assert any("2 measured cells: uneven loads" in line for line in found.remarks)


def test_group_sizes_between():
    assert counts_between([2, 8], 8) == [2, 3, 4, 5, 6, 7, 8]
    assert counts_between([8, 64], 8) == [2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64]


def test_base_system_gives_what_was_not_measured(known):
    base = {"gpu": {"mem_bw": 3.35e12, "sm_version": 90}, "node": {"pcie_bw": 6.4e10, "p2p_latency": 1.0}}
    base["misc"] = {"nccl_mem": {1: 0, 2: 5}, "nccl_version": "1.0"}
    export = to_aiconfigurator(known, a_target(base=base))
    text = export.files["made.yaml"].decode()
    assert "pcie_bw as in the base system" in export.remarks
    assert "mem_bw: 3350000000000.0" in text
    assert "pcie_bw: 64000000000.0" in text
    assert "p2p_latency: 1.0" not in text  # measured: the base's gives way
    assert '  nccl_version: "2.99"' in text
    assert "    2: 5" in text
    assert json.dumps("2.99") in text


def test_medians_of_repeats():
    frame = pd.concat([block("all_reduce", (2,), sizes=(512,))] * 3, ignore_index=True)
    frame["time_s"] = [1.0, 5.0, 2.0]
    assert median_cells(frame)["time_s"].tolist() == [2.0]
