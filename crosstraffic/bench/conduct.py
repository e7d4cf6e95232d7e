"""Conduct a run: plan it, bring the ranks together (threads, local processes, or a launcher's), watch it to its end."""

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from crosstraffic.bench.launch import launch_local
from crosstraffic.bench.open import AUTO, SIMULATED, open_transport, resolve_transport
from crosstraffic.bench.plan import Point, make_plan
from crosstraffic.bench.progress import Progress
from crosstraffic.bench.ranks import RankIdentity, identify
from crosstraffic.bench.resolve import Scenario, resolve
from crosstraffic.bench.scenario import ScenarioFile, default_scenario, read_scenario
from crosstraffic.bench.session import Session, begin, end_early, run_rank, scenario_file, take_up
from crosstraffic.bench.simulated_truth import SimulatedTruth, truth_from_dict
from crosstraffic.bench.suites import check_suite, suite_file
from crosstraffic.bench.watchdog import watch
from crosstraffic.errors import CrosstrafficError, EnvironmentRefused, RunFailed, UsageError
from crosstraffic.results.record import Place
from crosstraffic.results.run_info import RunInfo
from crosstraffic.results.store import read_run_info

DEFAULT_RANKS = 4
STAND_STILL_S = 25.0
BUSY_SHARE, BUSY_LOOK_S = 0.25, 0.3  # of the processors' time, over so long a look


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asked ``crosstraffic run`` for."""

    scenario: str | None = None
    suite: str | None = None
    ranks: int | None = None
    transport: str = "auto"
    output: Path | None = None
    resume: bool = False
    budget_s: float | None = None
    seed: int | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has ended: its folder, and what went wrong, if anything did."""

    folder: Path
    error: CrosstrafficError | None


def conduct(request: Request) -> Finished | None:
    """Run what was asked to its end; None on the ranks of a launcher that are not rank 0.

    Raises:
        UsageError: what was asked cannot be.
        EnvironmentRefused: this machine or launch cannot measure it.
    """
    before = _before(request)
    asked = before.transport.name if before is not None and request.transport == AUTO else request.transport
    transport_name = resolve_transport(asked)
    identity = None if transport_name == SIMULATED else _identity()
    scenario, plan = plan_scenario(request, identity, before)
    if transport_name == SIMULATED:
        simulated_truth(scenario.file)
    folder = request.output or Path("runs") / f"{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if identity is not None:
        return _in_launched_rank(request, scenario, plan, transport_name, identity, folder)
    begin(
        scenario,
        plan,
        transport_name=transport_name,
        folder=folder,
        command=_command(),
        resume=request.resume,
        notes=[] if transport_name == SIMULATED else _busy(),
    )
    session = take_up(folder)
    if transport_name == SIMULATED:
        return _in_threads(session)
    return _in_local_ranks(session, scenario.num_ranks)


def _before(request: Request) -> RunInfo | None:
    """Return the run that is to be finished: what the command line leaves open is as it was there."""
    if not request.resume:
        return None
    if request.output is None:
        raise UsageError("--resume needs --output, the folder of the run to finish")
    return read_run_info(request.output)


def plan_scenario(
    request: Request, identity: RankIdentity | None, before: RunInfo | None = None
) -> tuple[Scenario, tuple[Point, ...]]:
    """Read, resolve and plan the scenario, with what the command line changes in it; ``before``: a run to resume.

    Raises:
        UsageError: a value, a name or a combination is wrong.
    """
    if request.suite is not None:
        check_suite(request.suite)
    if request.budget_s is not None and not 0 < request.budget_s < math.inf:
        raise UsageError(f"--budget must be more than 0 seconds, and finite: {request.budget_s:g}")
    if identity is not None and request.ranks is not None and request.ranks != identity.world_size:
        raise UsageError(f"--ranks {request.ranks}: {identity.launcher} has started {identity.world_size} ranks")
    world = identity.world_size if identity is not None else request.ranks
    if world is None and before is not None:
        world = before.world_size
    if request.suite is not None:
        file = _suite(request, world, identity, before)
    elif request.scenario is not None:
        file = read_scenario(request.scenario)
    elif before is not None:
        file = scenario_file(before)
    else:
        file = default_scenario(world or DEFAULT_RANKS)
        if file.name == "collectives":
            print(f"no shipped model layout has {world} ranks: measuring plain collectives", file=sys.stderr)
    num_ranks = world or file.ranks or DEFAULT_RANKS
    try:
        scenario = resolve(_changed(file, request), num_ranks)
        return scenario, make_plan(scenario)
    except ValueError as error:
        raise UsageError(f"scenario {file.name} on {num_ranks} ranks: {error}") from error


