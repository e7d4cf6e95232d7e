"""A made-up run folder of the default scenario's shape, for tests and for looking at the report.

Its numbers come from a formula (round latencies and bandwidths, seeded noise), not from any machine.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crosstraffic.patterns.matrix import Chain, Explicit, Ring
from crosstraffic.patterns.step import Block, Step, Task, step_to_dict
from crosstraffic.patterns.stream import Stream, stream_to_dict
from crosstraffic.patterns.wire import busbw_factor, num_steps, traffic
from crosstraffic.results.definitions import definitions_block
from crosstraffic.results.record import Record
from crosstraffic.results.statistics import summarise
from crosstraffic.results.store import Run, RunFolder

LATENCY_S = 4e-6
BANDWIDTH_BYTES_PER_S = 5e9


def run_dict(run_id: str = "r1", **changes: Any) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "created": "2025-01-02T03:04:05Z",
        "crosstraffic": "0",
        "command": ["crosstraffic", "run"],
        "scenario": {},
        "transport": {"name": "simulated"},
        "world_size": 1,
        "placement": [{"rank": 0, "host": "h", "pid": 1, "node": 0, "cpus": [0], "device": None, "nic": None}],
        "streams": [],
        "plan": {"num_points": 1, "seed": 0},
        "status": "running",
        **changes,
    }


def a_record(**changes: Any) -> Record:
    absent = {
        name: None for name, field in Record.model_fields.items() if field.is_required() and field.default is not None
    }
    return Record.model_validate(
        {
            **absent,
            "schema_version": 1,
            "point": "p",
            "kind": "alone",
            "stream": "s",
            "mix": ["s"],
            "repeat": 0,
            "status": "ok",
            "num_samples": 3,
            "clock": "local",
            "num_warmup_calls": 0,
            "num_verified_calls": 0,
            "started_s": 0.0,
            "measured_s": 0.1,
            "elapsed_s": 0.2,
            **changes,
        }
    )


def streams(num_ranks: int = 4) -> tuple[Stream, ...]:
    """Return eight streams on four ranks (or their one-rank shadows)."""
    everyone = tuple(range(num_ranks))
    pairs = ((0, 1), (2, 3)) if num_ranks == 4 else (everyone,)
    across = ((0, 2), (1, 3)) if num_ranks == 4 else (everyone,)
    cells = np.array([[60, 40, 50, 50], [90, 30, 40, 60], [45, 55, 70, 30], [80, 60, 40, 40]]) * 4096
    routed = Explicit(bytes=(tuple(tuple(int(c) for c in row) for row in cells[:num_ranks, :num_ranks]),))
    back = Explicit(bytes=(tuple(tuple(int(c) for c in row) for row in cells.T[:num_ranks, :num_ranks]),))
    kv = np.zeros((num_ranks, num_ranks), dtype=int)
    for source, target in itertools.product(range(num_ranks // 2), range(num_ranks // 2, num_ranks)):
        kv[source, target] = 3 * 2**20
    handoff = Explicit(bytes=(tuple(tuple(int(c) for c in row) for row in kv),))

    def make(name: str, op: Any, groups: Any, size: int, phase: Any = "prefill", rule: Any = None) -> Stream:
        return Stream(
            name=name,
            pattern=name.split(".")[0],
            op=op,
            phase=phase,
            groups=groups,
            payload_bytes=size,
            calls_per_step=48,
            dtype="bfloat16",
            formula="made up",
            source="tests/results/synthetic.py",
            rule=rule,
        )

    most = int(cells[:num_ranks, :num_ranks].sum(axis=1).max())
    return (
        make("sp.all_gather", "all_gather", pairs, 2**20),
        make("sp.reduce_scatter", "reduce_scatter", pairs, 2**20),
        make("cp.ring_kv", "send_recv", across, 2**18, rule=Ring(num_bytes=2**18)),
        make("ep.dispatch", "all_to_all_v", (everyone,), most, rule=routed),
        make(
            "ep.combine", "all_to_all_v", (everyone,), int(cells.T[:num_ranks, :num_ranks].sum(axis=1).max()), rule=back
        ),
        make("tp.attention_output", "all_reduce", pairs, 2**18, "decode"),
        make("pp.activations", "send_recv", across, 2**18, "decode", rule=Chain(num_bytes=2**18)),
        make("pd.kv", "kv_transfer", (everyone,), int(kv.sum(axis=1).max()), "handoff", rule=handoff),
    )


def steps() -> tuple[Step, ...]:
    """Return one prefill, decode and handoff step."""
    layer = ("sp.all_gather", "cp.ring_kv", "sp.reduce_scatter", "ep.dispatch", "ep.combine")
    sizes = {stream.name: stream.payload_bytes for stream in streams()}

    def block(repeat: int, *names: str) -> Block:
        return Block(repeat=repeat, tasks=tuple(Task(stream=name, payload_bytes=sizes[name]) for name in names))

    decode = (block(24, "tp.attention_output", "tp.attention_output"), block(1, "pp.activations"))
    return (
        Step(name="prefill", phase="prefill", lanes=((block(48, *layer),),)),
        Step(name="decode", phase="decode", lanes=(decode,)),
        Step(name="handoff", phase="handoff", lanes=((block(4, "pd.kv"),), decode)),
    )


def true_time_s(stream: Stream, size: int, cadence: str) -> float:
    """Return the formula's time of a call, s."""
    nodes = [0] * 8
    latency = LATENCY_S * max(num_steps(stream.op, stream.group_size), 1) * (1.0 if cadence == "isolated" else 0.6)
    return latency + traffic(stream, nodes, size).bottleneck_bytes / BANDWIDTH_BYTES_PER_S


