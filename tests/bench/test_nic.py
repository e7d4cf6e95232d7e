"""Which NIC a transport takes, and how that is known."""

import pytest

from crosstraffic.bench.devices import Devices, Nic, RdmaPort
from crosstraffic.bench.nic import choose_nic

PLAIN = Devices(
    nics=(
        Nic(name="eth0", state="up", addresses=("10.0.0.7",)),
        Nic(name="eth1", state="up", addresses=("10.1.0.7",)),
        Nic(name="lo", state="unknown", addresses=("127.0.0.1",)),
    ),
    default_nic="eth0",
    host_address="10.1.0.7",
)


def with_ports(*states: str) -> Devices:
    ports = tuple(RdmaPort(device=f"mlx5_{index}", port=1, state=state) for index, state in enumerate(states))
    return Devices(nics=PLAIN.nics, rdma_ports=ports, default_nic="eth0", host_address="10.1.0.7")


LOOPBACK = Devices(nics=PLAIN.nics, default_nic="eth0", host_address="127.0.1.1")
NAME = "has 10.1.0.7, the address of this host's name"


@pytest.mark.parametrize(
    ("transport", "environment", "devices", "name", "how"),
    [
        pytest.param("gloo", {"GLOO_SOCKET_IFNAME": "eth0"}, PLAIN, "eth0", "named by GLOO_SOCKET_IFNAME", id="gloo"),
        pytest.param("gloo", {"UCX_NET_DEVICES": "eth0"}, PLAIN, "eth1", NAME, id="a variable of another transport"),
        pytest.param("mpi", {"UCX_NET_DEVICES": "mlx5_0:1"}, with_ports("ACTIVE", "ACTIVE"), "mlx5_0",
                     "named by UCX_NET_DEVICES", id="one port of UCX"),
        pytest.param("mpi", {"UCX_NET_DEVICES": "all"}, PLAIN, None, None, id="all of them"),
        pytest.param("nccl", {"NCCL_IB_HCA": "mlx5"}, with_ports("ACTIVE", "ACTIVE"), "mlx5_0,mlx5_1",
                     "named by NCCL_IB_HCA", id="a beginning of names"),
        pytest.param("nccl", {"NCCL_IB_HCA": "=mlx5_1:1", "NCCL_SOCKET_IFNAME": "eth0"}, with_ports("ACTIVE", "ACTIVE"),
                     "mlx5_1", "named by NCCL_IB_HCA", id="RDMA before sockets"),
        pytest.param("nccl", {"NCCL_SOCKET_IFNAME": "^docker0,lo"}, PLAIN, None, None, id="all but some"),
        pytest.param("mpi", {}, with_ports("ACTIVE", "DOWN"), "mlx5_0", "the only RDMA port that is up", id="one"),
        pytest.param("mpi", {}, with_ports("ACTIVE", "ACTIVE"), None, None, id="nobody knows which port"),
        pytest.param("mpi", {}, with_ports("DOWN"), "eth1", NAME, id="no port up"),
        pytest.param("gloo", {}, with_ports("ACTIVE"), "eth1", NAME, id="Gloo uses no RDMA"),
        pytest.param("mpi", {}, LOOPBACK, "eth0", "has the default route", id="a name that is local only"),
        pytest.param("gloo", {}, LOOPBACK, "lo", "has 127.0.1.1, the address of this host's name", id="Gloo takes it"),
        pytest.param("mpi", {}, Devices(), None, None, id="nothing there"),
    ],
)  # fmt: skip
def test_the_nic_of_a_transport(
    transport: str, environment: dict[str, str], devices: Devices, name: str | None, how: str | None
) -> None:
    chosen = choose_nic(transport, environment, devices)
    assert (None if chosen is None else chosen.name, None if chosen is None else chosen.how) == (name, how)
