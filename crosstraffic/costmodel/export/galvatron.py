"""Hetu-Galvatron: flat JSON files of bandwidths (MiB/ms), times (ms) and one overlap coefficient.

Source: https://github.com/PKU-DAIR/Hetu-Galvatron, galvatron/utils/config_utils.py (readers) and
galvatron/profile_hardware/profile_allreduce.py, profile_p2p.py (what the numbers are: bus bandwidth of an all-reduce of
32 MiB, all groups of the world at once; a send of 32 MiB to the next stage).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from crosstraffic.costmodel.export.files import Export
from crosstraffic.costmodel.export.known import PREFERRED, Known, pick_kernel, price
from crosstraffic.costmodel.export.target import Target
from crosstraffic.results.table import CELL

MIB = 2**20
BANDWIDTH_BYTES = 32 * MIB
TIME_MIB = tuple(2**power for power in range(11))
MIN_SIZES = 8  # its reader refuses fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One number of one file: the cell that it comes from, and the factor from 1/seconds or seconds to it."""

    file: str
    key: str
    cell: dict[str, Any] = field(default_factory=dict)
    per_time: float | None = None  # value = per_time / time_s; None: value is the time in ms
    optional: bool = False

    def value(self, time_s: float) -> float:
        """Return the number for a time."""
        return time_s * 1e3 if self.per_time is None else self.per_time / time_s


def to_galvatron(known: Known, target: Target) -> Export:
    """Return the files for a world of full nodes.

    Raises:
        ValueError: an op was not measured, or a number that its readers insist on cannot be told; says what to measure.
    """
    world = target.gpus_per_node * target.num_nodes
    if world < 2 or world & (world - 1):
        raise ValueError(f"Galvatron halves its world down to 2: {world} ranks are no power of two")
    for op in ("all_reduce", "all_to_all", "send_recv"):
        if not (known.cells["op"] == op).any():
            raise ValueError(f"Galvatron needs {op}: measure it, at sizes up to {BANDWIDTH_BYTES // MIB} MiB or more")
    pick_kernel(known.cells, target.kernel, ("all_reduce",))
    asked = list(_asked(known, target, world))
    wanted = pd.DataFrame([one.cell for one in asked])
    priced = price(known, wanted)
    found = wanted.reset_index().merge(priced.rows, on=list(CELL), how="left").set_index("index")
    files: dict[str, dict[str, float]] = {}
    values: list[dict[str, object]] = []
    missing = []
    for index, one in enumerate(asked):
        row: dict[str, Any] = found.loc[index].to_dict()  # type: ignore[assignment]
        if not row["time_s"] > 0:
            missing += [] if one.optional else [one.key]
            continue
        value, low, high = (one.value(float(row[name])) for name in ("time_s", "low_s", "high_s"))
        files.setdefault(one.file, {})[one.key] = value
        low, high = sorted((low, high))
        values.append(
            {"file": one.file, "key": one.key, "value": value, "low": low, "high": high, "source": row["source"],
             "kind": row["kind"]}
        )  # fmt: skip
    if missing:
        raise ValueError(
            f"Galvatron insists on {', '.join(missing)}: what was measured does not tell; measure all_reduce and "
            f"send_recv of these groups (consec_0: ranks {world} / size apart)"
        )
    _check_times(files, world)
    remarks = [*priced.remarks, *_said(asked, values, target)]
    if target.overlap_coefficient is not None:
        files["overlap_coefficient.json"] = {"overlap_coe": target.overlap_coefficient}
    else:
        remarks.append(
            "no overlap_coefficient.json: communication beside compute was not measured; Galvatron reads it: make it "
            "with its profile_overlap.py, or give --overlap-coefficient"
        )
    content = {name: (json.dumps(rows, indent=4) + "\n").encode() for name, rows in files.items()}
    return Export(files=content, remarks=tuple(remarks), values=tuple(values))


