"""Turn what was measured at a point into records and raw samples. Rank 0 only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from crosstraffic.bench.alone import Sample
from crosstraffic.bench.context import RankContext
from crosstraffic.bench.plan import Point
from crosstraffic.bench.replay import MAX_REPLAYS, StepSample
from crosstraffic.bench.times import late_rank
from crosstraffic.bench.together import MixSample
from crosstraffic.bench.transport import Floats
from crosstraffic.patterns.stream import MATRIX_OPS, Stream
from crosstraffic.patterns.wire import busbw_factor, traffic
from crosstraffic.results.record import Mismatch, Record, Status
from crosstraffic.results.statistics import summarise
from crosstraffic.results.store import RunFolder

_TRAFFIC_FIELDS = (
    "logical_bytes",
    "self_bytes",
    "intra_node_bytes",
    "inter_node_bytes",
    "max_egress_bytes",
    "max_ingress_bytes",
    "max_node_egress_bytes",
    "max_node_ingress_bytes",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "bottleneck_bytes_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a point was measured, s since the start of the run, and the error of the clocks then."""

    started_s: float
    elapsed_s: float
    clock_error_s: float


def alone_records(
    context: RankContext, point: Point, sample: Sample, span: Span, first_s: float | None
) -> list[Record]:
    """Return the one record of a stream alone."""
    name, size = point.streams[0]
    late = late_rank(sample.starts, span.clock_error_s) if point.cadence == "isolated" else None
    return [
        _record(
            context,
            point,
            span,
            stream=context.stream(name),
            payload_bytes=size,
            times=sample.times,
            local=sample.local,
            dependent=point.cadence == "streaming",
            mismatch=sample.mismatch,
            first_call_s=first_s,
            num_warmup_calls=sample.num_warmup,
            stopped_by=sample.stopped_by,
            num_verified_calls=sample.num_verified,
            late_rank=None if late is None else late.rank,
            late_s=None if late is None else late.late_s,
            late_share=None if late is None else late.share,
            measured_s=_inside_calls(sample.starts, sample.ends),
        )
    ]


def mix_records(context: RankContext, point: Point, sample: MixSample, span: Span) -> list[Record]:
    """Return a record for each stream of a mix and for its interleaved alone calls, and one for a whole one-shot."""
    records = []
    share = Span(
        started_s=span.started_s,
        elapsed_s=span.elapsed_s / max(2 * len(point.streams), 1),
        clock_error_s=span.clock_error_s,
    )
    steady = point.mode == "steady"
    for (name, size), part in zip(point.streams, sample.parts, strict=True):
        stream = context.stream(name)
        alone, together = _join(part.alone_times), _join(part.times)
        wrong, wrong_alone = sample.together.mismatches.get(name), sample.alone.mismatches.get(name)
        slowdown = None
        if len(alone) and len(together) and sample.invalid is None and wrong is None and wrong_alone is None:
            slowdown = float(np.median(together) / np.median(alone))
        records.append(
            _record(
                context,
                point,
                share,
                stream=stream,
                payload_bytes=size,
                times=together,
                local=_join(part.local),
                mismatch=wrong,
                invalid=sample.invalid,
                overlap_fraction=sample.overlap_fraction,
                slowdown=slowdown,
                num_verified_calls=sample.together.num_verified.get(name, 0),
                dependent=steady,
                measured_s=_busy(part.starts, part.ends),
            )
        )
        if not len(alone):
            continue
        records.append(
            _record(
                context,
                point,
                share,
                stream=stream,
                payload_bytes=size,
                times=alone,
                local=_join(part.alone_local),
                kind="alone",
                mix=(name,),
                cadence="streaming" if steady else "isolated",
                baseline_of=point.key,
                mismatch=wrong_alone,
                num_verified_calls=sample.alone.num_verified.get(name, 0),
                dependent=steady,
                measured_s=_busy(part.alone_starts, part.alone_ends),
            )
        )
    if not steady:
        records.append(
            _record(
                context,
                point,
                share,
                stream=None,
                payload_bytes=None,
                times=sample.whole,
                local=np.empty(0),
                mismatch=next(iter(sample.together.mismatches.values()), None),
                invalid=sample.invalid,
                overlap_fraction=sample.overlap_fraction,
                num_verified_calls=0,  # counted with the streams
                dependent=False,
                measured_s=0.0,
            )
        )
    return records


