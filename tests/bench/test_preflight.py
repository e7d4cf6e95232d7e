"""Preflight: each way in which a launch can be wrong is refused, and a right one is not."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from crosstraffic.bench.preflight import (
    RankReport,
    allowed_environment,
    available_bytes,
    check,
    environment,
    places,
    versions,
)


def good(num_ranks: int = 4, ranks_per_host: int = 2) -> list[RankReport]:
    return [
        RankReport(
            rank=rank,
            world_size=num_ranks,
            host=f"node{rank // ranks_per_host}",
            pid=100 + rank % ranks_per_host,
            cpus=(0, 1),
            versions={"python": "3.11.7", "mpi.library": "MPICH 5", "kernel": f"6.{rank // ranks_per_host}"},
            environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": f"eth{rank // ranks_per_host}"},
            device=f"GPU-{rank % ranks_per_host}",
        )
        for rank in range(num_ranks)
    ]


def test_a_right_launch_is_not_refused() -> None:
    assert check(good(), 4) == []


def but(reports: Sequence[RankReport], rank: int, /, **changes: object) -> list[RankReport]:
    return [replace(item, **changes) if item.rank == rank else item for item in reports]  # type: ignore[arg-type]


WRONG = {
    "too few": (good(3), r"4 ranks are asked for, 3 reported.*make --ranks"),
    "one-rank jobs": (good(1), r"4 ranks are asked for, 1 reported, with world size 1"),
    "one rank sees another world": (but(good(), 2, world_size=1), r"world size 1 and 4"),
    "a rank twice": (but(good(), 3, rank=2), r"ranks 2 are there more than once: give"),
    "all are rank 0": ([replace(item, rank=0) for item in good()], r"all 4 ranks think that they are rank 0.*launcher"),
    "two ranks in one process": (but(good(), 1, pid=100), r"ranks 0, 1 are one process \(host node0, pid 100\)"),
    "two ranks on one GPU": (but(good(), 3, device="GPU-0"), r"ranks 2, 3 share GPU GPU-0 on node1.*CUDA_VISIBLE"),
    "mixed library": (
        but(good(), 1, versions={"python": "3.11.7", "mpi.library": "MPICH 4", "kernel": "6.0"}),
        r"versions of mpi.library differ: MPICH 5 on rank 0, 2, 3, MPICH 4 on rank 1: use one environment",
    ),
    "a version missing": (but(good(), 0, versions={"python": "3.11.7"}), r"mpi.library differ: \(not set\) on rank 0"),
    "a setting differs": (
        but(good(), 2, environment={"UCX_TLS": "shm", "UCX_NET_DEVICES": "eth9"}),
        r"UCX_TLS differs between ranks: tcp on rank 0, 1, 3, shm on rank 2: set it for all",
    ),
}


@pytest.mark.parametrize(("reports", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_launch_is_refused_with_what_to_do(reports: Sequence[RankReport], message: str) -> None:
    found = check(reports, 4)
    assert any(re.search(message, line) for line in found), found
    assert all(": " in line for line in found)


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
    assert environment(good()) == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0 on rank 0, 1, eth1 on rank 2, 3"}
    assert versions(good())["kernel"] == "6.0 on rank 0, 1, 6.1 on rank 2, 3"
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
