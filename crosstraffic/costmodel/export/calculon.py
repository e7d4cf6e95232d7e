"""calculon: the ``networks`` of a system file, one entry for each tier.

Source: https://github.com/calculon-ai/calculon, calculon/network.py: t = latency + (scalar x S + offset x scalar x
S / n) / (bandwidth x efficiency), GB/s of 10^9 bytes and seconds; the latency is one for all ops and group sizes.
"""

import json

from crosstraffic.costmodel.export.files import Export
from crosstraffic.costmodel.export.known import Known, pick_kernel
from crosstraffic.costmodel.export.line import Line, fit_constant_latency, tier_cells
from crosstraffic.costmodel.export.target import Target

OPS: dict[str, tuple[float, int | None]] = {
    "p2p": (1.0, None),
    "reduce_scatter": (1.0, -1),
    "all_gather": (1.0, -1),
    "all_reduce": (2.0, -1),
}
MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")


def to_calculon(known: Known, target: Target) -> Export:
    """Return the network entries, to be put into a system file of calculon.

    Raises:
        ValueError: none of its ops was measured, or not between nodes where there are several.
    """
    kernel = pick_kernel(known.cells, target.kernel, MEASURED)
    cells = known.cells[known.cells["op"].isin(MEASURED)]
    entries: list[dict[str, object]] = []
    remarks: list[str] = []
    values: list[dict[str, object]] = []
    for size, across, where in (
        (target.gpus_per_node, False, "within a node"),
        (target.gpus_per_node * target.num_nodes, True, "between nodes"),
    ):
        if size == 1 or (across and target.num_nodes == 1):
            continue
        tier = tier_cells(cells, kernel, across=across)
        if tier.empty:
            raise ValueError(f"calculon needs links {where}: measure one of {', '.join(MEASURED)} {where}")
        line = fit_constant_latency(tier)
        remarks.append(f"{where}: {line}")
        values += _values(len(entries), line)
        entries.append(
            {
                "bandwidth": line.bytes_per_s / 1e9,
                "efficiency": 1.0,
                "size": size,
                "latency": line.latency_s,
                "ops": {name: list(numbers) for name, numbers in OPS.items()},
                "must_be_filled": not across,
                "processor_usage": 0.0,
            }
        )
    if not entries:
        raise ValueError("calculon needs a network of two ranks or more: give --gpus-per-node or --nodes")
    remarks += [
        "bandwidth is what was reached, so efficiency is 1; processor_usage was not measured and is 0",
        "one latency for all ops and group sizes, and no all_to_all: measured cells are in crosstraffic.json",
    ]
    content = json.dumps({"networks": entries}, indent=2) + "\n"
    return Export(files={"networks.json": content.encode()}, remarks=tuple(remarks), values=tuple(values))


def _values(index: int, line: Line) -> list[dict[str, object]]:
    return [
        {"file": "networks.json", "key": f"networks[{index}].{name}", "value": value, "source": "model", "kind": "fit",
         "low": None, "high": None}
        for name, value in (("bandwidth", line.bytes_per_s / 1e9), ("latency", line.latency_s))
    ]  # fmt: skip
