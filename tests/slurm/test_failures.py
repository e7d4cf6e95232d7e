"""What breaks on a cluster, done to a job on a real Slurm: it ends, names who it was, keeps its records, is resumed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crosstraffic.bench.processes import read_process
from crosstraffic.results.store import read_records, read_run_info
from crosstraffic.slurm.lab import cluster, network
from crosstraffic.slurm.lab.spec import LabSpec

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slurm,
    pytest.mark.slow,
]
# Points of some hundred calls, so that something can happen to them; the last run of a test measures them in seconds.
SCENARIO = """
name = "failures"
[[stream]]
name = "tp"
op = "all_reduce"
payload = "32KiB"
[[stream]]
name = "ep"
op = "all_to_all"
payload = "32KiB"
[measure]
sizes = ["8KiB", "32KiB"]
cadences = ["isolated", "streaming"]
together = "none"
target = 0.001
max_calls = {calls}
budget_s = 300
"""
PROGRAM = Path(sys.executable).with_name("crosstraffic")
CORRUPT = Path(__file__).parent / "corrupt.py"
NUM_RANKS = 3
WITHIN_S = 200  # bounds a test that fails; a job ends long before


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of one megabyte, there before the nodes are: they see only what was mounted before them."""
    place = tmp_path_factory.mktemp("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def lab(small: Path) -> Iterator[cluster.Lab]:
    try:
        yield cluster.up(LabSpec(num_nodes=NUM_RANKS, rate_bits_per_s=10**9, ranks_per_node=2))
    finally:
        cluster.down()


def wrapper(folder: Path, text: str) -> Path:
    """Write the program that each rank runs: some shell text, then a run without a report."""
    path = folder / "program"
    path.write_text(f'#!/bin/sh\n{text}\nexec {PROGRAM} "$@" --no-report\n')
    path.chmod(0o755)
    return path


class Run:
    """A job of the lab and its folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.folder = tmp_path, tmp_path / "run"
        self.setting = ""  # shell text that each rank runs first

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [str(PROGRAM), "slurm", *map(str, words)]
        return subprocess.run(
            command, env=cluster.environment(), capture_output=True, text=True, timeout=WITHIN_S, check=False
        )

    def submit(self, *more: object, transport: str = "gloo", calls: int = 150, scenario: str = SCENARIO) -> None:
        path = self.tmp_path / "failures.toml"
        path.write_text(scenario.replace("{calls}", str(calls)))
        where = ("--nodes", NUM_RANKS, "--ranks-per-node", 1, "--transport", transport, "--output", self.folder)
        program = wrapper(self.tmp_path, self.setting)
        done = self.call("submit", path, *where, "--program", program, *more)
        assert done.returncode == 0, done.stderr

    def state(self) -> dict[str, Any]:
        (row,) = json.loads(self.call("status", self.folder, "--json").stdout)
        return dict(row)

    def wait_for(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until = time.monotonic() + WITHIN_S
        while not is_so(row := self.state()):
            assert time.monotonic() < until, f"still {row}: {self.output()}"
            time.sleep(0.5)
        return row

    def wait(self) -> dict[str, Any]:
        return self.wait_for(lambda row: row["state"] not in ("PENDING", "RUNNING", "COMPLETING"))

    def wait_for_records(self, count: int = 2) -> list[bytes]:
        path, until = self.folder / "records.jsonl", time.monotonic() + WITHIN_S
        while not (path.exists() and path.read_bytes().count(b"\n") >= count):
            assert time.monotonic() < until, f"nothing was measured: {self.output()}"
            time.sleep(0.05)
        return path.read_bytes().splitlines()[:count]

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("slurm-*.out")))

    def pid(self, rank: int) -> int:
        return next(place.pid for place in read_run_info(self.folder).placement if place.rank == rank)

    def told(self) -> str:
        """What a user finds: the word of the run itself and the output of the job."""
        return f"{read_run_info(self.folder).why}\n{self.output()}"

    def check_resume(self, kept: list[bytes]) -> None:
        """Measure the rest: what was kept is still there, and every point was measured once."""
        done = self.call("resume", self.folder)
        assert done.returncode == 0, done.stderr
        row = self.wait()
        assert row["is_complete"], self.output()
        assert (self.folder / "records.jsonl").read_bytes().splitlines()[: len(kept)] == kept
        records, _ = read_records(self.folder)
        assert set(Counter(record.point for record in records).values()) == {1}
        assert len(records) == read_run_info(self.folder).plan.num_points
        assert self.call("collect", self.folder).returncode == 0


@pytest.fixture
def run(lab: cluster.Lab, tmp_path: Path) -> Run:
    return Run(tmp_path)


def fails(run: Run, kept: list[bytes], culprit: str, exit_code: int = 1) -> None:
    """The job has failed with this code, says who it was, and what was measured is not complete."""
    row = run.wait()
    assert (row["state"], row["exit_code"]) == ("FAILED", f"{exit_code}:0"), run.output()
    assert re.search(culprit, run.told()), run.told()
    assert not row["is_complete"]
    assert run.call("collect", run.folder).returncode == 1
    assert (run.folder / "records.jsonl").read_bytes().splitlines()[: len(kept)] == kept


@pytest.mark.parametrize(("number", "transport"), [(signal.SIGKILL, "gloo"), (signal.SIGSTOP, "mpi")])
def test_a_rank_that_is_killed_or_stopped(number: signal.Signals, transport: str, run: Run) -> None:
    run.submit(transport=transport, calls=120)
    kept = run.wait_for_records()
    pid = run.pid(1)
    os.kill(pid, number)
    did = "was killed by SIGKILL" if number == signal.SIGKILL else r"has stood still for [\d.]+ s"
    end = r": it is stopped \(SIGSTOP\)" if number == signal.SIGSTOP else ""
    fails(run, kept, rf"rank 1 \(pid {pid} on n1\) {did} in call \d+ of (tp|ep) \(point \d+\){end}")
    assert read_run_info(run.folder).status == "failed"
    run.check_resume(kept)


@contextmanager
def link_down(node: str) -> Iterator[None]:
    within = ("ip", "netns", "exec", network.namespace(node), "ip", "link", "set", network.PORT)
    subprocess.run([*within, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run([*within, "up"], check=True)


def wait_for_idle() -> None:
    until = time.monotonic() + WITHIN_S
    while any(state != "idle" for state in cluster.node_states().values()):
        assert time.monotonic() < until, cluster.node_states()
        time.sleep(0.5)


def test_a_node_whose_link_goes_down(run: Run) -> None:
    run.submit(calls=120)
    kept = run.wait_for_records()
    with link_down("n2"):
        until = time.monotonic() + WITHIN_S
        while read_run_info(run.folder).status == "running":
            assert time.monotonic() < until, run.output()
            time.sleep(0.2)
        told = read_run_info(run.folder).why or ""
        assert re.search(r"node n2 \(ranks 2\) has not been heard for \d+ s: it or its link is down", told), told
        row = run.wait()
    assert not row["is_complete"]
    assert run.call("collect", run.folder).returncode == 1
    wait_for_idle()
    run.check_resume(kept)


def test_a_job_that_is_cancelled(run: Run) -> None:
    run.submit(calls=120)
    kept = run.wait_for_records()
    subprocess.run(["scancel", str(run.state()["job_id"])], env=cluster.environment(), check=True, timeout=30)
    assert run.wait()["state"] == "CANCELLED"
    info = read_run_info(run.folder)
    assert info.status == "interrupted"
    assert re.match(r"interrupted after \d+ of \d+ points", info.why or "")
    run.check_resume(kept)


def test_a_last_line_that_is_torn(run: Run) -> None:
    run.submit(calls=120)
    kept = run.wait_for_records(3)
    guard = read_process(run.pid(0))
    assert guard is not None
    os.kill(guard.parent_pid, signal.SIGKILL)  # nobody is left who could say how it ended
    run.wait()
    path = run.folder / "records.jsonl"
    path.write_bytes(b"\n".join(kept)[:-40])  # as a machine that lost power leaves it
    assert run.state()["run"]["num_torn"] == 1
    assert "running" in run.state()["run"]["status"]
    assert run.call("collect", run.folder).returncode == 1
    run.check_resume(kept[:2])


@contextmanager
def corrupter(node: str) -> Iterator[subprocess.Popen[str]]:
    """Put a program between a node's port and the switch that spoils what the node sends once SIGUSR1 asks for it."""
    port, ends = network.namespace(node), ("ct-spoil-a", "ct-spoil-b")
    for other in cluster.require().spec.nodes:
        compute_checksums(other)
    commands = [
        ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]],
        ["ip", "link", "set", port, "nomaster"],
        ["ip", "link", "set", ends[1], "master", network.BRIDGE, "up"],
        ["ip", "link", "set", ends[0], "promisc", "on", "up"],
        ["ip", "link", "set", port, "promisc", "on"],
    ]
    for command in commands:
        subprocess.run(command, check=True)
    relay = subprocess.Popen([sys.executable, str(CORRUPT), port, ends[0]], stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        yield relay
    finally:
        relay.kill()
        relay.wait()
        subprocess.run(["ip", "link", "delete", ends[0]], check=True)
        subprocess.run(["ip", "link", "set", port, "master", network.BRIDGE], check=True)


def compute_checksums(node: str) -> None:
    """Let a node compute the checksums of what it sends itself (ethtool -K eth0 tx off): a program will look."""
    off = "import fcntl, socket, struct, array\n"
    off += "value = array.array('B', struct.pack('II', 0x17, 0))\n"  # ETHTOOL_STXCSUM
    off += f"request = struct.pack('16sQ', b'{network.PORT}', value.buffer_info()[0])\n"
    off += "fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8946, request)\n"  # SIOCETHTOOL
    subprocess.run(network.inside(node, (sys.executable, "-c", off)), check=True)


def test_a_payload_that_is_corrupted_in_flight(run: Run) -> None:
    with corrupter("n1") as relay:
        run.submit(calls=25)
        run.wait_for_records(2)
        relay.send_signal(signal.SIGUSR1)
        row = run.wait()
    assert (row["state"], row["exit_code"]) == ("FAILED", "1:0"), run.output()
    wrong = [record for record in read_records(run.folder)[0] if record.status == "wrong_data"]
    assert wrong, run.told()
    exchanged = [record.mismatch for record in wrong if record.stream == "ep" and record.mismatch is not None]
    assert {mismatch.peer for mismatch in exchanged} == {1}
    assert "received wrong bytes from rank 1 at offset" in run.output()
    assert "with wrong data" in run.call("collect", run.folder).stdout
    run.check_resume([])
    assert f"{len({record.point for record in wrong})} points had wrong data, and were" in str(
        read_run_info(run.folder).notes
    )


def test_a_disk_that_is_full(run: Run, small: Path) -> None:
    filler = small / "filler"
    filler.write_bytes(bytes(800 * 1024))
    run.folder = small / "run"
    run.submit(calls=150)
    kept = run.wait_for_records(1)
    fails(run, kept, "No space left on device")
    filler.unlink()
    run.check_resume(kept)


def test_two_runs_into_one_folder(run: Run) -> None:
    run.submit(calls=900)
    kept = run.wait_for_records(1)
    path = run.tmp_path / "failures.toml"
    again = (str(PROGRAM), "run", str(path), "--output", str(run.folder), "--resume", "--transport", "gloo")
    step = ("srun", "--overlap", f"--jobid={run.state()['job_id']}", f"-N{NUM_RANKS}", "--mpi=none")
    for launcher in (step, ()):
        second = subprocess.run(
            [*launcher, *again, "--no-report"], env=cluster.environment(), capture_output=True, text=True,
            timeout=WITHIN_S, check=False,
        )  # fmt: skip
        assert second.returncode == 3, second.stderr
        assert f"is being written by another run: its rank 0 is process {run.pid(0)} on n0" in second.stderr
    assert run.wait()["is_complete"], run.output()
    assert (run.folder / "records.jsonl").read_bytes().splitlines()[:1] == kept


def test_another_version_on_one_node(run: Run, tmp_path: Path) -> None:
    package = Path(cluster.__file__).parents[2]
    shutil.copytree(package, tmp_path / "other" / "crosstraffic", ignore=shutil.ignore_patterns("__pycache__"))
    start = tmp_path / "other" / "crosstraffic" / "__init__.py"
    start.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.1"', start.read_text()))
    run.setting = f'[ "$(hostname)" = n1 ] && export PYTHONPATH={tmp_path / "other"}'
    run.submit()
    row = run.wait()
    assert (row["state"], row["exit_code"]) == ("FAILED", "3:0"), run.output()
    assert re.search(r"crosstraffic is 0\.0\.1 on rank 1 \(n1\) and .* on rank 0 \(n0\): use one env", run.output())
    wrapper(tmp_path, "")
    run.check_resume([])


def test_ranks_that_all_think_they_are_rank_0(run: Run) -> None:
    rank_0 = ("RANK=0", f"WORLD_SIZE={NUM_RANKS}", "MASTER_ADDR=n0", "MASTER_PORT=29555")
    run.submit(*(word for variable in rank_0 for word in ("--env", variable)))
    row = run.wait()
    assert (row["state"], row["exit_code"]) == ("FAILED", "3:0"), run.output()
    assert re.search(r"processes say that they are rank 0: pid \d+ on n0, pid \d+ on n\d", run.output()), run.output()


def test_mpi_ranks_that_do_not_find_each_other(run: Run) -> None:
    run.submit("--mpi", "none", transport="mpi")
    row = run.wait()
    assert (row["state"], row["exit_code"]) == ("FAILED", "3:0"), run.output()
    assert "MPI sees a world of 1" in run.output()


HANDOFF = """
name = "handoff"
model = "Qwen3-8B"
[handoff]
prefill_layout = "tp=2"
decode_layout = "tp=1"
prefill_ranks = [0, 1]
decode_ranks = [2]
context = 64
[measure]
num_sizes = 2
max_size = "16KiB"
max_calls = 20
steps = false
budget_s = 60
"""


def test_both_pools_on_one_node(run: Run) -> None:
    job = ("--nodes", 2, "--ranks-per-node", 2)
    path = run.tmp_path / "handoff.toml"
    path.write_text(HANDOFF.replace("[0, 1]", "[0, 2]").replace("[2]", "[1, 3]").replace("tp=1", "tp=2"))
    done = run.call("submit", path, *job, "--transport", "gloo", "--program", PROGRAM, "--output", run.folder)
    assert done.returncode == 0, done.stderr
    row = run.wait()
    assert (row["state"], row["exit_code"]) == ("FAILED", "3:0"), run.output()
    told = r"prefill .*0, 2.* and decode .*1, 3.* share .*n0.*n1.*pools_may_share_nodes = true in \[handoff\]"
    assert re.search(told, run.output()), run.output()
