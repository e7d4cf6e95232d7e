"""Files for planners that are no package here, read by restatements of what their loaders do."""

import io
import json
import math

import numpy as np
import pandas as pd
import pytest
from made_cells import BYTES_PER_S, LATENCY_S, SIZES, a_target, block, everything, known_of

from crosstraffic.costmodel.export.astra_sim import to_astra_sim
from crosstraffic.costmodel.export.calculon import to_calculon
from crosstraffic.costmodel.export.galvatron import to_galvatron
from crosstraffic.costmodel.export.genz import to_genz
from crosstraffic.costmodel.export.line import fit_line, tier_cells
from crosstraffic.costmodel.export.vidur import dense_sizes, to_vidur

GIB = 2**30
MIB = 2**20
VIDUR_COLUMNS = ["Unnamed: 0"] + [f"time_stats.OP.{name}" for name in ("min", "max", "mean", "median", "std")]
VIDUR_COLUMNS += ["rank", "num_workers", "size", "collective", "devices_per_node", "max_devices_per_node"]


@pytest.fixture(scope="module")
def known():
    return everything()


# Vidur: the rows that its loader keeps, and the feature it derives


def vidur_rows(export, op: str, *, tensor_parallel: int = 0, is_multi_node: bool = False) -> pd.DataFrame:
    frame = pd.read_csv(io.BytesIO(export.files[f"data/profiling/network/made/{op}.csv"])).drop_duplicates()
    assert set(VIDUR_COLUMNS) <= {name.replace(f".{op}.", ".OP.") for name in frame.columns}
    if op == "all_reduce":
        kept = frame[(frame["num_workers"] == tensor_parallel) & (frame["devices_per_node"] == tensor_parallel)]
    else:
        kept = frame[frame["devices_per_node"] == (1 if is_multi_node else 2)]
    kept = kept[kept["collective"] == op]
    return kept.assign(num_tokens=kept["size"] / 8192 / 2, target=kept[f"time_stats.{op}.median"])


@pytest.mark.parametrize("count", [2, 4, 8])
def test_vidur_finds_measured_all_reduces_and_dense_ones(known, count):
    rows = vidur_rows(to_vidur(known, a_target()), "all_reduce", tensor_parallel=count)
    cells = known.cells.query(
        "op == 'all_reduce' and kernel == 'nccl' and dtype == 'bfloat16' and placement == 'consecutive' "
        "and num_ranks == @count"
    )
    measured = rows[rows["source"] == "measured"].sort_values("size")
    assert measured["size"].tolist() == sorted(cells["payload_bytes"])
    assert measured["target"].tolist() == pytest.approx((cells.sort_values("payload_bytes")["time_s"] * 1e3).tolist())
    assert len(rows) > 100
    ratios = np.diff(np.log2(np.sort(rows.loc[rows["size"] >= 2048, "size"])))
    assert ratios.max() < 0.2  # a forest is flat between its rows
    assert rows["num_tokens"].max() >= 4096


def test_vidur_finds_sends_within_and_between_nodes(known):
    export = to_vidur(known, a_target())
    inside, between = (vidur_rows(export, "send_recv", is_multi_node=where) for where in (False, True))
    assert len(inside) > 100
    assert len(between) > 100
    cell = known.cells.query("op == 'send_recv' and num_nodes == 2 and payload_bytes == 131072")
    found = between[between["size"] == 131072]
    assert found["target"].tolist() == pytest.approx((cell["time_s"] * 1e3).tolist())
    assert found["source"].tolist() == ["measured"]


def test_vidur_says_what_to_measure():
    with pytest.raises(ValueError, match="no measured cells of all_reduce: measure"):
        to_vidur(known_of(block("send_recv", (2,))), a_target())
    found = to_vidur(known_of(block("all_reduce", (2, 4))), a_target(gpus_per_node=4))
    assert [name.split("/")[-1] for name in found.files] == ["all_reduce.csv"]
    assert any("send_recv was not measured" in line for line in found.remarks)


def test_vidur_sizes_are_whole_halves():
    sizes = dense_sizes(pd.Series([3000, 2**27]))
    assert {3000, 2**27} <= set(sizes)
    assert all(size % 2 == 0 for size in sizes)


# Galvatron: its readers' keys, and the line it fits


def read_bandwidths(config: dict[str, float], world: int) -> dict[str, float]:
    found = {f"{world}_1": config[f"allreduce_size_{world}_consec_1"]}
    size = world // 2
    while size >= 2:
        for consecutive in (0, 1):
            found[f"{size}_{consecutive}"] = config[f"allreduce_size_{size}_consec_{consecutive}"]
        size //= 2
    return found


def read_times(config: dict[str, float], op: str) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for key, time_ms in config.items():
        if key.startswith(op):
            words = key.split("_")
            found.setdefault(int(words[-3]), {})[int(words[-2].removesuffix("MB"))] = time_ms
    for times in found.values():
        assert len(times) >= 8
    return found


