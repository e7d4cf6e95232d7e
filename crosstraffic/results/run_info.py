"""run.json: what was asked, where it ran, and how the run ended. Field meanings: ``definitions.py``."""

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from crosstraffic.results.record import ClockModel, Place

RUN_SCHEMA_VERSION = 1

RunStatus = Literal["running", "complete", "interrupted", "failed", "incomplete"]


class TransportInfo(BaseModel):
    """Which transport ran, and what it says about itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    details: dict[str, str] = Field(default_factory=dict)


class PlanInfo(BaseModel):
    """What was planned before the first measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_points: int
    seed: int
    budget_s: float | None = None


class LateRank(BaseModel):
    """A rank that often came last by more than the clocks' error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    late_s: float  # median over the records that name the rank
    num_records: int  # records that name the rank
    share: float  # of the records that could name a rank


class RunInfo(BaseModel):
    """The whole of run.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    run_id: str
    created: AwareDatetime  # UTC
    crosstraffic: str  # version
    command: tuple[str, ...]
    scenario: dict[str, Any]  # as resolved
    transport: TransportInfo
    world_size: int
    placement: tuple[Place, ...]
    streams: tuple[dict[str, Any], ...]  # stream_to_dict
    aliases: dict[str, str] = Field(default_factory=dict)  # stream -> the measured stream with the same communication
    real_sizes: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    steps: tuple[dict[str, Any], ...] = ()  # step_to_dict
    plan: PlanInfo
    clocks: tuple[ClockModel, ...] = ()
    definitions: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)  # allow-listed variables only
    versions: dict[str, str] = Field(default_factory=dict)

    status: RunStatus
    why: str | None = None
    started_s: float | None = None  # from ``created`` to the first measurement
    wall_s: float | None = None
    measured_s: float | None = None
    measured_share: float | None = None
    budget_s: float | None = None
    late_ranks: tuple[LateRank, ...] = ()
    notes: tuple[str, ...] = ()
    resumed_at: tuple[int, ...] = ()  # lines that records.jsonl had when the run was taken up again
