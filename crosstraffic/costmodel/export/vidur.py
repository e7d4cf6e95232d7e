"""Vidur: ``all_reduce.csv`` and ``send_recv.csv`` of a network device; ms and bytes.

Source: https://github.com/microsoft/vidur, vidur/execution_time_predictor/sklearn_execution_time_predictor.py: it
keeps all-reduces with num_workers = devices_per_node = tensor parallel size, and sends with devices_per_node = 2 within
a node or 1 between nodes; the feature is size / embedding dimension / 2, the target the median, the model a forest,
which is flat between and beyond its rows. So sizes are dense here.
"""

import pandas as pd

from crosstraffic.costmodel.export.files import Export
from crosstraffic.costmodel.export.known import Known, choose, pick_kernel, price, spread
from crosstraffic.costmodel.export.target import Target

PER_OCTAVE = 8
SMALLEST_BYTES, LARGEST_BYTES = 2 * 1024, 64 * 2**20  # one token of 1024 dimensions; 4096 tokens of 8192
STATISTICS = ("min", "max", "mean", "median", "std")


def to_vidur(known: Known, target: Target) -> Export:
    """Return the two files, as they lie in Vidur's data folder.

    Raises:
        ValueError: no all_reduce was measured.
    """
    folder = f"data/profiling/network/{target.system}"
    kernel = pick_kernel(known.cells, target.kernel, ("all_reduce",))
    reduces = known.cells[(known.cells["op"] == "all_reduce") & (known.cells["kernel"] == kernel)]
    table, said = _all_reduce(known, target, reduces)
    files = {f"{folder}/all_reduce.csv": _csv(table, "all_reduce", target)}
    remarks = [f"all_reduce.csv holds {kernel}: {line}" for line in said]
    sends = known.cells[known.cells["op"] == "send_recv"]
    if sends.empty:
        remarks.append("no send_recv.csv, which it needs for pipeline parallelism: send_recv was not measured")
    else:
        table, said = _send_recv(known, sends)
        files[f"{folder}/send_recv.csv"] = _csv(table, "send_recv", target)
        remarks += [f"send_recv.csv: {line}" for line in said]
    remarks.append("min, max, mean and std are empty: it reads the median only; intervals are in crosstraffic.json")
    return Export(files=files, remarks=tuple(remarks))


def dense_sizes(measured: pd.Series) -> list[int]:
    """Return the measured sizes and eight an octave around and between them, whole numbers of two bytes."""
    largest = max(LARGEST_BYTES, int(measured.max()))
    grid, step = [], 0
    while (size := round(SMALLEST_BYTES * 2 ** (step / PER_OCTAVE) / 2) * 2) <= largest:
        grid.append(size)
        step += 1
    return sorted({*grid, *(int(size) for size in measured)})


def _all_reduce(known: Known, target: Target, reduces: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return measured layouts as they are, with dense sizes for groups on one node, the ones that it loads."""
    kept, passed = choose(reduces, ("num_ranks", "ranks_per_node", "num_nodes"))
    counts = {2**power for power in range(1, target.gpus_per_node.bit_length()) if 2**power <= target.gpus_per_node}
    inside = kept[kept["num_nodes"] == 1]
    blocks = [kept]
    for count in sorted({*counts, *target.ranks, *inside["num_ranks"]}) if not inside.empty else []:
        if count > target.gpus_per_node:
            continue
        distance = (inside["num_ranks"] - count).abs()
        like = inside[distance == distance.min()]
        template = like.iloc[[0]].drop(columns=["payload_bytes", "time_s"]).assign(**spread(count, count))
        blocks.append(template.merge(pd.DataFrame({"payload_bytes": dense_sizes(like["payload_bytes"])}), how="cross"))
    rows, said = _priced(known, pd.concat(blocks, ignore_index=True))
    if inside.empty:
        said.append("no group on one node was measured: it will find no rows for tensor parallelism")
    if passed:
        said.append(f"{passed} measured cells have no room: other placements, issues, types or groups at once")
    return rows, said


def _send_recv(known: Known, sends: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    kept, passed = choose(sends, ("num_nodes",))
    blocks = [
        curve.iloc[[0]]
        .drop(columns=["payload_bytes", "time_s"])
        .merge(pd.DataFrame({"payload_bytes": dense_sizes(curve["payload_bytes"])}), how="cross")
        for _, curve in kept.groupby("num_nodes")
    ]
    rows, said = _priced(known, pd.concat(blocks, ignore_index=True))
    for num_nodes, where in ((1, "within a node"), (2, "between nodes")):
        if not (rows["num_nodes"] == num_nodes).any():
            said.append(f"sends {where} were not measured: it will find no rows for stages there")
    if passed:
        said.append(f"{passed} measured cells have no room: other kernels, types or groups at once")
    return rows, said


def _priced(known: Known, wanted: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    priced = price(known, wanted)
    measured = int((priced.rows["source"] == "measured").sum())
    return priced.rows, [f"{measured} measured cells, {len(priced.rows) - measured} predicted", *priced.remarks]


def _csv(rows: pd.DataFrame, op: str, target: Target) -> bytes:
    ordered = rows.sort_values(["num_ranks", "ranks_per_node", "payload_bytes"], ignore_index=True)
    table = pd.DataFrame(
        {
            **{f"time_stats.{op}.{name}": float("nan") for name in STATISTICS},
            f"time_stats.{op}.median": ordered["time_s"] * 1e3,
            "rank": 0,
            "num_workers": ordered["num_ranks"],
            "size": ordered["payload_bytes"],
            "collective": op,
            "devices_per_node": ordered["ranks_per_node"],
            "max_devices_per_node": target.gpus_per_node,
            "source": ordered["source"],
        },
        index=ordered.index,
    )
    return str(table.to_csv()).encode()
