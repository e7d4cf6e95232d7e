"""Before anything is measured: what each rank is and where it runs, and every reason not to trust this launch."""

import json
import os
import platform
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from crosstraffic.bench.transport import Transport
from crosstraffic.results.record import Place

ALLOWED = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
)
ALLOWED_PREFIXES = ("MPICH_", "MPIR_CVAR_", "UCX_", "FI_", "GLOO_", "NCCL_")
MUST_AGREE_PREFIXES = ("UCX_", "GLOO_", "NCCL_", "FI_")
_PER_NODE_WORDS = ("IFNAME", "HCA", "NET_DEVICES", "IFACE", "DOMAIN", "_FILE", "HOSTID")
_SECRET_WORDS = ("TOKEN", "SECRET", "PASS", "KEY", "CREDENTIAL", "AUTH")
_MAX_VALUE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank says about itself. ``device`` is a GPU's UUID or PCI address, None on host transports."""

    rank: int
    world_size: int
    host: str
    pid: int
    cpus: tuple[int, ...]
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    device: str | None = None
    nic: str | None = None


def report(transport: Transport) -> RankReport:
    """Look at this process."""
    allowed = allowed_environment(os.environ)
    return RankReport(
        rank=transport.rank,
        world_size=transport.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "kernel": platform.release(),
            **{f"{transport.name}.{name}": value for name, value in transport.describe().items()},
        },
        environment=allowed,
        nic=_named_nic(allowed),
    )


def gather(transport: Transport) -> list[RankReport] | None:
    """Return every rank's report on rank 0; None elsewhere."""
    gathered = transport.gather_bytes(json.dumps(asdict(report(transport))).encode())
    return None if gathered is None else [report_from_json(text) for text in gathered]


def report_from_json(text: str | bytes) -> RankReport:
    """Read back a report that was sent as JSON."""
    data = json.loads(text)
    return RankReport(**{**data, "cpus": tuple(data["cpus"])})


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that change how a transport works, by an allow-list; never one that may hold a secret.

    >>> allowed_environment({"UCX_TLS": "tcp", "NCCL_AUTH_TOKEN": "x", "HOME": "/root"})
    {'UCX_TLS': 'tcp'}
    """
    return {
        name: value[:_MAX_VALUE]
        for name, value in sorted(environment.items())
        if (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not any(word in name for word in _SECRET_WORDS)
    }


def check(reports: Sequence[RankReport], expected_world_size: int) -> list[str]:
    """Return every reason not to measure with these ranks, each with what to do about it; empty when all is well."""
    found = _check_world(reports, expected_world_size)
    found += _check_processes(reports)
    found += _check_devices(reports)
    found += _check_versions(reports)
    found += _check_settings(reports)
    return found


def _check_world(reports: Sequence[RankReport], expected: int) -> list[str]:
    sizes = sorted({item.world_size for item in reports})
    ranks = [item.rank for item in reports]
    if len(reports) > 1 and set(ranks) == {0}:
        return [
            (
                f"all {len(reports)} ranks think that they are rank 0: they are independent jobs. Start them with the "
                f"launcher of the MPI library in use (srun --mpi=list shows what Slurm supports)"
            )
        ]
    found = []
    if sizes != [expected] or len(reports) != expected:
        found.append(
            f"{expected} ranks are asked for, {len(reports)} reported, with world size "
            f"{' and '.join(map(str, sizes))}: make --ranks (or the layout) and the launcher's number of tasks agree"
        )
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        found.append(f"ranks {_list(twice)} are there more than once: give every task its own rank number")
    return found


def _check_processes(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"ranks {_list(ranks)} are one process (host {host}, pid {pid}): start one process for each rank"
        for (host, pid), ranks in _shared(reports, lambda item: (item.host, item.pid))
    ]


def _check_devices(reports: Sequence[RankReport]) -> list[str]:
    with_device = [item for item in reports if item.device is not None]
    return [
        f"ranks {_list(ranks)} share GPU {device} on {host}: start at most one rank for each GPU of a node "
        f"(srun --ntasks-per-node, --gpus-per-task=1) and check CUDA_VISIBLE_DEVICES"
        for (host, device), ranks in _shared(with_device, lambda item: (item.host, item.device))
    ]


def _check_versions(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"versions of {name} differ: {_differences(values)}: use one environment or container on all nodes"
        for name, values in _different(reports, lambda item: item.versions)
        if name != "kernel"
    ]


def _check_settings(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"{name} differs between ranks: {_differences(values)}: set it for all of them (srun --export, mpiexec -genv)"
        for name, values in _different(reports, lambda item: item.environment)
        if name.startswith(MUST_AGREE_PREFIXES) and not any(word in name for word in _PER_NODE_WORDS)
    ]


def _shared(
    reports: Iterable[RankReport], key: Callable[[RankReport], tuple[Hashable, Hashable]]
) -> list[tuple[tuple[Hashable, Hashable], list[int]]]:
    ranks: dict[tuple[Hashable, Hashable], list[int]] = defaultdict(list)
    for item in reports:
        ranks[key(item)].append(item.rank)
    return [(value, sorted(sharing)) for value, sharing in ranks.items() if len(sharing) > 1]


def _different(
    reports: Sequence[RankReport], mapping: Callable[[RankReport], Mapping[str, str]]
) -> list[tuple[str, dict[str, list[int]]]]:
    found = []
    for name in sorted({name for item in reports for name in mapping(item)}):
        values: dict[str, list[int]] = defaultdict(list)
        for item in reports:
            values[mapping(item).get(name, "(not set)")].append(item.rank)
        if len(values) > 1:
            found.append((name, dict(values)))
    return found


def _differences(values: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on rank {_list(sorted(ranks))}" for value, ranks in values.items())


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def places(reports: Sequence[RankReport]) -> list[Place]:
    """Return where each rank runs, in order of rank; nodes are numbered in order of their first rank."""
    ordered = sorted(reports, key=lambda item: item.rank)
    hosts = list(dict.fromkeys(item.host for item in ordered))
    return [
        Place(
            rank=item.rank,
            host=item.host,
            pid=item.pid,
            node=hosts.index(item.host),
            cpus=item.cpus,
            device=item.device,
            nic=item.nic,
        )
        for item in ordered
    ]


def environment(reports: Sequence[RankReport]) -> dict[str, str]:
    """Return the allowed variables of all ranks; one that differs (a NIC's name) is given rank by rank."""
    return _merged(reports, lambda item: item.environment)


def versions(reports: Sequence[RankReport]) -> dict[str, str]:
    """Return the versions of all ranks; after ``check`` only the kernel's can differ."""
    return _merged(reports, lambda item: item.versions)


def _merged(reports: Sequence[RankReport], mapping: Callable[[RankReport], Mapping[str, str]]) -> dict[str, str]:
    differing = {name: _differences(values) for name, values in _different(reports, mapping)}
    return {name: differing.get(name, value) for item in reports for name, value in mapping(item).items()}


def available_bytes() -> int | None:
    """Return how much memory this node can still give: the kernel's estimate, or less under a cgroup's limit.

    Source: proc(5), MemAvailable; cgroup v2, memory.max and memory.current of the root that this process sees.
    """
    found = []
    if sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            found.append(max(int(text) - int(used.read_text()), 0))
    return min(found, default=None)


def _named_nic(environment: Mapping[str, str]) -> str | None:
    names = ("NCCL_IB_HCA", "UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return next((environment[name] for name in names if name in environment), None)
