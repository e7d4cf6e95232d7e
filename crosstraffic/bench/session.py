"""One run as one rank sees it: preflight, the plan, and (on rank 0) run.json before, after, and on failure."""

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from crosstraffic import __version__
from crosstraffic.bench.context import Heart
from crosstraffic.bench.devices import available_bytes
from crosstraffic.bench.engine import Outcome, run_plan
from crosstraffic.bench.plan import Point, make_plan
from crosstraffic.bench.preflight import Pools, check, environment, gather, places, versions
from crosstraffic.bench.preflight import notes as notes_of
from crosstraffic.bench.resolve import Scenario, resolve
from crosstraffic.bench.scenario import MeasureSpec, ScenarioFile
from crosstraffic.bench.transport import Transport
from crosstraffic.bench.turns import MIN_SHARE, polled_processors
from crosstraffic.errors import EnvironmentRefused, RunFailed, UsageError
from crosstraffic.patterns.step import step_to_dict
from crosstraffic.patterns.stream import stream_to_dict
from crosstraffic.results.definitions import definitions_block
from crosstraffic.results.record import Place, Record
from crosstraffic.results.run_info import LateRank, PlanInfo, RunInfo, TransportInfo
from crosstraffic.results.store import RunFolder, is_empty, num_lines, read_records, read_run_info

NO_LOCKS = "the file system of the run folder has no locks: a second run into it would not be noticed"
LATE_SHARE = 0.5  # of the isolated records that could name a late rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What every rank of a run knows before it begins."""

    scenario: Scenario
    plan: tuple[Point, ...]
    transport_name: str
    folder: Path


