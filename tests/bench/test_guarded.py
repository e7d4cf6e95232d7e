"""Real ranks and their guards: what kills, stops or breaks one is named, all end, nothing is lost, nothing is left."""

import os
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from launcher import SCENARIO, launched

import crosstraffic
from crosstraffic.bench.processes import read_process
from crosstraffic.results.store import load, read_records, read_run_info

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
ENDS_WITHIN_S = 30.0  # after a fault


@pytest.fixture(autouse=True)
def _has_torch() -> None:
    pytest.importorskip("torch")


def raising(path: Path, rank: int) -> dict[str, str]:
    """Return an environment in which one rank breaks in its first point: Python runs sitecustomize before all else."""
    folder = path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"""
import os, sys
from importlib.abc import MetaPathFinder

class Break(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "crosstraffic.bench.engine" and os.environ["SLURM_PROCID"] == "{rank}":
            sys.meta_path.remove(self)
            from crosstraffic.bench import alone
            def broken(*_):
                raise ValueError("broken on purpose")
            alone.measure_alone = broken

sys.meta_path.insert(0, Break())
"""
    )
    return {"PYTHONPATH": str(folder)}


def test_a_run_that_goes_well(tmp_path: Path) -> None:
    with launched(tmp_path, calls=20) as launch:
        assert launch.codes() == [0, 0, 0], launch.said()
    assert launch.left() == []
    info, frame = read_run_info(tmp_path / "run"), load(tmp_path / "run")
    assert info.status == "complete"
    assert (frame["status"] == "ok").all()
    assert "error" not in launch.said()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed(tmp_path: Path, victim: int) -> None:
    with launched(tmp_path) as launch:
        launch.wait_for_records()
        pid, kept = launch.rank(victim), len(read_records(launch.folder)[0])
        os.kill(pid, signal.SIGKILL)
        assert launch.codes(ENDS_WITHIN_S) == [1, 1, 1], launch.said()
    assert launch.left() == []
    info = read_run_info(launch.folder)
    told = rf"rank {victim} \(pid {pid} on \S+\) was killed by SIGKILL in call \d+ of tp \(point \d+\)"
    assert info.status == "failed"
    assert re.match(told, info.why or "")
    assert len(re.findall(told, launch.said())) == 1
    assert len(read_records(launch.folder)[0]) >= kept


def test_a_guard_that_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path) as launch:
        launch.wait_for_records()
        pid = launch.rank(1)
        launch.processes[1].kill()
        assert launch.codes(ENDS_WITHIN_S) == [1, -signal.SIGKILL, 1], launch.said()
    assert launch.left() == []
    assert re.match(rf"rank 1 \(pid {pid} on \S+\) vanished", read_run_info(launch.folder).why or "")


def test_the_guard_of_rank_0_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path) as launch:
        launch.wait_for_records()
        launch.processes[0].kill()
        assert launch.codes(ENDS_WITHIN_S) == [-signal.SIGKILL, 1, 1], launch.said()
    assert launch.left() == []
    assert "rank 1 on" in launch.said()
    assert "the guard of rank 0 at localhost is gone" in launch.said()
    assert len(read_records(launch.folder)[0]) >= 1


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    with launched(tmp_path) as launch:
        launch.wait_for_records()
        pid = launch.rank(1)
        os.kill(pid, signal.SIGSTOP)
        assert launch.codes(ENDS_WITHIN_S) == [1, 1, 1], launch.said()
    assert launch.left() == []
    told = rf"rank 1 \(pid {pid} on \S+\) has stood still for [\d.]+ s in call .*: it is stopped \(SIGSTOP\)"
    assert re.match(told, read_run_info(launch.folder).why or "")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_breaks(tmp_path: Path, broken: int) -> None:
    environment = raising(tmp_path, broken)
    with launched(tmp_path, num_ranks=2, own=[environment] * 2) as launch:
        assert launch.codes() == [1, 1], launch.said()
    assert launch.left() == []
    why = read_run_info(launch.folder).why or ""
    assert re.match(rf"rank {broken} \(pid \d+ on \S+\) exited with code 1", why)
    assert "ValueError: broken on purpose" in why
    assert launch.said().count("ValueError: broken on purpose") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_all_ends_in_order_and_resume_measures_the_rest(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, num_ranks=2, calls=800) as launch:
        launch.wait_for_records()
        launch.send(number)
        assert launch.codes(ENDS_WITHIN_S) == [1, 0], launch.said()
    assert launch.left() == []
    assert launch.said().count(f"{number.name}: ending in order") == 1
    info, first = read_run_info(launch.folder), read_records(launch.folder)[0]
    assert info.status == "interrupted"
    assert re.match(r"interrupted after \d+ of \d+ points", info.why or "")
    lines = (launch.folder / "records.jsonl").read_bytes()

    path = tmp_path / "guarded.toml"
    with launched(tmp_path, "--resume", num_ranks=2, calls=800) as launch:
        assert launch.codes(200) == [0, 0], launch.said()
    assert path.exists()
    assert read_run_info(launch.folder).status == "complete"
    assert (launch.folder / "records.jsonl").read_bytes().startswith(lines)
    again = Counter(record.point for record in read_records(launch.folder)[0])
    assert set(again.values()) == {1}
    assert len(again) == info.plan.num_points > len(first)