def _asked(known: Known, target: Target, world: int) -> Iterator[_Asked]:
    """Yield what its readers want, by key."""
    where = f"{target.num_nodes}nodes_{target.gpus_per_node}gpus_per_node.json"
    for count in _halvings(world):
        for strided in (False, True) if count < world else (False,):
            cell = _cell(known, target, "all_reduce", count, strided=strided)
            size = min(BANDWIDTH_BYTES, cell.pop("largest"))
            yield _Asked(
                file=f"allreduce_bandwidth_{where}",
                key=f"allreduce_size_{count}_consec_{int(not strided)}",
                cell={**cell, "payload_bytes": size},
                per_time=2 * (count - 1) / count * size / MIB / 1e3,
            )
        for op, name in (("all_reduce", "allreduce"), ("all_to_all", "all2all")):
            cell = _cell(known, target, op, count, strided=False)
            cell.pop("largest")
            for mib in TIME_MIB:
                yield _Asked(
                    file=f"sp_time_{where}",
                    key=f"{name}_size_{count}_{mib}MB_time",
                    cell={**cell, "payload_bytes": mib * MIB},
                    optional=True,
                )
    for stages in reversed(_halvings(world)):
        cell = _cell(known, target, "send_recv", 2, strided=False, num_nodes=min(2, target.num_nodes))
        size = min(BANDWIDTH_BYTES, cell.pop("largest"))
        yield _Asked(
            file=f"p2p_bandwidth_{where}",
            key=f"pp_size_{stages}",
            cell={**cell, "payload_bytes": size},
            per_time=size / MIB / 1e3,
        )


def _halvings(world: int) -> list[int]:
    return [2**power for power in range(world.bit_length() - 1, 0, -1)]


def _cell(
    known: Known, target: Target, op: str, count: int, *, strided: bool, num_nodes: int | None = None
) -> dict[str, Any]:
    """Return the curve that tells about a group, made from the nearest measured one of its kind, and its largest size.

    A strided group with one rank on each node has no neighbours there: it may be named either way.
    """
    if num_nodes is None:
        num_nodes = min(count, target.num_nodes) if strided else -(-count // target.gpus_per_node)
    per_node = count // num_nodes
    mine = known.cells[known.cells["op"] == op]
    if op != "send_recv":
        mine = mine[mine["kernel"] == pick_kernel(known.cells, target.kernel, (op,))]
    lone = per_node == 1 and num_nodes > 1
    if strided and not lone and not (target.strided_as_consecutive and num_nodes == 1):
        mine = mine[mine["placement"] == "strided"]
        if mine.empty:
            raise ValueError(
                f"Galvatron insists on allreduce_size_{count}_consec_0: measure all_reduce of groups whose ranks are "
                "not neighbours; where that makes no difference within a node, say so with --strided-as-consecutive"
            )
    elif not lone:
        mine = mine[mine["placement"] == "consecutive"]
    ordered = mine.assign(
        _nodes=(mine["num_nodes"] - num_nodes).abs(),
        _ranks=(mine["num_ranks"] - count).abs(),
        _groups=(mine["num_groups"] - target.gpus_per_node * target.num_nodes // count).abs(),
        **{f"_{name}": ~mine[name].isin(order) for name, order in PREFERRED.items()},
    ).sort_values(["_nodes", "_ranks", "_groups", *(f"_{name}" for name in PREFERRED)], kind="stable")
    if ordered.empty:
        raise ValueError(f"Galvatron needs {op} of neighbouring ranks: measure it")
    curve = {str(name): value for name, value in ordered.iloc[0][list(CELL)].items()}
    curve |= {"num_ranks": count, "num_nodes": num_nodes, "ranks_per_node": per_node}
    return curve | {"largest": int(ordered["payload_bytes"].max())}


def _check_times(files: dict[str, dict[str, float]], world: int) -> None:
    (times,) = (rows for name, rows in files.items() if name.startswith("sp_time")) if len(files) == 3 else ({},)
    for op, name in (("allreduce", "all_reduce"), ("all2all", "all_to_all")):
        for count in _halvings(world):
            told = sum(key.startswith(f"{op}_size_{count}_") for key in times)
            if told < MIN_SIZES:
                raise ValueError(
                    f"Galvatron insists on times of {name} over {count} ranks at {MIN_SIZES} of the sizes 1, 2, 4 .. "
                    f"1024 MiB: {told} can be told; measure larger sizes"
                )


def _said(asked: list[_Asked], values: list[dict[str, object]], target: Target) -> Iterator[str]:
    measured = sum(row["source"] == "measured" for row in values)
    predicted = len(values) - measured
    yield f"{measured} numbers are measured, {predicted} predicted; crosstraffic.json says which"
    sizes = {one.cell["payload_bytes"] for one in asked if one.per_time is not None}
    shown = ", ".join(f"{size / MIB:g}" for size in sorted(sizes))
    yield f"bandwidths are those at {shown} MiB: it has one for all sizes"
    if any(one.cell["num_groups"] * one.cell["num_ranks"] < target.gpus_per_node * target.num_nodes for one in asked):
        yield "some groups were measured while others of the world were idle; Galvatron's own profile runs all at once"
    if target.strided_as_consecutive:
        yield "consec_0 within a node was not measured: it is that of consec_1, as asked for"
