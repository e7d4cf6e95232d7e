"""ASTRA-sim, analytical network: ``network.yml``, one dimension within a node and one between nodes.

Source: https://github.com/astra-sim/astra-network-analytical, common/NetworkFunction.cpp (its GB/s are 2^30 bytes) and
congestion_unaware/basic-topology/Switch.cpp (a message over a Switch makes two hops, so each has half the latency).
"""

from crosstraffic.costmodel.export.files import Export
from crosstraffic.costmodel.export.known import Known, pick_kernel
from crosstraffic.costmodel.export.line import RING, Line, fit_line, tier_cells
from crosstraffic.costmodel.export.target import Target

HOPS = {"Switch": 2, "Ring": 1}
GIB = 2**30


def to_astra_sim(known: Known, target: Target) -> Export:
    """Return the network file.

    Raises:
        ValueError: a dimension of the system was not measured, or a topology that two numbers do not describe.
    """
    if target.topology not in HOPS:
        raise ValueError(f"unknown topology: {target.topology!r}; allowed: {', '.join(HOPS)}")
    kernel = pick_kernel(known.cells, target.kernel, RING)
    dimensions: list[tuple[int, str, Line]] = []
    for count, across, where in (
        (target.gpus_per_node, False, "within a node"),
        (target.num_nodes, True, "between nodes"),
    ):
        if count == 1:
            continue
        cells = tier_cells(known.cells, kernel, across=across)
        if cells.empty:
            raise ValueError(f"ASTRA-sim needs links {where}: measure a collective or send_recv {where}")
        dimensions.append((count, where, fit_line(cells)))
    if not dimensions:
        raise ValueError("ASTRA-sim needs a dimension of two or more: give --gpus-per-node or --nodes")
    hops = HOPS[target.topology]
    rows: dict[str, list[str]] = {
        "topology": [target.topology] * len(dimensions),
        "npus_count": [str(count) for count, _, _ in dimensions],
        "bandwidth": [f"{line.bytes_per_s / GIB:.6g}" for _, _, line in dimensions],
        "latency": [f"{line.latency_s * 1e9 / hops:.6g}" for _, _, line in dimensions],
    }
    units = {"bandwidth": "  # GB/s of 2^30 bytes, a link and direction", "latency": "  # ns a hop"}
    said = [f"{where}: {line}" for _, where, line in dimensions]
    lines = [f"# {line}" for line in said]
    lines += [f"{name}: [ {', '.join(row)} ]{units.get(name, '')}" for name, row in rows.items()]
    values = [
        {"file": "network.yml", "key": f"{name}[{index}]", "value": float(rows[name][index]), "source": "model",
         "kind": "fit", "low": None, "high": None}
        for name in ("bandwidth", "latency")
        for index in range(len(dimensions))
    ]  # fmt: skip
    lost = (
        "network.yml holds one latency and one bandwidth a dimension: which algorithm and protocol a library takes at "
        "which size is lost; measured cells are in crosstraffic.json"
    )
    content = "\n".join(lines) + "\n"
    return Export(files={"network.yml": content.encode()}, remarks=(*said, lost), values=tuple(values))
