"""What ``crosstraffic doctor`` found, as text. Pure: the JSON object in, lines out."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from crosstraffic.bench.rank_report import few, ranges
from crosstraffic.units import format_seconds

MAX_HOSTS = 8  # beyond, hosts with the same devices share rows
MAX_ROWS = 32  # beyond, ranks of a host are folded although their CPUs and devices differ
_ABSENT = "-"

Item = Mapping[str, Any]


def doctor_text(found: Item) -> str:
    """Return the tables for a terminal, with a title each; refusals are not among them."""
    num_hosts = len({rank["host"] for rank in found["ranks"]})
    came = len(found["ranks"])
    ranks = f"{came} of {found['world_size']} ranks" if came != found["world_size"] else _count(came, "rank")
    head = f"{ranks} on {_count(num_hosts, 'node')}, transport {found['transport']}, started by {found['launcher']}"
    parts = [head, _table(("rank", "host", "pid", "CPUs", "device", "NIC"), _rank_rows(found["ranks"]))]
    parts.append(_table(("transport", "libraries", "usable"), map(_transport_row, found["transports"])))
    if found["clocks"]:
        parts.append(_table(("clock of rank", "offset", "error"), _clock_rows(found["clocks"])))
    else:
        parts.append("clocks: not compared, for no transport was opened")
    parts.append(_table(("host", "kind", "name", "state", "rate", "more"), _hardware_rows(found["hosts"])))
    parts.append("\n".join(f"note: {note}" for note in found["notes"]))
    return "\n\n".join(part for part in parts if part)


def _rank_rows(ranks: Sequence[Item]) -> list[tuple[str, ...]]:
    folded = _fold(ranks, lambda rank: (rank["host"], tuple(rank["cpus"]), rank["device"], rank["nic"]))
    if len(folded) > MAX_ROWS:
        folded = _fold(ranks, lambda rank: (rank["host"], len(rank["cpus"]), rank["device"] is None, rank["nic"]))
    return [_rank_row(items) for items in folded]


def _rank_row(items: Sequence[Item]) -> tuple[str, ...]:
    first = items[0]
    sets = {tuple(rank["cpus"]) for rank in items}
    cpus = ranges(cpu for rank in items for cpu in rank["cpus"])
    if len(sets) > 1:
        cpus = f"{len(first['cpus'])} each of {cpus}"
    devices = list(dict.fromkeys(rank["device"] for rank in items))
    device = devices[0] or _ABSENT if len(devices) == 1 else f"{len(devices)} GPUs"
    nic = first["nic"] or "not known"
    return (
        ranges(rank["rank"] for rank in items),
        first["host"],
        ranges(rank["pid"] for rank in items),
        cpus,
        device,
        f"{nic} ({first['nic_how']})" if first["nic_how"] else nic,
    )


def _transport_row(item: Item) -> tuple[str, ...]:
    return item["name"], ", ".join(item["libraries"]) or _ABSENT, "yes" if item["why_not"] is None else item["why_not"]


def _clock_rows(clocks: Sequence[Item]) -> list[tuple[str, ...]]:
    """Return a row a rank; of many, the ones that matter."""
    rows: list[tuple[str, ...]] = [
        (f"{clock['rank']}", _offset(clock["offset_s"]), format_seconds(clock["error_s"])) for clock in clocks
    ]
    if len(rows) <= MAX_ROWS:
        return rows
    worst = max(clocks, key=lambda clock: clock["error_s"])
    widest = max(clocks, key=lambda clock: abs(clock["offset_s"]))
    return [
        (f"{worst['rank']}, largest error", _offset(worst["offset_s"]), format_seconds(worst["error_s"])),
        (f"{widest['rank']}, largest offset", _offset(widest["offset_s"]), format_seconds(widest["error_s"])),
    ]


def _offset(offset_s: float) -> str:
    return f"{'-' if offset_s < 0 else ''}{format_seconds(abs(offset_s))}"


def _hardware_rows(hosts: Sequence[Item]) -> list[tuple[str, ...]]:
    """Return a row a device; of many hosts, those with the same devices share rows, and then show no addresses."""
    rows: list[tuple[str, ...]] = []
    for alike in _fold(hosts, _hardware) if len(hosts) > MAX_HOSTS else [[host] for host in hosts]:
        host, name = alike[0], few([host["host"] for host in alike])
        own = [
            *(_nic_row(nic, with_addresses=len(alike) == 1) for nic in host["nics"] if nic["state"] != "down"),
            *map(_port_row, host["rdma_ports"]),
            *map(_gpu_row, host["gpus"] if len(alike) == 1 else []),
        ]
        down = [nic["name"] for nic in host["nics"] if nic["state"] == "down"]
        if down:
            own.append(("NIC", few(down), "down", _ABSENT, ""))
        if len(alike) > 1 and host["gpus"]:
            own.append(("GPU", host["gpus"][0]["model"] or "?", f"{len(host['gpus'])} each", _ABSENT, ""))
        rows += [(name if index == 0 else "", *row) for index, row in enumerate(own)]
    return rows


def _hardware(host: Item) -> Hashable:
    nics = tuple((nic["name"], nic["state"], nic["speed_bits_per_s"], nic["mtu"]) for nic in host["nics"])
    ports = tuple(tuple(port.values()) for port in host["rdma_ports"])
    return nics, ports, tuple((gpu["model"], gpu["numa_node"]) for gpu in host["gpus"])


def _nic_row(nic: Item, *, with_addresses: bool) -> tuple[str, ...]:
    more = [f"MTU {nic['mtu']}" if nic["mtu"] else "", _numa(nic), *(nic["addresses"] if with_addresses else ())]
    return "NIC", nic["name"], nic["state"], _rate(nic["speed_bits_per_s"]), ", ".join(filter(None, more))


def _port_row(port: Item) -> tuple[str, ...]:
    more = ", ".join(filter(None, [port["link_layer"], _numa(port)]))
    return "RDMA", f"{port['device']}:{port['port']}", port["state"], _rate(port["rate_bits_per_s"]), more


def _gpu_row(gpu: Item) -> tuple[str, ...]:
    name = gpu["uuid"] or gpu["pci_address"] or "?"
    return "GPU", name, _ABSENT, _ABSENT, ", ".join(filter(None, [gpu["model"], gpu["pci_address"], _numa(gpu)]))


def _numa(item: Item) -> str:
    return "" if item["numa_node"] is None else f"NUMA node {item['numa_node']}"


def _rate(bits_per_s: float | None) -> str:
    """Write the rate of a link in its vendor's unit.

    >>> _rate(400e9), _rate(None)
    ('400 Gbit/s', '-')
    """
    if bits_per_s is None:
        return _ABSENT
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g} Mbit/s"


def _fold(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Put items that are alike together, in order of the first of each kind."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(head), *map(tuple, rows)]
    if len(lines) == 1:
        return ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
