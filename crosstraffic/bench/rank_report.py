"""What one rank says about itself before anything is measured, and how ranks are named to a person."""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from crosstraffic import __version__
from crosstraffic.bench.devices import Devices, devices_from_dict, gpu_of, look_here
from crosstraffic.bench.libraries import GPU_TRANSPORTS, installed_versions, why_not
from crosstraffic.bench.nic import choose_nic
from crosstraffic.bench.ranks import identify

ALLOWED = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_GPUS",
    "SLURM_TOPOLOGY_ADDR",
    "OMPI_MCA_btl_tcp_if_include",
)
ALLOWED_PREFIXES = ("MPICH_", "MPIR_CVAR_", "UCX_", "FI_", "GLOO_", "NCCL_")
_SECRET_WORDS = ("TOKEN", "SECRET", "PASS", "KEY", "CREDENTIAL", "AUTH")
_MAX_VALUE = 512
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux; another one after each boot, the same in all containers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank says about itself.

    ``device`` is a GPU's UUID or PCI address, None on host transports; ``seen`` is the hardware that the rank sees;
    ``num_cpus`` are those of its host, ``cpus`` those it may use; ``missing``: why its transport cannot start there;
    ``machine`` is the same for hosts that are one machine (containers, namespaces).
    """

    rank: int
    world_size: int
    host: str
    pid: int
    cpus: tuple[int, ...]
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    device: str | None = None
    nic: str | None = None
    nic_how: str | None = None
    transport: str = ""
    local_rank: int | None = None
    num_cpus: int | None = None
    seen: Devices = field(default_factory=Devices)
    missing: str | None = None
    machine: str | None = None


def look_at_rank(rank: int, world_size: int, transport_name: str) -> RankReport:
    """Look at this process, before its transport is opened."""
    allowed = allowed_environment(os.environ)
    seen = look_here(os.environ)
    nic = choose_nic(transport_name, os.environ, seen)
    identity = identify(os.environ)
    local_rank = None if identity is None else identity.local_rank
    return RankReport(
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        versions={
            "crosstraffic": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "kernel": platform.release(),
            **installed_versions(),
        },
        environment=allowed,
        device=gpu_of(seen.gpus, local_rank) if transport_name in GPU_TRANSPORTS else None,
        nic=None if nic is None else nic.name,
        nic_how=None if nic is None else nic.how,
        transport=transport_name,
        local_rank=local_rank,
        num_cpus=os.cpu_count(),
        seen=seen,
        missing=why_not(transport_name),
        machine=_machine(),
    )


def _machine() -> str | None:
    """Return a short hash of the running kernel's boot id; None where the kernel gives none."""
    try:
        boot_id = BOOT_ID.read_bytes().strip()
    except OSError:
        return None
    return hashlib.sha256(boot_id).hexdigest()[:12]


def report_to_json(found: RankReport) -> bytes:
    """Write a report as JSON."""
    return json.dumps(asdict(found)).encode()


def report_from_json(text: str | bytes) -> RankReport:
    """Read back a report that was sent as JSON."""
    data = json.loads(text)
    return RankReport(**{**data, "cpus": tuple(data["cpus"]), "seen": devices_from_dict(data["seen"])})


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


def named(reports: Iterable[RankReport]) -> str:
    """Name ranks and their hosts: ``ranks 0-3, 5 (n0, n1)``."""
    items = sorted(reports, key=lambda item: item.rank)
    word = "rank" if len(items) == 1 else "ranks"
    return f"{word} {ranges([item.rank for item in items])} ({host_names(items)})"


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers with runs of three or more as a range.

    >>> ranges([0, 1, 2, 5, 7, 8]), ranges([])
    ('0-2, 5, 7, 8', '')
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return few([text for run in runs for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))])


def host_names(reports: Iterable[RankReport]) -> str:
    """Name the hosts of ranks, each once."""
    return few(list(dict.fromkeys(item.host for item in reports)))


def few(words: Sequence[str]) -> str:
    """Join words with commas; beyond eight, say how many more there are."""
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
