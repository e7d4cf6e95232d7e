"""The links suite on a lab of known rates: healthy links are measured right, and each fault is named."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crosstraffic.slurm.lab import cluster
from crosstraffic.slurm.lab.spec import LabSpec, parse_limit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slurm,
    pytest.mark.slow,
]
PROGRAM = Path(sys.executable).with_name("crosstraffic")
NUM_NODES, BUDGET_S = 4, 60


@contextmanager
def lab(*limits: str) -> Iterator[LabSpec]:
    """Bring up four nodes at 200 Mbit/s, but for the limits; take them down at the end."""
    parsed = tuple(limit for text in limits for limit in parse_limit(text))
    spec = LabSpec(num_nodes=NUM_NODES, rate_bits_per_s=200_000_000, limits=parsed)
    cluster.up(spec)  # one that is not ours stays up
    try:
        yield spec
    finally:
        cluster.down()


def measured(folder: Path) -> tuple[int, dict[str, Any]]:
    """Run the suite over all nodes, two ranks each; return the exit code of rank 0 and what it printed."""
    command = ["srun", f"-N{NUM_NODES}", "--ntasks-per-node=2", "--mpi=none", str(PROGRAM), "run"]
    options = ["--suite", "links", "--transport", "gloo", "--output", str(folder), "--budget", str(BUDGET_S)]
    done = subprocess.run(
        [*command, *options, "--json"],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["links"]


def test_a_healthy_lab_is_healthy_and_its_rates_are_the_truth(tmp_path: Path) -> None:
    with lab() as spec:
        code, links = measured(tmp_path / "run")
    assert links["nodes"] == list(spec.nodes)
    for here in range(NUM_NODES):
        for there in set(range(NUM_NODES)) - {here}:
            truth = spec.goodput_bytes_per_s(spec.nodes[here], spec.nodes[there])
            assert links["bytes_per_s"][here][there] == pytest.approx(truth, rel=0.03)
    assert (links["verdict"], links["findings"], code) == ("healthy", [], 0)


@pytest.mark.parametrize(
    ("limit", "kind", "nodes"),
    [
        ("n2=50mbit", "slow_node", ["n2"]),
        ("n1>=50mbit", "slow_send", ["n1"]),
        ("n0-n3=50mbit", "slow_pair", ["n0", "n3"]),
    ],
)
def test_a_slow_link_is_named(limit: str, kind: str, nodes: list[str], tmp_path: Path) -> None:
    with lab(limit) as spec:
        code, links = measured(tmp_path / "run")
    assert [(found["kind"], found["nodes"]) for found in links["findings"]] == [(kind, nodes)]
    assert (links["verdict"], code) == ("slow", 1)
    for here in range(NUM_NODES):
        for there in set(range(NUM_NODES)) - {here}:
            truth = spec.goodput_bytes_per_s(spec.nodes[here], spec.nodes[there])
            assert links["bytes_per_s"][here][there] == pytest.approx(truth, rel=0.03)