def step_records(context: RankContext, point: Point, sample: StepSample, span: Span) -> list[Record]:
    """Return the one record of a whole step."""
    return [
        _record(
            context,
            point,
            span,
            stream=None,
            payload_bytes=None,
            name=point.step,
            times=sample.times,
            local=sample.local,
            dependent=False,
            mismatch=sample.mismatch,
            num_verified_calls=sample.num_verified,
            num_warmup_calls=1,
            stopped_by="calls" if len(sample.times) >= MAX_REPLAYS else "time",
            measured_s=float(np.nansum(sample.times)),
        )
    ]


def failed_records(context: RankContext, point: Point, status: Status, why: str, started_s: float) -> list[Record]:
    """Return records that say why a point has no numbers."""
    span = Span(started_s=started_s, elapsed_s=0.0, clock_error_s=0.0)
    streams: Sequence[tuple[str | None, int | None]] = [(None, None)] if point.kind == "step" else point.streams
    return [
        _record(
            context,
            point,
            span,
            stream=None if name is None else context.stream(name),
            payload_bytes=size,
            name=point.step,
            times=np.empty(0),
            local=np.empty(0),
            dependent=False,
            mismatch=None,
            failure=(status, why),
            measured_s=0.0,
        )
        for name, size in streams
    ]


def first_call_record(context: RankContext, point: Point, mismatch: Mismatch) -> Record:
    """Return a record that says that the very first call of a stream, made before its points, brought wrong bytes."""
    name, size = next(found for found in point.streams if found[0] == mismatch.stream)
    return _record(
        context,
        point,
        Span(started_s=0.0, elapsed_s=0.0, clock_error_s=0.0),
        stream=context.stream(name),
        payload_bytes=size,
        times=np.empty(0),
        local=np.empty(0),
        dependent=False,
        mismatch=mismatch,
        num_verified_calls=1,
        measured_s=0.0,
    )


