"""GenZ: keyword arguments of its ``System``, one file for links within a node and one for links between nodes.

Source: https://github.com/abhibambhaniya/GenZ-LLM-Analyzer, GenZ/collective_times.py (a collective takes 5 us + steps x
link latency + bytes / link bandwidth, ring or pairwise) and GenZ/unit.py (its GB/s are 2^30 bytes, latency in us).
"""

import json

from crosstraffic.costmodel.export.files import Export
from crosstraffic.costmodel.export.known import Known, pick_kernel
from crosstraffic.costmodel.export.line import fit_line, tier_cells
from crosstraffic.costmodel.export.target import Target

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
START_S = 5e-6
GIB = 2**30


def to_genz(known: Known, target: Target) -> Export:
    """Return the arguments.

    Raises:
        ValueError: none of its collectives was measured.
    """
    kernel = pick_kernel(known.cells, target.kernel, COLLECTIVES)
    cells = known.cells[known.cells["op"].isin(COLLECTIVES)]
    files, remarks, values = {}, [], []
    for across, name, where in (
        (False, "system_intra_node.json", "within a node"),
        (True, "system_inter_node.json", "between nodes"),
    ):
        tier = tier_cells(cells, kernel, across=across)
        if tier.empty:
            remarks.append(f"no {name}: no collective {where} was measured")
            continue
        line = fit_line(tier, constant_s=START_S)
        arguments = {
            "interchip_link_bw": line.bytes_per_s / GIB,
            "interchip_link_latency": line.latency_s * 1e6,
        }
        files[name] = (json.dumps(arguments, indent=2) + "\n").encode()
        remarks.append(f"{where}, beside GenZ's own 5 us a call: {line}")
        values += [
            {"file": name, "key": key, "value": value, "source": "model", "kind": "fit", "low": None, "high": None}
            for key, value in arguments.items()
        ]
    if not files:
        raise ValueError(f"GenZ needs {' or '.join(COLLECTIVES)} of neighbouring ranks: measure one of them")
    remarks.append(
        "GenZ's System has one link: which algorithm a library takes at which size is lost, and so is all that differs "
        "between ops; measured cells are in crosstraffic.json"
    )
    return Export(files=files, remarks=tuple(remarks), values=tuple(values))
