"""Preflight: each way in which a launch can be wrong is refused, and a right one is not."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crosstraffic import __version__
from crosstraffic.bench.devices import Devices, Gpu, Nic, RdmaPort, available_bytes
from crosstraffic.bench.preflight import Pools, check, environment, notes, places, versions
from crosstraffic.bench.rank_report import (
    RankReport,
    allowed_environment,
    look_at_rank,
    report_from_json,
    report_to_json,
)
from crosstraffic.cli import app
from crosstraffic.results.record import Place
from crosstraffic.results.store import read_run_info

SEEN = Devices(
    nics=(Nic(name="eth0", state="up"), Nic(name="eth1", state="up"), Nic(name="eth2", state="down")),
    rdma_ports=(RdmaPort(device="mlx5_0", port=1, state="ACTIVE"), RdmaPort(device="mlx5_1", port=1, state="DOWN")),
    gpus=(Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1")),
)


def good(num_ranks: int = 4, ranks_per_host: int = 2) -> list[RankReport]:
    return [
        RankReport(
            rank=rank,
            world_size=num_ranks,
            host=f"node{rank // ranks_per_host}",
            pid=100 + rank % ranks_per_host,
            cpus=(0, 1),
            versions={
                "crosstraffic": "1.0",
                "python": "3.11.7",
                "mpi.library": "MPICH 5",
                "mpi4py": "4.1",
                "torch": "2.13",
                "kernel": f"6.{rank // ranks_per_host}",
            },
            environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": f"eth{rank // ranks_per_host}"},
            device=f"GPU-{rank % ranks_per_host}",
            transport="mpi",
            num_cpus=64,
            seen=SEEN,
        )
        for rank in range(num_ranks)
    ]


def test_a_right_launch_is_not_refused() -> None:
    assert check(good(), 4) == []


def but(reports: Sequence[RankReport], rank: int, /, **changes: object) -> list[RankReport]:
    return [replace(item, **changes) if item.rank == rank else item for item in reports]  # type: ignore[arg-type]


def on(reports: Sequence[RankReport], transport: str, **environment: str) -> list[RankReport]:
    """Put ranks on another transport, with these variables set on all of them."""
    return [
        replace(item, transport=transport, environment={**item.environment, **environment}, device=None)
        for item in reports
    ]


def without_gpus(reports: Sequence[RankReport], rank: int) -> list[RankReport]:
    return but(reports, rank, device=None, seen=replace(SEEN, gpus=()))


VERSIONS = good()[0].versions
WRONG = {
    "too few": (good(3), r"4 ranks are asked for, 3 reported \(ranks 0-2 \(node0, node1\)\).*make --ranks.*--ntasks"),
    "one-rank jobs": (good(1), r"4 ranks are asked for, 1 reported.*with world size 1"),
    "one rank sees another world": (but(good(), 2, world_size=1), r"world size 1 and 4"),
    "a rank twice": (but(good(), 3, rank=2), r"ranks 2 \(node1\) are there more than once: give"),
    "all are rank 0": (
        [replace(item, rank=0) for item in good()],
        r"all 4 ranks think that they are rank 0 \(node0, node1\).*launcher",
    ),
    "two ranks in one process": (
        but(good(), 1, pid=100),
        r"ranks 0, 1 \(node0\) are one process \(host node0, pid 100\)",
    ),
    "two ranks on one GPU": (
        but(good(), 3, device="GPU-0"),
        r"ranks 2, 3 \(node1\) share GPU GPU-0.*--ntasks-per-node, --gpus-per-task=1.*CUDA_VISIBLE",
    ),
    "no GPU for NCCL": (
        on(without_gpus(good(), 1), "nccl")[1:2],
        r"rank 1 \(node0\) see no GPU, and transport nccl needs one.*--gpus-per-task=1.*--gpus-per-node",
    ),
    "which GPU is not known": (on(good(), "nccl"), r"ranks 0-3 \(node0, node1\) see several GPUs.*--gpus-per-task=1"),
    "mixed library": (
        but(good(), 1, versions={**VERSIONS, "mpi.library": "MPICH 4"}),
        r"versions of mpi.library differ: MPICH 5 on ranks 0, 2, 3 \(node0, node1\), MPICH 4 on rank 1 \(node0\): use",
    ),
    "mixed crosstraffic": (
        but(good(), 3, versions={**VERSIONS, "crosstraffic": "0.1"}),
        r"versions of crosstraffic differ: 1.0 on ranks 0-2 .*, 0.1 on rank 3 \(node1\): use one environment",
    ),
    "mixed mpi4py": (
        but(good(), 2, versions={**VERSIONS, "mpi4py": "3.1"}),
        r"versions of mpi4py differ: 4.1 on ranks 0, 1, 3 .*, 3.1 on rank 2 \(node1\)",
    ),
    "mixed torch": (on(but(good(), 2, versions={**VERSIONS, "torch": "2.4"}), "gloo"), r"versions of torch differ"),
    "a version missing": (
        but(good(), 0, versions={"python": "3.11.7"}),
        r"mpi.library differ: \(not set\) on rank 0 \(node0\)",
    ),
    "a setting differs": (
        but(good(), 2, environment={"UCX_TLS": "shm", "UCX_NET_DEVICES": "eth1"}),
        r"UCX_TLS differs between ranks: tcp on ranks 0, 1, 3 \(node0, node1\), shm on rank 2 \(node1\): set it",
    ),
    "a library is missing on a node": (
        but(good(), 3, missing="transport gloo needs torch: pip install it"),
        r"rank 3 \(node1\): transport gloo needs torch",
    ),
    "no such interface": (
        on(good(), "gloo", GLOO_SOCKET_IFNAME="nope"),
        r"GLOO_SOCKET_IFNAME=nope: nope is not there \(there are eth0.*\) on ranks 0-3 \(node0, node1\): name",
    ),
    "an interface that is down on one node": (
        but(on(good(), "gloo", GLOO_SOCKET_IFNAME="eth1"), 3, seen=Devices(nics=(Nic(name="eth1", state="down"),))),
        r"GLOO_SOCKET_IFNAME=eth1: eth1 is down on rank 3 \(node1\)",
    ),
    "an RDMA port that is down": (
        on(good(), "mpi", UCX_NET_DEVICES="mlx5_0:1,mlx5_1:1"),
        r"UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1: mlx5_1 is down on ranks 0-3",
    ),
    "no HCA of that name": (on(good(), "nccl", NCCL_IB_HCA="ibp"), r"NCCL_IB_HCA=ibp: ibp is not there"),
}


@pytest.mark.parametrize(("reports", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_launch_is_refused_with_what_to_do(reports: Sequence[RankReport], message: str) -> None:
    found = check(reports, 4)
    assert any(re.search(message, line) for line in found), found
    assert all(": " in line for line in found)
    assert all(re.search(r"\((.* )?node[01]", line) for line in found), "every refusal names hosts"


@pytest.mark.parametrize(
    ("transport", "environment"),
    [
        ("mpi", {"UCX_NET_DEVICES": "all"}),
        ("mpi", {"UCX_NET_DEVICES": "mlx5_0:1,eth0"}),
        ("mpi", {"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8"}),
        ("gloo", {"UCX_NET_DEVICES": "nope", "GLOO_SOCKET_IFNAME": "eth0,eth1"}),
        ("nccl", {"NCCL_SOCKET_IFNAME": "eth,ib"}),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^docker0"}),
        ("nccl", {"NCCL_IB_HCA": "=mlx5_0:1"}),
    ],
)
def test_a_named_interface_that_may_be_right_is_not_refused(transport: str, environment: dict[str, str]) -> None:
    assert not [line for line in check(on(good(), transport, **environment), 4) if "is not there" in line]


POOLS = Pools(prefill=(0, 2), decode=(1, 3))


def test_pools_that_share_nodes_are_refused_unless_the_scenario_allows_it() -> None:
    (found,) = check(good(), 4, POOLS)
    assert "prefill ranks 0, 2 (node0, node1) and decode ranks 1, 3 (node0, node1) share nodes node0, node1" in found
    assert "pools_may_share_nodes = true in [handoff]" in found
    allowed = replace(POOLS, may_share_nodes=True)
    assert check(good(), 4, allowed) == []
    assert any("crosses no network there" in note for note in notes(good(), allowed))


def test_one_rank_in_the_wrong_place_is_named() -> None:
    (found,) = check(good(), 4, Pools(prefill=(0, 1, 2), decode=(3,)))
    assert "prefill rank 2 (node1) and decode rank 3 (node1) share node node1" in found


def test_pools_on_nodes_of_their_own_are_fine() -> None:
    apart = Pools(prefill=(0, 1), decode=(2, 3))
    assert check(good(), 4, apart) == []
    assert not any("handoff" in note for note in notes(good(), apart))


def test_pools_on_the_only_node_are_a_note() -> None:
    alone = good(4, 4)
    assert check(alone, 4, POOLS) == []
    assert "both pools on one node: the KV handoff crosses no network" in notes(alone, POOLS)


NOTED = {
    "uneven": (good(3), "uneven ranks per node: 2 on node0, 1 on node1"),
    "CPU counts": (
        but(good(), 3, num_cpus=32, host="node2"),
        "different numbers of CPUs: 64 on node0, node1, 32 on node2",
    ),
    "kernels": (good(), r"versions of kernel differ: 6.0 on ranks 0, 1 \(node0\), 6.1 on ranks 2, 3 \(node1\)"),
    "a library beside": (
        but(good(), 1, versions={**VERSIONS, "torch": "2.4"}),
        r"versions of torch differ: 2.13 .*, 2.4 on rank 1 \(node0\)",
    ),
    "one CPU for two": (
        [replace(item, cpus=(3,)) for item in good(2, 2)],
        r"ranks 0, 1 \(node0\) are bound to one CPU, 3: they take turns",
    ),
}


@pytest.mark.parametrize(("reports", "message"), NOTED.values(), ids=NOTED.keys())
def test_what_matters_but_is_no_reason_to_refuse_is_noted(reports: Sequence[RankReport], message: str) -> None:
    assert any(re.search(message, line) for line in notes(reports)), notes(reports)
    assert check(reports, len(reports)) == [] or len(reports) != reports[0].world_size


def test_like_nodes_and_ranks_with_processors_of_their_own_need_no_note() -> None:
    same = [replace(item, versions=VERSIONS, cpus=(item.rank % 2,)) for item in good()]
    assert notes(same) == []


def test_a_report_survives_the_way_through_json() -> None:
    found = good()[3]
    assert report_from_json(report_to_json(found)) == found


def test_a_rank_reports_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = look_at_rank(0, 1, "gloo")
    assert found.versions["crosstraffic"] == __version__
    assert (found.nic, found.nic_how) == ("lo", "named by GLOO_SOCKET_IFNAME")
    assert any(nic.name == "lo" and "127.0.0.1" in nic.addresses for nic in found.seen.nics)
    assert found.device is None


def test_same_gpu_name_on_two_hosts_and_same_pid_on_two_hosts_are_fine() -> None:
    assert check(good(8, 4), 8) == []


def test_places_number_nodes_in_order_of_first_rank() -> None:
    found = places([good()[index] for index in (3, 0, 2, 1)])
    assert [(place.rank, place.host, place.node) for place in found] == [
        (0, "node0", 0),
        (1, "node0", 0),
        (2, "node1", 1),
        (3, "node1", 1),
    ]


def test_what_differs_is_kept_rank_by_rank() -> None:
    nics = "eth0 on ranks 0, 1 (node0), eth1 on ranks 2, 3 (node1)"
    assert environment(good()) == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": nics}
    assert versions(good())["kernel"] == "6.0 on ranks 0, 1 (node0), 6.1 on ranks 2, 3 (node1)"
    assert versions(good())["python"] == "3.11.7"


def test_environment_goes_by_an_allow_list() -> None:
    full = {
        "HOME": "/home/me",
        "AWS_SECRET_ACCESS_KEY": "x",
        "UCX_TLS": "tcp",
        "NCCL_SECRET": "x",
        "GLOO_KEY": "x",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "x",
        "OMP_NUM_THREADS": "1",
    }
    assert allowed_environment(full) == {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "UCX_TLS": "tcp"}


def test_memory_is_some() -> None:
    found = available_bytes()
    assert found is not None
    assert found > 2**20


@pytest.mark.mpi
def test_a_run_keeps_the_notes_and_how_the_nic_is_known(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    folder = tmp_path / "run"
    arguments = ["run", "default-2", "--transport", "mpi", "--budget", "1", "--no-report", "--output", str(folder)]
    CliRunner().invoke(app, arguments)
    info = read_run_info(folder)
    assert "both pools on one node: the KV handoff crosses no network" in info.notes
    assert {"crosstraffic", "mpi4py", "mpi.library"} <= set(info.versions)
    assert all((place.nic is None) == (place.nic_how is None) for place in info.placement)


def test_a_place_of_an_older_run_folder_is_read() -> None:
    older = {"rank": 0, "host": "n0", "pid": 1, "node": 0, "cpus": [0], "device": None, "nic": "eth0"}
    assert Place.model_validate(older).nic_how is None