def new_run_id() -> str:
    """Return an id that sorts by time."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def begin(
    scenario: Scenario,
    plan: Sequence[Point],
    *,
    transport_name: str,
    folder: Path,
    command: Sequence[str],
    resume: bool,
    notes: Sequence[str] = (),
) -> Session:
    """Make or take up the run folder and write run.json with status ``running``; done once, before ranks start.

    Raises:
        UsageError: the folder belongs to another run, or holds other things; nothing to resume; another scenario.
    """
    asked = _asked(scenario)
    if resume:
        info = read_run_info(folder)
        before = scenario_file(info)
        same = before.model_copy(update={"measure": _apart_from_budget(before)}) == scenario.file.model_copy(
            update={"measure": _apart_from_budget(scenario.file)}
        )
        if not same or info.world_size != scenario.num_ranks or info.transport.name != transport_name:
            raise UsageError(f"cannot resume {folder}: it was measured with another scenario, rank count or transport")
        budget_s = scenario.measure.budget_s
        planned = info.plan.model_copy(update={"budget_s": budget_s})
        records = read_records(folder)[0]
        wrong = len({record.point for record in records if record.status == "wrong_data"})
        again = [f"{wrong} points had wrong data, and were measured again"] if wrong else []
        changes = {
            "status": "running",
            "why": None,
            "scenario": asked,
            "plan": planned,
            "budget_s": budget_s,
            "resumed_at": (*info.resumed_at, num_lines(folder)),
            "notes": (*info.notes, *again),
        }
        info = info.model_copy(update=changes)
    else:
        if folder.exists() and (not folder.is_dir() or not is_empty(folder)):
            raise UsageError(f"output folder {folder} is not empty; choose another, or add --resume to finish its run")
        info = RunInfo(
            run_id=new_run_id(),
            created=datetime.datetime.now(datetime.UTC),
            crosstraffic=__version__,
            command=tuple(command),
            scenario=asked,
            transport=TransportInfo(name=transport_name),
            world_size=scenario.num_ranks,
            placement=(),
            streams=tuple(stream_to_dict(stream) for stream in scenario.streams),
            aliases=dict(scenario.aliases),
            real_sizes=dict(scenario.real_sizes),
            steps=tuple(step_to_dict(step) for step in scenario.steps),
            plan=PlanInfo(num_points=len(plan), seed=scenario.measure.seed, budget_s=scenario.measure.budget_s),
            definitions=definitions_block(),
            status="running",
            budget_s=scenario.measure.budget_s,
            notes=tuple(notes),
        )
    with RunFolder.create(folder, info.run_id) as opened:
        opened.write_run(info)
    return Session(scenario=scenario, plan=tuple(plan), transport_name=transport_name, folder=folder)


def scenario_file(info: RunInfo) -> ScenarioFile:
    """Return the scenario that a run was asked to measure.

    Raises:
        UsageError: run.json does not hold one.
    """
    try:
        return ScenarioFile.model_validate(info.scenario["file"])
    except (KeyError, ValidationError) as error:
        raise UsageError(
            f"run.json of run {info.run_id} holds no scenario that this version can read: {error}"
        ) from error


def _apart_from_budget(file: ScenarioFile) -> MeasureSpec:
    return file.measure.model_copy(update={"budget_s": 1.0})


def take_up(folder: Path, *, resume: bool = True) -> Session:
    """Read what a run folder asks for: how a rank that was started for it begins. Points already kept are left out."""
    info = read_run_info(folder)
    scenario = resolve(scenario_file(info), info.world_size)
    plan = make_plan(scenario)
    if resume:
        records = read_records(folder)[0]
        again = {record.point for record in records if record.status != "ok"}
        kept = {record.point for record in records} - again
        plan = tuple(point for point in plan if point.key not in kept)
    return Session(scenario=scenario, plan=plan, transport_name=info.transport.name, folder=folder)


def run_rank(
    session: Session, transport: Transport, heart: Heart, *, known: Sequence[Place] | None = None
) -> Outcome | None:
    """Measure as one rank; rank 0 keeps records and run.json and returns the outcome.

    ``known`` places stand in for the preflight where ranks are no processes (the simulated transport).

    Raises:
        EnvironmentRefused: preflight found a reason not to measure.
    """
    found = _known(transport, known) if known is not None else _preflight(session, transport)
    agreed = None if found is None else json.dumps([found.nodes, found.processors(session.transport_name)]).encode()
    places, num_processors = json.loads(transport.broadcast(agreed))
    nodes = tuple(places)
    if found is None:
        run_plan(
            transport,
            session.scenario,
            session.plan,
            nodes=nodes,
            heart=heart,
            folder=None,
            num_processors=num_processors,
        )
        return None
    info = read_run_info(session.folder)
    with RunFolder.create(session.folder, info.run_id) as folder:
        info = info.model_copy(
            update={
                "placement": found.places,
                "transport": TransportInfo(name=session.transport_name, details=transport.describe()),
                "environment": found.environment,
                "versions": found.versions,
                "notes": tuple(dict.fromkeys((*info.notes, *found.notes, *([] if folder.is_locked else [NO_LOCKS])))),
                "started_s": (datetime.datetime.now(datetime.UTC) - info.created).total_seconds(),
            }
        )
        folder.write_run(info)
        outcome = run_plan(
            transport,
            session.scenario,
            session.plan,
            nodes=nodes,
            heart=heart,
            folder=folder,
            available_bytes=found.available_bytes,
            num_processors=num_processors,
        )
        if outcome is None:
            raise RuntimeError("rank 0 measured, but has no outcome")
        folder.write_run(info.model_copy(update=_ending(session, outcome, info)))
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What rank 0 learned of all ranks before measuring."""

    places: tuple[Place, ...]
    environment: dict[str, str]
    versions: dict[str, str]
    available_bytes: int | None
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[int]:
        return [place.node for place in sorted(self.places, key=lambda place: place.rank)]

    def processors(self, transport_name: str) -> int | None:
        """Return how many processors the ranks keep busy by polling; None where they do not poll."""
        return polled_processors(transport_name, self.places)


def _known(transport: Transport, known: Sequence[Place]) -> _Found | None:
    if transport.rank != 0:
        return None
    return _Found(places=tuple(known), environment={}, versions={}, available_bytes=None)