def galvatron_files(export) -> dict[str, dict[str, float]]:
    return {name: json.loads(content) for name, content in export.files.items()}


def test_galvatron_reads_all_it_insists_on(known):
    files = galvatron_files(to_galvatron(known, a_target(overlap_coefficient=1.25)))
    where = "2nodes_8gpus_per_node.json"
    assert set(files) == {
        f"allreduce_bandwidth_{where}", f"p2p_bandwidth_{where}", f"sp_time_{where}", "overlap_coefficient.json",
    }  # fmt: skip
    bandwidths = read_bandwidths(files[f"allreduce_bandwidth_{where}"], 16)
    assert len(bandwidths) == 7
    assert bandwidths["8_1"] > 3 * bandwidths["8_0"]  # strided groups of eight cross nodes
    assert set(files[f"p2p_bandwidth_{where}"]) == {f"pp_size_{stages}" for stages in (2, 4, 8, 16)}
    for op in ("allreduce", "all2all"):
        assert set(read_times(files[f"sp_time_{where}"], op)) == {2, 4, 8, 16}
    assert files["overlap_coefficient.json"] == {"overlap_coe": 1.25}


def test_galvatron_units(known):
    export = to_galvatron(known, a_target())
    files = galvatron_files(export)
    size = 32 * MIB
    time_s = 2 * 7 * LATENCY_S[1] + 2 * 7 / 8 * size / BYTES_PER_S[1]
    bus = files["allreduce_bandwidth_2nodes_8gpus_per_node.json"]["allreduce_size_8_consec_1"]
    assert bus == pytest.approx(2 * 7 / 8 * 32 / (time_s * 1e3))
    ms = files["sp_time_2nodes_8gpus_per_node.json"]["allreduce_size_8_32MB_time"]
    assert ms == pytest.approx(time_s * 1e3)
    (value,) = (row for row in export.values if row["key"] == "allreduce_size_8_32MB_time")
    assert value["source"] == "measured"
    assert any("overlap_coefficient.json" in line and "not measured" in line for line in export.remarks)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("op == 'send_recv'", "Galvatron needs send_recv: measure it"),
        ("op == 'all_to_all'", "Galvatron needs all_to_all: measure it"),
        ("placement == 'strided' and num_nodes == 1", "strided|not neighbours"),
    ],
    ids=["send_recv", "all_to_all", "strided"],
)
def test_galvatron_says_what_to_measure(known, without, message):
    lacking = known_of(known.cells.drop(known.cells.query(without).index).assign(low_s=math.nan))
    if "strided" in without:
        one_node = known_of(lacking.cells[lacking.cells["num_nodes"] == 1])
        with pytest.raises(ValueError, match="consec_0: measure all_reduce of groups whose ranks are not neighbours"):
            to_galvatron(one_node, a_target(num_nodes=1))
        files = galvatron_files(to_galvatron(one_node, a_target(num_nodes=1, strided_as_consecutive=True)))
        config = files["allreduce_bandwidth_1nodes_8gpus_per_node.json"]
        assert config["allreduce_size_4_consec_0"] == config["allreduce_size_4_consec_1"]
        return
    with pytest.raises(ValueError, match=message):
        to_galvatron(lacking, a_target())


def test_galvatron_halves_its_world(known):
    with pytest.raises(ValueError, match="12 ranks are no power of two"):
        to_galvatron(known, a_target(gpus_per_node=6))


# ASTRA-sim: the seven rules of its parser, and the time of one message


def parse_network(text: str) -> dict[str, list]:
    """Read four inline lists, and refuse what NetworkParser refuses."""
    found: dict[str, list] = {}
    for line in text.splitlines():
        name, colon, rest = line.split("#")[0].partition(":")
        if colon:
            words = rest.strip().removeprefix("[").removesuffix("]").split(",")
            found[name] = [word.strip() if name == "topology" else float(word) for word in words]
    assert set(found) == {"topology", "npus_count", "bandwidth", "latency"}
    check_network(found)
    return found


def check_network(found: dict[str, list]) -> None:
    dimensions = len(found["topology"])
    rules = {
        "topology": all(name in ("Ring", "Switch", "FullyConnected") for name in found["topology"]),
        "length of npus_count": len(found["npus_count"]) == dimensions,
        "length of bandwidth": len(found["bandwidth"]) == dimensions,
        "length of latency": len(found["latency"]) == dimensions,
        "npus_count": all(count > 1 for count in found["npus_count"]),
        "bandwidth": all(rate > 0 for rate in found["bandwidth"]),
        "latency": all(time >= 0 for time in found["latency"]),
    }
    broken = [name for name, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"breaks {broken}")


