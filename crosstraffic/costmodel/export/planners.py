"""The planners that can be exported to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crosstraffic.costmodel.export.aiconfigurator import to_aiconfigurator
from crosstraffic.costmodel.export.astra_sim import to_astra_sim
from crosstraffic.costmodel.export.calculon import to_calculon
from crosstraffic.costmodel.export.files import Export
from crosstraffic.costmodel.export.galvatron import to_galvatron
from crosstraffic.costmodel.export.genz import to_genz
from crosstraffic.costmodel.export.known import Known
from crosstraffic.costmodel.export.target import Target
from crosstraffic.costmodel.export.vidur import to_vidur


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What is written for a planner, what it needs measured, and what writes it (None: crosstraffic.json alone)."""

    files: str
    needs: str
    make: Callable[[Known, Target], Export] | None


PLANNERS: Mapping[str, Planner] = {
    "aiconfigurator": Planner(
        files="systems folder: NAME.yaml, nccl_perf, custom_allreduce_perf, moe_a2a_perf (parquet)",
        needs="a collective; send_recv; ep_dispatch and ep_combine for expert parallelism",
        make=to_aiconfigurator,
    ),
    "vidur": Planner(files="all_reduce.csv, send_recv.csv", needs="all_reduce; send_recv", make=to_vidur),
    "galvatron": Planner(
        files="allreduce_bandwidth, p2p_bandwidth, sp_time, overlap_coefficient (JSON)",
        needs="all_reduce (neighbours and strided), all_to_all, send_recv",
        make=to_galvatron,
    ),
    "astra-sim": Planner(files="network.yml", needs="a collective or send_recv of each tier", make=to_astra_sim),
    "calculon": Planner(
        files="networks.json", needs="all_reduce, all_gather, reduce_scatter or send_recv", make=to_calculon
    ),
    "genz": Planner(
        files="system_intra_node.json, system_inter_node.json",
        needs="all_reduce, all_gather or all_to_all",
        make=to_genz,
    ),
    "ours": Planner(files="crosstraffic.json", needs="anything", make=None),
}


def planner_of(name: str) -> Planner:
    """Look a planner up.

    Raises:
        ValueError: no such planner.
    """
    if name not in PLANNERS:
        raise ValueError(f"unknown planner: {name!r}; allowed: {', '.join(PLANNERS)}")
    return PLANNERS[name]
