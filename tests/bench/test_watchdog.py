"""The watchdog on real ranks: who died or stands still is named, all others are gone, in bounded time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crosstraffic.bench.failures import Outcome, RankFailure
from crosstraffic.bench.heartbeat import Beat, read_beats
from crosstraffic.bench.launch import LocalRanks, launch_local
from crosstraffic.bench.processes import Process, running
from crosstraffic.bench.watchdog import watch

TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]
NUM_RANKS = 3
EnvironmentOf = Callable[..., dict[str, str]]


class Watched:
    """What ``run_loop`` saw: the outcome, how long it took after the fault, and the processes that were there."""

    def __init__(self, outcome: Outcome, took_s: float, processes: list[Process]) -> None:
        self.outcome, self.took_s, self.processes = outcome, took_s, processes

    def left(self) -> list[Process]:
        return [process for process in self.processes if running(process.pid, process.start_ticks) is not None]


def run_loop(
    run_dir: Path,
    transport: str,
    environment: dict[str, str],
    *,
    act: Callable[[LocalRanks, dict[int, Beat]], None] | None = None,
    stop: threading.Event | None = None,
    **limits: float,
) -> Watched:
    """Start the looping program, act once every rank is well under way, and watch it to its end."""
    processes: list[Process] = []
    acted_s = [time.monotonic()]
    with launch_local(transport, NUM_RANKS, run_dir, module="program_loop", environment=environment) as ranks:
        ended = threading.Event()

        def act_later() -> None:
            while not ended.is_set():
                beats = {beat.rank: beat for beat in read_beats(run_dir)}
                if len(beats) == NUM_RANKS and all((beat.call or 0) >= 10 for beat in beats.values()):
                    processes.extend(ranks.processes())
                    acted_s[0] = time.monotonic()
                    if act is not None:
                        act(ranks, beats)
                    return
                time.sleep(0.02)

        actor = threading.Thread(target=act_later)
        actor.start()
        outcome = watch(ranks, stop=stop, stream_names=("tp.test",), **limits)  # type: ignore[arg-type]
        took_s = time.monotonic() - acted_s[0]
        ended.set()
        actor.join()
        processes.extend(ranks.processes())
    return Watched(outcome, took_s, processes)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named(tmp_path: Path, environment_of: EnvironmentOf, transport: str, victim: int) -> None:
    watched = run_loop(
        tmp_path,
        transport,
        environment_of(transport),
        act=lambda ranks, beats: os.kill(beats[victim].pid, signal.SIGKILL),
    )
    (failure,) = watched.outcome.failures
    assert (failure.rank, failure.what, failure.signal) == (victim, "killed", "SIGKILL")
    assert failure.stream == "tp.test"
    assert failure.call is not None
    assert watched.outcome.exit_code == 1
    assert f"rank {victim} (pid {failure.pid}) was killed by SIGKILL in call" in (watched.outcome.failure or "")
    assert watched.took_s < 30
    assert len(watched.processes) > NUM_RANKS
    assert watched.left() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_whose_guard_is_killed_is_named(tmp_path: Path, environment_of: EnvironmentOf, transport: str) -> None:
    """MPICH's launcher may then kill every rank at once; those that cannot be told apart are all named."""

    def kill_guard(ranks: LocalRanks, beats: dict[int, Beat]) -> None:
        process = running(beats[1].pid, beats[1].start_ticks)
        assert process is not None
        os.kill(process.parent_pid, signal.SIGKILL)

    watched = run_loop(tmp_path, transport, environment_of(transport), act=kill_guard)
    assert 1 in {failure.rank for failure in watched.outcome.failures}
    assert {failure.what for failure in watched.outcome.failures} == {"vanished"}
    assert watched.outcome.exit_code == 1
    assert watched.left() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_named(tmp_path: Path, environment_of: EnvironmentOf, transport: str) -> None:
    watched = run_loop(
        tmp_path,
        transport,
        environment_of(transport),
        act=lambda ranks, beats: os.kill(beats[1].pid, signal.SIGSTOP),
        stand_still_s=1.5,
    )
    (failure,) = watched.outcome.failures
    assert (failure.rank, failure.what, failure.stream) == (1, "stands_still", "tp.test")
    assert failure.still_s is not None
    assert failure.still_s >= 1.5
    assert "SIGSTOP" in (watched.outcome.failure or "")
    assert watched.took_s < 30
    assert watched.left() == []


