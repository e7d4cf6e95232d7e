"""``crosstraffic doctor`` through srun on two nodes of a lab: who runs where, on which interface, and refusals."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crosstraffic.slurm.lab import cluster, network
from crosstraffic.slurm.lab.spec import LabSpec

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slurm,
]
PROGRAM = Path(sys.executable).with_name("crosstraffic")


@pytest.fixture(scope="module")
def lab() -> Iterator[cluster.Lab]:
    try:
        yield cluster.up(LabSpec(num_nodes=2, rate_bits_per_s=10**9))
    finally:
        cluster.down()


def srun(*words: str, options: tuple[str, ...] = ("-N2", "--ntasks-per-node=2", "--mpi=none")) -> tuple[int, str, str]:
    done = subprocess.run(
        ["srun", *options, *words],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def doctor(*arguments: str, **how: Any) -> tuple[int, str, str]:
    return srun(str(PROGRAM), "doctor", *arguments, **how)


@pytest.mark.gloo
def test_ranks_of_two_nodes_are_shown_with_their_interface(lab: cluster.Lab) -> None:
    pytest.importorskip("torch")
    code, out, err = doctor("--transport", "gloo")
    assert code == 0, out + err
    rows = [line.split() for line in out.splitlines() if "(named by GLOO_SOCKET_IFNAME)" in line]
    assert [(row[0], row[1], row[2]) for row in rows] == [("0,", "1", "n0"), ("2,", "3", "n1")]
    assert all(network.PORT in row for row in rows)
    assert "4 ranks on 2 nodes, transport gloo, started by srun" in out
    assert all(network.address(node) in out for node in ("n0", "n1"))


@pytest.mark.mpi
def test_mpi_ranks_of_srun_are_examined_too(lab: cluster.Lab) -> None:
    pytest.importorskip("mpi4py")
    code, out, err = doctor("--transport", "mpi", "--json", options=("-N2", "--ntasks-per-node=2", "--mpi=pmi2"))
    assert code == 0, out + err
    found = json.loads(out)
    assert [(rank["rank"], rank["host"], rank["nic"]) for rank in found["ranks"]] == [
        (0, "n0", network.PORT),
        (1, "n0", network.PORT),
        (2, "n1", network.PORT),
        (3, "n1", network.PORT),
    ]
    assert len(found["clocks"]) == 4


@pytest.mark.mpi
def test_ranks_that_would_run_as_independent_jobs_are_refused(lab: cluster.Lab) -> None:
    pytest.importorskip("mpi4py")
    code, out, err = doctor("--transport", "mpi")  # with --mpi=none no rank knows of another
    assert code == 3
    assert "the launcher started 4 ranks, but MPI sees a world of 1" in err
    assert "4 ranks on 2 nodes, transport mpi" in out


@pytest.mark.gloo
def test_an_interface_that_is_not_there_is_refused_on_all_nodes(lab: cluster.Lab) -> None:
    pytest.importorskip("torch")
    code, out, err = srun(
        "env", "GLOO_SOCKET_IFNAME=nope", str(PROGRAM), "doctor", "--transport", "gloo", "--start-limit", "30"
    )
    assert code == 3, out + err
    assert "refused: GLOO_SOCKET_IFNAME=nope: nope is not there (there are" in err
    assert "ranks 0-3 (n0, n1)" in err
    assert "4 ranks on 2 nodes" in out


@pytest.mark.gloo
def test_a_rank_that_does_not_come_is_named(lab: cluster.Lab) -> None:
    pytest.importorskip("torch")
    script = f'[ "$SLURM_PROCID" = 3 ] || exec {PROGRAM} doctor --transport gloo --start-limit 10'
    code, out, err = srun("sh", "-c", script)
    assert code == 3, out + err
    assert "refused: rank 3 did not come to tcp://n0:" in err
    assert "3 of 4 ranks on 2 nodes" in out


@pytest.mark.gloo
def test_a_run_with_both_pools_on_each_node_is_refused(lab: cluster.Lab, tmp_path: Path) -> None:
    """default-4 has prefill ranks 0, 1 and decode ranks 2, 3; dealt out in turn, each node gets one of both."""
    pytest.importorskip("torch")
    options = ("-N2", "--ntasks-per-node=2", "--mpi=none", "--distribution=cyclic")
    run = ("run", "default-4", "--transport", "gloo", "--budget", "3", "--no-report", "--output", str(tmp_path / "run"))
    code, out, err = srun(str(PROGRAM), *run, options=options)
    assert code == 3, out + err
    assert "prefill ranks 0, 1 (n0, n1) and decode ranks 2, 3 (n0, n1) share nodes n0, n1" in err
    assert "pools_may_share_nodes = true" in err
