"""What one rank sees of its machine: network interfaces, RDMA ports, GPUs, and where they hang. No library is asked.

Everything is read below ``root`` (``/sys``, ``/proc``, ``/dev``), so that a made-up tree can stand in for a machine.
Source: Documentation/ABI/testing/sysfs-class-net and sysfs-class-infiniband of Linux; proc_net(5); README of NVIDIA's
driver, "The /proc interface"; CUDA C++ programming guide, CUDA_VISIBLE_DEVICES; srun(1), SLURM_STEP_GPUS.
"""

import fcntl
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
_UP = frozenset({"up", "unknown"})  # drivers that cannot tell (loopback, tunnels) say unknown
_SIOCGIFCONF, _IFREQ_BYTES, _MAX_ADDRESSES = 0x8912, 40, 1024
_ROUTE_IS_UP = 0x1


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network interface. ``state`` is the kernel's operstate; None where the driver does not know."""

    name: str
    state: str
    speed_bits_per_s: int | None = None
    mtu: int | None = None
    addresses: tuple[str, ...] = ()
    numa_node: int | None = None

    @property
    def is_up(self) -> bool:
        return self.state in _UP


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device. ``link_layer``: InfiniBand, or Ethernet (RoCE)."""

    device: str
    port: int
    state: str
    rate_bits_per_s: int | None = None
    link_layer: str | None = None
    numa_node: int | None = None

    @property
    def is_up(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. ``minor`` is N of /dev/nvidiaN; a slice of a GPU (MIG) has only its UUID."""

    uuid: str | None = None
    pci_address: str | None = None
    model: str | None = None
    minor: int | None = None
    numa_node: int | None = None

    @property
    def name(self) -> str:
        """The UUID, or the PCI address while the driver does not tell the UUID."""
        return self.uuid or self.pci_address or "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What a rank sees. ``gpus`` are those that it may use, in CUDA's order (by PCI address).

    ``default_nic`` has the default route; ``host_address`` is what the name of this host resolves to.
    """

    nics: tuple[Nic, ...] = ()
    rdma_ports: tuple[RdmaPort, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    default_nic: str | None = None
    host_address: str | None = None

    def nic_of(self, address: str) -> str | None:
        """Return the interface that carries an address; all of 127.0.0.0/8 is the loopback's."""
        for nic in self.nics:
            if address in nic.addresses:
                return nic.name
        is_loopback = ipaddress.ip_address(address).is_loopback
        return "lo" if is_loopback and any(nic.name == "lo" for nic in self.nics) else None


def look(
    environment: Mapping[str, str],
    *,
    addresses: Mapping[str, tuple[str, ...]],
    host_address: str | None,
    root: Path = ROOT,
) -> Devices:
    """Look at the machine below ``root``; ``addresses`` are the IPv4 addresses of each interface."""
    return Devices(
        nics=tuple(_nics(root, addresses)),
        rdma_ports=tuple(_rdma_ports(root)),
        gpus=visible_gpus(tuple(_gpus(root)), environment),
        default_nic=_default_nic(root),
        host_address=host_address,
    )


def look_here(environment: Mapping[str, str]) -> Devices:
    """Look at this machine, as this process sees it."""
    return look(environment, addresses=interface_addresses(), host_address=own_address())


def devices_from_dict(data: Mapping[str, Any]) -> Devices:
    """Read back what ``dataclasses.asdict`` made of ``Devices``, also by way of JSON."""
    return Devices(
        nics=tuple(Nic(**{**nic, "addresses": tuple(nic["addresses"])}) for nic in data["nics"]),
        rdma_ports=tuple(RdmaPort(**port) for port in data["rdma_ports"]),
        gpus=tuple(Gpu(**gpu) for gpu in data["gpus"]),
        default_nic=data["default_nic"],
        host_address=data["host_address"],
    )


def visible_gpus(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that the environment lets a process use, in its order.

    CUDA_VISIBLE_DEVICES lists numbers or (beginnings of) UUIDs; from the first one that is wrong on, nothing is
    visible. Without it SLURM_STEP_GPUS names minor numbers.

    >>> two = (Gpu(uuid="GPU-aa", minor=0), Gpu(uuid="GPU-bb", minor=1))
    >>> [gpu.name for gpu in visible_gpus(two, {"CUDA_VISIBLE_DEVICES": "1,7,0"})]
    ['GPU-bb']
    """
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        found: list[Gpu] = []
        for word in asked.split(","):
            gpu = _gpu_called(gpus, word.strip())
            if gpu is None or gpu in found:
                break
            found.append(gpu)
        return tuple(found)
    step = environment.get("SLURM_STEP_GPUS")
    if step is None:
        return gpus
    minors = set(_numbers(step))
    return tuple(gpu for gpu in gpus if gpu.minor in minors)


def gpu_of(gpus: tuple[Gpu, ...], local_rank: int | None) -> str | None:
    """Return the GPU that a rank of its node takes: the n-th, going round where there are too few of them.

    None where it sees none, or sees several and does not know its local rank.
    """
    if not gpus or (local_rank is None and len(gpus) > 1):
        return None
    return gpus[(local_rank or 0) % len(gpus)].name


def _gpu_called(gpus: tuple[Gpu, ...], word: str) -> Gpu | None:
    if word.isdecimal():
        return gpus[int(word)] if int(word) < len(gpus) else None
    if word.startswith("MIG-"):
        return Gpu(uuid=word)
    matching = [gpu for gpu in gpus if gpu.uuid and word.startswith("GPU-") and gpu.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as 0-2,5."""
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(low), int(high or low) + 1)