@pytest.mark.mpi
def test_a_rank_that_sleeps_in_a_call_that_others_have_begun_stands_still(
    tmp_path: Path, environment_of: EnvironmentOf
) -> None:
    watched = run_loop(tmp_path, "mpi", environment_of("mpi", TEST_FAULT="2:sleep"), stand_still_s=1.5)
    named = {failure.rank for failure in watched.outcome.failures}
    assert 2 in named
    assert all(failure.call == 30 for failure in watched.outcome.failures)
    assert watched.left() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_exits_is_named_and_the_others_follow(
    tmp_path: Path, environment_of: EnvironmentOf, transport: str
) -> None:
    watched = run_loop(tmp_path, transport, environment_of(transport, TEST_FAULT="1:exit"))
    (failure,) = watched.outcome.failures
    assert (failure.rank, failure.what, failure.exit_code, failure.call) == (1, "exited", 5, 30)
    assert watched.left() == []


@pytest.mark.mpi
def test_a_rank_that_raises_is_named_with_its_last_lines(tmp_path: Path, environment_of: EnvironmentOf) -> None:
    watched = run_loop(tmp_path, "mpi", environment_of("mpi", TEST_FAULT="2:raise"))
    assert [failure.rank for failure in watched.outcome.failures] == [2]
    assert "wrong on purpose" in (watched.outcome.failure or "")


@pytest.mark.mpi
def test_a_refusal_by_all_ranks_keeps_its_exit_code(tmp_path: Path, environment_of: EnvironmentOf) -> None:
    watched = run_loop(tmp_path, "mpi", environment_of("mpi", TEST_FAULT="0:refuse"))
    assert watched.outcome.exit_code == 3
    assert "this machine will not do" in (watched.outcome.failure or "")


@pytest.mark.mpi
def test_a_rank_that_never_starts_is_named(tmp_path: Path, environment_of: EnvironmentOf) -> None:
    watched = run_loop(
        tmp_path, "mpi", environment_of("mpi", TEST_FAULT="1:silent"), stand_still_s=1.0, start_limit_s=4.0
    )
    assert watched.outcome.failures == (RankFailure(rank=1, what="never_started"),)
    assert watched.left() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_asked_to_stop_ranks_end_in_order(tmp_path: Path, environment_of: EnvironmentOf, transport: str) -> None:
    stop = threading.Event()
    watched = run_loop(tmp_path, transport, environment_of(transport), act=lambda ranks, beats: stop.set(), stop=stop)
    assert watched.outcome == Outcome(interrupted=True)
    assert watched.outcome.exit_code == 0
    assert watched.left() == []
    assert (tmp_path / "logs" / "rank-0.log").read_text().endswith("all ok\n")


@pytest.mark.mpi
def test_a_stop_that_is_not_heard_is_bounded(tmp_path: Path, environment_of: EnvironmentOf) -> None:
    stop = threading.Event()

    def hold(ranks: LocalRanks, beats: dict[int, Beat]) -> None:
        os.kill(beats[0].pid, signal.SIGSTOP)
        stop.set()

    watched = run_loop(tmp_path, "mpi", environment_of("mpi"), act=hold, stop=stop, stop_limit_s=1.0)
    assert "did not end within 1 s" in (watched.outcome.failure or "")
    assert [failure.rank for failure in watched.outcome.failures] == [0]
    assert watched.took_s < 30
    assert watched.left() == []


def test_progress_is_what_rank_0_says(tmp_path: Path, environment_of: EnvironmentOf) -> None:
    pytest.importorskip("mpi4py")
    seen: list[tuple[int, int, float]] = []
    stop = threading.Event()

    def show(done: int, total: int, left: float) -> None:
        seen.append((done, total, left))
        if done >= 3:
            stop.set()

    with launch_local("mpi", 2, tmp_path, module="program_loop", environment=environment_of("mpi")) as ranks:
        assert watch(ranks, stop=stop, on_progress=show).failure is None
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {(total, left) for _, total, left in seen} == {(1000, 1.5)}
