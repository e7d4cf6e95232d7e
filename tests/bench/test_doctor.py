"""``crosstraffic doctor`` from the outside: tables, refusals, exit codes, and an end in bounded time."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosstraffic.bench.devices import Devices, Gpu, Nic, RdmaPort
from crosstraffic.bench.diagnosis import Diagnosis, diagnosis_to_dict
from crosstraffic.bench.libraries import Availability, availability, why_not
from crosstraffic.bench.rank_report import RankReport, look_at_rank, report_to_json
from crosstraffic.bench.roll_call import attend
from crosstraffic.commands.doctor_table import MAX_ROWS, doctor_text
from crosstraffic.results.record import ClockModel

DOCTOR = (sys.executable, "-m", "crosstraffic.cli", "doctor")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
transports = pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]
)


def need(transport: str) -> None:
    pytest.importorskip("torch" if transport == "gloo" else "mpi4py")


def clean(**extra: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED} | extra


def run(*arguments: str, before: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*before, *DOCTOR, *arguments]
    return subprocess.run(command, env=clean(**environment), capture_output=True, text=True, timeout=200, check=False)


@transports
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_doctor_starts_ranks_here(transport: str, num_ranks: int) -> None:
    need(transport)
    done = run("--ranks", str(num_ranks), "--transport", transport, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["schema_version"], found["transport"], found["world_size"]) == (1, transport, num_ranks)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(num_ranks))
    assert len({rank["pid"] for rank in found["ranks"]}) == num_ranks
    assert {rank["host"] for rank in found["ranks"]} == {socket.gethostname()}
    assert all(rank["device"] is None for rank in found["ranks"])
    assert [clock["rank"] for clock in found["clocks"]] == list(range(num_ranks))
    assert all(clock["error_s"] > 0 for clock in found["clocks"][1:])
    assert {item["name"]: item["why_not"] for item in found["transports"]}[transport] is None
    assert found["versions"][f"{transport}.library"]
    (host,) = found["hosts"]
    assert "lo" in {nic["name"] for nic in host["nics"]}


@pytest.mark.mpi
def test_the_table_shows_ranks_transports_clocks_and_hardware() -> None:
    need("mpi")
    done = run("--ranks", "2", "--transport", "mpi")
    assert done.returncode == 0, done.stderr
    for words in ("2 ranks on 1 node, transport mpi", "rank", "mpi4py", "clock of rank", "nccl", "NIC", "MTU"):
        assert words in done.stdout
    assert socket.gethostname() in done.stdout


@pytest.mark.mpi
def test_doctor_examines_the_ranks_of_mpiexec() -> None:
    need("mpi")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python")
    done = run("--json", before=(str(mpiexec), "-n", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)  # printed by rank 0 alone
    assert found["launcher"].startswith("mpiexec")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert len(found["clocks"]) == 2


@pytest.mark.gloo
def test_an_interface_that_is_not_there_is_refused_and_the_table_printed_all_the_same() -> None:
    need("gloo")
    done = run("--ranks", "2", "--transport", "gloo", GLOO_SOCKET_IFNAME="nope")
    assert done.returncode == 3
    assert "refused: GLOO_SOCKET_IFNAME=nope: nope is not there" in done.stderr
    assert f"on ranks 0, 1 ({socket.gethostname()})" in done.stderr
    assert "2 ranks on 1 node, transport gloo" in done.stdout
    assert "clocks: not compared" in done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def launched() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test started as ranks; none outlives it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def as_rank(rank: int, world_size: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    environment = clean(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    return subprocess.Popen(
        [*DOCTOR, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.gloo
def test_ranks_that_are_there_meet_and_rank_0_prints(launched: list[subprocess.Popen[str]]) -> None:
    need("gloo")
    port = free_port()
    launched += [as_rank(rank, 2, port, "--transport", "gloo", "--json") for rank in (0, 1)]
    told = [process.communicate(timeout=150) for process in launched]
    assert [process.returncode for process in launched] == [0, 0], told
    assert told[1] == ("", "")
    found = json.loads(told[0][0])
    assert [rank["local_rank"] for rank in found["ranks"]] == [0, 1]
    assert len(found["clocks"]) == 2


@transports
def test_a_rank_that_never_comes_is_named_in_bounded_time(
    transport: str, launched: list[subprocess.Popen[str]]
) -> None:
    need(transport)
    launched.append(as_rank(0, 3, free_port(), "--transport", transport, "--start-limit", "2"))
    out, err = launched[0].communicate(timeout=100)
    assert launched[0].returncode == 3
    assert "refused: ranks 1, 2 did not come to tcp://127.0.0.1:" in err
    assert "within 2 s" in err
    assert "1 of 3 ranks on 1 node" in out


def other(rank: int, **changes: Any) -> RankReport:
    return replace(look_at_rank(rank, 2, "gloo"), host="elsewhere", local_rank=0, **changes)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"python": "2.7"}}, "versions of crosstraffic differ: "),
        ({"missing": "transport gloo needs torch"}, "rank 1 (elsewhere): transport gloo needs torch"),
        ({"world_size": 1}, "with world size 1 and 2"),
    ],
    ids=["versions", "library", "world"],
)
def test_what_speaks_against_another_rank_is_found_before_anything_is_opened(
    changes: dict[str, Any], said: str, launched: list[subprocess.Popen[str]]
) -> None:
    need("gloo")
    port = free_port()
    launched.append(as_rank(0, 2, port, "--transport", "gloo", "--json"))
    answer = attend(f"tcp://127.0.0.1:{port}", 1, report_to_json(other(1, **changes)), 60)
    out, err = launched[0].communicate(timeout=100)
    assert answer == b"stop"
    assert launched[0].returncode == 3
    assert said in err
    assert "elsewhere" in err
    found = json.loads(out)
    assert [rank["host"] for rank in found["ranks"]] == [socket.gethostname(), "elsewhere"]
    assert found["clocks"] == []
    assert any(said in refusal for refusal in found["refusals"])


@pytest.mark.gloo
@pytest.mark.slow
def test_a_transport_that_hangs_is_ended(launched: list[subprocess.Popen[str]]) -> None:
    """Rank 1 answers the roll call and then does not join."""
    need("gloo")
    port = free_port()
    launched.append(as_rank(0, 2, port, "--transport", "gloo", "--start-limit", "6"))
    assert attend(f"tcp://127.0.0.1:{port}", 1, report_to_json(other(1, environment={}, pid=1)), 60) == b"go"
    out, err = launched[0].communicate(timeout=100)
    assert launched[0].returncode == 3
    assert f"rank 0 ({socket.gethostname()}): transport gloo did not come up within" in err
    assert "2 ranks on 2 nodes" in out
    assert "elsewhere" in out


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (("--transport", "simulated"), {}, "has no ranks to examine"),
        (("--transport", "nope"), {}, "unknown transport: 'nope'"),
        (("--start-limit", "nan"), {}, "--start-limit must be more than 0 seconds, and finite: nan"),
        (("--ranks", "3"), {"PMI_RANK": "0", "PMI_SIZE": "2"}, "--ranks 3: mpiexec has started 2 ranks"),
        ((), {"PMI_RANK": "5", "PMI_SIZE": "2"}, "rank must be in 0..1: 5"),
    ],
)
def test_bad_use_is_two(arguments: tuple[str, ...], environment: dict[str, str], said: str) -> None:
    done = run(*arguments, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def cluster(num_nodes: int, ranks_per_node: int, *, gpus: bool = False) -> dict[str, Any]:
    """A cluster as doctor would find it: each rank bound to a processor of its own."""
    seen = Devices(
        nics=(Nic(name="eth0", state="up", speed_bits_per_s=25 * 10**9, mtu=9000), Nic(name="eth1", state="down")),
        rdma_ports=(RdmaPort(device="mlx5_0", port=1, state="ACTIVE", rate_bits_per_s=400 * 10**9, numa_node=0),),
        gpus=tuple(Gpu(uuid=f"GPU-{index}", model="H100") for index in range(8 if gpus else 0)),
    )
    world = num_nodes * ranks_per_node
    reports = [
        RankReport(
            rank=rank,
            world_size=world,
            host=f"n{rank // ranks_per_node:03}",
            pid=1000 + rank % ranks_per_node,
            cpus=(rank % ranks_per_node,),
            versions={"kernel": "6.1"},
            environment={},
            transport="nccl" if gpus else "mpi",
            device=f"GPU-{rank % 8}" if gpus else None,
            nic="mlx5_0",
            nic_how="the only RDMA port that is up",
            seen=seen,
        )
        for rank in range(world)
    ]
    clocks = tuple(
        ClockModel(rank=rank, offset_s=-1e-3 * rank, drift=0.0, at_s=0.0, error_s=1e-6 * (rank % 7))
        for rank in range(world)
    )
    transports = (Availability(name="mpi", libraries=("mpi4py 4",), why_not=None),)
    return diagnosis_to_dict(
        Diagnosis(
            transport=reports[0].transport,
            launcher="srun",
            world_size=world,
            reports=tuple(reports),
            transports=transports,
            clocks=clocks,
        )
    )


def test_few_ranks_have_a_row_each_where_they_differ() -> None:
    text = doctor_text(cluster(2, 8, gpus=True))
    rows = [line.split() for line in text.splitlines() if "GPU-" in line and "mlx5_0" in line]
    assert [row[0] for row in rows] == [str(rank) for rank in range(16)]
    assert rows[9][1:5] == ["n001", "1001", "1", "GPU-1"]


def test_512_ranks_stay_readable() -> None:
    text = doctor_text(cluster(64, 8, gpus=True))
    rows = [line for line in text.splitlines() if "8 GPUs" in line]
    assert len(rows) == 64
    assert rows[1].split()[:8] == ["8-15", "n001", "1000-1007", "1", "each", "of", "0-7", "8"]
    assert len(text.splitlines()) < 100
    assert "511, largest offset  -511 ms" in text
    assert "n000, n001, n002, n003, n004, n005, n006, n007 and 56 more" in text
    assert "400 Gbit/s" in text
    assert len(text.splitlines()) > MAX_ROWS


def test_ranks_that_are_alike_share_a_row() -> None:
    found = cluster(1, 4)
    for rank in found["ranks"]:
        rank["cpus"] = [0, 1, 2, 3]
    row = next(line for line in doctor_text(found).splitlines() if line.startswith("0-3"))
    assert row.split()[:4] == ["0-3", "n000", "1000-1003", "0-3"]


def test_every_transport_says_whether_it_can_be_used_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [item.name for item in availability()] == ["mpi", "gloo", "nccl", "nixl", "mooncake"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'crosstraffic[local]'" in str(why_not("mpi"))
    assert "pip install 'crosstraffic[torch]'" in str(why_not("gloo"))


def test_looking_for_transports_imports_none_of_their_libraries() -> None:
    program = (
        "import sys\nfrom crosstraffic.bench.libraries import availability\navailability()\n"
        "print([name for name in ('torch', 'mpi4py', 'nixl', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
