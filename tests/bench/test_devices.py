"""What a rank sees, on made-up machines: trees that look like /sys, /proc and /dev."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from crosstraffic.bench.devices import (
    Devices,
    Gpu,
    devices_from_dict,
    gpu_of,
    interface_addresses,
    look,
    look_here,
    visible_gpus,
)

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
ib0\t000A0A0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth1\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\t0\t0\t0
eth0\t00000000\t0101010A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth9\t00000000\t0101010A\t0002\t0\t0\t1\t00000000\t0\t0\t0
"""
INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t {minor}
GPU UUID: \t {uuid}
Bus Type: \t PCIe
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def add_gpu(root: Path, minor: int, address: str, uuid: str, *, openable: bool = True) -> None:
    write(
        root,
        {
            f"proc/driver/nvidia/gpus/{address}/information": INFORMATION.format(
                minor=minor, uuid=uuid, address=address
            ),
            f"sys/bus/pci/devices/{address}/numa_node": str(minor // 2),
        },
    )
    if openable:
        write(root, {f"dev/nvidia{minor}": ""})


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two Ethernet NICs (one down), one bridge of unknown speed, a 400 Gbit/s and a RoCE port, three GPUs."""
    files = {
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/eth0/speed": "25000",
        "sys/class/net/eth0/mtu": "9000",
        "sys/class/net/eth0/device/numa_node": "1",
        "sys/class/net/eth1/operstate": "down",
        "sys/class/net/eth1/speed": "-1",
        "sys/class/net/eth1/mtu": "1500",
        "sys/class/net/eth1/device/numa_node": "-1",
        "sys/class/net/br0/operstate": "up",
        "sys/class/net/lo/operstate": "unknown",
        "sys/class/net/bonding_masters": "",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
        "sys/class/infiniband/mlx5_0/device/numa_node": "0",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "sys/class/infiniband/mlx5_1/ports/1/rate": "2.5 Gb/sec (1X SDR)",
        "sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet",
        "proc/net/route": ROUTES.strip("\n"),
        "proc/net/if_inet6": "fe8000000000000000fc00fffe000001 04 40 20 80     eth0",
    }
    write(tmp_path, files)
    add_gpu(tmp_path, 0, "0000:1b:00.0", "GPU-aaaa0000-1111")
    add_gpu(tmp_path, 1, "0000:43:00.0", "GPU-aaaa2222-3333")
    add_gpu(tmp_path, 2, "0000:9b:00.0", "GPU-bbbb4444-5555")
    return tmp_path


def seen(root: Path, **environment: str) -> Devices:
    return look(environment, addresses={"eth0": ("10.1.1.7",)}, host_address="10.1.1.7", root=root)


def test_nics_have_state_speed_mtu_addresses_and_numa_node(machine: Path) -> None:
    nics = {nic.name: nic for nic in seen(machine).nics}
    assert list(nics) == ["br0", "eth0", "eth1", "lo"]
    eth0, eth1 = nics["eth0"], nics["eth1"]
    assert (eth0.speed_bits_per_s, eth0.mtu, eth0.numa_node, eth0.is_up) == (25 * 10**9, 9000, 1, True)
    assert eth0.addresses == ("10.1.1.7", "fe80::fc:ff:fe00:1")
    assert (eth1.speed_bits_per_s, eth1.numa_node, eth1.is_up) == (None, None, False)
    assert (nics["br0"].speed_bits_per_s, nics["br0"].mtu) == (None, None)
    assert nics["lo"].is_up


def test_rdma_ports_have_state_rate_and_link_layer(machine: Path) -> None:
    first, second = seen(machine).rdma_ports
    assert (first.device, first.port, first.rate_bits_per_s, first.link_layer) == (
        "mlx5_0",
        1,
        400 * 10**9,
        "InfiniBand",
    )
    assert (first.is_up, first.numa_node) == (True, 0)
    assert (second.state, second.rate_bits_per_s, second.link_layer) == ("DOWN", 2_500_000_000, "Ethernet")


def test_the_default_route_with_the_least_metric_counts_and_one_that_is_down_does_not(machine: Path) -> None:
    assert seen(machine).default_nic == "eth0"


def test_gpus_have_uuid_address_and_numa_node(machine: Path) -> None:
    gpu = seen(machine).gpus[2]
    assert gpu == Gpu(
        uuid="GPU-bbbb4444-5555", pci_address="0000:9b:00.0", model="NVIDIA H100 80GB HBM3", minor=2, numa_node=1
    )


def test_a_gpu_whose_uuid_is_not_known_yet_goes_by_its_address(tmp_path: Path) -> None:
    add_gpu(tmp_path, 0, "0000:1b:00.0", "GPU-????????-????-????")
    assert [gpu.name for gpu in seen(tmp_path).gpus] == ["0000:1b:00.0"]


def test_a_gpu_that_a_container_or_cgroup_takes_away_is_not_seen(machine: Path) -> None:
    """Slurm with ConstrainDevices numbers CUDA_VISIBLE_DEVICES among what is left."""
    (machine / "dev/nvidia0").unlink()
    assert [gpu.minor for gpu in seen(machine).gpus] == [1, 2]
    assert [gpu.minor for gpu in seen(machine, CUDA_VISIBLE_DEVICES="0", SLURM_STEP_GPUS="1").gpus] == [1]


@pytest.mark.parametrize(
    ("environment", "minors"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1,3,0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "-1,0"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}, []),
        ({"SLURM_STEP_GPUS": "1-2"}, [1, 2]),
        ({"SLURM_STEP_GPUS": "0,2"}, [0, 2]),
        ({"SLURM_STEP_GPUS": "0,2", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
    ],
    ids=lambda value: (
        ",".join(map(str, value)) if isinstance(value, list) else " ".join(f"{k}={v}" for k, v in value.items())
    ),
)
def test_only_the_gpus_that_a_rank_may_use_are_seen(
    machine: Path, environment: dict[str, str], minors: list[int]
) -> None:
    assert [gpu.minor for gpu in seen(machine, **environment).gpus] == minors


def test_a_slice_of_a_gpu_goes_by_its_own_uuid() -> None:
    sliced = visible_gpus((Gpu(uuid="GPU-a", minor=0),), {"CUDA_VISIBLE_DEVICES": "MIG-1-2,MIG-3-4"})
    assert [gpu.name for gpu in sliced] == ["MIG-1-2", "MIG-3-4"]


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "name"),
    [(0, 0, None), (1, 5, "GPU-0"), (4, 3, "GPU-3"), (2, 3, "GPU-1"), (1, None, "GPU-0"), (2, None, None)],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(num_gpus: int, local_rank: int | None, name: str | None) -> None:
    assert gpu_of(tuple(Gpu(uuid=f"GPU-{index}") for index in range(num_gpus)), local_rank) == name


def test_a_machine_without_any_of_it_has_none(tmp_path: Path) -> None:
    assert look({}, addresses={}, host_address=None, root=tmp_path) == Devices()


def test_what_is_seen_survives_the_way_through_json(machine: Path) -> None:
    found = seen(machine)
    assert devices_from_dict(json.loads(json.dumps(asdict(found)))) == found


def test_an_address_leads_to_its_interface(machine: Path) -> None:
    found = seen(machine)
    assert (found.nic_of("10.1.1.7"), found.nic_of("127.0.1.1"), found.nic_of("10.9.9.9")) == ("eth0", "lo", None)


def test_this_machine_has_a_loopback() -> None:
    assert interface_addresses()["lo"][0] == "127.0.0.1"
    assert "lo" in {nic.name for nic in look_here(os.environ).nics}
