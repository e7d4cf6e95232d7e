"""What a user asked ``crosstraffic run`` for, and the plan that it comes to."""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from crosstraffic.bench.launch import DEFAULT_RANKS
from crosstraffic.bench.open import SIMULATED
from crosstraffic.bench.plan import Point, make_plan
from crosstraffic.bench.ranks import RankIdentity
from crosstraffic.bench.resolve import Scenario, resolve
from crosstraffic.bench.scenario import ScenarioFile, default_scenario, read_scenario
from crosstraffic.bench.session import scenario_file
from crosstraffic.bench.simulated_truth import SimulatedTruth, truth_from_dict
from crosstraffic.bench.suites import check_suite, links_scenario, suite_file
from crosstraffic.errors import CrosstrafficError, UsageError
from crosstraffic.results.run_info import RunInfo
from crosstraffic.results.store import read_run_info


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
    command: tuple[str, ...] = ("crosstraffic", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where launched ranks run, and bytes that one call between two nodes moves in a few hundredths of a second."""

    nodes: tuple[int, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has ended: its folder, and what went wrong, if anything did."""

    folder: Path
    error: CrosstrafficError | None


def earlier_run(request: Request) -> RunInfo | None:
    """Return the run that is to be finished: what the command line leaves open is as it was there."""
    if not request.resume:
        return None
    if request.output is None:
        raise UsageError("--resume needs --output, the folder of the run to finish")
    return read_run_info(request.output)


def plan_scenario(
    request: Request, identity: RankIdentity | None, before: RunInfo | None = None, probe: Probe | None = None
) -> tuple[Scenario, tuple[Point, ...]]:
    """Read, resolve and plan the scenario, with what the command line changes in it; ``before``: a run to resume.

    ``probe`` is what a suite must know of ranks that a launcher started.

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
        file = _suite(request, world, before, probe)
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


def _suite(request: Request, world: int | None, before: RunInfo | None, probe: Probe | None) -> ScenarioFile:
    if before is not None:
        file = scenario_file(before)
        if file.name != request.suite:
            raise UsageError(
                f"cannot resume {request.output}: it is a run of {file.name}, not of suite {request.suite}"
            )
        return file
    base = None if request.scenario is None else read_scenario(request.scenario)
    num_ranks = world or (None if base is None else base.ranks) or DEFAULT_RANKS
    if probe is not None:
        return links_scenario(probe.nodes, payload_bytes=probe.payload_bytes, base=base)
    return suite_file(request.suite or "", num_ranks, base, simulated=request.transport == SIMULATED)


def new_folder(request: Request, scenario: Scenario) -> Path:
    """Return the run folder: the one that was asked for, or one named after the scenario and the time."""
    return request.output or Path("runs") / f"{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}"


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
