"""Which NIC a transport takes for traffic to other nodes, how that is known, and names of NICs that cannot be right.

Pure: variables and what a rank sees go in. Source of the variables' grammar: NCCL user guide, "Environment variables"
(NCCL_SOCKET_IFNAME, NCCL_IB_HCA); ``ucx_info -cf`` (UCX_NET_DEVICES); fi_tcp(7); Open MPI FAQ, "Tuning TCP";
torch, ProcessGroupGloo.cpp (without a variable it takes the address of the host's name).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.bench.devices import Devices

NIC_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "gloo": ("GLOO_SOCKET_IFNAME",),
    "mpi": ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include"),
    "nccl": ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"),
    "nixl": ("UCX_NET_DEVICES",),
}
_PREFIXES = frozenset({"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"})  # their words are beginnings of names
_USES_RDMA = frozenset({"mpi", "nccl", "nixl", "mooncake"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenNic:
    """The NIC (or several, with commas), and how that is known."""

    name: str
    how: str


def choose_nic(transport_name: str, environment: Mapping[str, str], devices: Devices) -> ChosenNic | None:
    """Return the NIC that a transport takes; None where nobody can know.

    It is what a variable names, else the only RDMA port that is up (for transports that use RDMA), else the interface
    with the address of this host's name, else the one with the default route.
    """
    variable = next((name for name in NIC_VARIABLES.get(transport_name, ()) if name in environment), None)
    if variable is None:
        return _unnamed(transport_name, devices)
    named = _matching(variable, environment[variable], devices)
    if named is None:  # the transport understands this form, we do not
        return None
    return ChosenNic(name=",".join(named[0]) or environment[variable], how=f"named by {variable}")


def _unnamed(transport_name: str, devices: Devices) -> ChosenNic | None:
    active = [port for port in devices.rdma_ports if port.is_up]
    if active and transport_name in _USES_RDMA:
        return ChosenNic(name=active[0].device, how="the only RDMA port that is up") if len(active) == 1 else None
    if devices.host_address is not None:
        name = devices.nic_of(devices.host_address)
        if name is not None and (name != "lo" or transport_name == "gloo"):
            return ChosenNic(name=name, how=f"has {devices.host_address}, the address of this host's name")
    if devices.default_nic is not None and transport_name != "gloo":
        return ChosenNic(name=devices.default_nic, how="has the default route")
    return None


def unusable_nics(transport_name: str, environment: Mapping[str, str], devices: Devices) -> dict[str, str]:
    """Return, for each variable of a transport that names a NIC which is not there or is down, what is wrong.

    >>> unusable_nics("gloo", {"GLOO_SOCKET_IFNAME": "eth9"}, Devices())
    {'GLOO_SOCKET_IFNAME=eth9': 'eth9 is not there (there are none)'}
    """
    found = {}
    states = {nic.name: nic.is_up for nic in devices.nics}
    for port in devices.rdma_ports:
        states[port.device] = states.get(port.device, False) or port.is_up
    for variable in NIC_VARIABLES.get(transport_name, ()):
        value = environment.get(variable)
        matching = None if value is None else _matching(variable, value, devices)
        if matching is None:
            continue
        names, missing = matching
        wrong = [f"{word} is not there (there are {', '.join(states) or 'none'})" for word in missing]
        wrong += [f"{name} is down" for name in names if not states[name]]
        if wrong:
            found[f"{variable}={value}"] = ", ".join(wrong)
    return found


def _matching(variable: str, value: str, devices: Devices) -> tuple[list[str], list[str]] | None:
    """Return the devices that a value names, and its words that name none; None for a form that is not understood."""
    words = [word.strip() for word in value.lstrip("=").split(",")]
    if not value or value == "all" or any(not re.fullmatch(r"[\w.@-]+(:\d+)?", word) for word in words):
        return None  # ^ leaves devices out, a subnet has a slash, a pattern has brackets
    is_prefix = variable in _PREFIXES and not value.startswith("=")
    known = list(dict.fromkeys([port.device for port in devices.rdma_ports] + [nic.name for nic in devices.nics]))
    if variable == "NCCL_IB_HCA":
        known = list(dict.fromkeys(port.device for port in devices.rdma_ports))
    hits = {
        word: [
            name for name in known if (name.startswith(word.split(":")[0]) if is_prefix else name == word.split(":")[0])
        ]
        for word in words
    }
    names = list(dict.fromkeys(name for found in hits.values() for name in found))
    missing = [word for word, found in hits.items() if not found]
    return names, [] if is_prefix and names else missing
