"""A real lab on this machine: nodes answer by name, links have the rate asked for, nothing is left behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosstraffic.errors import EnvironmentRefused, UsageError
from crosstraffic.slurm.lab import cluster, network
from crosstraffic.slurm.lab.processes import is_alive, running
from crosstraffic.slurm.lab.spec import LabSpec, parse_limit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slurm,
]
TCP = Path(__file__).parent / "tcp.py"
MBIT = 10**6
LIMITS = (*parse_limit("n1<=40mbit"), *parse_limit("n0>n2=60mbit"))
SPEC = LabSpec(num_nodes=3, rate_bits_per_s=100 * MBIT, limits=LIMITS)


@pytest.fixture(scope="module")
def lab() -> Iterator[cluster.Lab]:
    try:
        yield cluster.up(SPEC)
    finally:
        cluster.down()


def bytes_per_s(source: str, destination: str, num_bytes: int) -> float:
    receiver = subprocess.Popen(
        network.inside(destination, (sys.executable, str(TCP), "recv", network.address(destination))),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = (sys.executable, str(TCP), "send", network.address(destination), str(num_bytes))
        subprocess.run(network.inside(source, sender), check=True, timeout=60)
        told, _ = receiver.communicate(timeout=60)
    finally:
        receiver.kill()
        receiver.wait()
    return float(told)


def test_slurm_runs_a_job_on_every_node(lab: cluster.Lab) -> None:
    done = subprocess.run(
        ["srun", "-N3", "hostname"], env=cluster.environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.split()) == ["n0", "n1", "n2"]
    assert set(cluster.node_states()) == set(SPEC.nodes)


def test_tasks_are_told_to_use_the_network(lab: cluster.Lab) -> None:
    done = subprocess.run(
        ["srun", "-N1", "sh", "-c", "echo $FI_PROVIDER $FI_TCP_IFACE $UCX_TLS $GLOO_SOCKET_IFNAME"],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["tcp", network.PORT, "tcp,self", network.PORT]


def test_nodes_share_no_memory(lab: cluster.Lab) -> None:
    seen = subprocess.run(
        ["srun", "-N3", "sh", "-c", "mktemp -p /dev/shm ct.XXXXXX > /dev/null; sleep 1; ls /dev/shm | grep -c ^ct"],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert seen.stdout.split() == ["1"] * 3
    assert not list(Path("/dev/shm").glob("ct.*"))


@pytest.mark.parametrize(("source", "destination"), [("n1", "n2"), ("n0", "n1"), ("n0", "n2"), ("n2", "n0")])
def test_a_link_has_its_rate(lab: cluster.Lab, source: str, destination: str) -> None:
    truth = SPEC.goodput_bytes_per_s(source, destination)
    assert bytes_per_s(source, destination, 2_000_000 + int(truth)) == pytest.approx(truth, rel=0.03)


def test_up_again_changes_nothing_and_another_lab_is_refused(lab: cluster.Lab) -> None:
    assert cluster.up(SPEC) == lab
    with pytest.raises(EnvironmentRefused, match="another lab is up: crosstraffic lab down"):
        cluster.up(LabSpec(num_nodes=2, rate_bits_per_s=100 * MBIT))
    assert all(map(is_alive, lab.processes))


def test_a_command_runs_on_its_node_and_its_exit_code_is_told(lab: cluster.Lab, capfd) -> None:
    assert cluster.execute("n1", ("sh", "-c", "hostname; getent hosts n2; exit 7")) == 7
    assert capfd.readouterr().out.split() == ["n1", "10.77.0.12", "n2"]
    with pytest.raises(UsageError, match="no such node: 'n9'; there are n0, n1, n2"):
        cluster.execute("n9", ("true",))


def test_down_leaves_nothing_behind(lab: cluster.Lab) -> None:
    left = subprocess.Popen(network.inside("n0", ("sleep", "600")))
    assert cluster.down()
    assert left.wait(timeout=10) != 0
    assert not running(("slurmctld", "slurmd", "slurmstepd"))
    assert not any(map(is_alive, lab.processes))
    assert not list(Path("/sys/class/net").glob(f"{network.BRIDGE}*"))
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert network.BRIDGE not in names
    assert not cluster.FOLDER.exists()
    assert not (cluster.HOSTS / network.namespace("n0")).exists()
    assert not cluster.down()
    with pytest.raises(UsageError, match="no lab is up"):
        cluster.require()


def test_a_machine_with_a_slurm_of_its_own_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "running", lambda names: {4711: "slurmctld"})
    with pytest.raises(EnvironmentRefused, match=r"a Slurm runs on this machine already.*slurmctld \(process 4711\)"):
        cluster.up(SPEC)
    assert not cluster.FOLDER.exists()


def test_a_part_that_does_not_start_is_told_and_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.files, "CONTROL_PORT", "no port")
    with pytest.raises(EnvironmentRefused, match="the lab did not start: slurm"):
        cluster.up(SPEC)
    assert not cluster.FOLDER.exists()
    assert not running(("slurmctld", "slurmd"))


def test_no_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentRefused, match="needs root"):
        cluster.up(SPEC)