def slowdown_of(stream: str, other: str) -> float:
    """Return how much ``other`` slows ``stream`` down, by formula: the transfer hurts most and feels least."""
    hurt = {"pd": 4.0, "ep": 1.9, "sp": 1.6, "cp": 1.5, "tp": 1.4, "pp": 1.15}
    felt = {"pd": 0.12, "ep": 1.0, "sp": 0.8, "cp": 0.6, "tp": 1.1, "pp": 0.7}
    return 1 + (hurt[other.split(".")[0]] - 1) * felt[stream.split(".")[0]]


def make_run(
    path: Path,
    *,
    num_ranks: int = 4,
    pairs: bool = True,
    with_steps: bool = True,
    status: str = "complete",
    host: str = "synthetic-host",
    rename: dict[str, str] | None = None,
    num_sizes: int = 13,
    **changes: Any,
) -> Path:
    """Write a run folder; return its path."""
    rng = np.random.default_rng(1)
    mine = streams(num_ranks)
    nodes = [0] * num_ranks
    renamed = rename or {}
    clock_s = itertools.count()

    def measured(about: Stream | None, true_s: float, n: int, **fields: Any) -> Record:
        times = true_s * rng.lognormal(0, 0.06, n) * (1 + (rng.random(n) < 0.04) * rng.random(n))
        short = summarise(times)
        bytes_of: dict[str, Any] = {}
        if about is not None:
            size = fields["payload_bytes"]
            load = traffic(about, nodes, size)
            rate = None if about.rule is not None else size / (short.median_s or 1)
            bytes_of = {
                "pattern": about.pattern,
                "op": about.op,
                "group_size": about.group_size,
                "num_groups": len(about.groups),
                "logical_bytes": load.logical_bytes,
                "self_bytes": load.self_bytes,
                "intra_node_bytes": load.intra_node_bytes,
                "inter_node_bytes": load.inter_node_bytes,
                "max_egress_bytes": max(load.egress_bytes.values(), default=0),
                "max_ingress_bytes": max(load.ingress_bytes.values(), default=0),
                "algbw_bytes_per_s": rate,
                "busbw_bytes_per_s": None if rate is None else rate * busbw_factor(about.op, about.group_size),
                "bottleneck_bytes_per_s": load.bottleneck_bytes / (short.median_s or 1),
                "stream": renamed.get(about.name, about.name),
            }
        return a_record(
            num_samples=n,
            time_median_s=short.median_s,
            time_low_s=short.low_s,
            time_high_s=short.high_s,
            time_mean_s=short.mean_s,
            time_p05_s=short.p05_s,
            time_p95_s=short.p95_s,
            time_p99_s=short.p99_s,
            local_median_s=(short.median_s or 0) * 0.98,
            clock="synchronised",
            clock_error_s=3e-7,
            num_verified_calls=2,
            num_warmup_calls=3,
            stopped_by="interval",
            started_s=0.1 * next(clock_s),
            measured_s=float(times.sum()),
            elapsed_s=float(times.sum()) * 1.4,
            **(fields | bytes_of),
        )

    records = []
    for stream, cadence in itertools.product(mine, ("isolated", "streaming")):
        if not stream.payload_bytes:
            continue
        sizes = sorted({int(size) for size in np.geomspace(64, 2**24, num_sizes)} | {stream.payload_bytes})
        for size, repeat in itertools.product(sizes, (0, 1)):
            if repeat and size != stream.payload_bytes:
                continue
            key = f"alone-{stream.name}-{size}-{cadence}-{repeat}"
            true_s = true_time_s(stream, size, cadence)
            fields = {"point": key, "kind": "alone", "mix": (renamed.get(stream.name, stream.name),)}
            fields |= {"payload_bytes": size, "cadence": cadence, "repeat": repeat}
            first = true_s * 30 if size == stream.payload_bytes and not repeat else None
            records.append(measured(stream, true_s, int(rng.integers(30, 200)), first_call_s=first, **fields))
    mixes = [*itertools.combinations(mine, 2), (mine[0], mine[3], mine[7])] if pairs and num_ranks > 1 else []
    for mix, mode in itertools.product(mixes, ("steady", "one_shot")):
        key = f"{mode}-{'-'.join(stream.name for stream in mix)}"
        names = tuple(renamed.get(stream.name, stream.name) for stream in mix)
        broken = names[0] == "cp.ring_kv" and names[1] == "pp.activations" and mode == "one_shot"
        for stream in mix:
            cadence = "streaming" if mode == "steady" else "isolated"
            true_s = true_time_s(stream, stream.payload_bytes, cadence)
            slow = float(np.prod([slowdown_of(stream.name, other.name) for other in mix if other is not stream]))
            slow = slow if mode == "steady" else 1 + 0.6 * (slow - 1)
            size = {"payload_bytes": stream.payload_bytes, "mode": mode, "point": key}
            own = renamed.get(stream.name, stream.name)
            alone = measured(stream, true_s, 40, kind="alone", mix=(own,), cadence=cadence, baseline_of=key, **size)
            fields = {"kind": "together", "mix": names, "overlap_fraction": 0.7 if broken else 0.97}
            if broken:
                fields |= {"status": "invalid", "why": "streams overlapped 70% of the time, at least 90% is needed"}
            together = measured(stream, true_s * slow, 40, **fields, **size)
            ratio = (together.time_median_s or 1) / (alone.time_median_s or 1)
            records += [together.model_copy(update={"slowdown": None if broken else ratio}), alone]
    measured_steps = steps() if with_steps and num_ranks == 4 else ()
    by_name = {stream.name: stream for stream in mine}
    for step in measured_steps:
        lanes = [
            sum(true_time_s(by_name[t.stream], t.payload_bytes, "streaming") for t in step.tasks(lane))
            for lane in range(len(step.lanes))
        ]
        names = tuple(renamed.get(name, name) for name in step.streams)
        records.append(
            measured(None, 1.12 * max(lanes), 30, point=f"step-{step.name}", kind="step", stream=step.name, mix=names)
        )
    info = run_dict(
        "synthetic",
        crosstraffic="0.0.0",
        command=["crosstraffic", "run", "default-4", "--transport", "simulated"],
        scenario={"name": "default-4", "model": "Qwen3-30B-A3B", "prefill": {"layout": "tp=2,cp=2,ep=4"}}
        | {"decode": {"layout": "tp=2,pp=2"}, "handoff": {"prefill_layout": "dp=2", "decode_layout": "tp=2"}},
        transport={"name": "simulated", "details": {"latency": "4 us", "bandwidth": "5 GB/s"}},
        world_size=num_ranks,
        placement=[
            {"rank": r, "host": host, "pid": 100 + r, "node": 0, "cpus": [r % 2], "device": None, "nic": None}
            for r in range(num_ranks)
        ],
        streams=[stream_to_dict(s) | {"name": renamed.get(s.name, s.name)} for s in mine],
        aliases={"tp.mlp_output": "tp.attention_output"},
        real_sizes={renamed.get(s.name, s.name): [s.payload_bytes] for s in mine},
        steps=[
            step_to_dict(
                replace(
                    step,
                    lanes=tuple(
                        tuple(
                            replace(b, tasks=tuple(replace(t, stream=renamed.get(t.stream, t.stream)) for t in b.tasks))
                            for b in lane
                        )
                        for lane in step.lanes
                    ),
                )
            )
            for step in measured_steps
        ],
        plan={"num_points": len({record.point for record in records}), "seed": 1, "budget_s": 110.0},
        clocks=[
            {"rank": r, "offset_s": 0.005 * r, "drift": 1e-7 * r, "at_s": 1.0, "error_s": 3e-7}
            for r in range(num_ranks)
        ],
        definitions=definitions_block(),
        environment={"OMP_NUM_THREADS": "1"},
        versions={"python": "3.11", "numpy": "2.0", "kernel": "Linux 6.1"},
        status=status,
        why=None if status == "complete" else "interrupted by the user",
        wall_s=104.2,
        measured_s=66.1,
        measured_share=0.634,
        budget_s=110.0,
    )
    with RunFolder.create(path, "synthetic") as folder:
        folder.write_run(info | changes)
        for record in records:
            folder.append(record)
    return path


