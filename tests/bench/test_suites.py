"""Suite links: the streams it makes, what it refuses, and whole runs of it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import run_in, truth_of
from typer.testing import CliRunner, Result

from crosstraffic.bench.plan import make_plan
from crosstraffic.bench.resolve import Scenario, resolve
from crosstraffic.bench.scenario import MeasureSpec, ScenarioFile
from crosstraffic.bench.simulated import SimulatedWorld
from crosstraffic.bench.simulated_truth import Tier, truth_to_dict
from crosstraffic.bench.suites import FAN, LATENCY_BYTES, MAX_FULL_FAN, end_points, links_scenario
from crosstraffic.cli import app
from crosstraffic.errors import UsageError
from crosstraffic.results.links import Links, links_of
from crosstraffic.results.links_verdict import Verdict, verdict
from crosstraffic.results.report import render

PAYLOAD = 2**20


def resolved(nodes: list[int], base: ScenarioFile | None = None) -> Scenario:
    return resolve(links_scenario(nodes, payload_bytes=PAYLOAD, base=base), len(nodes))


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [([0, 0, 1, 1, 2], (0, 2, 4)), ([0, 1, 0, 1], (0, 1)), ([0, 0, 0], (0, 1, 2)), ([0], (0,))],
)
def test_end_points(nodes: list[int], ranks: tuple[int, ...]) -> None:
    assert end_points(nodes) == ranks


@given(num_nodes=st.integers(2, 12), ranks_per_node=st.integers(1, 3))
def test_each_direction_is_measured_once_and_ranks_that_are_no_end_point_take_no_part(
    num_nodes: int, ranks_per_node: int
) -> None:
    nodes = [rank // ranks_per_node for rank in range(num_nodes * ranks_per_node)]
    scenario = resolved(nodes)
    seen: Counter[tuple[int, int]] = Counter()
    for stream in scenario.streams:
        for group in stream.groups:
            assert all(rank % ranks_per_node == 0 for rank in group)
        if stream.pattern == "link":
            ((source, destination),) = np.argwhere(stream.matrix(0)).tolist()
            seen.update((group[source], group[destination]) for group in stream.groups)
    ranks = end_points(nodes)
    assert seen == Counter({(here, there): 1 for here in ranks for there in ranks if here != there})


@pytest.mark.parametrize("num_nodes", [3, 5, MAX_FULL_FAN, MAX_FULL_FAN + 1, 40])
def test_incast_and_outcast_at_each_end_point(num_nodes: int) -> None:
    scenario = resolved(list(range(num_nodes)))
    num_peers = num_nodes - 1 if num_nodes <= MAX_FULL_FAN else FAN
    for pattern, hubs_row in (("incast", False), ("outcast", True)):
        streams = [stream for stream in scenario.streams if stream.pattern == pattern]
        assert [stream.name for stream in streams] == [f"{pattern}.{node}" for node in range(num_nodes)]
        peers: Counter[int] = Counter()
        for node, stream in enumerate(streams):
            (group,) = stream.groups
            matrix = stream.matrix(0)
            line = matrix[0] if hubs_row else matrix[:, 0]
            assert (group[0], len(set(group))) == (node, num_peers + 1)
            assert line.sum() == matrix.sum() == PAYLOAD // num_peers * num_peers
            peers.update(group[1:])
        assert set(peers.values()) == {num_peers}  # spread evenly


def test_two_end_points_have_no_incast() -> None:
    assert {stream.pattern for stream in resolved([0, 1]).streams} == {"link", "link_both"}


def test_small_messages_alone_and_the_payload_back_to_back_each_twice() -> None:
    plan = make_plan(resolved([0, 1, 2]))
    points = Counter((point.streams[0][0].split(".")[0], *point.streams[0][1:], point.cadence) for point in plan)
    assert points["link", LATENCY_BYTES, "isolated"] == 2 * 6
    assert points["link", PAYLOAD, "streaming"] == 2 * (6 + 3)
    assert points["incast", PAYLOAD // 2, "streaming"] == points["outcast", PAYLOAD, "streaming"] == 2 * 3
    assert sum(points.values()) == len(plan) == 12 + 18 + 12
    again = [point.repeat for point in plan]
    assert again == sorted(again)  # a second visit lies far from the first


def test_what_a_scenario_says_of_measuring_is_kept() -> None:
    base = ScenarioFile(name="mine", measure=MeasureSpec(seed=7, budget_s=3.0), simulated=truth_to_dict(truth_of()))
    file = links_scenario([0, 1, 2], payload_bytes=PAYLOAD, base=base)
    assert (file.measure.seed, file.measure.budget_s, file.measure.together) == (7, 3.0, "none")
    assert file.simulated == base.simulated
    plain = [links_scenario(list(range(n)), payload_bytes=PAYLOAD, base=None).measure.budget_s for n in (4, 8, 16)]
    assert plain == sorted(set(plain))  # the budget grows with the rounds


@pytest.mark.parametrize(("nodes", "message"), [([0], "at least 2 nodes"), (list(range(513)), "up to 512 end points")])
def test_numbers_of_nodes_that_cannot_be_are_refused(nodes: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        links_scenario(nodes, payload_bytes=PAYLOAD, base=None)


def command(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(app, ["run", "--suite", "links", *map(str, arguments)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "chains"], "no such suite: 'chains'; there is: links"),
        (["--transport", "simulated"], "needs a scenario with a [simulated] table"),
        (["--ranks", "1"], "at least 2 nodes"),
    ],
)
def test_bad_use_is_refused_before_anything_is_written(options: list[str], message: str, tmp_path: Path) -> None:
    result = command(*options, "--output", tmp_path / "run")
    assert getattr(result.exception, "exit_code", result.exit_code) == 2
    assert message in result.stderr + str(result.exception)
    assert not (tmp_path / "run").exists()


def simulated(folder: Path, num_nodes: int, max_calls: int = 40, **truth: Any) -> tuple[Links, Verdict]:
    """Run the suite in a world with a rank a node; return what was found."""
    world = SimulatedWorld(truth_of(ranks_per_node=1, **truth), num_nodes)
    base = ScenarioFile(name="world", measure=MeasureSpec(max_calls=max_calls), simulated=truth_to_dict(world.truth))
    links = links_of(run_in(world, resolved(list(range(num_nodes)), base), folder))
    return links, verdict(links)


def told(found: Verdict) -> list[tuple[str, tuple[str, ...]]]:
    return [(finding.kind, finding.nodes) for finding in found.findings]


@pytest.mark.parametrize("num_nodes", [4, 5])
@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ({"2": 1.25e9}, [("slow_node", ("n2",))]),
        ({"1>": 1.25e9}, [("slow_send", ("n1",))]),
        ({"1<": 1.25e9}, [("slow_receive", ("n1",))]),
        ({"0-3": 1.25e9}, [("slow_pair", ("n0", "n3"))]),
        ({"3>1": 1.25e9}, [("slow_direction", ("n3", "n1"))]),
        ({"1": 1.25e9, "0-3": 2e9}, [("slow_node", ("n1",)), ("slow_pair", ("n0", "n3"))]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_the_truth_of_a_simulated_world_is_found(
    slow: dict[str, float], expected: list[Any], num_nodes: int, tmp_path: Path
) -> None:
    links, found = simulated(tmp_path / "run", num_nodes, slow_bytes_per_s=slow, noise_sigma=0.02)
    assert told(found) == expected
    assert found.verdict == "slow"
    for finding in found.findings:
        assert finding.bytes_per_s == pytest.approx(slow.get(finding.nodes[0][1:], min(slow.values())), rel=0.65)
    truth = truth_of(ranks_per_node=1, slow_bytes_per_s=slow)
    for here in range(num_nodes):
        for there in range(num_nodes):
            if here != there:
                nics = truth.nic_bytes_per_s(here, ">"), truth.nic_bytes_per_s(there, "<")
                time_s = truth.inter.latency_s + PAYLOAD / min(*nics, truth.pair_bytes_per_s(here, there))
                assert links.rate.best[here, there] == pytest.approx(PAYLOAD / time_s, rel=0.03)


def test_a_node_that_answers_late_is_found(tmp_path: Path) -> None:
    _, found = simulated(tmp_path / "run", 4, straggler_s={2: 1e-3})
    assert ("high_latency", ("n2",)) in told(found)


def test_latency_is_told_across_ranks_where_clocks_are_good_enough(tmp_path: Path) -> None:
    slow = Tier(latency_s=1e-3, bandwidth_bytes_per_s=5e9)
    links, _ = simulated(tmp_path / "run", 3, max_calls=8, inter=slow, clock_offset_s={1: 5e-3, 2: -2e-3})
    assert links.clock == "synchronised"
    wanted = np.where(np.eye(3), np.nan, slow.latency_s + LATENCY_BYTES / slow.bandwidth_bytes_per_s)
    assert links.best_latency_s == pytest.approx(wanted, abs=links.clock_error_s + 1e-5, nan_ok=True)


def test_a_budget_that_is_too_short_leaves_links_unmeasured_and_says_which(tmp_path: Path) -> None:
    world = SimulatedWorld(truth_of(ranks_per_node=1), 4)
    scenario = resolved([0, 1, 2, 3], ScenarioFile(name="world", measure=MeasureSpec(budget_s=0.02)))
    run = run_in(world, scenario, tmp_path / "run")
    found = verdict(links_of(run))
    assert found.verdict == "incomplete"
    missing = [finding for finding in found.findings if finding.kind == "not_measured"]
    assert missing
    assert all("skipped: " in finding.text for finding in missing)
    page = render(run)
    assert "links were not all measured" in page
    assert 'id="links"' in page
    assert not [key for key in ("bytes", "together", "steps", "model") if f'id="{key}"' in page]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_world_with_noise_is_healthy(seed: int, tmp_path: Path) -> None:
    _, found = simulated(tmp_path / "run", 4, noise_sigma=0.05, seed=seed, clock_offset_s={1: 3e-3})
    assert (found.verdict, told(found)) == ("healthy", [])


@pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]
)
def test_ranks_of_this_machine(transport: str, tmp_path: Path) -> None:
    """What a shared machine's links are worth cannot be told; that all were measured, and what is said of them, can."""
    pytest.importorskip("torch" if transport == "gloo" else "mpi4py")
    result = command("--ranks", 4, "--transport", transport, "--output", tmp_path / "run", "--json")
    found = json.loads(result.stdout)["links"]
    assert found["nodes"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for name in ("bytes_per_s", "latency_s"):
        cells = {(i, j): cell for i, row in enumerate(found[name]) for j, cell in enumerate(row)}
        assert all((cell is None) == (i == j) and (cell is None or cell > 0) for (i, j), cell in cells.items())
    assert all(rate > 0 for rate in found["incast_bytes_per_s"] + found["outcast_bytes_per_s"])
    assert result.exit_code == (0 if found["verdict"] == "healthy" else 1)
    assert (found["verdict"] == "healthy") == (not found["findings"])
    assert 'id="links"' in (tmp_path / "run" / "report.html").read_text()
