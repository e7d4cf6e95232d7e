"""What ``crosstraffic doctor`` finds, as one JSON object: ranks, hosts, transports, clocks, refusals, notes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstraffic import __version__
from crosstraffic.bench.libraries import Availability
from crosstraffic.bench.preflight import environment, notes, places, versions
from crosstraffic.bench.rank_report import RankReport
from crosstraffic.results.record import ClockModel

SCHEMA_VERSION = 1
FILE = "diagnosis.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found. ``reports`` are those of the ranks that came; ``clocks`` are absent if nothing was opened.

    ``transports`` are those of the host of rank 0.
    """

    transport: str
    launcher: str
    world_size: int
    reports: tuple[RankReport, ...]
    transports: tuple[Availability, ...]
    clocks: tuple[ClockModel, ...] = ()
    refusals: tuple[str, ...] = ()


def diagnosis_to_dict(found: Diagnosis) -> dict[str, Any]:
    """Return what ``doctor --json`` prints."""
    reports = sorted(found.reports, key=lambda item: item.rank)
    placed = places(reports)
    ranks = [
        place.model_dump(mode="json") | {"local_rank": item.local_rank}
        for place, item in zip(placed, reports, strict=True)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "crosstraffic": __version__,
        "transport": found.transport,
        "launcher": found.launcher,
        "world_size": found.world_size,
        "ranks": ranks,
        "hosts": _hosts(reports),
        "transports": [asdict(item) for item in found.transports],
        "clocks": [
            {"rank": clock.rank, "offset_s": clock.offset_s, "error_s": clock.error_s} for clock in found.clocks
        ],
        "versions": versions(reports),
        "environment": environment(reports),
        "refusals": list(found.refusals),
        "notes": notes(reports),
    }


def _hosts(reports: Sequence[RankReport]) -> list[dict[str, Any]]:
    """Say of each host what its ranks see; GPUs are all that any of them may use."""
    by_host: dict[str, list[RankReport]] = {}
    for item in reports:
        by_host.setdefault(item.host, []).append(item)
    found = []
    for host, items in by_host.items():
        gpus = {gpu.name: asdict(gpu) for item in items for gpu in item.seen.gpus}
        found.append(
            {
                "host": host,
                "ranks": [item.rank for item in items],
                "num_cpus": items[0].num_cpus,
                "kernel": items[0].versions.get("kernel"),
                "nics": [asdict(nic) for nic in items[0].seen.nics],
                "rdma_ports": [asdict(port) for port in items[0].seen.rdma_ports],
                "gpus": list(gpus.values()),
            }
        )
    return found


def write_diagnosis(folder: Path, data: Mapping[str, Any]) -> None:
    """Write it in one step: a reader sees the old one or the new one."""
    draft = folder / f"{FILE}.new"
    draft.write_text(json.dumps(data), encoding="utf-8")
    draft.replace(folder / FILE)


def read_diagnosis(folder: Path) -> dict[str, Any] | None:
    """Return what rank 0 wrote last; None where it came to nothing."""
    path = folder / FILE
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
