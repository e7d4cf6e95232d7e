"""Before anything is measured: what each rank is and where it runs, and every reason not to trust this launch."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from crosstraffic.bench.libraries import GPU_TRANSPORTS, LIBRARIES
from crosstraffic.bench.nic import unusable_nics
from crosstraffic.bench.rank_report import (
    RankReport,
    few,
    host_names,
    look_at_rank,
    named,
    report_from_json,
    report_to_json,
)
from crosstraffic.bench.transport import Transport
from crosstraffic.results.record import Place

MUST_AGREE_PREFIXES = ("UCX_", "GLOO_", "NCCL_", "FI_")
_PER_NODE_WORDS = ("IFNAME", "HCA", "NET_DEVICES", "IFACE", "DOMAIN", "_FILE", "HOSTID")
_MAY_DIFFER = frozenset({"kernel"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The ranks of both sides of a KV handoff, and whether they may run on one node although there are several."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    may_share_nodes: bool = False


def report(transport: Transport) -> RankReport:
    """Look at this process, and ask its transport."""
    found = look_at_rank(transport.rank, transport.world_size, transport.name)
    details = {f"{transport.name}.{name}": value for name, value in transport.describe().items()}
    return replace(found, versions={**found.versions, **details})


def gather(transport: Transport) -> list[RankReport] | None:
    """Return every rank's report on rank 0; None elsewhere."""
    gathered = transport.gather_bytes(report_to_json(report(transport)))
    return None if gathered is None else [report_from_json(text) for text in gathered]


def check(reports: Sequence[RankReport], expected_world_size: int, pools: Pools | None = None) -> list[str]:
    """Return every reason not to measure with these ranks, each with what to do about it; empty when all is well."""
    found = _check_world(reports, expected_world_size) + check_ranks(reports)
    shared = shared_pool_nodes(reports, pools)
    if pools is not None and not pools.may_share_nodes and shared and _num_hosts(reports) > 1:
        found.append(
            f"{shared}: that part of the KV handoff crosses no network. Give each pool nodes of its own (order of "
            f"prefill_ranks and decode_ranks, srun --ntasks-per-node, --distribution), or set "
            f"pools_may_share_nodes = true in [handoff]"
        )
    return found


def check_ranks(reports: Sequence[RankReport]) -> list[str]:
    """Return every reason that lies in these ranks themselves, whether or not they are all of them."""
    found = _check_processes(reports)
    found += _check_libraries(reports)
    found += _check_devices(reports)
    found += _check_nics(reports)
    found += _check_versions(reports)
    found += _check_settings(reports)
    return found


def shared_pool_nodes(reports: Sequence[RankReport], pools: Pools | None) -> str | None:
    """Say which ranks of both pools run on one node; None where no node has both."""
    if pools is None:
        return None
    hosts = {item.host for item in reports if item.rank in pools.prefill}
    hosts &= {item.host for item in reports if item.rank in pools.decode}
    both = [item for item in reports if item.host in hosts]
    if not both:
        return None
    prefill = [item for item in both if item.rank in pools.prefill]
    decode = [item for item in both if item.rank in pools.decode]
    return f"prefill {named(prefill)} and decode {named(decode)} share {_nodes(hosts)}"


def _check_world(reports: Sequence[RankReport], expected: int) -> list[str]:
    sizes = sorted({item.world_size for item in reports})
    ranks = [item.rank for item in reports]
    if len(reports) > 1 and set(ranks) == {0}:
        return [
            (
                f"all {len(reports)} ranks think that they are rank 0 ({host_names(reports)}): they are independent "
                f"jobs. Start them with the launcher of the MPI library in use (srun --mpi=list shows what Slurm has)"
            )
        ]
    found = []
    if sizes != [expected] or len(reports) != expected:
        found.append(
            f"{expected} ranks are asked for, {len(reports)} reported ({named(reports)}), with world size "
            f"{' and '.join(map(str, sizes))}: make --ranks (or the layout) and the launcher's number of tasks agree "
            f"(srun --ntasks, or --nodes and --ntasks-per-node; mpiexec -n)"
        )
    twice = [item for item in reports if ranks.count(item.rank) > 1]
    if twice:
        found.append(f"{named(twice)} are there more than once: give every task its own rank number")
    return found


def _check_processes(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"{named(sharing)} are one process (host {host}, pid {pid}): start one process for each rank"
        for (host, pid), sharing in _shared(reports, lambda item: (item.host, item.pid))
    ]


def _check_libraries(reports: Sequence[RankReport]) -> list[str]:
    without = [item for item in reports if item.missing is not None]
    reasons = dict.fromkeys(item.missing for item in without)
    return [f"{named([item for item in without if item.missing == reason])}: {reason}" for reason in reasons]


def _check_devices(reports: Sequence[RankReport]) -> list[str]:
    change = "srun --ntasks-per-node, --gpus-per-task=1, or --gpus-per-node as many as ranks"
    with_device = [item for item in reports if item.device is not None]
    found = [
        f"{named(sharing)} share GPU {device}: start at most one rank for each GPU of a node ({change}) and check "
        f"CUDA_VISIBLE_DEVICES"
        for (_, device), sharing in _shared(with_device, lambda item: (item.host, item.device))
    ]
    needing = [item for item in reports if item.device is None and item.transport in GPU_TRANSPORTS]
    blind = [item for item in needing if not item.seen.gpus]
    lost = [item for item in needing if item.seen.gpus]
    if blind:
        found.append(
            f"{named(blind)} see no GPU, and transport {blind[0].transport} needs one for each rank: ask for them "
            f"({change}), check CUDA_VISIBLE_DEVICES, or choose --transport mpi or gloo"
        )
    if lost:
        found.append(
            f"{named(lost)} see several GPUs and do not know which is theirs, for the launcher gives no local rank: "
            f"let each see one (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES)"
        )
    return found