def _suite(request: Request, world: int | None, identity: RankIdentity | None, before: RunInfo | None) -> ScenarioFile:
    if before is not None:
        file = scenario_file(before)
        if file.name != request.suite:
            raise UsageError(
                f"cannot resume {request.output}: it is a run of {file.name}, not of suite {request.suite}"
            )
        return file
    if identity is not None:
        raise UsageError(f"--suite {request.suite}: {identity.launcher} has not said yet on which node each rank is")
    base = None if request.scenario is None else read_scenario(request.scenario)
    num_ranks = world or (None if base is None else base.ranks) or DEFAULT_RANKS
    return suite_file(request.suite or "", num_ranks, base, simulated=request.transport == SIMULATED)


def simulated_truth(file: ScenarioFile) -> SimulatedTruth:
    """Read the scenario's simulated world.

    Raises:
        UsageError: it has none, or a value is wrong.
    """
    if file.simulated is None:
        raise UsageError(f"scenario {file.name} has no [simulated] table: transport simulated needs its known truth")
    try:
        return truth_from_dict(file.simulated)
    except ValueError as error:
        raise UsageError(f"scenario {file.name}, [simulated]: {error}") from error


def _changed(file: ScenarioFile, request: Request) -> ScenarioFile:
    measure = {
        name: value for name, value in (("budget_s", request.budget_s), ("seed", request.seed)) if value is not None
    }
    changes: dict[str, object] = {"measure": file.measure.model_copy(update=measure)}
    if request.model is not None:
        if file.model is None:
            raise UsageError(f"scenario {file.name} has no model that --model {request.model} could replace")
        changes["model"] = request.model
    return file.model_copy(update=changes)


def _identity() -> RankIdentity | None:
    try:
        return identify(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from error


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


def _command() -> list[str]:
    return ["crosstraffic", *sys.argv[1:]]


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


def _in_launched_rank(
    request: Request,
    scenario: Scenario,
    plan: Sequence[Point],
    transport_name: str,
    identity: RankIdentity,
    folder: Path,
) -> Finished | None:
    transport = open_transport(transport_name, identity)
    failure, todo = b"", b""
    if transport.rank == 0:
        try:
            begin(
                scenario, plan, transport_name=transport_name, folder=folder, command=_command(), resume=request.resume
            )
            todo = ",".join(point.key for point in take_up(folder).plan).encode()
        except CrosstrafficError as error:
            failure = str(error).encode()
    failure = transport.broadcast(failure if transport.rank == 0 else None)
    if failure:
        raise UsageError(failure.decode())
    wanted = set(transport.broadcast(todo if transport.rank == 0 else None).decode().split(","))
    session = Session(
        scenario=scenario,
        plan=tuple(point for point in plan if point.key in wanted),
        transport_name=transport_name,
        folder=folder,
    )
    try:
        with _stop_on_interrupt() as stop:
            if transport.rank == 0:
                with Progress(session.plan) as progress:
                    run_rank(session, transport, RankHeart(progress.show, stop))
            else:
                run_rank(session, transport, RankHeart(_unseen, stop))
    except EnvironmentRefused:  # all ranks have agreed on it
        raise
    except BaseException as error:
        _leave_at_once(identity, folder, error)
    transport.close()
    return Finished(folder=folder, error=None) if identity.rank == 0 else None


def _leave_at_once(identity: RankIdentity, folder: Path, error: BaseException) -> NoReturn:
    """End this rank, loudly: the others wait in a call that will not end, and so would this one on its way out.

    The launcher sees a rank that ends without taking leave, and ends the others.
    """
    print(f"error: rank {identity.rank}: {error!r}", file=sys.stderr)
    if not isinstance(error, CrosstrafficError | KeyboardInterrupt):
        traceback.print_exception(error)
    if identity.rank == 0:
        end_early(folder, "failed", f"rank 0: {error!r}")
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, CrosstrafficError) else 1)