def keep_samples(folder: RunFolder, point: Point, sample: Sample | MixSample | StepSample) -> str:
    """Write the raw clock readings of a point; return the path for its records.

    ``batch`` tells which calls were made in one go: no interval between calls of two batches is a sample.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    if isinstance(sample, MixSample):
        for (name, _), part in zip(point.streams, sample.parts, strict=True):
            for label, values in (
                ("start", part.starts),
                ("end", part.ends),
                ("alone.start", part.alone_starts),
                ("alone.end", part.alone_ends),
            ):
                if values:
                    arrays[f"{name}.{label}"] = np.concatenate(values)
            for label, values in (("batch", part.starts), ("alone.batch", part.alone_starts)):
                arrays[f"{name}.{label}"] = np.repeat(np.arange(len(values)), [len(calls) for calls in values])
    else:
        name = point.step or point.streams[0][0]
        arrays = {f"{name}.start": sample.starts, f"{name}.end": sample.ends}
        if isinstance(sample, Sample):
            arrays[f"{name}.batch"] = sample.batch
    return folder.write_samples(point.key, arrays)


def measured_s(sample: Sample | MixSample | StepSample) -> float:
    """Wall time of a point spent inside calls that were kept, s: calls that ran at the same time count once."""
    if isinstance(sample, Sample):
        return _inside_calls(sample.starts, sample.ends)
    if isinstance(sample, StepSample):
        return float(sample.times.sum())
    return sample.together_s + sum(_busy(part.alone_starts, part.alone_ends) for part in sample.parts)


def _join(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0)


def _inside_calls(starts: Floats, ends: Floats) -> float:
    """Time inside the kept calls on the rank that spent most in them, s."""
    return float(np.nansum(ends - starts, axis=0).max()) if len(starts) else 0.0


def _busy(starts: Sequence[Floats], ends: Sequence[Floats]) -> float:
    return sum(_inside_calls(start, end) for start, end in zip(starts, ends, strict=True))


def _record(
    context: RankContext,
    point: Point,
    span: Span,
    *,
    stream: Stream | None,
    payload_bytes: int | None,
    times: Floats,
    local: Floats,
    dependent: bool,
    mismatch: Mismatch | None,
    measured_s: float,
    kind: Literal["alone", "together", "step"] | None = None,
    name: str | None = None,
    mix: tuple[str, ...] | None = None,
    cadence: Literal["isolated", "streaming"] | None = None,
    invalid: str | None = None,
    failure: tuple[Status, str] | None = None,
    **fields: Any,
) -> Record:
    summary = summarise(times, dependent=dependent)
    status: Status = "ok"
    why = None
    if failure is not None:
        status, why = failure
    elif mismatch is not None:
        status = "wrong_data"
        why = (
            f"stream {mismatch.stream}: rank {mismatch.rank} received wrong bytes"
            f"{'' if mismatch.peer is None else f' from rank {mismatch.peer}'} at offset {mismatch.offset_bytes}: "
            f"expected {mismatch.expected}, found {mismatch.found} ({mismatch.num_wrong_bytes} bytes wrong)"
        )
    elif invalid is not None:
        status, why = "invalid", invalid
    elif not summary.num_samples:
        status, why = "invalid", "no call was kept"
    kind = kind or point.kind
    values: dict[str, Any] = {
        "point": point.key,
        "kind": kind,
        "stream": stream.name if stream is not None else name or "*",
        "mix": mix or tuple(found for found, _ in point.streams),
        "repeat": point.repeat,
        "pattern": None,
        "op": None,
        "group_size": None,
        "num_groups": None,
        "payload_bytes": payload_bytes,
        "cadence": cadence or point.cadence,
        "mode": point.mode,
        "baseline_of": None,
        "status": status,
        "why": why,
        "num_samples": summary.num_samples,
        "time_median_s": summary.median_s,
        "time_low_s": summary.low_s,
        "time_high_s": summary.high_s,
        "time_mean_s": summary.mean_s,
        "time_p05_s": summary.p05_s,
        "time_p95_s": summary.p95_s,
        "time_p99_s": summary.p99_s,
        "local_median_s": float(np.median(local)) if len(local) else None,
        "clock": "synchronised",
        "clock_error_s": span.clock_error_s,
        "overlap_fraction": None,
        "slowdown": None,
        "first_call_s": None,
        "num_warmup_calls": 0,
        "stopped_by": None,
        "num_verified_calls": 0,
        "mismatch": mismatch,
        "late_rank": None,
        "late_s": None,
        "late_share": None,
        "processor_share": None,
        "num_disturbed": 0,
        "started_s": span.started_s,
        "measured_s": measured_s,
        "elapsed_s": span.elapsed_s,
        "samples": None,
        **_traffic_fields(context, stream, payload_bytes, summary.median_s),
        **fields,
    }
    return Record(**values)


def _traffic_fields(
    context: RankContext, stream: Stream | None, payload_bytes: int | None, median_s: float | None
) -> dict[str, Any]:
    fields: dict[str, Any] = dict.fromkeys(_TRAFFIC_FIELDS)
    if stream is None or payload_bytes is None:
        return fields
    load = traffic(stream, context.nodes, payload_bytes)
    fields |= {
        "pattern": stream.pattern,
        "op": stream.op,
        "group_size": stream.group_size,
        "num_groups": len(stream.groups),
        "logical_bytes": load.logical_bytes,
        "self_bytes": load.self_bytes,
        "intra_node_bytes": load.intra_node_bytes,
        "inter_node_bytes": load.inter_node_bytes,
        "max_egress_bytes": max(load.egress_bytes.values(), default=0),
        "max_ingress_bytes": max(load.ingress_bytes.values(), default=0),
        "max_node_egress_bytes": max(load.node_egress_bytes.values(), default=0),
        "max_node_ingress_bytes": max(load.node_ingress_bytes.values(), default=0),
    }
    if median_s is not None and median_s > 0:
        rate = payload_bytes / median_s
        fields["algbw_bytes_per_s"] = rate
        if stream.op not in MATRIX_OPS:
            fields["busbw_bytes_per_s"] = rate * busbw_factor(stream.op, stream.group_size)
        fields["bottleneck_bytes_per_s"] = load.bottleneck_bytes / median_s
    return fields