def _check_nics(reports: Sequence[RankReport]) -> list[str]:
    wrong: dict[tuple[str, str], list[RankReport]] = defaultdict(list)
    for item in reports:
        for setting, why in unusable_nics(item.transport, item.environment, item.seen).items():
            wrong[setting, why].append(item)
    return [
        f"{setting}: {why} on {named(where)}: name an interface that every node has and that is up, or unset it"
        for (setting, why), where in wrong.items()
    ]


def _check_versions(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"versions of {name} differ: {_differences(values)}: use one environment or container on all nodes"
        for name, values in _different(reports, lambda item: item.versions)
        if name not in _MAY_DIFFER and not _is_beside(name, reports)
    ]


def _is_beside(name: str, reports: Sequence[RankReport]) -> bool:
    """Tell whether a library is there, but not for the transport in use."""
    needed = {library for item in reports for library in LIBRARIES.get(item.transport, ())}
    return name not in needed and any(name in libraries for libraries in LIBRARIES.values())


def _check_settings(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"{name} differs between ranks: {_differences(values)}: set it for all of them (srun --export, mpiexec -genv)"
        for name, values in _different(reports, lambda item: item.environment)
        if name.startswith(MUST_AGREE_PREFIXES) and not any(word in name for word in _PER_NODE_WORDS)
    ]


def notes(reports: Sequence[RankReport], pools: Pools | None = None) -> list[str]:
    """Return what is no reason to refuse, but matters to who reads the numbers."""
    found = []
    by_host: dict[str, list[RankReport]] = defaultdict(list)
    for item in reports:
        by_host[item.host].append(item)
    counts = {host: len(items) for host, items in by_host.items()}
    if len(set(counts.values())) > 1:
        told = _per_value(counts)
        found.append(f"uneven ranks per node: {told}")
    cpus = {host: items[0].num_cpus for host, items in by_host.items()}
    if len(set(cpus.values())) > 1:
        found.append(f"nodes have different numbers of CPUs: {_per_value(cpus)}")
    for name, values in _different(reports, lambda item: item.versions):
        if name in _MAY_DIFFER or _is_beside(name, reports):
            found.append(f"versions of {name} differ: {_differences(values)}")
    bound = [item for item in reports if len(item.cpus) == 1]
    found += [
        f"{named(sharing)} are bound to one CPU, {cpu}: they take turns"
        for (_, cpu), sharing in _shared(bound, lambda item: (item.host, item.cpus[0]))
    ]
    shared = shared_pool_nodes(reports, pools)
    if shared:
        crossing = "both pools on one node" if _num_hosts(reports) == 1 else shared
        found.append(f"{crossing}: the KV handoff crosses no network{'' if _num_hosts(reports) == 1 else ' there'}")
    return found


def _nodes(hosts: Iterable[str]) -> str:
    names = sorted(hosts)
    return f"node{'' if len(names) == 1 else 's'} {few(names)}"


def _num_hosts(reports: Iterable[RankReport]) -> int:
    return len({item.host for item in reports})


def _per_value(values: Mapping[str, int | None]) -> str:
    hosts: dict[int | None, list[str]] = defaultdict(list)
    for host, value in values.items():
        hosts[value].append(host)
    return ", ".join(f"{value} on {few(names)}" for value, names in hosts.items())


def _shared(
    reports: Iterable[RankReport], key: Callable[[RankReport], tuple[Hashable, Hashable]]
) -> list[tuple[tuple[Hashable, Hashable], list[RankReport]]]:
    sharing: dict[tuple[Hashable, Hashable], list[RankReport]] = defaultdict(list)
    for item in reports:
        sharing[key(item)].append(item)
    return [(value, items) for value, items in sharing.items() if len(items) > 1]


def _different(
    reports: Sequence[RankReport], mapping: Callable[[RankReport], Mapping[str, str]]
) -> list[tuple[str, dict[str, list[RankReport]]]]:
    found = []
    for name in sorted({name for item in reports for name in mapping(item)}):
        values: dict[str, list[RankReport]] = defaultdict(list)
        for item in reports:
            values[mapping(item).get(name, "(not set)")].append(item)
        if len(values) > 1:
            found.append((name, dict(values)))
    return found


def _differences(values: Mapping[str, Sequence[RankReport]]) -> str:
    return ", ".join(f"{value} on {named(items)}" for value, items in values.items())


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
            nic_how=item.nic_how,
            gpus=tuple(gpu.name for gpu in item.seen.gpus),
            machine=item.machine,
        )
        for item in ordered
    ]


def environment(reports: Sequence[RankReport]) -> dict[str, str]:
    """Return the allowed variables of all ranks; one that differs (a NIC's name) is given rank by rank."""
    return _merged(reports, lambda item: item.environment)


def versions(reports: Sequence[RankReport]) -> dict[str, str]:
    """Return the versions of all ranks; after ``check`` only those differ that no transport in use needs."""
    return _merged(reports, lambda item: item.versions)


def _merged(reports: Sequence[RankReport], mapping: Callable[[RankReport], Mapping[str, str]]) -> dict[str, str]:
    differing = {name: _differences(values) for name, values in _different(reports, mapping)}
    return {name: differing.get(name, value) for item in reports for name, value in mapping(item).items()}