@pytest.mark.parametrize(("topology", "hops"), [("Switch", 2), ("Ring", 1)])
def test_astra_sim_reads_two_dimensions(known, topology, hops):
    network = parse_network(to_astra_sim(known, a_target(topology=topology)).files["network.yml"].decode())
    assert network["npus_count"] == [8, 2]
    for index in (0, 1):
        tier = index + 1
        message = 2**20
        delay_ns = hops * network["latency"][index] + message / (network["bandwidth"][index] * GIB / 1e9)
        assert delay_ns == pytest.approx((LATENCY_S[tier] + message / BYTES_PER_S[tier]) * 1e9, rel=0.01)


@pytest.mark.parametrize("name", ["topology", "npus_count", "bandwidth", "latency"])
def test_the_rules_of_its_parser_find_faults(name):
    good = {"topology": ["Ring"], "npus_count": [2], "bandwidth": [1.0], "latency": [0.0]}
    check_network(good)
    bad = {"topology": ["Torus"], "npus_count": [1], "bandwidth": [0.0], "latency": [-1.0]}
    for rows in (bad[name], []):
        with pytest.raises(ValueError, match="breaks"):
            check_network(good | {name: rows})


def test_astra_sim_says_which_tier_to_measure():
    inside = known_of(block("all_reduce", (2, 4, 8)))
    with pytest.raises(ValueError, match="needs links between nodes: measure"):
        to_astra_sim(inside, a_target())
    assert parse_network(to_astra_sim(inside, a_target(num_nodes=1)).files["network.yml"].decode())["npus_count"] == [8]


# calculon: the time of Network.time


def calculon_time(network: dict, op: str, op_bytes: float, num_ranks: int) -> float:
    assert set(network) == {
        "bandwidth", "efficiency", "size", "latency", "ops", "must_be_filled", "processor_usage",
    }  # fmt: skip
    assert set(network["ops"]) == {"p2p", "reduce_scatter", "all_gather", "all_reduce"}
    assert 0 < network["efficiency"] <= 1
    assert 0 <= network["processor_usage"] < 1
    scalar, offset = network["ops"][op]
    assert (offset is None) == (op == "p2p")
    scaled = op_bytes * scalar
    scaled += scaled / num_ranks * (offset or 0)
    return network["latency"] + scaled / (network["bandwidth"] * 1e9 * network["efficiency"])


def test_calculon_times(known):
    networks = json.loads(to_calculon(known, a_target()).files["networks.json"])["networks"]
    assert [network["size"] for network in networks] == [8, 16]
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        share = (2 if op == "all_reduce" else 1) * 7 / 8
        found = calculon_time(networks[0], op, 2**30, 8)
        assert found == pytest.approx(share * 2**30 / BYTES_PER_S[1], rel=0.05)
    assert calculon_time(networks[1], "p2p", 2**26, 2) == pytest.approx(2**26 / BYTES_PER_S[2], rel=0.05)


def test_calculon_says_what_to_measure():
    with pytest.raises(ValueError, match="no measured cells of all_reduce"):
        to_calculon(known_of(block("all_to_all", (2, 4))), a_target())


# GenZ: the times of its collectives


def genz_all_reduce(arguments: dict[str, float], num_bytes: float, count: int) -> float:
    latency_s, rate = arguments["interchip_link_latency"] * 1e-6, arguments["interchip_link_bw"] * GIB
    return 5e-6 + 2 * (count - 1) * latency_s + 2 * (count - 1) * (num_bytes / count) / rate


def test_genz_times():
    cells = block("all_reduce", (2, 4, 8, 16))
    cells["time_s"] += 5e-6  # GenZ's own start of each collective
    export = to_genz(known_of(cells), a_target())
    arguments = json.loads(export.files["system_intra_node.json"])
    assert arguments["interchip_link_latency"] == pytest.approx(LATENCY_S[1] * 1e6, rel=1e-6)
    assert arguments["interchip_link_bw"] == pytest.approx(BYTES_PER_S[1] / GIB, rel=1e-6)
    for row in cells[cells["num_nodes"] == 1].itertuples():
        assert genz_all_reduce(arguments, row.payload_bytes, row.num_ranks) == pytest.approx(row.time_s, rel=1e-6)
    assert "system_inter_node.json" in export.files


def test_genz_says_what_to_measure():
    with pytest.raises(ValueError, match="no measured cells of all_reduce or all_gather or all_to_all"):
        to_genz(known_of(block("send_recv", (2,))), a_target())


# the line that three of them get


def test_a_line_needs_two_sizes_and_times_that_grow():
    with pytest.raises(ValueError, match="all_reduce measured at two sizes"):
        fit_line(block("all_reduce", (2, 4), sizes=(1024,)))
    flat = block("all_reduce", (2,)).assign(time_s=1e-5)
    falling = flat.assign(time_s=1e-5 / np.arange(1, len(SIZES) + 1))
    with pytest.raises(ValueError, match="do not grow with the size"):
        fit_line(falling)


def test_one_rank_a_node_tells_about_links_between_nodes(known):
    between = tier_cells(known.cells, "nccl", across=True)
    assert set(between["ranks_per_node"]) == {1}
    assert set(between["op"]) == {"all_reduce", "send_recv"}
