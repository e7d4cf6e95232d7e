"""AIConfigurator's system file: bandwidths and latency of point-to-point, and what the loader insists on.

Source: https://github.com/ai-dynamo/aiconfigurator, operators/communication.rs (``P2POp``): the time of a send is
always bytes / ``inter_node_bw`` + ``p2p_latency``; there is no table for it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from crosstraffic.costmodel.export.known import choose
from crosstraffic.costmodel.export.line import RING, fit_line, of_kernel, peak_bus_bytes_per_s
from crosstraffic.costmodel.export.target import Target


def node_of(cells: pd.DataFrame, target: Target, kernel: str) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``node`` and where each comes from.

    Raises:
        ValueError: a bandwidth that the file must have was neither measured nor given.
    """
    base = dict((target.base or {}).get("node", {}))
    node: dict[str, Any] = {"num_gpus_per_node": target.gpus_per_node}
    said = []
    sends, _ = choose(of_kernel(cells[cells["op"] == "send_recv"], kernel), ("num_nodes",))
    across = sends[sends["num_nodes"] > 1]
    used = across if not across.empty else sends
    if target.inter_node_bytes_per_s is not None:
        node["inter_node_bw"] = target.inter_node_bytes_per_s
        said.append("inter_node_bw is as given")
    if not used.empty:
        line = fit_line(used)
        where = "between nodes" if not across.empty else "within a node, as none between nodes was measured"
        node.setdefault("inter_node_bw", line.bytes_per_s)
        node["p2p_latency"] = line.latency_s
        said.append(f"p2p_latency and inter_node_bw from send_recv {where}: {line}")
    elif "inter_node_bw" in base:
        node.setdefault("inter_node_bw", base["inter_node_bw"])
        node |= {name: base[name] for name in ("p2p_latency",) if name in base}
        said.append("p2p_latency and inter_node_bw are the base system's: send_recv was not measured")
    if "inter_node_bw" not in node:
        raise ValueError(
            "AIConfigurator needs the bandwidth between nodes: measure send_recv, or give --inter-node-bandwidth or "
            "--base-system"
        )
    if "p2p_latency" not in node:
        said.append("p2p_latency is not known, send_recv was not measured: AIConfigurator takes 0")
    inside = cells[(cells["num_nodes"] == 1) & (cells["kernel"] == kernel) & cells["op"].isin(RING)]
    if not inside.empty:
        node["intra_node_bw"] = peak_bus_bytes_per_s(inside)
        said.append("intra_node_bw is the largest bus bandwidth measured within a node")
    elif "intra_node_bw" in base:
        node["intra_node_bw"] = base["intra_node_bw"]
        said.append("intra_node_bw is the base system's: no collective within a node was measured")
    else:
        raise ValueError("AIConfigurator needs the bandwidth within a node: measure a collective on one node")
    further = {name: value for name, value in base.items() if name not in node}
    if further:
        said.append(f"{', '.join(further)} as in the base system")
    return node | further, said


def system_yaml(node: Mapping[str, Any], target: Target, said: Iterable[str]) -> str:
    """Return the system file.

    Without a base system the GPU's memory bandwidth is .nan, so that an estimate of compute is no number: the loader
    insists on this field, and it was not measured.
    """
    base = target.base or {}
    misc = dict(base.get("misc", {})) | {"nccl_version": target.nccl_version}
    unknown = {"mem_bw": float("nan")}
    lines = [f"# {line}" for line in said]
    if "gpu" not in base:
        lines.append("# gpu was not measured: mem_bw is there because the loader insists on it")
    document = {"data_dir": f"data/{target.system}", "gpu": base.get("gpu", unknown), "node": node, "misc": misc}
    return "\n".join([*lines, *yaml_lines(document)]) + "\n"


def sidecars(files: Iterable[str]) -> dict[str, bytes]:
    """Return for each folder the file that says which tables are whole; without it the loader complains."""
    folders: dict[str, list[str]] = {}
    for folder, _, name in (path.rpartition("/") for path in files):
        folders.setdefault(folder, []).append(name.removesuffix(".parquet"))
    return {
        f"{folder}/collection_meta.yaml": (
            "\n".join(
                yaml_lines(
                    {
                        "schema_version": 1,
                        "provenance": "crosstraffic",
                        "runtime": {"framework": folder.split("/")[-2], "version": folder.split("/")[-1]},
                        "tables": {name: {"status": "complete"} for name in names},
                    }
                )
            )
            + "\n"
        ).encode()
        for folder, names in folders.items()
    }


def yaml_lines(value: Mapping[Any, Any], indent: str = "") -> list[str]:
    """Write nested mappings of scalars as YAML.

    >>> yaml_lines({"node": {"bw": 5e10, 2: 7}, "version": "2.27"})
    ['node:', '  bw: 50000000000.0', '  2: 7', 'version: "2.27"']
    """
    lines: list[str] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{key}:", *yaml_lines(item, indent + "  ")]
        elif isinstance(item, float) and item != item:
            lines.append(f"{indent}{key}: .nan")
        elif isinstance(item, float):
            lines.append(f"{indent}{key}: {_number(item)}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}")
    return lines


def _number(value: float) -> str:
    """Write a float so that YAML 1.1 reads a float: it takes 1e-05 for a string."""
    text = repr(float(value))
    return text if "e" not in text or "." in text.split("e")[0] else text.replace("e", ".0e")
