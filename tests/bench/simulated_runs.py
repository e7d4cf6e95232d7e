"""Whole runs over the simulated transport, for the tests of this folder: a scenario, a known truth, a run folder."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstraffic.bench.conduct import RankHeart
from crosstraffic.bench.plan import make_plan
from crosstraffic.bench.resolve import Scenario, resolve
from crosstraffic.bench.scenario import ScenarioFile
from crosstraffic.bench.session import begin, run_rank, take_up
from crosstraffic.bench.simulated import SimulatedTransport, SimulatedWorld, run_simulated
from crosstraffic.bench.simulated_truth import SimulatedTruth, Tier
from crosstraffic.results.record import Place
from crosstraffic.results.store import Run, load_run

INTRA, INTER = (2e-6, 20e9), (6e-6, 5e9)

STREAMS: tuple[dict[str, Any], ...] = (
    {"name": "reduce", "op": "all_reduce", "payload": 2**20},
    {"name": "exchange", "op": "all_to_all", "payload": 2**19},
    {"name": "ring", "op": "send_recv", "payload": 2**21, "matrix": "ring"},
    {"name": "pairs", "op": "all_gather", "payload": 2**18, "groups": [[0, 1], [2, 3]]},
)


def truth_of(**changes: Any) -> SimulatedTruth:
    """Two ranks a node, without noise."""
    values: dict[str, Any] = {
        "ranks_per_node": 2,
        "intra": Tier(latency_s=INTRA[0], bandwidth_bytes_per_s=INTRA[1]),
        "inter": Tier(latency_s=INTER[0], bandwidth_bytes_per_s=INTER[1]),
    }
    return SimulatedTruth(**{**values, **changes})


def file_of(streams: Sequence[Mapping[str, Any]] = STREAMS, **measure: Any) -> ScenarioFile:
    return ScenarioFile.model_validate({"name": "test", "stream": list(streams), "measure": measure})


def scenario_of(streams: Sequence[Mapping[str, Any]] = STREAMS, num_ranks: int = 4, **measure: Any) -> Scenario:
    return resolve(file_of(streams, **measure), num_ranks)


def toml_of(
    streams: Sequence[Mapping[str, Any]] = STREAMS, simulated: str = "", name: str = "test", **measure: Any
) -> str:
    """Write a scenario file; ``simulated`` are further lines of its simulated world."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, Mapping):
            return "{ " + ", ".join(f"{key} = {text(item)}" for key, item in value.items()) + " }"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(text, value)) + "]"
        return f'"{value}"' if isinstance(value, str) else repr(value)

    lines = [f'name = "{name}"']
    for stream in streams:
        lines += ["[[stream]]", *(f"{key} = {text(value)}" for key, value in stream.items())]
    lines += ["[measure]", *(f"{key} = {text(value)}" for key, value in measure.items())]
    lines += ["[simulated]", "ranks_per_node = 2"]
    for tier, (latency_s, rate) in (("intra", INTRA), ("inter", INTER)):
        lines.append(f"{tier} = {{ latency_s = {latency_s}, bandwidth_bytes_per_s = {rate} }}")
    return "\n".join([*lines, simulated, ""])


def run_in(world: SimulatedWorld, scenario: Scenario, folder: Path) -> Run:
    """Measure a scenario in a world, as ``crosstraffic run`` does; return what it left in the folder."""
    begin(scenario, make_plan(scenario), transport_name="simulated", folder=folder, command=["test"], resume=False)
    session, stop = take_up(folder), threading.Event()
    places = [
        Place(rank=rank, host=f"n{node}", pid=rank, node=node, cpus=(), device=None, nic=None)
        for rank, node in enumerate(map(world.truth.node, range(world.num_ranks)))
    ]

    def body(transport: SimulatedTransport) -> None:
        run_rank(session, transport, RankHeart(lambda *_: None, stop), known=places)

    run_simulated(world, body)
    return load_run(folder)