def test_a_signal_to_one_rank_that_is_not_the_first(tmp_path: Path) -> None:
    with launched(tmp_path, num_ranks=2) as launch:
        launch.wait_for_records()
        launch.processes[1].send_signal(signal.SIGTERM)
        assert launch.codes(ENDS_WITHIN_S) == [1, 0], launch.said()
    assert launch.said().count("SIGTERM: ending in order") == 1
    assert read_run_info(launch.folder).status == "interrupted"


def test_a_signal_before_the_ranks_have_met(tmp_path: Path) -> None:
    """It comes as soon as the guards can take it: no rank has loaded its transport yet, and guards look for rank 0."""
    with launched(tmp_path, num_ranks=2) as launch:
        until = time.monotonic() + ENDS_WITHIN_S
        while not all(guard_is_ready(process.pid) for process in launch.processes):
            assert time.monotonic() < until, launch.said()
            time.sleep(0.005)
        launch.look()
        launch.send(signal.SIGTERM)
        assert launch.codes() == [1, 0], launch.said()
    assert launch.left() == []
    assert re.match(r"interrupted after 0 of \d+ points", read_run_info(launch.folder).why or "")


def guard_is_ready(pid: int) -> bool:
    """Tell whether a process catches SIGTERM. Source: proc_pid_status(5), SigCgt."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_ranks_that_all_say_rank_0(tmp_path: Path) -> None:
    port = str(20000 + os.getpid() % 9000)
    told = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with launched(tmp_path, own=[told] * 3) as launch:
        pids = {process.pid for process in launch.processes}
        assert launch.codes() == [3, 3, 3], launch.said()
    assert launch.left() == []
    (line,) = re.findall(r".*processes say that they are rank 0: .*", launch.said())
    assert "3 processes" in line
    assert {int(pid) for pid in re.findall(r"pid (\d+) on", line)} == pids
    assert not (launch.folder / "run.json").exists()


def test_another_version_on_one_rank(tmp_path: Path) -> None:
    package = Path(crosstraffic.__file__).parent
    copy = tmp_path / "other" / "crosstraffic"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    start = copy / "__init__.py"
    start.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.1"', start.read_text()))
    other = {"PYTHONPATH": str(tmp_path / "other")}
    with launched(tmp_path, own=[{}, other]) as launch:
        assert launch.codes() == [3, 3, 3], launch.said()
    assert launch.left() == []
    told = rf"crosstraffic is 0\.0\.1 on rank 1 \(\S+\) and {re.escape(crosstraffic.__version__)} on rank 0"
    assert len(re.findall(told, launch.said())) == 1


def test_a_bad_scenario_is_told_once(tmp_path: Path) -> None:
    scenario = SCENARIO.replace("all_reduce", "all_at_once")
    with launched(tmp_path, scenario=scenario) as launch:
        assert launch.codes() == [2, 2, 2], launch.said()
    assert launch.left() == []
    assert launch.said().count("error:") == 1, launch.said()
    assert "all_at_once" in launch.said()
    assert not (launch.folder / "run.json").exists()


def test_a_scenario_that_one_rank_cannot_read(tmp_path: Path) -> None:
    """As when a file lies on the disk of one node only: rank 0 sees nothing wrong, so its guard must say it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with launched(tmp_path, num_ranks=2, places={1: elsewhere}) as launch:
        assert launch.codes(ENDS_WITHIN_S) == [2, 2], launch.said()
    assert launch.left() == []
    assert re.search(r"error: rank 1 \(.*\) exited with code 2 .*\n.*guarded\.toml", launch.said()), launch.said()


def test_a_second_run_into_the_folder_of_the_first(tmp_path: Path) -> None:
    with launched(tmp_path, num_ranks=2) as first:
        first.wait_for_records()
        with launched(tmp_path, "--resume", num_ranks=2) as second:
            assert second.codes() == [3, 3], second.said()
        assert "is being written by another run" in second.said()
        assert f"its rank 0 is process {first.rank(0)} on" in second.said()
        assert second.said().count("error:") == 1
        assert all(process.poll() is None for process in first.processes)
        assert read_run_info(first.folder).status == "running"
        first.send(signal.SIGTERM)
        assert first.codes(ENDS_WITHIN_S) == [1, 0], first.said()
    assert first.left() == []
    assert read_run_info(first.folder).status == "interrupted"


def test_the_rank_holds_no_descriptor_of_its_guard(tmp_path: Path) -> None:
    """A rank that kept the guard's sockets would keep its lines up after the guard is gone."""
    with launched(tmp_path, num_ranks=2) as launch:
        launch.wait_for_records()
        for rank, guard in enumerate(launch.processes):
            sockets = [
                {target for link in Path(f"/proc/{pid}/fd").iterdir() if "socket" in (target := str(link.readlink()))}
                for pid in (guard.pid, launch.rank(rank))
            ]
            process = read_process(launch.rank(rank))
            assert sockets[0], "a guard has a line"
            assert not sockets[0] & sockets[1]
            assert process is not None
            assert process.parent_pid == guard.pid
        launch.send(signal.SIGTERM)
        assert launch.codes(ENDS_WITHIN_S) == [1, 0], launch.said()
