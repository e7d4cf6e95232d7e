"""A world of known truth, written apart from the code under test, and run folders measured in it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from crosstraffic.patterns.matrix import Chain, Explicit, Ring
from crosstraffic.patterns.step import Block, Step, Task, step_to_dict
from crosstraffic.patterns.stream import MATRIX_OPS, Stream, round_payload, stream_to_dict
from crosstraffic.patterns.wire import steps_by_tier, wire_matrix
from crosstraffic.results.record import Record
from crosstraffic.results.store import Run, RunFolder, load_run

SIZES = tuple(2**power for power in range(6, 25, 2))


def stream(name, op, groups, payload=65536, rule=None):
    return Stream(
        name=name,
        pattern=name.split(".")[0],
        op=op,
        phase="decode",
        groups=groups,
        payload_bytes=payload,
        calls_per_step=1,
        dtype="bfloat16",
        formula="",
        source="",
        rule=rule,
    )


@dataclass
class World:
    """Latency per dependent step and bandwidth per link; every call waits, then transfers at its busiest resource."""

    nodes: tuple[int, ...] = (0, 0, 1, 1)
    latency: tuple[float, float] = (2e-6, 9e-6)
    bandwidth: dict = field(default_factory=lambda: {"intra": 8e9, "inter": 3e9, "nic": 4e9})
    noise: float = 0.0
    knee: Callable[[str, int], float] = lambda name, size: 1.0
    seed: int = 0

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)

    def resources(self, one, size, group):
        """Seconds on each resource, brute force over pairs."""
        ranks = one.groups[group]
        matrix = wire_matrix(one, group, size)
        seconds = {}
        for i, j in itertools.permutations(range(len(ranks)), 2):
            if not matrix[i, j]:
                continue
            a, b = ranks[i], ranks[j]
            keys = [("intra", "out", a), ("intra", "in", b)]
            if self.nodes[a] != self.nodes[b]:
                keys = [("inter", "out", a), ("inter", "in", b)]
                keys += [("nic", "out", self.nodes[a]), ("nic", "in", self.nodes[b])]
            for key in keys:
                seconds[key] = seconds.get(key, 0.0) + matrix[i, j] / self.bandwidth[key[0]]
        return seconds

    def calls(self, one, size):
        """(latency, transfer, loads) of each group."""
        found = []
        for group in range(len(one.groups)):
            steps = steps_by_tier(one.op, one.groups[group], self.nodes)
            factor = self.knee(one.name, size)
            seconds = {key: value * factor for key, value in self.resources(one, size, group).items()}
            longest = max(seconds.values(), default=0.0)
            latency = factor * (steps[0] * self.latency[0] + steps[1] * self.latency[1])
            found.append((latency, longest, {key: value / longest for key, value in seconds.items()}))
        return found

    def alone(self, one, size):
        return self.together([(one, size)], "one_shot")[0]

    def together(self, mix, mode, calls_wanted=14):
        """Advance all groups of all streams in time; sharing by bisection on the common speed."""
        flows = [(index, call) for index, (one, size) in enumerate(mix) for call in self.calls(one, size)]
        state = [["wait", call[0]] for _, call in flows]
        ends = [[] for _ in flows]
        now, running = 0.0, set(range(len(flows)))
        while running:
            speeds = share({f: flows[f][1][2] for f in running if state[f][0] == "move"})
            spans = {f: state[f][1] / speeds.get(f, 1.0) for f in running}
            step = min(spans.values())
            now += step
            for f in sorted(running):
                if spans[f] > step * (1 + 1e-9):
                    state[f][1] -= step * speeds.get(f, 1.0)
                elif state[f][0] == "wait":
                    state[f] = ["move", flows[f][1][1]]
                else:
                    ends[f].append(now)
                    state[f] = ["wait", flows[f][1][0]]
                    if mode == "one_shot":
                        running.discard(f)
            if mode == "steady" and min(map(len, ends)) >= calls_wanted:
                break
        times = []
        for index in range(len(mix)):
            mine = [end for (owner, _), end in zip(flows, ends, strict=True) if owner == index]
            if mode == "one_shot":
                times.append(max(end[0] for end in mine))
            else:
                count = min(map(len, mine))
                times.append(float(np.median(np.diff(np.max([end[:count] for end in mine], axis=0)[1:]))))
        return times

    def seen(self, time_s):
        return time_s * float(np.exp(self.noise * self.random.standard_normal()))


def share(loads):
    """Max-min speeds by bisection on the common level of those not yet held back."""
    fixed = {}
    while len(fixed) < len(loads):
        free = [flow for flow in loads if flow not in fixed]

        def fits(level, free=free):
            total = {}
            for flow, load in loads.items():
                for key, amount in load.items():
                    total[key] = total.get(key, 0.0) + amount * fixed.get(flow, level)
            return all(value <= 1 + 1e-13 for value in total.values())

        low, high = 0.0, 1.0
        if fits(1.0):
            low = 1.0
        else:
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if fits(middle) else (low, middle)
        total = {}
        for flow, load in loads.items():
            for key, amount in load.items():
                total[key] = total.get(key, 0.0) + amount * fixed.get(flow, low)
        full = {key for key, value in total.items() if value >= 1 - 1e-9}
        held = [flow for flow in free if low == 1.0 or full & {key for key, v in loads[flow].items() if v > 0}]
        fixed.update(dict.fromkeys(held, low))
    return fixed


def record(**changes):
    fields = dict.fromkeys(Record.model_fields)
    fields.update(
        schema_version=1, point="p", kind="alone", stream="x", mix=(), repeat=0, status="ok", num_samples=20,
        clock="synchronised", num_warmup_calls=1, num_verified_calls=1, num_disturbed=0,
        started_s=0.0, measured_s=0.0, elapsed_s=0.0,
    )  # fmt: skip
    fields.update(changes)
    return Record(**fields)


def timed(time_s, noise=0.0, **changes):
    width = np.exp(1.96 * noise * 0.3)
    return record(time_median_s=time_s, time_low_s=time_s / width, time_high_s=time_s * width, **changes)


def write_run(path: Path, nodes: Sequence[int], streams, records, steps=(), run_id="r1", aliases=None) -> Run:
    places = [
        {"rank": rank, "host": f"n{node}", "pid": rank, "node": node, "cpus": (), "device": None, "nic": None}
        for rank, node in enumerate(nodes)
    ]
    with RunFolder.create(path, run_id) as folder:
        folder.write_run(
            {
                "run_id": run_id,
                "created": datetime(2026, 1, 1, tzinfo=UTC),
                "crosstraffic": "0",
                "command": ("run",),
                "scenario": {},
                "transport": {"name": "simulated"},
                "world_size": len(nodes),
                "placement": places,
                "streams": [stream_to_dict(one) for one in streams],
                "aliases": aliases or {},
                "steps": [step_to_dict(step) for step in steps],
                "plan": {"num_points": len(records), "seed": 1},
                "status": "complete",
            }
        )
        for one in records:
            folder.append(one)
    return load_run(path)


def default_streams():
    quarter = tuple(tuple(0 if i == j else 16384 for j in range(4)) for i in range(4))
    return (
        stream("tp.all_reduce", "all_reduce", ((0, 1), (2, 3))),
        stream("dp.all_reduce", "all_reduce", ((0, 1, 2, 3),)),
        stream("sp.all_gather", "all_gather", ((0, 2), (1, 3))),
        stream("ep.dispatch", "all_to_all_v", ((0, 1, 2, 3),), 49152, Explicit(bytes=(quarter,))),
        stream("cp.ring", "send_recv", ((0, 2), (1, 3)), 65536, Ring(num_bytes=65536)),
        stream("pp.chain", "send_recv", ((0, 1, 2, 3),), 65536, Chain(num_bytes=65536)),
    )


def alone_records(world: World, streams, sizes=SIZES, cadences=("isolated", "streaming"), repeats=1):
    records = []
    for cadence, repeat, one, size in itertools.product(cadences, range(repeats), streams, sizes):
        payload = size if one.op in MATRIX_OPS else round_payload(one.op, size, one.group_size)
        records.append(
            timed(
                world.seen(world.alone(one, payload)), world.noise, point=f"{one.name}{payload}{cadence}{repeat}",
                stream=one.name, mix=(one.name,), op=one.op, payload_bytes=payload, cadence=cadence, repeat=repeat,
                started_s=float(len(records)),
            )
        )  # fmt: skip
    return records


def mix_records(world: World, mixes, size_of=None, modes=("steady", "one_shot")):
    records = []
    for mode, mix in itertools.product(modes, mixes):
        sized = [(one, one.payload_bytes if size_of is None else size_of[one.name]) for one in mix]
        names = tuple(one.name for one in mix)
        point = f"{'+'.join(names)}{mode}"
        times = [world.seen(time_s) for time_s in world.together(sized, mode)]
        for (one, size), time_s in zip(sized, times, strict=True):
            common = {"stream": one.name, "op": one.op, "payload_bytes": size, "mode": mode}
            records.append(timed(time_s, world.noise, point=point, kind="together", mix=names, **common))
            cadence = "streaming" if mode == "steady" else "isolated"
            alone_s = world.seen(world.alone(one, size))
            records.append(
                timed(alone_s, world.noise, point=f"{point}{one.name}", mix=names, cadence=cadence, baseline_of=point,
                      **common)
            )  # fmt: skip
        if mode == "one_shot":
            records.append(
                timed(max(times), world.noise, point=point, kind="together", stream="*", mix=names, mode=mode)
            )
    return records


def layered_step(num_layers=3):
    return Step(
        name="decode",
        phase="decode",
        lanes=(
            (
                Block(
                    repeat=num_layers,
                    tasks=(
                        Task(stream="tp.all_reduce", payload_bytes=65536),
                        Task(stream="ep.dispatch", payload_bytes=49152),
                    ),
                ),
            ),
        ),
    )


@pytest.fixture(scope="session")
def world():
    return World()


@pytest.fixture(scope="session")
def exact_run(world, tmp_path_factory):
    streams = default_streams()
    records = alone_records(world, streams)
    records += mix_records(world, [*itertools.combinations(streams, 2), streams[1:4], streams[2:5]])
    step = layered_step()
    time_s = 3 * (world.alone(streams[0], 65536) + world.alone(streams[3], 49152))
    records.append(timed(time_s, point="step", kind="step", stream="decode", mix=step.streams))
    return write_run(tmp_path_factory.mktemp("exact") / "run", world.nodes, streams, records, steps=(step,))


@pytest.fixture(scope="session")
def lab():
    """The functions of this file, for tests that build their own worlds."""
    import types

    return types.SimpleNamespace(
        World=World, SIZES=SIZES, stream=stream, streams=default_streams, alone_records=alone_records,
        mix_records=mix_records, write_run=write_run, timed=timed, record=record, layered_step=layered_step,
        share=share,
    )  # fmt: skip