def predictions(run: Run) -> pd.DataFrame:
    """Return made-up predictions of a run's records: right within a few percent."""
    rng = np.random.default_rng(2)
    frame = run.frame[(run.frame["status"] == "ok") & run.frame["baseline_of"].isna()]
    measured_s = frame["time_median_s"].to_numpy()
    spread = np.where(frame["kind"] == "alone", 0.05, np.where(frame["kind"] == "together", 0.12, 0.1))
    predicted_s = measured_s * np.exp(rng.normal(0, 1, len(frame)) * spread)
    real = frame["mix"].map(len).to_numpy() > 2
    held = real | (frame["kind"] == "step").to_numpy() | (np.arange(len(frame)) % 2 == 1)
    keep = frame[["kind", "stream", "mix", "payload_bytes", "cadence", "mode"]].copy()
    keep["step"] = frame["stream"].where(frame["kind"] == "step")
    return keep.assign(
        measured_s=measured_s,
        predicted_s=predicted_s,
        low_s=predicted_s * np.exp(-1.7 * spread),
        high_s=predicted_s * np.exp(1.7 * spread),
        held_out=held,
    )


def curves(run: Run) -> pd.DataFrame:
    """Return the formula as fitted curves."""
    rows = []
    for stream, cadence in itertools.product((s for s in run.streams if s.payload_bytes), ("isolated", "streaming")):
        for size in np.geomspace(64, 2**24, 60).astype(int).tolist():
            time_s = true_time_s(stream, size, cadence)
            rows.append((stream.name, cadence, size, time_s, time_s * 0.88, time_s * 1.13))
    return pd.DataFrame(rows, columns=["stream", "cadence", "payload_bytes", "predicted_s", "low_s", "high_s"])