def _preflight(session: Session, transport: Transport) -> _Found | None:
    reports = gather(transport)
    pools = _pools(session.scenario.file)
    refusals = [] if reports is None else check(reports, session.scenario.num_ranks, pools)
    agreed = transport.broadcast("; ".join(refusals).encode() if transport.rank == 0 else None)
    if agreed:
        raise EnvironmentRefused(agreed.decode())
    if reports is None:
        return None
    return _Found(
        places=tuple(places(reports)),
        environment=environment(reports),
        versions=versions(reports),
        available_bytes=available_bytes(),
        notes=tuple(notes_of(reports, pools)),
    )


def _pools(file: ScenarioFile) -> Pools | None:
    handoff = file.handoff
    if handoff is None:
        return None
    return Pools(
        prefill=handoff.prefill_ranks, decode=handoff.decode_ranks, may_share_nodes=handoff.pools_may_share_nodes
    )


def end_early(folder: Path, status: Literal["failed", "interrupted"], why: str) -> None:
    """Write into run.json that the run did not come to its end, and why; what was measured stays.

    Raises:
        RunFailed: not even that can be written (a full disk); says both.
    """
    info = read_run_info(folder)
    try:
        with RunFolder.create(folder, info.run_id) as opened:
            opened.write_run(info.model_copy(update={"status": status, "why": why}))
    except OSError as error:
        raise RunFailed(f"{why}; and run.json cannot be written: {error}") from error


def _asked(scenario: Scenario) -> dict[str, Any]:
    return {
        "name": scenario.name,
        "model": scenario.model,
        "num_ranks": scenario.num_ranks,
        "file": scenario.file.model_dump(mode="json"),
    }


def _ending(session: Session, outcome: Outcome, info: RunInfo) -> Mapping[str, Any]:
    skipped = [record for record in outcome.records if record.status in ("skipped", "oom", "timeout")]
    status, why = "complete", None
    if outcome.interrupted:
        status, why = "interrupted", f"interrupted after {outcome.num_done} of {len(session.plan)} points"
    elif skipped:
        points = len({record.point for record in skipped})
        status, why = "incomplete", f"{points} of {len(session.plan)} points were not measured: {skipped[0].why}"
    measured_s = outcome.measured_s + (info.measured_s or 0.0)  # a run that was resumed adds up
    wall_s = outcome.wall_s + (info.wall_s or 0.0)
    return {
        "status": status,
        "why": why,
        "clocks": outcome.clocks,
        "measured_s": measured_s,
        "wall_s": wall_s,
        "measured_share": measured_s / wall_s if wall_s > 0 else None,
        "notes": (*info.notes, *_disturbances(outcome.records)),
        "late_ranks": late_ranks(read_records(session.folder)[0]),
    }


def _disturbances(records: Sequence[Record]) -> list[str]:
    """Say how many points other processes disturbed to the end."""
    shares = {record.point: record.processor_share for record in records if record.processor_share is not None}
    disturbed = sum(share < MIN_SHARE for share in shares.values())
    if not disturbed:
        return []
    taken = f"more than {1 - MIN_SHARE:.0%} of the processors"
    return [f"{disturbed} of {len(shares)} points were measured while other processes took {taken}"]


def late_ranks(records: Sequence[Record]) -> tuple[LateRank, ...]:
    """Name ranks that came last, by more than the clocks' error, in most of the isolated records."""
    asked = [record for record in records if record.kind == "alone" and record.cadence == "isolated"]
    asked = [record for record in asked if record.mode is None and record.status == "ok" and record.num_samples >= 6]
    found: dict[int, list[float]] = {}
    for record in asked:
        if record.late_rank is not None and record.late_s is not None:
            found.setdefault(record.late_rank, []).append(record.late_s)
    return tuple(
        LateRank(
            rank=rank,
            late_s=sorted(values)[len(values) // 2],
            num_records=len(values),
            share=len(values) / len(asked),
        )
        for rank, values in sorted(found.items())
        if len(values) / len(asked) >= LATE_SHARE
    )
