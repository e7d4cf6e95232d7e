"""Conduct a run: plan it, bring the ranks together (threads, local processes, or a launcher's), watch it to its end."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crosstraffic.bench.guarded import Launched
from crosstraffic.bench.launch import launch_local
from crosstraffic.bench.launched import conduct_launched
from crosstraffic.bench.open import AUTO, SIMULATED, resolve_transport
from crosstraffic.bench.progress import Progress
from crosstraffic.bench.request import Finished, Request, earlier_run, new_folder, plan_scenario, simulated_truth
from crosstraffic.bench.session import Session, begin, end_early, run_rank, take_up
from crosstraffic.bench.watchdog import watch
from crosstraffic.errors import CrosstrafficError, EnvironmentRefused, RunFailed, UsageError
from crosstraffic.results.record import Place

STAND_STILL_S = 20.0
BUSY_SHARE, BUSY_LOOK_S = 0.25, 0.3  # of the processors' time, over so long a look


def conduct(request: Request, launched: Launched | None = None) -> Finished | None:
    """Run what was asked to its end; None on the ranks of a launcher that are not rank 0.

    ``launched`` ties this process, a rank of a launcher, to its guard; without it ranks are started here.

    Raises:
        UsageError: what was asked cannot be.
        EnvironmentRefused: this machine or launch cannot measure it.
    """
    before = earlier_run(request)
    asked = before.transport.name if before is not None and request.transport == AUTO else request.transport
    transport_name = resolve_transport(asked)
    if launched is not None:
        return conduct_launched(request, launched, transport_name, before)
    scenario, plan = plan_scenario(request, None, before)
    if transport_name == SIMULATED:
        simulated_truth(scenario.file)
    folder = new_folder(request, scenario)
    begin(
        scenario,
        plan,
        transport_name=transport_name,
        folder=folder,
        command=request.command,
        resume=request.resume,
        notes=[] if transport_name == SIMULATED else _busy(),
    )
    session = take_up(folder)
    if transport_name == SIMULATED:
        return _in_threads(session)
    return _in_local_ranks(session, scenario.num_ranks)


def _busy() -> list[str]:
    """Say so if other processes use this machine: the noise of their turns is not the interconnect's."""
    before = _processor_times()
    time.sleep(BUSY_LOOK_S)
    after = _processor_times()
    if before is None or after is None or after[1] == before[1]:
        return []
    share = 1 - (after[0] - before[0]) / (after[1] - before[1])
    if share <= BUSY_SHARE:
        return []
    note = f"other processes used {share:.0%} of this machine's processors when the run began"
    print(f"{note}: times will be noisy", file=sys.stderr)
    return [note]


def _processor_times() -> tuple[int, int] | None:
    """Return idle and all time of the processors since boot, in ticks; None on systems without /proc/stat."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    ticks = [int(field) for field in first[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _unseen(done: int, total: int, seconds_left: float) -> None:
    """Progress of a rank that nobody looks at: only rank 0's is shown."""


class RankHeart:
    """The heart of ranks that no watchdog reads: progress goes to ``on_progress``, stopping comes from an event."""

    def __init__(self, on_progress: Callable[[int, int, float], None], stop: threading.Event) -> None:
        self._on_progress, self._stop = on_progress, stop

    def call(self, point: int, stream: int, call: int) -> None:
        """Nobody watches a call here."""

    def progress(self, done: int, total: int, seconds_left: float) -> None:
        self._on_progress(done, total, seconds_left)

    def should_stop(self) -> bool:
        return self._stop.is_set()


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """Turn Ctrl-C into an event: the run ends after the batch it is in. A second Ctrl-C ends at once."""
    stop = threading.Event()

    def interrupted(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("\nstopping: what is measured is kept (Ctrl-C again to end at once)", file=sys.stderr)

    earlier = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, earlier)


def _in_threads(session: Session) -> Finished:
    from crosstraffic.bench.simulated import SimulatedWorld, run_simulated

    truth = simulated_truth(session.scenario.file)
    world = SimulatedWorld(truth, session.scenario.num_ranks)
    places = [
        Place(
            rank=rank,
            host=f"simulated{truth.node(rank)}",
            pid=rank,
            node=truth.node(rank),
            cpus=(),
            device=None,
            nic=None,
        )
        for rank, node in enumerate(map(truth.node, range(session.scenario.num_ranks)))
    ]
    with _stop_on_interrupt() as stop, Progress(session.plan) as progress:
        hearts = [RankHeart(progress.show if rank == 0 else _unseen, stop) for rank in range(world.num_ranks)]
        try:
            run_simulated(world, lambda transport: run_rank(session, transport, hearts[transport.rank], known=places))
        except CrosstrafficError as error:
            end_early(session.folder, "failed", str(error))
            return Finished(folder=session.folder, error=error)
        except KeyboardInterrupt:
            return _ended_at_once(session)
    return Finished(folder=session.folder, error=None)


def _in_local_ranks(session: Session, num_ranks: int) -> Finished:
    try:
        with (
            _stop_on_interrupt() as stop,
            Progress(session.plan) as progress,
            launch_local(session.transport_name, num_ranks, session.folder) as local,
        ):
            outcome = watch(
                local,
                stop=stop,
                on_progress=progress.show,
                stream_names=[stream.name for stream in session.scenario.streams],
                stand_still_s=STAND_STILL_S,
            )
    except KeyboardInterrupt:
        return _ended_at_once(session)
    except SystemExit as ending:
        name = signal.Signals(int(ending.code or 128) - 128).name if int(ending.code or 0) > 128 else "an exit"
        end_early(session.folder, "interrupted", f"ended by {name}: ranks were ended at once")
        raise
    if outcome.failure is None:
        return Finished(folder=session.folder, error=None)
    end_early(session.folder, "failed", outcome.failure)
    kind = {2: UsageError, 3: EnvironmentRefused}.get(outcome.exit_code, RunFailed)
    return Finished(folder=session.folder, error=kind(outcome.failure))


def _ended_at_once(session: Session) -> Finished:
    """Ctrl-C came twice: ranks are gone, and rank 0 could not say how far it came."""
    why = "interrupted twice, so that the ranks were ended at once"
    end_early(session.folder, "interrupted", why)
    return Finished(folder=session.folder, error=RunFailed(why))