def validation() -> dict[str, Any]:
    """Return a made-up validation in the shape of ``validate --json``."""

    def row(median: float, p90: float, coverage: float, num_points: int = 214) -> dict[str, Any]:
        return {"median_ape": median, "p90_ape": p90, "coverage_90": coverage, "num_points": num_points}

    return {
        "hold_out": "every other size; all triples; whole steps",
        "noise": {"median_ape": 0.031, "p90_ape": 0.094},
        "models": {"ours": row(0.052, 0.148, 0.91), "alpha_beta": row(0.127, 0.41, 0.62)}
        | {"linear": row(0.38, 1.9, 0.31), "loglog": row(0.081, 0.22, 0.87)},
        "kinds": {
            "sizes": {"models": {"ours": row(0.052, 0.148, 0.91)}, "in_sample": False},
            "pairs": {"models": {"ours": row(0.04, 0.1, 0.95)}, "in_sample": True},
            "triples": {"models": {"ours": row(0.061, 0.12, 0.95)}, "in_sample": False},
            "steps": {"models": {"ours": row(0.083, 0.12, 0.95)}, "in_sample": False},
        },
        "by_op": {"all_reduce": row(0.04, 0.1, 0.93, 40), "all_to_all_v": row(0.06, 0.17, 0.9, 80)},
        "by_size": {"under 4 KiB": row(0.05, 0.14, 0.9, 70), "4 KiB to 1 MiB": row(0.05, 0.15, 0.92, 80)},
    }