def _gpus(root: Path) -> Iterator[Gpu]:
    """Yield the GPUs that this process may open; a cgroup of Slurm or a container takes others away.

    access(2) asks the device cgroup too, and unlike open(2) does not wake the GPU.
    """
    for path in _entries(root / "proc/driver/nvidia/gpus"):
        fields = {
            name.strip(): value.strip()
            for name, _, value in (line.partition(":") for line in (_read(path / "information") or "").splitlines())
        }
        address = fields.get("Bus Location", path.name).lower()
        minor = _integer(fields.get("Device Minor"))
        if minor is None or not os.access(root / f"dev/nvidia{minor}", os.R_OK | os.W_OK):
            continue
        uuid = fields.get("GPU UUID")
        yield Gpu(
            uuid=None if uuid is None or "?" in uuid else uuid,
            pci_address=address,
            model=fields.get("Model"),
            minor=minor,
            numa_node=_numa_node(root / "sys/bus/pci/devices" / address),
        )


def _nics(root: Path, addresses: Mapping[str, tuple[str, ...]]) -> Iterator[Nic]:
    inet6 = _inet6(root)
    for path in _entries(root / "sys/class/net"):
        if not path.is_dir():  # bonding_masters is a file
            continue
        speed = _integer(_read(path / "speed"))  # Mbit/s; refused or -1 where it is not known
        yield Nic(
            name=path.name,
            state=_read(path / "operstate") or "unknown",
            speed_bits_per_s=speed * 10**6 if speed is not None and speed > 0 else None,
            mtu=_integer(_read(path / "mtu")),
            addresses=(*addresses.get(path.name, ()), *inet6.get(path.name, ())),
            numa_node=_numa_node(path / "device"),
        )


def _rdma_ports(root: Path) -> Iterator[RdmaPort]:
    for device in _entries(root / "sys/class/infiniband"):
        for path in _entries(device / "ports"):
            rate = re.match(r"([\d.]+) Gb/sec", _read(path / "rate") or "")
            state = _read(path / "state") or "unknown"  # as "4: ACTIVE"
            yield RdmaPort(
                device=device.name,
                port=int(path.name),
                state=state.split(": ")[-1],
                rate_bits_per_s=round(float(rate[1]) * 1e9) if rate and float(rate[1]) > 0 else None,
                link_layer=_read(path / "link_layer"),
                numa_node=_numa_node(device / "device"),
            )


def _default_nic(root: Path) -> str | None:
    """Return the interface of the default IPv4 route with the least metric."""
    rows = [line.split() for line in (_read(root / "proc/net/route") or "").splitlines()[1:]]
    routes = [
        (int(row[6]), row[0])
        for row in rows
        if len(row) > 7 and row[1] == row[7] == "00000000" and int(row[3], 16) & _ROUTE_IS_UP
    ]
    return min(routes)[1] if routes else None


def _inet6(root: Path) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in (_read(root / "proc/net/if_inet6") or "").splitlines():
        number, *_, name = line.split()
        found[name] = (*found.get(name, ()), str(ipaddress.IPv6Address(int(number, 16))))
    return found


def _numa_node(device: Path) -> int | None:
    node = _integer(_read(device / "numa_node"))
    return None if node is None or node < 0 else node  # -1: the firmware does not say


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return ()


def _read(path: Path) -> str | None:
    """Return the text of a file of the kernel; None where it is not there or its driver refuses to tell."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _integer(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"-?\d+", text) else None


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return the IPv4 addresses of each interface of this process's network. Source: netdevice(7), SIOCGIFCONF."""
    if sys.platform != "linux":
        return {}
    import array

    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        filled: int = struct.unpack("iP", fcntl.ioctl(asked, _SIOCGIFCONF, request))[0]
    found: dict[str, tuple[str, ...]] = {}
    for start in range(0, filled, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().partition(":")[0]  # eth0:1 is a second address of eth0
        found[name] = (*found.get(name, ()), socket.inet_ntoa(entry[20:24]))
    return found


def own_address() -> str | None:
    """Return the first address to which the name of this host resolves; None where it resolves to none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return None


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
