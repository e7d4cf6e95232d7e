"""The record: one measured point of one stream, as one line of records.jsonl. Field meanings: ``definitions.py``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1

Kind = Literal["alone", "together", "step"]
Cadence = Literal["isolated", "streaming"]
Mode = Literal["steady", "one_shot"]
Status = Literal["ok", "invalid", "timeout", "oom", "skipped", "wrong_data"]


class Mismatch(BaseModel):
    """The first wrong byte that the check of a payload found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    peer: int | None  # the rank whose bytes are wrong; None where every rank contributes to each byte (all_reduce)
    offset_bytes: int  # within the block of that peer
    expected: int
    found: int
    num_wrong_bytes: int
    call: int  # index of the call within the point
    stream: str


class Record(BaseModel):
    """What was seen of one stream (or one whole step) at one point. Absent numbers are None, with ``why``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    point: str  # hash of what defines the point: kind, streams, sizes, cadence, mode, repeat, seed
    kind: Kind
    stream: str  # stream name; the step's name for kind "step"; "*" for all streams of a one-shot mix as a whole
    mix: tuple[str, ...]  # names of the streams that ran at the same time, this one included
    repeat: int  # 0 for the first visit of a point, 1, 2, ... for later ones in the same run
    pattern: str | None
    op: str | None
    group_size: int | None
    num_groups: int | None
    payload_bytes: int | None
    cadence: Cadence | None  # alone and step records
    mode: Mode | None  # together records, and the alone records interleaved with them
    baseline_of: str | None  # for an alone record interleaved with a mix: the mix point's hash
    status: Status
    why: str | None

    num_samples: int
    time_median_s: float | None
    time_low_s: float | None  # distribution-free 95 % interval of the median
    time_high_s: float | None
    time_mean_s: float | None
    time_p05_s: float | None
    time_p95_s: float | None
    time_p99_s: float | None  # None under 100 samples
    local_median_s: float | None  # median over calls of the largest local time of a rank
    clock: Literal["synchronised", "local"]  # which time the time_* fields hold
    clock_error_s: float | None

    logical_bytes: int | None
    self_bytes: int | None
    intra_node_bytes: int | None
    inter_node_bytes: int | None
    max_egress_bytes: int | None
    max_ingress_bytes: int | None
    max_node_egress_bytes: int | None
    max_node_ingress_bytes: int | None
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    bottleneck_bytes_per_s: float | None

    overlap_fraction: float | None
    slowdown: float | None  # time together / time alone of the interleaved baseline
    first_call_s: float | None
    num_warmup_calls: int
    stopped_by: Literal["interval", "time", "calls", "interrupted"] | None
    num_verified_calls: int
    mismatch: Mismatch | None
    late_rank: int | None  # the rank that most often came last, where that is more than the clocks' error
    late_s: float | None  # median lateness of that rank
    late_share: float | None  # share of calls in which that rank came last

    processor_share: float | None = None  # of the processors' time that the ranks had; None where ranks do not poll
    num_disturbed: int = 0  # earlier attempts that were thrown away because other processes took the processors

    started_s: float  # since the start of the run
    measured_s: float  # time inside the calls that were kept, on the slowest rank
    elapsed_s: float  # time the whole point took
    samples: str | None  # path of the raw samples, relative to the run folder


class Place(BaseModel):
    """Where one rank ran."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    host: str
    pid: int
    node: int  # index of the host among the hosts of the run, in order of first rank
    cpus: tuple[int, ...]
    device: str | None
    nic: str | None
    nic_how: str | None = None
    gpus: tuple[str, ...] = ()
    machine: str | None = None  # hash of what tells running kernels apart


class ClockModel(BaseModel):
    """One rank's clock against rank 0's: remote = local + offset_s + drift * (local - at_s)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    offset_s: float
    drift: float
    at_s: float
    error_s: float
